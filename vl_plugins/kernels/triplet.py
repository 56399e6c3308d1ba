"""Triplet loss with the hardest negative, of embeddings and labels."""

from functools import partial

from torch import Tensor

from vl_plugins import functional
from vl_plugins.functional.goal import NegativeStatistics
from vl_plugins.functional.triplet import triplet_margin
from vl_plugins.kernels.hardest import hardest_negative_loss

__all__ = ["triplet_hn_loss"]


def triplet_hn_loss(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    margin: float = 0.2,
    *,
    normalize: bool = True,
    same_set: bool = False,
    symmetric: bool = True,
    reduction: str = "mean",
    pairs: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Triplet-HN of embeddings: :func:`vl_plugins.functional.triplet_hn_loss` without a matrix (A, C).

    Pairs of equal labels are positive, all others negative. The hardest negatives are searched tile by tile; ``dense``
    is the same as ``tiled`` here.

    Args:
        x: (A, D), floating point; the anchors.
        y: (C, D), of the same type; the candidates, with ``symmetric`` anchors too.
        x_labels: (A,), integers.
        y_labels: (C,), integers.
        margin: by how much the positive should be closer than the hardest negative.
        normalize: compare by cosine, otherwise by dot product. A vector of norm below 1e-12 has the cosine 0 to any
            other, and no gradient.
        same_set: ``y`` is ``x``; an item is not its own positive.
        symmetric: rows and columns are anchors; otherwise rows only.
        reduction: ``"mean"`` or ``"sum"`` over the positive pairs, or ``"none"`` for one value per positive pair, in
            the order of ``torch.where(x_labels[:, None] == y_labels)``.
        pairs: what :func:`~vl_plugins.kernels.pairs.equal_label_pairs` returns for the labels, if it is known already.
        backend: one of :data:`~vl_plugins.kernels.dispatch.BACKENDS`; chosen by device, size and memory if left out.

    Returns:
        A scalar, or (number of positive pairs,), float32 or float64, also under autocast. NaN if any embedding is not
        finite. Second derivatives take vectors of all positive pairs.

    Raises:
        ValueError: wrong shape, type, device, reduction or backend.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 1-2;
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives.

    >>> import torch
    >>> images, texts = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> triplet_hn_loss(images, texts, labels, labels, margin=0.2)
    tensor(2.4000)
    """
    return hardest_negative_loss(
        partial(_losses, margin=margin),
        partial(functional.triplet_hn_loss, margin=margin),
        x,
        y,
        x_labels,
        y_labels,
        normalize=normalize,
        same_set=same_set,
        symmetric=symmetric,
        reduction=reduction,
        pairs=pairs,
        backend=backend,
        name="triplet_hn_loss",
    )


def _losses(
    anchors: Tensor, positive_similarities: Tensor, of_negatives: NegativeStatistics, *, margin: float
) -> Tensor:
    return triplet_margin(positive_similarities, of_negatives.hardest[anchors], margin)
