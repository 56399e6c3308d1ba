"""Regions and words that are left out at random in training."""

import torch
from torch import Tensor

from vl_plugins.errors import number

__all__ = ["fraction", "leave_out"]


def leave_out(padding_mask: Tensor, rate: float) -> Tensor:
    """Add places to a padding mask at random, and leave at least one to every item that has any.

    Args:
        padding_mask: (B, N), bool, N >= 1, True for places that do not exist.
        rate: probability with which a place is left out, [0, 1).

    Returns:
        (B, N), bool, True for places that do not exist or are left out.

    >>> leave_out(torch.tensor([[False, True], [True, True]]), 0.999)
    tensor([[False,  True],
            [ True,  True]])
    """
    noise = torch.rand(padding_mask.shape, device=padding_mask.device).masked_fill(padding_mask, -1)
    return padding_mask | ((noise < rate) & (noise < noise.amax(dim=1, keepdim=True)))


def fraction(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is a number in [0, 1)."""
    if number(name, value, least=0) >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}")
    return float(value)
