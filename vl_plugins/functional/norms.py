"""L2 normalization in which zero vectors stay zero."""

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision

__all__ = ["unit_vectors"]

LEAST_NORM = 1e-12  # a smaller norm is that of a zero vector, as in torch's normalize


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return normalized vectors (..., D), float32 or float64; a zero vector stays zero and has no gradient.

    >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    (vectors,) = full_precision(vectors)
    are_zero = torch.linalg.vector_norm(vectors.detach(), dim=-1, keepdim=True) < LEAST_NORM
    # Zero vectors are replaced before and after: the second derivative of their norm would be NaN.
    norms = torch.linalg.vector_norm(vectors.masked_fill(are_zero, 1), dim=-1, keepdim=True)
    return (vectors / norms).masked_fill(are_zero, 0)
