"""Checks of hyper-parameters."""

import math
from numbers import Real

__all__ = ["finite", "non_negative", "non_negative_integer", "positive"]


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number."""
    if not _is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def non_negative(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number >= 0."""
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)


def non_negative_integer(name: str, value: int) -> int:
    """Return ``value``, or raise ``ValueError`` unless it is an integer >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
    return value


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number > 0."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
