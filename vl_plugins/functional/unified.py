"""Unified loss of pair similarity optimisation, and vision-language contrastive loss as its margin-free case."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vl_plugins.functional.pairs import reduce_positive_pairs

__all__ = ["unified_loss", "vlc_loss"]


def unified_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    margin: float = 0.2,
    scale: float | Tensor = 50.0,
    *,
    symmetric: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""Unified loss: the contrastive loss with the margin of the triplet loss (Eq. 5).

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \frac{1}{\gamma} \log \Bigl(1 + \sum_{n \in N_i} e^{\gamma (S_{in} - S_{ip} + m)} \Bigr)

    Other positives of an anchor are never its negatives. An anchor without negatives gives 0. A larger scale brings
    the loss closer to :func:`~vl_plugins.functional.triplet_hn_loss` (Eq. 6).

    Args:
        similarities: (A, C), anchors x candidates, larger is closer.
        positive_mask: (A, C), bool.
        negative_mask: (A, C), bool. A pair in both masks counts as both; this is not checked.
        margin: m, by how much the positive should be closer than the negatives.
        scale: gamma > 0, the inverse temperature; a number, or a tensor of one element, which receives a gradient.
        symmetric: rows and columns are anchors; otherwise rows only.
        reduction: ``"mean"`` or ``"sum"`` over the positive pairs, or ``"none"`` for one value per positive pair, in
            the order of ``torch.where(positive_mask)``.

    Returns:
        A scalar, or (number of positive pairs,), float32 or float64. NaN if any similarity is not finite.

    Raises:
        ValueError: wrong shape, type, device or reduction.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval.

    >>> similarities = torch.tensor([[0.5, 0.4], [0.6, 0.9]])
    >>> positives = torch.eye(2, dtype=torch.bool)
    >>> unified_loss(similarities, positives, ~positives, margin=0.2, scale=50)
    tensor(0.2001)
    """
    scale = _one_number("scale", scale)
    pair_loss = reduce_positive_pairs(
        partial(_softplus_over_negatives, margin=margin, scale=scale),
        similarities,
        positive_mask,
        negative_mask,
        symmetric=symmetric,
        reduction=reduction,
    )
    return pair_loss / scale


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
    the sum of the two cross entropies of ``scale * similarities``, by row and by column.

    Args:
        similarities: (A, C), anchors x candidates, larger is closer.
        positive_mask: (A, C), bool.
        negative_mask: (A, C), bool. A pair in both masks counts as both; this is not checked.
        scale: gamma > 0, the inverse temperature; a number, or a tensor of one element, which receives a gradient.
        symmetric: rows and columns are anchors; otherwise rows only.
        reduction: ``"mean"`` or ``"sum"`` over the positive pairs, or ``"none"`` for one value per positive pair, in
            the order of ``torch.where(positive_mask)``.

    Returns:
        A scalar, or (number of positive pairs,), float32 or float64. NaN if any similarity is not finite.

    Raises:
        ValueError: wrong shape, type, device or reduction.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval.

    >>> similarities = torch.tensor([[0.5, 0.4], [0.6, 0.9]])
    >>> positives = torch.eye(2, dtype=torch.bool)
    >>> vlc_loss(similarities, positives, ~positives, scale=10)
    tensor(0.8409)
    """
    scale = _one_number("scale", scale)
    return scale * unified_loss(
        similarities, positive_mask, negative_mask, 0.0, scale, symmetric=symmetric, reduction=reduction
    )


def _softplus_over_negatives(
    similarities: Tensor,
    negative_mask: Tensor,
    anchors: Tensor,
    positives: Tensor,
    *,
    margin: float,
    scale: float | Tensor,
) -> Tensor:
    # Not -inf: without negatives logsumexp would have NaN gradients, masked here but reported by anomaly detection.
    lowest = torch.finfo(similarities.dtype).min
    negatives = (scale * similarities).masked_fill(~negative_mask, lowest).logsumexp(dim=1)  # (A,)
    difference = negatives[anchors] + scale * (margin - similarities[anchors, positives])  # (M,)
    return -logsigmoid(-difference)  # torch's softplus is only the identity above 20


def _one_number(name: str, value: float | Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must have one element, got shape {tuple(value.shape)}")
    return value.reshape(())
