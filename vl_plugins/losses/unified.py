"""Unified loss of pair similarity optimization, and vision-language contrastive loss, its case without a margin."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.functional import Polynomial, unified_loss, vlc_loss
from vl_plugins.functional.unified import Margin, Weights
from vl_plugins.kernels import unified_losses_from_embeddings
from vl_plugins.losses.base import PairBatch, PairLoss, distance_problem
from vl_plugins.utils.checks import adaptive_margin, constant_scale, finite_tensor

__all__ = ["UnifiedLoss", "VLCLoss"]


class UnifiedLoss(PairLoss):
    """Contrastive loss with the margin of the triplet loss, over all negatives of an anchor.

    See :func:`vl_plugins.functional.unified_loss` for the formula and its variants, and
    :class:`~vl_plugins.losses.base.PairLoss` for how to call it. In the shapes below A is the number of embeddings and
    C that of reference embeddings. A tensor belongs to one batch, so it is usually set as an attribute before each
    call, ``loss.margin = soft_margin(confidence)``, and has to be on the device of the embeddings.

    Args:
        margin: by how much the positive should be closer than the negatives, >= 0, in units of the similarity: a
            number, a tensor 0-D, (A,) or (A, C), or a function of the similarities and both masks (Eq. 26).
        scale: inverse temperature, > 0. 50 is the paper's value for CLIP, 60 for VSE++. A learned one belongs to the
            call: ``loss(..., scale=model.logit_scale.exp())``.
        weights: of the similarities (Eq. 24): a function of them, or a tensor, (A,) of the rows or (A, C); or a pair of
            these, for the positives and for the negatives.
        relative: a function of the relative similarities (Eq. 25). Memory is then one row of candidates per positive
            pair. Here and in ``weights`` a sequence of numbers stands for a function, the
            :class:`~vl_plugins.functional.Polynomial` with these coefficients.
        kwargs: ``symmetric`` and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 5 and 24-27.

    >>> image_embeddings, text_embeddings, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> UnifiedLoss(margin=0.2, scale=50)(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    >>> UnifiedLoss(weights=([0.5, -0.7], [0.03, 0.9]), relative=[0, 1, 0.5]).relative
    Polynomial(coefficients=(0.0, 1.0, 0.5))
    """

    equation = "Eq. 5, 24-27"
    paper = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    independent_pairs = True

    def __init__(
        self,
        margin: Margin = 0.2,
        scale: float = 50.0,
        weights: Weights | Sequence[Weights | Sequence[float] | float] | None = None,
        relative: Callable[[Tensor], Tensor] | Sequence[float] | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.margin = adaptive_margin("margin", margin)
        self.scale = constant_scale(scale)
        self.weights = _weights(weights)
        self.relative = None if relative is None else _function("relative", relative)
        # pytorch-metric-learning writes these to its logs as numbers.
        self.add_to_recordable_attributes(list_of_names=["scale"] if callable(margin) else ["margin", "scale"])
        if isinstance(self.weights, tuple) and any(isinstance(weight, nn.Module) for weight in self.weights):
            # An optimizer would not find their parameters in a tuple.
            self.weight_modules = nn.ModuleList(weight for weight in self.weights if isinstance(weight, nn.Module))

    def adds_up_over_rows(self) -> bool:
        # Functions may look at all similarities, and tensors have numbers for certain rows.
        has_numbers = isinstance(self.margin, float) and self.weights is None and self.relative is None
        return has_numbers and super().adds_up_over_rows()

    def pair_losses(self, batch: PairBatch) -> Tensor:
        if callable(self.margin) or not batch.use_kernel:
            similarities, masks = batch.similarities(), batch.masks()
            options: dict[str, Any] = {"weights": self.weights, "relative": self.relative, "symmetric": batch.symmetric}
            return unified_loss(similarities, *masks, self.margin, batch.scale, **options, reduction="none")
        arguments, margin = batch.kernel_arguments(), _margin_of_pairs(self.margin, batch)
        return unified_losses_from_embeddings(**arguments, margin=margin, scale=batch.scale, backend=self.backend)

    def kernel_problem(self) -> str | None:
        if self.relative is not None:
            return "relative similarities are a row of candidates for each pair"
        if callable(self.margin):
            return "the margin is a function of all similarities"
        if self.weights is not None:
            return "similarities are weighted"
        return distance_problem(self.distance)


class VLCLoss(PairLoss):
    """Vision-language contrastive loss, known as InfoNCE, NT-Xent or CLIP loss.

    See :func:`vl_plugins.functional.vlc_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for how to
    call it. With one text per image it is twice open_clip's ``ClipLoss``, which averages the two directions.

    Args:
        scale, kwargs: see :class:`UnifiedLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 3-4.

    >>> image_embeddings, text_embeddings, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> VLCLoss(scale=50)(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(100.)
    """

    equation = "Eq. 3-4"
    paper = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    independent_pairs = True

    def __init__(self, scale: float = 50.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.scale = constant_scale(scale)
        self.add_to_recordable_attributes(name="scale")

    def pair_losses(self, batch: PairBatch) -> Tensor:
        if not batch.use_kernel:
            similarities, masks = batch.similarities(), batch.masks()
            return vlc_loss(similarities, *masks, batch.scale, symmetric=batch.symmetric, reduction="none")
        arguments = batch.kernel_arguments()
        losses = unified_losses_from_embeddings(**arguments, margin=0.0, scale=batch.scale, backend=self.backend)
        return (batch.scale * losses).to(losses.dtype)

    def kernel_problem(self) -> str | None:
        return distance_problem(self.distance)


def _margin_of_pairs(margin: float | Tensor, batch: PairBatch) -> float | Tensor:
    """Return the margins of the positive pairs, a number or (M,)."""
    if not isinstance(margin, Tensor):
        return margin
    expected = (len(batch.embeddings), len(batch.ref_emb))[: margin.ndim]
    if margin.shape != expected:
        raise ValueError(f"margin must have the shape {expected}, got {tuple(margin.shape)}")
    margin = margin[batch.pairs[: margin.ndim]] if margin.ndim else margin
    return margin.to(torch.promote_types(batch.embeddings.dtype, torch.float32))


def _weights(weights: Any) -> Weights | tuple[Weights, Weights] | None:
    """Return weights, or a pair of them, with a polynomial in place of its coefficients."""
    if isinstance(weights, Sequence) and len(weights) == 2 and not any(isinstance(item, Real) for item in weights):
        positives, negatives = weights
        return _one_weight("weights of the positives", positives), _one_weight("weights of the negatives", negatives)
    return None if weights is None else _one_weight("weights", weights)


def _one_weight(name: str, value: Any) -> Weights:
    if not isinstance(value, Tensor):
        return _function(name, value)
    if value.ndim not in (1, 2):
        raise ValueError(f"{name} must have the shape (anchors,) or (anchors, candidates), got {tuple(value.shape)}")
    return finite_tensor(name, value)


def _function(name: str, value: Any) -> Callable[[Tensor], Tensor]:
    if callable(value):
        return value
    try:
        return Polynomial(value)
    except ValueError as error:
        raise ValueError(f"{name} must be a function or the coefficients of a polynomial: {error}") from error
