"""Norms of embeddings: which are unit vectors, and division by the norm."""

import torch
from torch import Tensor

from vl_plugins.numerics import full_precision

__all__ = ["divided_by_norms", "has_unit_norm", "norms"]

# In every type: half precision rounds norms by up to 0.004, and such embeddings may be in float32 now.
TOLERANCE = 0.01


def norms(embeddings: Tensor) -> Tensor:
    """Return the Euclidean norms (...) of vectors (..., D), in float32 at least.

    Squares are added up in float64: those of float32 numbers may overflow, or vanish.
    """
    (embeddings,) = full_precision(embeddings)
    return torch.linalg.vector_norm(embeddings, dim=-1, dtype=torch.float64).to(embeddings.dtype)


def has_unit_norm(norms: Tensor) -> Tensor:
    """Return where norms are 1 up to 0.01. NaN is not."""
    return (norms - 1).abs() < TOLERANCE


def divided_by_norms(embeddings: Tensor) -> Tensor:
    """Return unit vectors (..., D), in float32 at least. Zero vectors, such as the padding of sets, stay zero."""
    (embeddings,) = full_precision(embeddings)
    divisors = norms(embeddings)[..., None]
    return embeddings / divisors.masked_fill(divisors == 0, 1)
