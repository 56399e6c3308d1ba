"""Checks of hyper-parameters and of what a call gives."""

import math
from collections.abc import Callable
from numbers import Real

from torch import Tensor

__all__ = [
    "adaptive_margin",
    "constant_scale",
    "finite",
    "finite_tensor",
    "integer",
    "non_negative",
    "positive",
    "scale_of_call",
    "tensor_or_none",
]


def adaptive_margin(name: str, value: float | Tensor | Callable) -> float | Tensor | Callable:
    """Return a number as a float, a tensor or callable as it is, or raise ``ValueError``.

    Numbers, and all elements of a tensor, have to be finite and >= 0.
    """
    if callable(value):
        return value
    if isinstance(value, Tensor):
        finite_tensor(name, value)
        if (value < 0).any():
            raise ValueError(f"{name} must be >= 0 everywhere, got a tensor with the minimum {value.min().item():.4g}")
        return value
    if not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, a tensor or a function, got {value!r}")
    return non_negative(name, value)


def constant_scale(value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number > 0."""
    if isinstance(value, Tensor) or value == "learned":
        given = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"scale must be a finite number > 0, got {given}: give a learned one in the call, "
            "loss(..., scale=logit_scale), or to open_clip's launcher as --loss-kwargs scale=learned"
        )
    return positive("scale", value)


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number."""
    if not _is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def finite_tensor(name: str, value: Tensor) -> Tensor:
    """Return ``value``, or raise ``ValueError`` unless all its elements are finite."""
    if not value.isfinite().all():
        raise ValueError(f"{name} must be finite everywhere, got a tensor with NaN or infinity")
    return value


def non_negative(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number >= 0."""
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)


def integer(name: str, value: int, least: int) -> int:
    """Return ``value``, or raise ``ValueError`` unless it is an integer >= ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a finite number > 0."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def scale_of_call(value: float | Tensor) -> float | Tensor:
    """Return a tensor of one element as it is or a finite number > 0 as a float, or raise ``ValueError``."""
    if not isinstance(value, Tensor):
        return positive("scale", value)
    if value.numel() != 1:
        raise ValueError(f"scale must have one element, got shape {tuple(value.shape)}")
    return value


def tensor_or_none(name: str, value: Tensor | None) -> Tensor | None:
    """Return ``value``, or raise ``ValueError`` unless it is a tensor or None."""
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}: torch.as_tensor makes one of it")
    return value


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
