"""Numbers in float32 at least, and functions that ``torch.compile`` does not trace."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["eager", "full_precision"]

# torch.compile traces either; torch 2.2 has only the second.
_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common type, float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function where ``torch.compile`` breaks its graph instead of unrolling loops."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _is_compiling():
            return function(*args, **kwargs)
        from vl_plugins.untraced import call  # imports the compiler, which takes seconds

        return call(function, *args, **kwargs)

    return wrapper
