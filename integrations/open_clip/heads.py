"""Heads on both towers of any open_clip model: embedding sets, or a linear embedding layer for fine-tuning."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.integrations.open_clip.towers import image_features, text_features
from vl_plugins.modules import SetHead, SetPrediction, SetPredictionOutput, TowerFeatures
from vl_plugins.registry import construct, format_options
from vl_plugins.retrieval.features import describe_similarity
from vl_plugins.utils.checks import integer
from vl_plugins.utils.errors import UserError

__all__ = ["HEADS", "CLIPWithHeads", "LinearHead", "head_settings"]


@dataclass(frozen=True)
class LinearSettings:
    """The embedding layer that Li et al. 2022 put on each encoder of CLIP for fine-tuning (B.1.2).

    Args:
        dim: width of the embeddings.
    """

    dim: int = 768

    def build(self, image: TowerFeatures, text: TowerFeatures) -> tuple[nn.Module, nn.Module]:
        integer("dim", self.dim, least=1)
        head = LinearHead(image.pooled.shape[-1], self.dim)
        # The same for both, so that images and texts which a pretrained model brought together stay together.
        return head, copy.deepcopy(head)


@dataclass(frozen=True)
class SetSettings:
    """The set prediction module of DivE; see :class:`vl_plugins.modules.SetPrediction` for the options."""

    num_slots: int = 4
    num_iters: int = 4
    hidden_dim: int = 1024
    slots: str = "learned"
    update: str = "residual"
    attention: str = "slots"
    global_feature: bool = True

    def build(self, image: TowerFeatures, text: TowerFeatures) -> tuple[nn.Module, nn.Module]:
        return tuple(
            SetHead(SetPrediction(features.pooled.shape[-1], features.local.shape[-1], **asdict(self)))
            for features in (image, text)
        )


# A Hugging Face tower names the most it could take, which may be too much for a try.
MOST_TOKENS = 77

NO_SIMILARITY = MappingProxyType({"similarity": None, "similarity_kwargs": {}})

HEADS = MappingProxyType({"linear": LinearSettings, "set": SetSettings})


def head_settings(name: str, options: Mapping[str, Any]) -> LinearSettings | SetSettings:
    """Return the checked options of a head, one of ``HEADS``.

    Raises:
        UserError: an unknown name or option, or one out of its range.
    """
    settings = construct("head", name, HEADS[name], options)
    tower = TowerFeatures(torch.zeros(1, 1, 2), torch.zeros(1, 2), None, None, has_positions=True)
    try:
        settings.build(tower, tower)
    except (TypeError, ValueError) as error:
        raise UserError(f"--head {name}: {error}") from error
    return settings


class LinearHead(nn.Linear):
    """A linear layer on the tower's embedding that keeps cosines as they are at first, where ``dim`` allows it."""

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:
        pooled = features.pooled.to(self.weight.dtype)
        return {"features": super().forward(pooled)}


class CLIPWithHeads(nn.Module):
    """An open_clip model whose embeddings go through a head: ``encode_image`` and ``encode_text`` give what it makes.

    Everything else, such as locking of towers, gradient checkpointing or the logit scale, is that of the model inside.
    The heads compute in float32, or what autocast says, whatever the precision of the model. ``state_dict`` holds a
    description of it all in ``_extra_state``, from which
    :func:`vl_plugins.integrations.open_clip.checkpoints.load_model` builds the model again.

    Args:
        clip: ``CLIP`` or ``CustomTextCLIP``.
        head: a name of ``HEADS``.
        settings: its options.
        similarity: by which sets are compared; its parameters are trained with the model. None for single vectors.
        description: what :func:`load_model` needs to build ``clip`` again; plain numbers, strings and containers.

    Attributes:
        grid: (height, width) of the image tower's local features, None for a head that uses none.
    """

    def __init__(
        self,
        clip: nn.Module,
        head: str,
        settings: LinearSettings | SetSettings,
        similarity: BaseDistance | None = None,
        description: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__()
        self.clip = clip
        self.head = head
        self.settings = settings
        self.description = dict(description)
        image, text = self._example_features()
        self.grid = image.grid
        image_head, text_head = settings.build(image, text)
        device = image.pooled.device
        self.image_head = image_head.to(device)
        self.text_head = text_head.to(device)
        self.similarity = similarity.to(device) if similarity is not None else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "clip":
                raise
            return getattr(self.clip, name)

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor] | tuple:
        """Return what open_clip's train step takes, and for sets ``image_slots`` and ``text_slots`` (B, K, D) besides.

        Args:
            image: (B, 3, H, W) or None.
            text: (B, L) token ids or None.
        """
        output = {}
        for tower, inputs in (("image", image), ("text", text)):
            made = {"features": None} if inputs is None else self._normalized(tower, inputs)
            output |= {f"{tower}_{name}": tensor for name, tensor in made.items()}
        output["logit_scale"] = self._connected(self.clip.logit_scale.exp())
        if self.clip.logit_bias is not None:
            output["logit_bias"] = self.clip.logit_bias
        if self.clip.output_dict:
            return output
        as_tuple = ("image_features", "text_features", "logit_scale", "logit_bias")
        return tuple(output[name] for name in as_tuple if name in output)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of images (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._encode("image", image, normalize)

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of texts (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._encode("text", text, normalize)

    def predict_image_sets(self, image: Tensor) -> SetPredictionOutput:
        """Return the sets of images with slots and attention maps over the ``grid`` of local features.

        Raises:
            UserError: the head makes no sets.
        """
        if not isinstance(self.image_head, SetHead):
            raise UserError(f"the model has a {self.head} head, which makes no sets")
        return self.image_head.predict(self._features("image", image))

    def get_extra_state(self) -> dict[str, Any]:
        similarity = NO_SIMILARITY
        if self.similarity is not None:
            # Its parameters stand in the state dict, and may be sharded.
            similarity = describe_similarity(self.similarity, parameters=False)
        return {**self.description, "head": self.head, "head_kwargs": asdict(self.settings), **similarity}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        found, expected = (
            f"{head}({format_options(options)})"
            for head, options in (
                (state["head"], state["head_kwargs"]),
                (self.head, asdict(self.settings)),
            )
        )
        if found != expected:
            raise UserError(f"the checkpoint has the head {found}, but the model was made with {expected}")

    def get_logits(self, image: Tensor, text: Tensor):
        raise UserError("a model with heads has no get_logits: compare encode_image and encode_text by its similarity")

    def forward_intermediates(self, *args, **kwargs):
        raise UserError("a model with heads has no forward_intermediates: call that of the model inside, model.clip")

    def _encode(self, tower: str, inputs: Tensor, normalize: bool) -> Tensor:
        if normalize:
            return self._normalized(tower, inputs)["features"]
        return self._heads(tower)(self._features(tower, inputs))["features"]

    def _normalized(self, tower: str, inputs: Tensor) -> dict[str, Tensor]:
        output = self._heads(tower)(self._features(tower, inputs))
        return {**output, "features": functional.normalize(output["features"].float(), dim=-1)}

    def _heads(self, tower: str) -> nn.Module:
        return {"image": self.image_head, "text": self.text_head}[tower]

    def _features(self, tower: str, inputs: Tensor) -> TowerFeatures:
        if self.head == "set":
            features = {"image": image_features, "text": text_features}[tower]
            return features(self.clip, inputs)
        encode = {"image": self.clip.encode_image, "text": self.clip.encode_text}[tower]
        return TowerFeatures(None, encode(inputs), None, None, has_positions=True)

    def _connected(self, logit_scale: Tensor) -> Tensor:
        """Connect the similarity's parameters, which the loss uses outside of ``forward``, for data parallelism."""
        if self.similarity is None:
            return logit_scale
        return logit_scale + sum(0 * parameter.sum() for parameter in self.similarity.parameters())

    @torch.no_grad()
    def _example_features(self) -> tuple[TowerFeatures, TowerFeatures]:
        """Run both towers once on nothing in particular: only they know how wide their features are."""
        weight = next(module.weight for module in self.clip.visual.modules() if isinstance(module, nn.Conv2d))
        images = weight.new_zeros(1, 3, *_pair(self.clip.visual.image_size))
        texts = torch.ones(1, min(self.clip.context_length, MOST_TOKENS), dtype=torch.long, device=weight.device)
        modes = {module: module.training for module in self.clip.modules()}
        self.clip.eval()  # batch statistics stay as they are
        try:
            return self._features("image", images), self._features("text", texts)
        finally:
            for module, training in modes.items():
                module.training = training


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
