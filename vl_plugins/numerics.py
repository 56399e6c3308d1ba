"""Labels, ids and embeddings as the losses compute with them, and functions that ``torch.compile`` does not trace."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "NO_ID",
    "as_ids",
    "as_labels",
    "as_ref_labels",
    "check_loss",
    "check_not_negative",
    "check_tensors",
    "eager",
    "fill_at",
    "full_precision",
    "labels_of_one_set",
]

NO_ID = -1
UNSIGNED = getattr(torch, "uint64", None)  # torch 2.2 has none
# Types that torch sorts and compares on every device.
LABEL_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.float64, torch.float32)

# torch.compile traces either; torch 2.2 has only the second.
_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def check_tensors(**arguments: Any) -> None:
    """Raise ``ValueError`` for an argument that is no tensor, such as an array of numpy."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_loss(loss: Any) -> None:
    """Raise ``TypeError`` for something else than a loss, such as its name."""
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a loss, got {loss!r}; create_loss makes one by its name")


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common type, float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def fill_at(matrix: Tensor, places: tuple[Tensor, ...], value: float) -> None:
    """Set entries of a matrix to a number, without a wait for the device.

    ``matrix[places] = value`` copies the number from the host to the device, which makes the host wait.
    """
    matrix.index_put_(places, matrix.new_full((), value))


def as_labels(name: str, labels: Any, embeddings: Tensor) -> Tensor:
    """Return labels as a tensor (B,) on the device of the embeddings.

    Args:
        name: of the argument, for the message of an error.
        labels: (B,), a tensor, a numpy array, or a list of numbers. Floating-point labels are checked for NaN, which
            waits for their device; integers need no check.
        embeddings: (B, ...).

    Raises:
        ValueError: another type or length, or NaN, which is equal to no label.
    """
    if not isinstance(labels, Tensor):
        labels = _label_tensor(name, labels)
    rows = len(embeddings)
    if labels.shape != (rows,):
        shape = len(labels) if labels.ndim == 1 else tuple(labels.shape)
        advice = "; embeddings go to ref_emb=" if labels.ndim > 1 and labels.is_floating_point() else ""
        raise ValueError(f"{name} must have the length {rows}, got {shape}{advice}")
    if labels.is_floating_point() and labels.isnan().any():
        raise ValueError(f"{name} must be numbers, got NaN")
    if labels.dtype not in LABEL_TYPES:
        labels = labels.double() if labels.is_floating_point() else labels.long()
    return labels.to(embeddings.device)


def as_ref_labels(labels: Any, embeddings: Tensor) -> Tensor:
    """Return the labels of the second side as :func:`as_labels` does, but as a copy.

    For pytorch-metric-learning, one object as ``labels`` and ``ref_labels`` means one set.
    """
    return as_labels("ref_labels", labels, embeddings).clone()


def check_not_negative(name: str, values: Tensor) -> None:
    """Raise ``ValueError`` if a number on the CPU is below 0; the check would synchronize a GPU."""
    if values.device.type == "cpu" and (values < 0).any():
        raise ValueError(f"{name} must be >= 0, got {values.min().item():g}")


def as_ids(name: str, ids: Any, embeddings: Tensor, dimensions: int = 1) -> Tensor | None:
    """Return integer ids (N,), or (N, M), as a tensor on the device of the embeddings (N, ...); None stays None."""
    if ids is None:
        return None
    expected = f"{name} must be integers that fit into int64"
    if not isinstance(ids, Tensor):
        if dimensions == 2 and isinstance(ids, (list, tuple)):
            ids = _filled_up(ids)
        try:
            ids = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:  # such as strings, and integers beyond int64
            raise ValueError(f"{expected}, such as vl_plugins.data.content_ids(captions): {error}") from error
        if dimensions == 2 and len(ids) == 0:  # lists for no rows
            ids = ids.reshape(0, 0)
    if ids.ndim != dimensions or len(ids) != len(embeddings):
        shape = f"({len(embeddings)},)"
        if dimensions == 2:
            shape = f"({len(embeddings)}, M)"
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(ids.shape)}")
    if ids.numel() > 0 and (ids.is_floating_point() or ids.is_complex() or ids.dtype == UNSIGNED):
        advice = "; shift them right by 1" if ids.dtype == UNSIGNED else ""
        raise ValueError(f"{expected}, got {ids.dtype}{advice}")
    return ids.to(embeddings.device, torch.int64)


def _filled_up(rows: Any) -> Any:
    """Return lists of ids with one length, the shorter ones filled up with ``NO_ID``."""
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]  # arrays and tensors
    if not all(isinstance(row, (list, tuple)) for row in rows):
        return rows
    longest = max(map(len, rows), default=0)
    return [[*row, *[NO_ID] * (longest - len(row))] for row in rows]


def labels_of_one_set(labels: Any, ref_labels: Any, embeddings: Tensor) -> Tensor | None:
    """Return the labels of embeddings that are both sides of a comparison, or None for none.

    Raises:
        ValueError: see :func:`as_labels`; or ``ref_labels`` are given and are not the labels.
    """
    if labels is not None:
        labels = as_labels("labels", labels, embeddings)
    if ref_labels is None:
        return labels
    ref_labels = as_labels("ref_labels", ref_labels, embeddings)
    if labels is None or not (labels is ref_labels or torch.equal(labels, ref_labels.to(labels.dtype))):
        raise ValueError("ref_labels must be the labels, because ref_emb is the embeddings or missing")
    return labels


def _label_tensor(name: str, labels: Any) -> Tensor:
    expected = f"{name} must be a tensor, an array or a list of integers"
    is_array = hasattr(labels, "__array__")
    if not is_array and not isinstance(labels, (list, tuple)):
        raise ValueError(f"{expected}, got {None if labels is None else type(labels).__name__}")
    try:
        tensor = torch.tensor(np.asarray(labels) if is_array else labels)
        return tensor if tensor.numel() > 0 else tensor.long()  # no numbers are floating-point ones
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{expected}: {error}") from error


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function where ``torch.compile`` breaks its graph instead of unrolling loops."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _is_compiling():
            return function(*args, **kwargs)
        from vl_plugins.untraced import call  # imports the compiler, which takes seconds

        return call(function, *args, **kwargs)

    return wrapper
