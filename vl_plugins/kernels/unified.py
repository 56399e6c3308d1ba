"""Unified loss and vision-language contrastive loss of embeddings and labels."""

from torch import Tensor

from vl_plugins import functional
from vl_plugins.functional.norms import unit_vectors
from vl_plugins.functional.pairs import check_reduction, reduce_pair_losses
from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.functional.unified import softplus_over_negatives
from vl_plugins.kernels.dispatch import choose_backend
from vl_plugins.kernels.log_sum_exp import contrast
from vl_plugins.kernels.pairs import check_vectors, compare_all, equal_label_pairs, pairs_of_others
from vl_plugins.kernels.vectors import number_on
from vl_plugins.utils.eager import eager

__all__ = ["unified_loss", "vlc_loss"]


def unified_loss(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    margin: float | Tensor = 0.2,
    scale: float | Tensor = 50.0,
    *,
    weights: Tensor | None = None,
    normalize: bool = True,
    same_set: bool = False,
    symmetric: bool = True,
    reduction: str = "mean",
    pairs: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Unified loss of embeddings: :func:`vl_plugins.functional.unified_loss` without several matrices (A, C).

    Pairs of equal labels are positive, all others negative.

    Args:
        x: (A, D), floating point; the anchors.
        y: (C, D), of the same type; the candidates, with ``symmetric`` anchors too.
        x_labels: (A,), integers.
        y_labels: (C,), integers.
        margin: m; a number, or a tensor 0-D, (A,) or (A, C), read at the positive pairs.
        scale: gamma > 0, the inverse temperature; a number, or a tensor of one element, which receives a gradient.
        weights: w, (A,), of all similarities of a row (Eq. 24).
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
        finite. Second derivatives take all similarities.

    Raises:
        ValueError: wrong shape, type, device, reduction or backend.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 5.

    >>> import torch
    >>> images, texts = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> unified_loss(images, texts, labels, labels, margin=0.2, scale=50)
    tensor(2.4000)
    """
    check_vectors(x, y, x_labels, y_labels, same_set)
    check_reduction(reduction)
    backend = eager()(choose_backend, backend, x, y, name="unified_loss")
    if weights is not None:
        if weights.shape != x_labels.shape or weights.device != x.device:
            raise ValueError(
                f"weights must have the shape {tuple(x_labels.shape)} on {x.device}, "
                f"got {tuple(weights.shape)} on {weights.device}"
            )
        x, y = (unit_vectors(x), unit_vectors(y)) if normalize else full_precision(x, y)
        x, normalize = x * weights[:, None].to(x.dtype), False
    if backend == "functional":
        similarities, *masks = compare_all(x, y, x_labels, y_labels, normalize=normalize, same_set=same_set)
        return functional.unified_loss(similarities, *masks, margin, scale, symmetric=symmetric, reduction=reduction)

    # Before the losses, so that backwards its gradient comes last, and is added in the memory of theirs.
    zero = sum(zero_or_nan(side) for side in full_precision(x, y))
    options = {"symmetric": symmetric, "normalize": normalize, "backend": backend}
    pairs = eager()(equal_label_pairs, x_labels, y_labels) if pairs is None else pairs
    of_all = contrast(x, y, x_labels, y_labels, pairs, scale, **options)
    rows, columns, positives = pairs_of_others(*pairs, of_all.positives) if same_set else (*pairs, of_all.positives)
    scale = number_on(x.device, positives.dtype, scale)
    margin = _at_pairs(margin, rows, columns, (len(x), len(y)), positives)
    losses = softplus_over_negatives(of_all.rows[rows], positives, margin, scale)
    if symmetric:
        losses = losses + softplus_over_negatives(of_all.columns[columns], positives, margin, scale)
    loss = reduce_pair_losses(losses, reduction) / scale
    return loss.to(zero.dtype) + zero


def vlc_loss(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    scale: float | Tensor = 50.0,
    *,
    normalize: bool = True,
    same_set: bool = False,
    symmetric: bool = True,
    reduction: str = "mean",
    pairs: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Vision-language contrastive loss of embeddings: :func:`vl_plugins.functional.vlc_loss` without its matrices.

    :func:`unified_loss` with margin 0, times the scale.

    Args:
        x, y, x_labels, y_labels, scale, normalize, same_set, symmetric, reduction, pairs, backend: see
            :func:`unified_loss`.

    Returns:
        A scalar, or (number of positive pairs,), as :func:`unified_loss`.

    Raises:
        ValueError: wrong shape, type, device, reduction or backend.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 3-4.

    >>> import torch
    >>> images, texts = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> vlc_loss(images, texts, labels, labels, scale=50)
    tensor(100.)
    """
    options = {"normalize": normalize, "same_set": same_set, "symmetric": symmetric, "reduction": reduction}
    loss = unified_loss(x, y, x_labels, y_labels, 0.0, scale, pairs=pairs, backend=backend, **options)
    return (scale * loss).to(loss.dtype)


def _at_pairs(
    margin: float | Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int], like: Tensor
) -> float | Tensor:
    """Return the margins of the positive pairs, (M,) or a number."""
    if not isinstance(margin, Tensor):
        return margin
    if margin.shape != shape[: margin.ndim]:
        raise ValueError(
            f"margin must have the shape (), ({shape[0]},) or ({shape[0]}, {shape[1]}), got {tuple(margin.shape)}"
        )
    index = (rows, columns)[: margin.ndim]
    return (margin[index] if index else margin).to(like)
