"""The arguments of a call as the losses compute with them: checked shapes, labels, ids, and full precision.

Also functions that ``torch.compile`` does not trace.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "NO_ID",
    "captions_per_row",
    "check_loss",
    "check_not_negative",
    "checked_rows",
    "eager",
    "fill_at",
    "full_precision",
    "full_precision_call",
    "is_autocast_enabled",
    "type_of_products",
    "with_labels",
]

NO_ID = -1
EMBEDDINGS = ("embeddings", "ref_emb", "negatives")
LABELS = ("labels", "ref_labels")
IDS = ("ref_ids", "matching_ids", "negative_ids")
# Of A anchors, C candidates and N further negatives, of width D. With one set, the candidates are the anchors. Other
# arguments have a number for each candidate.
SHAPES = {
    "embeddings": "AD",
    "ref_emb": "CD",
    "negatives": "ND",
    "labels": "A",
    "ref_labels": "C",
    "ref_ids": "C",
    "matching_ids": "AM",
    "negative_ids": "N",
    "copies": "A",
}
# Types that torch sorts and compares on every device.
LABEL_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.float64, torch.float32)
HALF = {torch.bfloat16, torch.float16}
UNSIGNED = getattr(torch, "uint64", None)  # torch 2.2 has none

# torch.compile traces either; torch 2.2 has only the second.
_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
# Of a device, from torch 2.4 on.
is_autocast_enabled: Any = torch.is_autocast_enabled
_autocast_dtype: Any = getattr(torch, "get_autocast_dtype", None)
if _autocast_dtype is None:

    def is_autocast_enabled(device: str) -> bool:
        if device == "cpu":
            return torch.is_autocast_cpu_enabled()
        return bool(torch.is_autocast_enabled())

    def _autocast_dtype(device: str) -> torch.dtype:
        if device == "cpu":
            return torch.get_autocast_cpu_dtype()
        return torch.get_autocast_gpu_dtype()


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common type, float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    converted = []
    for tensor in tensors:
        converted.append(tensor.to(dtype))
    return tuple(converted)


# Of the call that goes on: the half-precision type of its caller, and that of its products; None for full precision.
_types: ContextVar[tuple[Any, Any] | None] = ContextVar("types", default=None)


@contextlib.contextmanager
def full_precision_call(products: str = "float32", **embeddings: Any) -> Iterator[torch.dtype | None]:
    """Turn autocast off in a call of a loss, but for its matrix products.

    With ``products="autocast"`` they have the type of the caller's autocast, or of the embeddings. A call within
    another one has the caller of the outermost.

    Yields:
        the type of the products: bfloat16 or float16; None for that of the embeddings, float32 at least.
    """
    dtypes = set()
    device = ""
    for name, side in embeddings.items():
        if side is None and device:  # embeddings come first, and are always there
            continue
        if not isinstance(side, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(side).__name__}")
        dtypes.add(side.dtype)
        device = side.device.type
    of_caller = None
    if (types := _types.get()) is not None:
        of_caller, _ = types
    elif is_autocast_enabled(device) and torch.float64 not in dtypes:
        of_caller = _autocast_dtype(device)
    elif len(dtypes) == 1 and dtypes <= HALF:
        of_caller = dtypes.pop()
    dtype = of_caller if products == "autocast" else None
    token = _types.set((of_caller, dtype))
    try:
        if not is_autocast_enabled(device):  # entering torch's context takes longer than a small product
            yield dtype
            return
        with torch.autocast(device, enabled=False):
            yield dtype
    finally:
        _types.reset(token)


def type_of_products() -> torch.dtype | None:
    """Return the half-precision type of matrix products in the call that goes on; None for full precision."""
    types = _types.get()
    return None if types is None else types[1]


def fill_at(matrix: Tensor, places: tuple[Tensor, ...], value: float) -> None:
    """Set entries of a matrix to a number, without a wait for the device.

    ``matrix[places] = value`` copies the number from the host to the device, which makes the host wait.
    """
    matrix.index_put_(places, matrix.new_full((), value))


def checked_rows(arguments: Mapping[str, Any], compares_vectors: bool = True) -> dict[str, Any]:
    """Return the arguments of a call that have rows as tensors, None for those that are not given.

    Embeddings are in their common type, float32 at least. All others are on the device of the embeddings: labels in a
    type that can be sorted, ids in int64. Where one set is compared, ``ref_emb`` and ``ref_labels`` become None.

    Args:
        arguments: by the names of :class:`~vl_plugins.losses.PairLoss`, embeddings first. Labels and numbers may be
            lists or arrays. Floating-point labels are checked for NaN.
        compares_vectors: False if embeddings may have any shape, such as sets.

    Raises:
        ValueError: the argument that does not fit, with the shape that it should have.
    """
    rows = dict(arguments)
    embeddings = rows["embeddings"]
    if rows.get("ref_emb") is embeddings:
        rows["ref_emb"] = None
    sizes: dict[str, int] = {}
    dtype = torch.float32
    for name, value in rows.items():
        if value is None:
            continue
        letters = SHAPES.get(name, "C")
        if name in EMBEDDINGS:
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
            dtype, shape = torch.promote_types(dtype, value.dtype), value.shape
            if not compares_vectors:
                shape, letters = shape[:1], letters[0]
        else:
            is_plain = isinstance(value, Tensor) and value.dtype == torch.int64 and value.device == embeddings.device
            if not is_plain or name not in SHAPES:
                value = rows[name] = _as_tensor(name, value, embeddings)
            shape = value.shape
        if len(shape) != len(letters):
            raise _wrong_shape(name, value, letters, sizes)
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise _wrong_shape(name, value, letters, sizes)
        if name == "embeddings" and rows.get("ref_emb") is None:
            sizes["C"] = sizes["A"]
    for name in EMBEDDINGS:
        if rows.get(name) is not None:
            rows[name] = rows[name].to(dtype)
    ref_labels = rows.get("ref_labels")
    if ref_labels is not None and (rows["ref_emb"] is None or ref_labels is rows["labels"]):
        _check_both_labels(rows)
    return rows


def _wrong_shape(name: str, value: Tensor, letters: str, sizes: Mapping[str, int]) -> ValueError:
    """Return the error for an argument of another shape, in numbers where other arguments say what they must be."""
    shape = tuple(value.shape)
    if name not in SHAPES:
        expected = "one number" if name == "confidence" else "a number, or one"
        return ValueError(f"{name} must be {expected} for each caption, ({sizes['C']},); got the shape {shape}")
    if len(letters) == 1:
        got = len(value) if value.ndim == 1 else shape
        advice = "; embeddings go to ref_emb=" if value.is_floating_point() and value.ndim > 1 else ""
        return ValueError(f"{name} must have the length {sizes[letters]}, got {got}{advice}")
    if name in EMBEDDINGS and value.ndim == 2:
        return ValueError(f"embeddings and {name} must have the same width, got {sizes['D']} and {shape[1]}")
    advice = ""
    if name in EMBEDDINGS and value.ndim == 3:
        advice = "; .flatten(0, 1) makes rows of the captions of each image; sets need a distance of sets"
    return ValueError(f"{name} must have the shape ({letters[0]}, {letters[1]}), got {shape}{advice}")


def _as_tensor(name: str, value: Any, embeddings: Tensor) -> Tensor:
    """Return labels, ids or numbers as a tensor on the device of the embeddings."""
    kind = "integers"
    if name not in LABELS and name not in IDS:
        kind = "numbers"
    expected = f"{name} must be a tensor, an array or a list of {kind}"
    if name in IDS:
        expected = f"{expected} that fit into int64, such as vl_plugins.data.content_ids(captions)"
    if not isinstance(value, Tensor):
        if not isinstance(value, (list, tuple)) and not hasattr(value, "__array__"):
            raise ValueError(f"{expected}, got {type(value).__name__}")
        if name == "matching_ids" and isinstance(value, (list, tuple)):
            value = _filled_up(value)
        if hasattr(value, "__array__"):
            value = np.array(value)  # a copy, which may be written to
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:  # such as strings, and integers beyond int64
            raise ValueError(f"{expected}: {error}") from error
        if value.numel() == 0:  # no numbers are floating-point ones
            value = value.long()
    if name in LABELS:
        if value.is_floating_point() and value.isnan().any():
            raise ValueError(f"{name} must be numbers, got NaN")
        if value.dtype not in LABEL_TYPES:
            value = value.double() if value.is_floating_point() else value.long()
    elif name in IDS:
        if value.is_floating_point() or value.is_complex() or value.dtype == UNSIGNED:
            raise ValueError(f"{expected}, got {value.dtype}")
        value = value.long()
    elif name == "confidence":
        check_not_negative(name, value)
    return value.to(embeddings.device)


def _filled_up(rows: Any) -> Any:
    """Return lists of ids with one length, the shorter ones filled up with ``NO_ID``."""
    lists, longest = [], 0
    for row in rows:
        if hasattr(row, "tolist"):  # arrays and tensors
            row = row.tolist()
        if not isinstance(row, (list, tuple)):
            return rows
        lists.append([*row])
        longest = max(longest, len(row))
    for row in lists:
        row += [NO_ID] * (longest - len(row))
    return np.array(lists, dtype=np.int64).reshape(len(lists), longest)


def _check_both_labels(rows: dict[str, Any]) -> None:
    """Raise ``ValueError`` for ``ref_labels`` that say something else than the labels of one set.

    For pytorch-metric-learning, one object with both names means one set. So two sets get two objects.
    """
    labels: Any = rows.get("labels")
    ref_labels: Any = rows["ref_labels"]
    if rows.get("ref_emb") is not None:
        if labels is ref_labels:
            rows["ref_labels"] = ref_labels.clone()
        return
    if labels is None or not (labels is ref_labels or torch.equal(labels, ref_labels.to(labels.dtype))):
        raise ValueError("ref_labels must be the labels, because ref_emb is the embeddings or missing")
    rows["ref_labels"] = None


def captions_per_row(rows: Mapping[str, Any]) -> int:
    """Return how many rows of ``ref_emb`` belong to each row of the embeddings by position.

    Raises:
        ValueError: one set without labels, ``ref_labels`` without labels, or sides of which one is no multiple.
    """
    ref_emb = rows["ref_emb"]
    if rows["labels"] is None and ref_emb is None:
        raise ValueError("labels must be given with one set of embeddings")
    if rows["labels"] is None and rows["ref_labels"] is not None:
        raise ValueError("labels must be given with ref_labels")
    if ref_emb is None:
        return 1
    anchors, candidates = rows["embeddings"].shape[0], ref_emb.shape[0]
    captions = candidates // max(1, anchors)
    if captions * anchors != candidates and rows["ref_labels"] is None:
        raise ValueError(
            "without ref_labels, rows k i to k i + k - 1 of ref_emb belong to row i of the embeddings: "
            f"{candidates} is not a multiple of {anchors}"
        )
    return captions


def with_labels(rows: dict[str, Any], first_label: int = 0) -> dict[str, Any]:
    """Return the rows of a call with labels for both sides; those that are not given follow from the order."""
    captions = captions_per_row(rows)
    labels, ref_labels, ref_emb = rows["labels"], rows["ref_labels"], rows["ref_emb"]
    if labels is None:
        labels = torch.arange(len(rows["embeddings"]), device=rows["embeddings"].device) + first_label
    if ref_emb is not None and ref_labels is None:
        ref_labels = labels.repeat_interleave(captions, output_size=len(ref_emb))
    return rows | {"labels": labels, "ref_labels": ref_labels}


def check_not_negative(name: str, values: Tensor) -> None:
    """Raise ``ValueError`` if a number on the CPU is below 0; the check would synchronize a GPU."""
    if values.device.type == "cpu" and (values < 0).any():
        raise ValueError(f"{name} must be >= 0, got {values.min().item():g}")


def check_loss(loss: Any) -> None:
    """Raise ``TypeError`` for something else than a loss, such as its name."""
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a loss, got {loss!r}; create_loss makes one by its name")


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function where ``torch.compile`` breaks its graph instead of unrolling loops."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _is_compiling():
            return function(*args, **kwargs)
        from vl_plugins.untraced import call  # imports the compiler, which takes seconds

        return call(function, *args, **kwargs)

    return wrapper
