"""Unified loss of pair similarity optimization, and vision-language contrastive loss as its margin-free case."""

from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vl_plugins.functional.pairs import check_pairs, reduce_positive_pairs
from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.utils.checks import scale_of_call

__all__ = ["Margin", "Weights", "unified_loss", "unified_pair_losses", "vlc_loss"]

Margin = float | Tensor | Callable[[Tensor, Tensor, Tensor], float | Tensor]
Weights = Tensor | Callable[[Tensor], Tensor]


def unified_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    margin: Margin = 0.2,
    scale: float | Tensor = 50.0,
    *,
    weights: Weights | tuple[Weights, Weights] | None = None,
    relative: Callable[[Tensor], Tensor] | None = None,
    symmetric: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""Unified loss: the contrastive loss with the margin of the triplet loss (Eq. 5).

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \frac{1}{\gamma} \log \Bigl(1 + \sum_{n \in N_i} e^{\gamma (S_{in} - S_{ip} + m)} \Bigr)

    Other positives of an anchor are never its negatives. An anchor without negatives gives 0. A larger scale brings
    the loss closer to :func:`~vl_plugins.functional.triplet_hn_loss` (Eq. 6). Its variants, alone or together:

    - Weighted (Eq. 24): :math:`w_{in} S_{in} - w_{ip} S_{ip} + m` in the exponent. The self-similarity polynomial loss
      SSP has ``weights=(Polynomial(...), Polynomial(...))``, for the positives and for the negatives.
    - Of relative similarities (Eq. 25): :math:`G(S_{in} - S_{ip}) + m`. The relative-similarity polynomial loss RSP has
      ``relative=Polynomial(...)``. Memory is then one row of candidates per positive pair, M x C.
    - With adaptive margins (Eq. 26): :math:`m_{ip}` for m, for example ``margin=soft_margin(confidence)`` of Noisy
      Correspondence Rectifier, see :func:`~vl_plugins.functional.soft_margin` (Eq. 27).

    Args:
        similarities: (A, C), anchors x candidates, larger is closer.
        positive_mask, negative_mask: (A, C), bool; see :func:`triplet_hn_loss`, also for ``symmetric``, ``reduction``.
        margin: m, by how much the positive should be closer than the negatives: a number or 0-D tensor; (A,), one for
            all positive pairs of a row, also where their columns are the anchors; (A, C), read at the positive pairs;
            or a function of (similarities, positive_mask, negative_mask) that returns one of these. Margins per
            negative are added to the similarities of the negatives instead.
        scale: gamma > 0, the inverse temperature; a number, or a tensor of one element, which receives a gradient.
        weights: w, (A,), one for all similarities of a row, or (A, C), read at the positive and negative pairs, or a
            function of the similarities that returns one of these; or a pair of these, for the positives and for the
            negatives. The gradient goes through such a function; one whose weights are constants detaches them.
        relative: G, an elementwise function of a tensor (number of positive pairs, candidates). It is also called with
            pairs in neither mask, whose values are not read.

    Returns:
        A scalar, or (number of positive pairs,), float32 or float64 as the similarities. NaN if any similarity is not
        finite, and for NaN in a margin or weight that is read. Tensors of margins and weights receive gradients.

    Raises:
        ValueError: wrong shape, type, device or reduction.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval.

    >>> similarities = torch.tensor([[0.5, 0.4], [0.6, 0.9]])
    >>> positives = torch.eye(2, dtype=torch.bool)
    >>> unified_loss(similarities, positives, ~positives, margin=0.2, scale=50)
    tensor(0.2001)
    >>> unified_loss(similarities, positives, ~positives, margin=torch.tensor([0.0, 0.2]), scale=50)
    tensor(0.0502)
    """
    scale = scale_of_call(scale)
    check_pairs(similarities, positive_mask, negative_mask)
    (similarities,) = full_precision(similarities)
    if isinstance(scale, Tensor):
        scale = scale.to(similarities.dtype).reshape(())
    margin = _margin_of_pairs(margin, similarities, positive_mask, negative_mask)
    s_p = s_n = similarities
    if weights is not None:
        positive_weights, negative_weights = _pair_of_weights(weights, similarities)
        # What a weight is where it is not read must not reach a gradient: 0 * nan is nan.
        s_p = similarities * torch.where(positive_mask, positive_weights, 1)
        s_n = similarities * torch.where(negative_mask, negative_weights, 1)

    def anchor_loss(
        s_n: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor, s_p: Tensor, margin: float | Tensor
    ) -> Tensor:  # s_n (A, C), s_p (M,)
        if relative is None:
            negative_lse = _masked_logsumexp(scale * s_n, negative_mask)[anchors]  # (M,)
            return unified_pair_losses(negative_lse, s_p, margin, scale)
        differences = s_n[anchors] - s_p[:, None]  # (M, C)
        exponents = scale * _tensor_like(differences, "relative similarities", relative, least_ndim=2)
        negative_lse = _masked_logsumexp(exponents, negative_mask[anchors])  # (M,)
        # A NaN of the positive's weight or margin comes out, in value and gradients, without negatives too.
        return unified_pair_losses(negative_lse, 0 * s_p, margin, scale)

    loss = reduce_positive_pairs(
        anchor_loss, s_n, positive_mask, negative_mask, s_p, margin, symmetric=symmetric, reduction=reduction
    )
    return loss + zero_or_nan(scale) if isinstance(scale, Tensor) else loss  # in the graph without pairs too


def vlc_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    scale: float | Tensor = 50.0,
    *,
    symmetric: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""Vision-language contrastive loss, known as InfoNCE, NT-Xent or CLIP loss (Eq. 3-4).

    :func:`unified_loss` with margin 0, times the scale (Eq. 7). With one positive per row and column, ``"mean"`` is
    the sum of the two cross entropies of ``scale * similarities``, by row and by column. Arguments, result and errors
    are those of :func:`unified_loss`.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval.

    >>> similarities = torch.tensor([[0.5, 0.4], [0.6, 0.9]])
    >>> positives = torch.eye(2, dtype=torch.bool)
    >>> vlc_loss(similarities, positives, ~positives, scale=10)
    tensor(0.8409)
    """
    loss = unified_loss(
        similarities, positive_mask, negative_mask, 0.0, scale, symmetric=symmetric, reduction=reduction
    )
    return (scale * loss).to(loss.dtype).reshape(loss.shape)


def unified_pair_losses(
    negative_lse: Tensor, positive_similarities: Tensor, margin: float | Tensor, scale: float | Tensor
) -> Tensor:
    """Return the Unified losses of M positive pairs (Eq. 5), (..., M), 0 without negatives.

    Args:
        negative_lse: (..., M), for each pair the log-sum-exp of the scaled similarities of its anchor's negatives; -inf
            without negatives.
        positive_similarities: (M,).
        margin: m; a number or (M,).
        scale: gamma; a number or 0-D.
    """
    exponents = negative_lse + scale * (margin - positive_similarities)
    # Not softplus, which is the identity above 20, nor logaddexp, whose second derivative is NaN without negatives.
    return -logsigmoid(-exponents) / scale


def _masked_logsumexp(exponents: Tensor, mask: Tensor) -> Tensor:
    # Not -inf: without negatives logsumexp would have NaN gradients, masked here but reported by anomaly detection.
    return exponents.masked_fill(~mask, torch.finfo(exponents.dtype).min).logsumexp(dim=1)


def _margin_of_pairs(margin: Margin, similarities: Tensor, *masks: Tensor) -> float | Tensor:
    """Return the margin as a number or (A, C)."""
    if callable(margin):
        margin = margin(similarities, *masks)
    if isinstance(margin, Real):
        return margin
    if not isinstance(margin, Tensor):
        raise ValueError(f"margin must be a number, a tensor or a function that returns one, got {margin!r}")
    return _tensor_like(similarities, "margin", margin, least_ndim=0)


def _pair_of_weights(weights: Weights | tuple[Weights, Weights], similarities: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights (A, C) of the positives and of the negatives."""
    if not isinstance(weights, (tuple, list)):
        return (_tensor_like(similarities, "weights", weights),) * 2
    if len(weights) != 2:
        raise ValueError(f"weights must be one or a pair, for positives and negatives, got {len(weights)}")
    positive_weights = _tensor_like(similarities, "weights of the positives", weights[0])
    return positive_weights, _tensor_like(similarities, "weights of the negatives", weights[1])


def _tensor_like(matrix: Tensor, name: str, value: Weights, least_ndim: int = 1) -> Tensor:
    """Return ``value``, or the values of a function of the matrix, in its type and shape, rows repeated if need be."""
    value = value(matrix) if callable(value) else value
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor or a function that returns one, got {value!r}")
    expected = tuple(matrix.shape[: max(value.ndim, least_ndim)])
    if value.shape != expected:
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(value.shape)}")
    if value.ndim > 0 and value.device != matrix.device:
        raise ValueError(f"{name} must have the device {matrix.device}, got {value.device}")
    return value.to(matrix).reshape(expected + (1,) * (2 - value.ndim)).expand_as(matrix)
