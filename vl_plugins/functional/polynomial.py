"""A polynomial of similarities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

__all__ = ["Polynomial"]


@dataclass(frozen=True)
class Polynomial:
    """``c0 + c1 x + c2 x^2 + ...`` of each element of a tensor.

    Two of them, for the positive and the negative pairs, are the weights of the self-similarity polynomial loss, SSP;
    one of relative similarities is that of the relative-similarity polynomial loss, RSP (Eq. 25). See
    :func:`~vl_plugins.functional.unified.unified_loss`.

    Args:
        coefficients: c0, c1, c2, ...; at least one.

    Raises:
        ValueError: no coefficient, or one that is not a finite number.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Section A.4.1.

    >>> Polynomial([1, 0, 0.5])
    Polynomial(coefficients=(1.0, 0.0, 0.5))
    >>> Polynomial([1, 0, 0.5])(torch.tensor([0.0, 2.0]))
    tensor([1., 3.])
    """

    coefficients: Sequence[float]

    def __post_init__(self):
        try:
            coefficients = tuple(self.coefficients)
        except TypeError:
            coefficients = ()
        if not coefficients or not all(map(_is_finite_number, coefficients)):
            raise ValueError(f"coefficients must be one or more finite numbers, got {self.coefficients!r}")
        object.__setattr__(self, "coefficients", tuple(map(float, coefficients)))  # a frozen dataclass allows no other

    def __call__(self, x: Tensor) -> Tensor:
        """Return the polynomial of each element, in the shape of ``x``."""
        *lower, highest = self.coefficients
        value = torch.full_like(x, highest)
        for coefficient in reversed(lower):  # Horner
            value = value * x + coefficient
        return value


def _is_finite_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
