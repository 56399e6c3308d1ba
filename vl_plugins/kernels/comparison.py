"""How embeddings are compared: by which backend, in which blocks, and the similarities and gradients of both sides."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.utils.errors import unknown_name

__all__ = [
    "BACKENDS",
    "Block",
    "EmbeddingPair",
    "PairLabels",
    "add_normalization_gradient",
    "check_embeddings",
    "choose_backend",
    "differentiable_gradients",
    "equal_label_pairs",
    "inverse_norms",
    "log_choice",
    "row_blocks",
]

BACKENDS = ("dense", "tiled")
"""How similarities (A, C) are computed:

- ``dense``: as one matrix, which becomes its own gradient.
- ``tiled``: block by block, and again for the gradients: memory for the gradients and two blocks.
"""

DENSE_BYTES = 2**30  # a larger matrix is not worth the product that it saves

# Similarities of a block: on the CPU they should stay in the cache; elsewhere fewer, larger steps are faster.
CPU_BLOCK = 2**20
DEVICE_BLOCK = 2**24
LEAST_ROWS = 32  # matrix products of fewer rows are slow

LEAST_NORM = 1e-12  # as in torch's normalize

logger = logging.getLogger(__name__)


def choose_backend(backend: str | None, embeddings: Tensor, ref_emb: Tensor, *, name: str) -> str:
    """Return the backend that compares (A, D) with (C, D), by their sizes alone unless one is given.

    Args:
        backend: one of :data:`BACKENDS`, or None to choose.
        embeddings: (A, D).
        ref_emb: (C, D).
        name: of what is computed, for the log, where each choice is written once.

    Raises:
        ValueError: an unknown backend.
    """
    if backend is None:
        itemsize = torch.promote_types(embeddings.dtype, torch.float32).itemsize
        backend = "dense" if len(embeddings) * len(ref_emb) * itemsize <= DENSE_BYTES else "tiled"
    elif backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    log_choice(name, backend, embeddings.device.type)
    return backend


@functools.cache
def log_choice(name: str, backend: str, device: str) -> None:
    """Log which backend computes what, once for each choice."""
    logger.info("%s: backend %s on %s", name, backend, device)


def row_blocks(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Cut the rows of a matrix into blocks of a size that suits the device."""
    step = max(LEAST_ROWS, (CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK) // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def equal_label_pairs(labels: Tensor, ref_labels: Tensor, *, same_set: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows and columns, (M,) each, of all pairs of equal labels, as ``torch.where`` of their mask orders them.

    Args:
        labels: (A,), integers.
        ref_labels: (C,), integers, on the same device.
        same_set: leave out the pairs (i, i).

    >>> equal_label_pairs(torch.tensor([3, 5, 4]), torch.tensor([5, 3, 3]))
    (tensor([0, 0, 1]), tensor([1, 2, 0]))
    """
    blocks = row_blocks(len(labels), len(ref_labels), labels.device)
    found = [(labels[block, None] == ref_labels).nonzero() for block in blocks]
    for block, pairs in zip(blocks[1:], found[1:], strict=True):
        pairs[:, 0] += block.start
    rows, columns = (torch.cat(found) if len(found) != 1 else found[0]).T if found else labels.new_zeros(2, 0).long()
    if same_set:
        different = rows != columns
        rows, columns = rows[different], columns[different]
    return rows, columns


def inverse_norms(vectors: Tensor) -> Tensor:
    """Return the inverse norms (...,) of vectors (..., D), float32 or float64; 0 for norms below 1e-12."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.promote_types(vectors.dtype, torch.float32))
    return norms.reciprocal().masked_fill_(norms < LEAST_NORM, 0)


@dataclass(frozen=True)
class EmbeddingPair:
    """Anchors and candidates without autograd; the similarity of i and j is their dot product over their norms.

    Attributes:
        embeddings: (A, D), contiguous.
        ref_emb: (C, D).
        inverse_norms: (A,) and (C,), 0 for zero vectors; None to compare by dot product.
    """

    embeddings: Tensor
    ref_emb: Tensor
    inverse_norms: tuple[Tensor, Tensor] | None

    @classmethod
    def prepare(cls, embeddings: Tensor, ref_emb: Tensor, *, normalize: bool) -> "EmbeddingPair":
        """Compare by cosine with ``normalize``, otherwise by dot product; half precision becomes float32."""
        dtype = torch.promote_types(torch.promote_types(embeddings.dtype, ref_emb.dtype), torch.float32)
        left, right = (side.detach().to(dtype).contiguous() for side in (embeddings, ref_emb))
        return cls(left, right, (inverse_norms(left), inverse_norms(right)) if normalize else None)

    @property
    def dtype(self) -> torch.dtype:
        """The type of similarities and gradients, float32 or float64."""
        return self.embeddings.dtype

    @property
    def zero_or_nan(self) -> Tensor:
        """0, or NaN if any embedding has NaN or infinity."""
        return (self.embeddings.sum() + self.ref_emb.sum()) * 0

    def swapped(self) -> "EmbeddingPair":
        """Return the same with the sides exchanged."""
        return EmbeddingPair(self.ref_emb, self.embeddings, self.inverse_norms and self.inverse_norms[::-1])

    def similarities(self, rows: slice, factor: float | Tensor = 1.0) -> Tensor:
        """Return the similarities of some rows and all columns, (a, C), times a factor."""
        vectors = self.embeddings[rows]
        if self.inverse_norms is None:
            return (vectors @ self.ref_emb.T).mul_(factor)
        products = (vectors * self.inverse_norms[0][rows, None]) @ self.ref_emb.T
        return products.mul_(self.inverse_norms[1] * factor)

    def similarities_of_pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the similarities of pairs of indices, (M,)."""
        values = torch.empty(len(rows), dtype=self.dtype, device=rows.device)
        for part in row_blocks(len(rows), self.embeddings.shape[1], rows.device):
            torch.sum(self.embeddings[rows[part]] * self.ref_emb[columns[part]], dim=1, out=values[part])
        if self.inverse_norms is not None:
            values *= self.inverse_norms[0][rows] * self.inverse_norms[1][columns]
        return values

    def add_gradients_of_pairs(
        self, rows: Tensor, columns: Tensor, upstream: Tensor, grad: Tensor | None, ref_grad: Tensor | None
    ) -> None:
        """Add the gradients of :meth:`similarities_of_pairs`, for constant norms, to (A, D) and (C, D) in place."""
        if self.inverse_norms is not None:
            upstream = upstream * self.inverse_norms[0][rows] * self.inverse_norms[1][columns]
        shape = len(self.embeddings), len(self.ref_emb)
        weights = torch.sparse_coo_tensor(torch.stack([rows, columns]), upstream, shape, check_invariants=False)
        if grad is not None:
            torch.addmm(grad, weights, self.ref_emb, out=grad)
        if ref_grad is not None:
            torch.addmm(ref_grad, weights.t(), self.embeddings, out=ref_grad)

    def finish_gradients(self, grad: Tensor | None, ref_grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Turn gradients for constant norms into those of the normalized embeddings, in place."""
        sides = zip((grad, ref_grad), (self.embeddings, self.ref_emb), self.inverse_norms or (), strict=False)
        for gradient, vectors, factors in sides:
            if gradient is not None:
                add_normalization_gradient(gradient, vectors, factors)
        return grad, ref_grad


def add_normalization_gradient(gradient: Tensor, vectors: Tensor, factors: Tensor) -> None:
    """Turn the gradient by vectors of constant norm, (N, D), in place into that by vectors with these inverse norms."""
    # The part along a vector itself only changes its norm; computed for some vectors at a time, for little memory.
    for part in row_blocks(len(vectors), 4 * vectors.shape[1], vectors.device):
        some, some_vectors = gradient[part], vectors[part]
        radial = (some * some_vectors).sum(1).mul_(factors[part]).mul_(factors[part])
        some.addcmul_(some_vectors, radial[:, None], value=-1)


def differentiable_gradients(
    formula: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor | None, ...], upstream: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Return the gradients of a plain formula with a graph of their own, for a backward pass with ``create_graph``.

    Args:
        formula: the forward pass of the ``inputs`` in plain torch.
        inputs: tensors saved for the backward pass, or None.
        upstream: the gradients by what ``formula`` returns.
    """
    inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]  # one may be both sides
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    outputs = formula(*inputs)
    gradients = iter(
        torch.autograd.grad(outputs, needed, upstream, create_graph=True, allow_unused=True, materialize_grads=True)
    )
    return [next(gradients) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


def check_embeddings(embeddings: Tensor, ref_emb: Tensor, labels: Tensor, ref_labels: Tensor) -> None:
    """Raise ``ValueError`` unless these are embeddings of one dimension and device with one label each."""
    for name, side in (("embeddings", embeddings), ("ref_emb", ref_emb)):
        if side.ndim != 2 or not side.is_floating_point():
            raise ValueError(f"{name} must be floating point of shape (B, D), got {side.dtype} of {tuple(side.shape)}")
    for what, expected, actual in (
        ("dimension", embeddings.shape[1], ref_emb.shape[1]),
        ("device", embeddings.device, ref_emb.device),
    ):
        if actual != expected:
            raise ValueError(f"ref_emb must have the {what} of embeddings, {expected}, got {actual}")
    for name, values, side in (("labels", labels, embeddings), ("ref_labels", ref_labels, ref_emb)):
        if values.shape != side.shape[:1] or values.device != side.device:
            raise ValueError(
                f"{name} must have the shape {tuple(side.shape[:1])} on {side.device}, "
                f"got {tuple(values.shape)} on {values.device}"
            )


class PairLabels(NamedTuple):
    """The labels of both sides, and the rows and columns of the pairs of equal ones."""

    labels: Tensor
    ref_labels: Tensor
    rows: Tensor
    columns: Tensor
    same_set: bool

    def blocks(self) -> list["Block"]:
        """Cut the similarities into blocks of rows with their pairs of equal labels."""
        slices = row_blocks(len(self.labels), len(self.ref_labels), self.rows.device)
        if len(slices) == 1:
            return [Block(slices[0], self.rows, self.columns, self.same_set)]
        numbers = self.rows // slices[0].stop if slices else self.rows
        counts = numbers.bincount(minlength=len(slices)).tolist()
        parts = zip(slices, self.rows.split(counts), self.columns.split(counts), strict=True)
        return [Block(part, rows - part.start, columns, self.same_set) for part, rows, columns in parts]


class Block(NamedTuple):
    """Some rows, and where in these rows the labels are equal."""

    rows: slice
    equal_rows: Tensor
    equal_columns: Tensor
    same_set: bool

    def fill_equal(self, matrix: Tensor, value: float) -> Tensor:
        """Overwrite (a, C) in place where the labels are equal."""
        matrix[self.equal_rows, self.equal_columns] = value
        if self.same_set:
            matrix.diagonal(self.rows.start).fill_(value)
        return matrix
