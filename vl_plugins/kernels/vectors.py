"""Two sides of vectors to compare, and what all backends do with them alike."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.norms import inverse_norms
from vl_plugins.kernels.tiles import slices

__all__ = [
    "Comparison",
    "add_pair_gradients",
    "compare",
    "differentiable_gradients",
    "finish_gradient",
    "number_on",
    "pair_similarities",
    "precise",
]

# Elements of vectors that are gathered at a time: few on the CPU, for little memory; elsewhere few steps count.
CPU_GATHERED = 2**16
DEVICE_GATHERED = 2**24


class Comparison(NamedTuple):
    """Anchors and candidates, whose similarity is ``(x * x_factors[:, None]) @ (y * y_factors[:, None]).T``.

    Attributes:
        x: (A, D), contiguous, of any floating-point type.
        y: (C, D), of the same type.
        x_factors: (A,), inverse norms; None for ones.
        y_factors: (C,).
        x_labels: (A,), integers; pairs of equal labels are not negative.
        y_labels: (C,).
        rows, columns: (M,), the pairs of equal labels, in the order of rows.
    """

    x: Tensor
    y: Tensor
    x_factors: Tensor | None
    y_factors: Tensor | None
    x_labels: Tensor
    y_labels: Tensor
    rows: Tensor
    columns: Tensor


def compare(
    x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor, pairs: tuple[Tensor, Tensor], *, normalize: bool
) -> Comparison:
    """Prepare a comparison, without autograd; ``normalize`` makes the similarities cosines.

    A vector of norm below 1e-12 has the cosine 0 to any other.
    """
    x, y = (side.detach().contiguous() for side in (x, y))
    factors = (inverse_norms(x), inverse_norms(y)) if normalize else (None, None)
    return Comparison(x, y, *factors, x_labels, y_labels, *pairs)


def number_on(device: torch.device, dtype: torch.dtype, value: float | Tensor) -> Tensor:
    """Return a number or a tensor of one element as 0-D, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype).reshape(())
    # A tensor made of a number on the CPU would be copied, and the copy waited for.
    return torch.full((), value, dtype=dtype, device=device)


def precise(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a few numbers per vector are summed up: float64 where there is such a thing."""
    return dtype if device.type == "mps" else torch.float64


def pair_similarities(comparison: Comparison) -> Tensor:
    """Return the similarities of the pairs ``comparison.rows, comparison.columns``, (M,), a few pairs at a time."""
    x, y, x_factors, y_factors, _, _, rows, columns = comparison
    dtype = torch.promote_types(x.dtype, torch.float32)
    similarities = torch.empty(len(rows), dtype=dtype, device=x.device)
    for part in slices(len(rows), _pairs_at_a_time(x)):
        left, right = x[rows[part]].to(dtype), y[columns[part]].to(dtype)
        torch.sum(left.mul_(right), dim=1, out=similarities[part])
    for factors, index in ((x_factors, rows), (y_factors, columns)):
        if factors is not None:
            similarities *= factors[index]
    return similarities


def add_pair_gradients(
    comparison: Comparison, upstream: Tensor, x_gradient: Tensor | None, y_gradient: Tensor | None
) -> None:
    """Add in place what the pairs of :func:`pair_similarities` contribute to the gradients, as if norms were constant.

    Args:
        comparison: of the vectors.
        upstream: (M,), the gradients by the similarities of the pairs.
        x_gradient: (A, D), float32 or float64, or None.
        y_gradient: (C, D), likewise.
    """
    x, y, x_factors, y_factors, _, _, rows, columns = comparison
    for gradient, index, factors, others, other_index, other_factors in (
        (x_gradient, rows, x_factors, y, columns, y_factors),
        (y_gradient, columns, y_factors, x, rows, x_factors),
    ):
        if gradient is None:
            continue
        weights = upstream
        for of_side, of_index in ((factors, index), (other_factors, other_index)):
            weights = weights if of_side is None else weights * of_side[of_index]
        weights = weights.to(gradient.dtype)
        if gradient.device.type == "cpu":
            # Three times as fast there, without copies of the vectors.
            places = torch.stack([index, other_index])
            sparse = torch.sparse_coo_tensor(places, weights, (len(gradient), len(others)), check_invariants=False)
            torch.addmm(gradient, sparse, others.to(gradient.dtype), out=gradient)
            continue
        for part in slices(len(rows), _pairs_at_a_time(x)):
            vectors = others[other_index[part]].to(gradient.dtype)
            gradient.index_add_(0, index[part], vectors.mul_(weights[part, None]))


def finish_gradient(gradient: Tensor, vectors: Tensor, factors: Tensor | None) -> Tensor:
    """Turn the gradient by vectors of constant norm, in place, into that by normalised ones, in the type of these."""
    if factors is not None:
        for part in slices(len(gradient), _pairs_at_a_time(vectors)):
            of_part, of_vectors = gradient[part], vectors[part].to(gradient.dtype)
            # Nothing along the vector itself: its length does not matter.
            radial = torch.linalg.vecdot(of_part, of_vectors).mul_(factors[part].square())
            of_part.addcmul_(of_vectors, radial[:, None], value=-1)
    return gradient.to(vectors.dtype)


def differentiable_gradients(
    formulas: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    upstream: tuple[Tensor, ...],
) -> list[Tensor | None]:
    """Return gradients that have gradients themselves, for a backward pass with ``create_graph``.

    Second derivatives are rare, and worth memory for all similarities but no kernels of their own.

    Args:
        formulas: the forward pass of the ``inputs`` in plain torch.
        inputs: saved tensors, which know where they come from.
        upstream: gradients by what ``formulas`` returns.
    """
    # As views, because one tensor may be two inputs.
    inputs = [tensor.view_as(tensor) for tensor in inputs]
    outputs = [pair for pair in zip(formulas(*inputs), upstream, strict=True) if pair[0].requires_grad]
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    outputs, upstream = zip(*outputs, strict=True)
    gradients = iter(
        torch.autograd.grad(outputs, needed, upstream, create_graph=True, allow_unused=True, materialize_grads=True)
    )
    return [next(gradients) if tensor.requires_grad else None for tensor in inputs]


def _pairs_at_a_time(vectors: Tensor) -> int:
    elements = CPU_GATHERED if vectors.device.type == "cpu" else DEVICE_GATHERED
    return max(1, elements // max(1, vectors.shape[1]))
