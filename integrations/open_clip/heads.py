"""Heads on both towers of any open_clip model: embedding sets, or a linear embedding layer for fine-tuning."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from open_clip import CLIP, CustomTextCLIP
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.errors import UserError, number, user_errors
from vl_plugins.integrations.open_clip.towers import image_features, text_features
from vl_plugins.modules import SetHead, SetPrediction, SetPredictionOutput, TowerFeatures
from vl_plugins.registry import format_options
from vl_plugins.retrieval.features import describe_similarity

__all__ = ["ARCHITECTURE", "HEADS", "PREPROCESSING", "CLIPWithHeads", "LinearHead", "head_settings"]

# Options of open_clip's create_model_and_transforms that its checkpoints do not hold: what changes the meaning of the
# weights, and the transform of images.
ARCHITECTURE = ("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length", "init_logit_bias")
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


class LinearHead(nn.Module):
    """A linear layer on the tower's embedding that keeps cosines as they are at first, where ``dim`` allows it."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(dim, width)))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:
        return {"features": functional.linear(_embedding(features).to(self.weight.dtype), self.weight, self.bias)}


@dataclass(frozen=True)
class LinearSettings:
    """The embedding layer on each encoder of CLIP in the fine-tuning of Li et al. 2022 (B.1.2).

    Args:
        dim: width of the embeddings.
    """

    dim: int = 768

    def build(self, image: TowerFeatures, text: TowerFeatures) -> tuple[nn.Module, nn.Module]:
        head = LinearHead(_embedding(image).shape[-1], number("dim", self.dim, least=1, kind=int))
        # The same for both, so that the cosines of a pretrained model stay as they are.
        return head, copy.deepcopy(head)


@dataclass(frozen=True)
class SetSettings:
    """The set prediction module of DivE; see :class:`vl_plugins.modules.SetPrediction` for the options."""

    num_slots: int = 4
    num_iters: int = 4
    hidden_dim: int = 1024

    def build(self, image: TowerFeatures, text: TowerFeatures) -> tuple[nn.Module, nn.Module]:
        image_head, text_head = (
            SetHead(SetPrediction(_embedding(features).shape[-1], features.local.shape[-1], **asdict(self)))
            for features in (image, text)
        )
        return image_head, text_head


def _embedding(features: TowerFeatures) -> Tensor:
    assert features.pooled is not None  # every tower of open_clip pools
    return features.pooled


HEADS = MappingProxyType({"linear": LinearSettings, "set": SetSettings})

# Options that version 0.2 wrote into checkpoints; of their values only these are left.
FORMER = {"slots": "learned", "update": "residual", "attention": "slots", "global_feature": True}


def head_settings(name: str, options: Mapping[str, Any]) -> LinearSettings | SetSettings:
    """Return the checked options of a head, one of ``HEADS``.

    Raises:
        UserError: an unknown name or option, or one out of its range.
    """
    tower = TowerFeatures(torch.zeros(1, 1, 2), torch.zeros(1, 2), None, None, has_positions=True)
    with user_errors(f"--head {name}"):
        settings = HEADS[name](**{key: value for key, value in options.items() if FORMER.get(key) != value})
        settings.build(tower, tower)
    return settings


class CLIPWithHeads(nn.Module):
    """An open_clip model with a head on each tower: ``encode_image`` and ``encode_text`` return the heads' embeddings.

    Everything else, such as locking of towers, gradient checkpointing or the logit scale, is that of the inner model.
    The heads compute in float32, or in the type of autocast, whatever the precision of the model. In ``state_dict`` an
    ``_extra_state`` describes the model, from which :func:`vl_plugins.integrations.checkpoints.load_model` rebuilds it.

    Args:
        clip: what open_clip's ``create_model_and_transforms`` returned.
        model: its name.
        created_with: the options it was created with.
        head: a name of ``HEADS``.
        head_kwargs: options of the head.
        similarity: compares sets; its parameters are trained with the model. None for single vectors.

    Attributes:
        grid: (height, width) of the image tower's local features, None for a head that uses none.

    Raises:
        UserError: as :func:`head_settings`.
    """

    def __init__(
        self,
        clip: CLIP | CustomTextCLIP,
        model: str,
        created_with: Mapping[str, Any],
        head: str,
        head_kwargs: Mapping[str, Any],
        similarity: BaseDistance | None = None,
    ):
        super().__init__()
        self.clip = clip
        self.head = head
        self.settings = head_settings(head, head_kwargs)
        self.description = {"model": model, **{name: created_with.get(name) for name in ARCHITECTURE}}
        self.description |= {f"image_{name}": clip.visual.preprocess_cfg[name] for name in PREPROCESSING}
        image, text = self._example_features()
        self.grid = image.grid
        device = image.local.device
        self.image_head, self.text_head = (head.to(device) for head in self.settings.build(image, text))
        self.similarity = None if similarity is None else similarity.to(device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("clip", "forward_intermediates", "get_logits"):  # the last two would be without the heads
                raise
            return getattr(self.clip, name)

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor]:
        """Return the output for open_clip's train step; for sets with ``image_slots`` and ``text_slots``, (B, K, D).

        Args:
            image: (B, 3, H, W) or None.
            text: (B, L) token ids or None.
        """
        output: dict[str, Any] = {}
        for tower, inputs in (("image", image), ("text", text)):
            embedded = {"features": None} if inputs is None else self._embed(tower, inputs, normalize=True)
            output |= {f"{tower}_{name}": tensor for name, tensor in embedded.items()}
        output["logit_scale"] = self.clip.logit_scale.exp()
        if self.similarity is not None:
            # Data parallelism needs the similarity's parameters here, though the loss uses them outside.
            output["logit_scale"] = output["logit_scale"] + sum(0 * p.sum() for p in self.similarity.parameters())
        if self.clip.logit_bias is not None:
            output["logit_bias"] = self.clip.logit_bias
        return output

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of images (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._embed("image", image, normalize)["features"]

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of texts (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._embed("text", text, normalize)["features"]

    def predict_image_sets(self, image: Tensor) -> SetPredictionOutput:
        """Return the sets of images with slots and attention maps over the ``grid`` of local features.

        Raises:
            UserError: the head makes no sets.
        """
        if not isinstance(self.image_head, SetHead):
            raise UserError(f"the model has a {self.head} head, which makes no sets")
        return self.image_head.predict(self._features("image", image))

    def get_extra_state(self) -> dict[str, Any]:
        similarity: dict[str, Any] = {"similarity": None, "similarity_kwargs": {}}
        if self.similarity is not None:
            # Its parameters are in the state dict, and may be sharded.
            similarity = describe_similarity(self.similarity, parameters=False)
        return {**self.description, "head": self.head, "head_kwargs": asdict(self.settings), **similarity}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        settings = head_settings(state["head"], state["head_kwargs"]), self.settings
        if settings[0] != settings[1]:
            names = (state["head"], self.head)
            saved, own = (f"{name}({format_options(asdict(each))})" for name, each in zip(names, settings, strict=True))
            raise UserError(f"the checkpoint has the head {saved}, but the model was made with {own}")

    def _embed(self, tower: str, inputs: Tensor, normalize: bool) -> dict[str, Tensor]:
        output = getattr(self, f"{tower}_head")(self._features(tower, inputs))
        if normalize:
            output["features"] = functional.normalize(output["features"].float(), dim=-1)
        return output

    def _features(self, tower: str, inputs: Tensor) -> TowerFeatures:
        if self.head == "set":
            return {"image": image_features, "text": text_features}[tower](self.clip, inputs)
        pooled = getattr(self.clip, f"encode_{tower}")(inputs)
        return TowerFeatures(pooled[:, None], pooled, None, None, has_positions=True)

    @torch.no_grad()
    def _example_features(self) -> tuple[TowerFeatures, TowerFeatures]:
        """Run both towers on a zero image and a short text: only they know how wide their features are."""
        weight = next(module.weight for module in self.clip.visual.modules() if isinstance(module, nn.Conv2d))
        size = self.clip.visual.image_size
        images = weight.new_zeros(1, 3, *((size, size) if isinstance(size, int) else size))
        length = min(self.clip.context_length, 77)  # Hugging Face towers take 512 tokens or more
        texts = torch.ones(1, length, dtype=torch.long, device=weight.device)
        training = self.clip.training
        self.clip.eval()  # batch statistics stay as they are
        features = self._features("image", images), self._features("text", texts)
        self.clip.train(training)
        return features
