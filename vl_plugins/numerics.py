"""Numbers in float32 at least, and functions that ``torch.compile`` does not trace."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["eager", "full_precision"]

# torch.compile traces either; torch 2.2 has only the second.
_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common type, float32 at least.

    >>> [tensor.dtype for tensor in full_precision(torch.ones(2, dtype=torch.float16), torch.ones(2))]
    [torch.float32, torch.float32]
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def eager() -> Callable[..., Any]:
    """Return ``call(function, *args, **kwargs)``, where ``torch.compile`` breaks its graph instead of unrolling loops.

    A decorator would itself be traced, again for each function that it is given.
    """
    if _is_compiling():
        from vl_plugins.untraced import call  # imports the compiler, which takes seconds

        return call
    return lambda function, *args, **kwargs: function(*args, **kwargs)
