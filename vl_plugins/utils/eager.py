"""Parts that ``torch.compile`` leaves as they are."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["eager"]

# torch.compile knows both functions; torch 2.2 has only the second.
is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def eager() -> Callable:
    """Return ``call(function, *args, **kwargs)``; what ``torch.compile`` traces, goes through it without a look inside.

    Tracing would unroll loops over tiles. A function that took the other one would itself be compiled, again for each
    one that it is given, such as a method of an object or of an autograd function.
    """
    if is_compiling():
        from vl_plugins.utils.untraced import call  # importing it takes seconds, where nothing is compiled

        return call
    return _call


def _call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
