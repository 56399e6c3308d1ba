"""What :func:`vl_plugins.numerics.eager` calls under ``torch.compile``."""

import torch


@torch.compiler.disable
def call(function, *args, **kwargs):
    """Return ``function(*args, **kwargs)``."""
    return function(*args, **kwargs)
