"""L2 normalisation in which a vector of no direction stays zero."""

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision

__all__ = ["inverse_norms", "unit_vectors"]

# Norms below it, as in torch's normalize, are those of no direction.
LEAST_NORM = 1e-12


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return normalised vectors (..., D), differentiable, in float32 or float64; 0 with gradient 0 for no direction.

    >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    (vectors,) = full_precision(vectors)
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(norms < LEAST_NORM, 0, vectors / norms.clamp(min=LEAST_NORM))


def inverse_norms(vectors: Tensor) -> Tensor:
    """Return the inverse norms (...,) of vectors (..., D) in float32 or float64, 0 for no direction."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.promote_types(vectors.dtype, torch.float32))
    return norms.reciprocal().masked_fill_(norms < LEAST_NORM, 0)
