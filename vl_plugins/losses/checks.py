"""Checks of hyper-parameters."""

import math
from numbers import Real

__all__ = ["non_negative", "positive"]


def non_negative(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number >= 0."""
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number > 0."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
