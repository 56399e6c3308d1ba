"""Parts that ``torch.compile`` leaves as they are."""

from collections.abc import Callable

import torch

__all__ = ["eager"]


def eager(function: Callable) -> Callable:
    """Return the function; while ``torch.compile`` traces the caller, one that it calls without looking into it.

    Tracing would unroll loops over tiles. At the call and not as a decorator of torch's: importing a module with such a
    decorator takes seconds.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
