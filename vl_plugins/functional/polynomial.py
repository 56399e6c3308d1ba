"""A polynomial of similarities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vl_plugins.utils.checks import finite

__all__ = ["Polynomial"]


@dataclass(frozen=True)
class Polynomial:
    """``c0 + c1 x + c2 x^2 + ...`` of each element of a tensor.

    :func:`~vl_plugins.functional.unified_loss` takes two as ``weights`` (SSP), or one as ``relative`` (RSP).

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

    def __post_init__(self) -> None:
        if not isinstance(self.coefficients, Sequence) or not self.coefficients:
            raise ValueError(f"coefficients must be one or more finite numbers, got {self.coefficients!r}")
        coefficients = tuple(finite("coefficients", value) for value in self.coefficients)
        object.__setattr__(self, "coefficients", coefficients)  # a frozen dataclass allows no other way

    def __call__(self, values: Tensor) -> Tensor:
        """Return the polynomial of each element, in the shape of ``values``."""
        *lower, highest = self.coefficients
        result = torch.full_like(values, highest)
        for coefficient in reversed(lower):  # Horner
            result = result * values + coefficient
        return result
