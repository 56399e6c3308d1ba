"""Single precision at least, no value that hides a NaN, and unit vectors without any."""

import torch
from torch import Tensor

__all__ = ["full_precision", "unit_vectors", "zero_or_nan"]


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common type, float32 at least.

    Gradients come back in each tensor's own type.

    >>> [tensor.dtype for tensor in full_precision(torch.ones(2, dtype=torch.float16), torch.ones(2))]
    [torch.float32, torch.float32]
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def zero_or_nan(tensor: Tensor) -> Tensor:
    """Return 0 connected to ``tensor``, or NaN when any of its elements is NaN or infinite; its gradient likewise.

    Added to a loss, it keeps the loss in the graph where nothing contributes to it, and shows what a mask, a
    rectifier or a threshold would hide.

    >>> zero_or_nan(torch.tensor([1.0, 2.0])), zero_or_nan(torch.tensor([1.0, float("inf")]))
    (tensor(0.), tensor(nan))
    """
    total = tensor.sum()
    # The second factor makes the gradient NaN too: a GradScaler looks at gradients, not at the loss.
    return total * 0 * total


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return normalized vectors (..., D), float32 or float64; a zero vector stays zero and has no gradient.

    >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    (vectors,) = full_precision(vectors)
    are_zero = torch.linalg.vector_norm(vectors.detach(), dim=-1, keepdim=True) < 1e-12  # as in torch's normalize
    # Zero vectors are replaced before and after: the second derivative of their norm would be NaN.
    norms = torch.linalg.vector_norm(vectors.masked_fill(are_zero, 1), dim=-1, keepdim=True)
    return (vectors / norms).masked_fill(are_zero, 0)
