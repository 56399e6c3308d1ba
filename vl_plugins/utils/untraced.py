"""Calls into which ``torch.compile`` does not look; for :func:`vl_plugins.utils.eager.eager`."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["call"]


@torch.compiler.disable
def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``."""
    return function(*args, **kwargs)
