"""What all losses of a similarity matrix share: checks, precision, directions and reduction."""

from collections.abc import Callable

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision, zero_or_nan

__all__ = ["check_pairs", "reduce_positive_pairs"]


def reduce_positive_pairs(
    anchor_loss: Callable[..., Tensor],
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    *pair_values: Tensor | float,
    symmetric: bool,
    reduction: str,
) -> Tensor:
    """Apply ``anchor_loss`` to every positive pair, in one direction or both, and reduce.

    Args:
        anchor_loss: ``(similarities, negative_mask, anchors, positives, *pair_values) -> losses``, the losses (M,) of
            the M positive pairs with the rows as anchors. ``anchors`` and ``positives`` (M,) are their indices,
            ``pair_values`` those given here at these pairs, (M,) each, the same in both directions. Not called without
            such pairs.
        similarities: (A, C), anchors x candidates, larger is closer. Computed in float32 at least.
        positive_mask, negative_mask: (A, C), bool.
        pair_values: (A, C) each, or a number; what else belongs to the pairs, such as a margin of each.
        symmetric: add the loss with the columns as anchors to each pair's value.
        reduction: ``"mean"`` or ``"sum"`` over the positive pairs, or ``"none"``.

    Returns:
        A scalar; with ``"none"`` (M,), in the order of ``torch.where(positive_mask)``. Without positive pairs the
        scalar is 0, connected to ``similarities`` and ``pair_values``. Any NaN or infinity in ``similarities`` makes
        the result NaN, also at a pair in neither mask.
    """
    check_pairs(similarities, positive_mask, negative_mask)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be one of 'mean', 'sum', 'none', got {reduction!r}")
    (similarities,) = full_precision(similarities)

    anchors, positives = torch.where(positive_mask)
    pair_values = [value[anchors, positives] if isinstance(value, Tensor) else value for value in pair_values]
    if len(anchors) == 0:  # torch has no maximum over zero rows or columns
        values = sum((value for value in pair_values if isinstance(value, Tensor)), similarities.new_zeros(0))
    else:
        values = anchor_loss(similarities, negative_mask, anchors, positives, *pair_values)
        if symmetric:
            values = values + anchor_loss(similarities.T, negative_mask.T, positives, anchors, *pair_values)

    if reduction != "none":
        values = values.sum()
    if reduction == "mean":
        values = values / max(len(anchors), 1)
    return values + zero_or_nan(similarities)


def check_pairs(similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor) -> None:
    """Raise ``ValueError`` unless both masks are bool and match the (A, C) matrix in shape and device."""
    if similarities.ndim != 2:
        raise ValueError(f"similarities must have the shape (anchors, candidates), got {tuple(similarities.shape)}")
    for name, mask in (("positive_mask", positive_mask), ("negative_mask", negative_mask)):
        for what, expected, actual in (
            ("shape", tuple(similarities.shape), tuple(mask.shape)),
            ("dtype", torch.bool, mask.dtype),
            ("device", similarities.device, mask.device),
        ):
            if actual != expected:
                raise ValueError(f"{name} must have the {what} {expected}, got {actual}")
