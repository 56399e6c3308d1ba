"""Pairs of equal labels, without a matrix of all pairs."""

import torch
from torch import Tensor

from vl_plugins.functional.norms import unit_vectors
from vl_plugins.functional.precision import full_precision

__all__ = [
    "RememberedPairs",
    "SameTensors",
    "check_vectors",
    "compare_all",
    "equal_label_pairs",
    "pairs_of_others",
]


def equal_label_pairs(x_labels: Tensor, y_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns, (M,) each, of all pairs of equal labels, sorted by row and then by column.

    The same as ``torch.where(x_labels[:, None] == y_labels)`` with memory for the pairs that there are. On an
    accelerator it waits for their number.

    Args:
        x_labels: (A,), integers.
        y_labels: (C,), integers, on the same device.

    >>> equal_label_pairs(torch.tensor([3, 5, 4]), torch.tensor([5, 3, 3]))
    (tensor([0, 0, 1]), tensor([1, 2, 0]))
    """
    dtype = torch.promote_types(torch.promote_types(x_labels.dtype, y_labels.dtype), torch.uint8)
    x_labels, (ordered, order) = x_labels.to(dtype), y_labels.to(dtype).sort(stable=True)
    first = torch.searchsorted(ordered, x_labels)  # (A,)
    counts = torch.searchsorted(ordered, x_labels, right=True) - first
    rows = torch.repeat_interleave(counts)  # (M,)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return rows, order[first[rows] + place]


class SameTensors:
    """Tells of two tensors whether they are those of the last call, and have not been written to since."""

    def __init__(self):
        self._tensors = self._versions = None

    def __call__(self, one: Tensor, other: Tensor) -> bool:
        is_same = self.are(one, other)
        # Tensors of inference mode do not know whether they have been written to.
        can_tell = not (one.is_inference() or other.is_inference())
        self._tensors, self._versions = ((one, other), (one._version, other._version)) if can_tell else (None, None)
        return is_same

    def are(self, one: Tensor, other: Tensor) -> bool:
        """Return the same, and remember the tensors of the last call still."""
        if self._tensors is None or self._tensors[0] is not one or self._tensors[1] is not other:
            return False
        return self._versions == (one._version, other._version)


class RememberedPairs:
    """:func:`equal_label_pairs`, which are not searched again for the tensors of the last two calls.

    So a caller whose labels stay the same never waits for an accelerator, also where it compares one way and then the
    other.
    """

    def __init__(self):
        self._known: list[tuple[SameTensors, tuple[Tensor, Tensor]]] = []

    def __call__(self, x_labels: Tensor, y_labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and columns, (M,) each.

        Args:
            x_labels: (A,), integers.
            y_labels: (C,), integers.
        """
        for tensors, pairs in self._known:
            if tensors.are(x_labels, y_labels):
                return pairs
        tensors, pairs = SameTensors(), equal_label_pairs(x_labels, y_labels)
        tensors(x_labels, y_labels)
        self._known = [*self._known[-1:], (tensors, pairs)]
        return pairs


def pairs_of_others(rows: Tensor, columns: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Leave out the pairs of an item and itself, from indices and what belongs to the pairs."""
    others = torch.where(rows != columns)[0]
    return tuple(tensor[others] for tensor in (rows, columns, *values))


def compare_all(
    x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor, *, normalize: bool, same_set: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all similarities and the masks of positive and negative pairs, (A, C) each, for ``functional``."""
    with torch.autocast(x.device.type, enabled=False):
        x, y = (unit_vectors(x), unit_vectors(y)) if normalize else full_precision(x, y)
        similarities = x @ y.T
    positive_mask = x_labels[:, None] == y_labels
    negative_mask = ~positive_mask
    return similarities, positive_mask.fill_diagonal_(False) if same_set else positive_mask, negative_mask


def check_vectors(x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor, same_set: bool) -> None:
    """Raise ``ValueError`` unless these are vectors of one width, type and device with a label each."""
    for name, vectors, like in (("x", x, x), ("y", y, x)):
        if vectors.ndim != 2 or not vectors.is_floating_point():
            raise ValueError(
                f"{name} must be floating point of shape (number, D), got {vectors.dtype} of {tuple(vectors.shape)}"
            )
        for what, expected, actual in (
            ("width", like.shape[1], vectors.shape[1]),
            ("type", like.dtype, vectors.dtype),
            ("device", like.device, vectors.device),
        ):
            if actual != expected:
                raise ValueError(f"y must have the {what} of x, {expected}, got {actual}")
    for name, labels, vectors in (("x_labels", x_labels, x), ("y_labels", y_labels, y)):
        if labels.shape != vectors.shape[:1] or labels.device != x.device:
            raise ValueError(
                f"{name} must have the shape {tuple(vectors.shape[:1])} on {x.device}, "
                f"got {tuple(labels.shape)} on {labels.device}"
            )
    if same_set and len(x) != len(y):
        raise ValueError(f"same_set needs y to be x, got {len(x)} and {len(y)} vectors")
