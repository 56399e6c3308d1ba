"""Argument checks: each returns its argument, or raises ``ValueError`` with what is expected and what was given."""

import math
from collections.abc import Callable
from numbers import Real

from torch import Tensor


def finite(name: str, value: float) -> float:
    """Return a finite number as a float."""
    return _number(name, value, "")


def non_negative(name: str, value: float) -> float:
    """Return a finite number >= 0 as a float."""
    return _number(name, value, " >= 0")


def positive(name: str, value: float) -> float:
    """Return a finite number > 0 as a float."""
    return _number(name, value, " > 0")


def _number(name: str, value: float, bound: str) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (bound and value < 0) or (bound == " > 0" and value == 0):
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}")
    return float(value)


def integer(name: str, value: int, least: int) -> int:
    """Return an integer >= ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def finite_tensor(name: str, value: Tensor) -> Tensor:
    """Return a tensor with finite elements."""
    if not value.isfinite().all():
        raise ValueError(f"{name} must be finite everywhere, got a tensor with NaN or infinity")
    return value


def tensor_or_none(name: str, value: Tensor | None) -> Tensor | None:
    """Return a tensor or None."""
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}: torch.as_tensor makes one of it")
    return value


def adaptive_margin(name: str, value: float | Tensor | Callable) -> float | Tensor | Callable:
    """Return a finite number >= 0 as a float, or a tensor of such numbers or a function as it is."""
    if isinstance(value, Tensor) and finite_tensor(name, value).lt(0).any():
        raise ValueError(f"{name} must be >= 0 everywhere, got a tensor with the minimum {value.min().item():.4g}")
    if not isinstance(value, (Real, Tensor)) and not callable(value):
        raise ValueError(f"{name} must be a number, a tensor or a function, got {value!r}")
    return non_negative(name, value) if isinstance(value, Real) else value


def constant_scale(value: float) -> float:
    """Return a finite number > 0 as a float; a learned scale is given in the call instead."""
    if isinstance(value, Tensor) or value == "learned":
        raise ValueError(
            f"scale must be a finite number > 0, got {'a tensor' if isinstance(value, Tensor) else repr(value)}: "
            "give a learned one in the call, loss(..., scale=logit_scale), or to open_clip's launcher as "
            "--loss-kwargs scale=learned"
        )
    return positive("scale", value)


def scale_of_call(value: float | Tensor) -> float | Tensor:
    """Return a finite number > 0 as a float, or a tensor with one element as it is."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"scale must have one element, got shape {tuple(value.shape)}")
    return value if isinstance(value, Tensor) else positive("scale", value)
