"""Heads on both towers of any open_clip model: embedding sets, or a linear embedding layer for fine-tuning."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from open_clip import CLIP, CustomTextCLIP
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.errors import check_sizes, number, user_errors
from vl_plugins.integrations.open_clip.towers import image_features, text_features
from vl_plugins.modules import SetHead, SetPrediction, SetPredictionOutput, TowerFeatures

__all__ = ["LinearHead", "add_heads"]


class LinearHead(nn.Linear):
    """The embedding layer on each encoder of CLIP in the fine-tuning of Li et al. 2022 (B.1.2).

    It keeps the cosines of a pretrained model at first, if ``dim`` is not smaller than ``width``.

    Args:
        width: of the tower's embedding.
        dim: width of the embeddings.
    """

    def __init__(self, width: int, dim: int = 768):
        super().__init__(width, number("dim", dim, least=1, kind=int))
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:  # type: ignore[override]
        assert features.pooled is not None  # every tower of open_clip pools
        return {"features": super().forward(features.pooled.to(self.weight.dtype))}


def add_heads(
    model: CLIP | CustomTextCLIP, head: str, options: Mapping[str, Any], similarity: BaseDistance | None = None
) -> Any:
    """Add a head to both towers of a model: ``encode_image`` and ``encode_text`` then return the heads' embeddings.

    All else stays as it is: locked towers, gradient checkpointing, the names of the model's own weights. The heads
    compute in float32, or in the type of autocast, whatever the precision of the model. The model gets the modules
    ``image_head``, ``text_head`` and ``similarity``, ``head``, and ``grid``: (height, width) of the image tower's local
    features, None for a head that uses none.

    Args:
        model: of open_clip; it is changed.
        head: ``"linear"`` or ``"set"``.
        options: ``dim`` of :class:`LinearHead`, or those of :class:`vl_plugins.modules.SetPrediction`.
        similarity: compares sets; its parameters are trained with the model. None for single vectors.

    Returns:
        The model.

    Raises:
        UserError: an unknown option, or one out of range.
    """
    image, text = _example_features(model, head)
    device = image.local.device
    image_head = _make_head(head, image, options)
    # The same for both, so that the cosines of a pretrained model stay as they are.
    text_head = copy.deepcopy(image_head) if head == "linear" else _make_head(head, text, options)
    model.image_head, model.text_head = image_head.to(device), text_head.to(device)
    model.similarity = None if similarity is None else similarity.to(device)
    model.head, model.grid = head, image.grid
    model.__class__ = type(f"{type(model).__name__}WithHeads", (_WithHeads, type(model)), {})
    return model


class _WithHeads(nn.Module):
    """Mixed into the class of an open_clip model by :func:`add_heads`."""

    image_head: Any
    text_head: Any
    similarity: BaseDistance | None
    logit_scale: Tensor
    logit_bias: Tensor | None

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
        output["logit_scale"] = self.logit_scale.exp()
        if self.similarity is not None:
            # Data parallelism needs the similarity's parameters here, though the loss uses them outside.
            output["logit_scale"] = output["logit_scale"] + sum(0 * p.sum() for p in self.similarity.parameters())
        if self.logit_bias is not None:
            output["logit_bias"] = self.logit_bias
        return output

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of images (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._embed("image", image, normalize)["features"]

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of texts (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._embed("text", text, normalize)["features"]

    def predict_image_sets(self, image: Tensor) -> SetPredictionOutput:
        """Return the sets of images of a set head, with slots and attention maps over the ``grid``."""
        return self.image_head.predict(image_features(self, image))

    def _embed(self, tower: str, inputs: Tensor, normalize: bool) -> dict[str, Tensor]:
        head = self.image_head if tower == "image" else self.text_head
        if isinstance(head, SetHead):
            features = (image_features if tower == "image" else text_features)(self, inputs)
        else:
            features = _pooled_only(getattr(super(), f"encode_{tower}")(inputs))
        output = head(features)
        if normalize:
            output["features"] = functional.normalize(output["features"].float(), dim=-1)
        return output


def _make_head(head: str, features: TowerFeatures, options: Mapping[str, Any]) -> nn.Module:
    assert features.pooled is not None
    width = features.pooled.shape[-1]
    with user_errors(f"--head {head}", TypeError):
        check_sizes(f"--head {head}", options)
        if head == "linear":
            return LinearHead(width, **options)
        return SetHead(SetPrediction(width, features.local.shape[-1], **options))


def _pooled_only(embeddings: Tensor) -> TowerFeatures:
    return TowerFeatures(embeddings[:, None], embeddings, None, None, has_positions=True)


@torch.no_grad()
def _example_features(model: CLIP | CustomTextCLIP, head: str) -> tuple[TowerFeatures, TowerFeatures]:
    """Run both towers on a zero image and a short text: only they know how wide their features are."""
    weight = next(module.weight for module in model.visual.modules() if isinstance(module, nn.Conv2d))
    size = model.visual.image_size
    images = weight.new_zeros(1, 3, *((size, size) if isinstance(size, int) else size))
    length = min(model.context_length, 77)  # Hugging Face towers take 512 tokens or more
    texts = torch.ones(1, length, dtype=torch.long, device=weight.device)
    training = model.training
    model.eval()  # batch statistics stay as they are
    if head == "set":
        features = image_features(model, images), text_features(model, texts)
    else:
        features = _pooled_only(model.encode_image(images)), _pooled_only(model.encode_text(texts))
    model.train(training)
    return features
