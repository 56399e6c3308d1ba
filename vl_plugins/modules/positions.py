"""Sinusoidal positions, for features that do not contain their positions."""

import math
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["kept_positions", "sinusoidal_positions", "sinusoidal_positions_2d"]


def sinusoidal_positions(length: int, dim: int) -> Tensor:
    r"""Return sine and cosine waves over the positions 0, 1, ..., with wavelengths from 2 pi to 10000 * 2 pi.

    .. math:: P_{p, 2i} = \sin(p / 10000^{2i / D}), \quad P_{p, 2i+1} = \cos(p / 10000^{2i / D})

    Args:
        length: number of positions, >= 1.
        dim: D >= 1; an odd one ends with a sine.

    Returns:
        (length, dim), float32, in [-1, 1].

    Reference:
        Vaswani et al. 2017, Attention Is All You Need, Section 3.5.

    >>> sinusoidal_positions(2, 3)
    tensor([[0.0000, 1.0000, 0.0000],
            [0.8415, 0.5403, 0.0022]])
    """
    # In float64: rounding a phase of some thousand radians to float32 would be visible.
    positions = torch.arange(length, dtype=torch.float64)
    frequencies = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10000) / dim))
    phases = positions[:, None] * frequencies  # (length, ceil(dim / 2))
    return torch.stack([phases.sin(), phases.cos()], dim=-1).flatten(1)[:, :dim].float()


def sinusoidal_positions_2d(height: int, width: int, dim: int) -> Tensor:
    """Return :func:`sinusoidal_positions` of rows in the first half of the channels and of columns in the second.

    Args:
        height, width: numbers of rows and of columns, >= 1.
        dim: D >= 2; of an odd one the rows have one channel more.

    Returns:
        (height * width, dim), float32, row by row as in ``feature_map.flatten(2).transpose(1, 2)``.

    >>> sinusoidal_positions_2d(1, 2, 4)[:, [0, 2]]
    tensor([[0.0000, 0.0000],
            [0.0000, 0.8415]])
    """
    rows = sinusoidal_positions(height, dim - dim // 2)
    columns = sinusoidal_positions(width, dim // 2)
    return torch.cat([rows.repeat_interleave(width, dim=0), columns.repeat(height, 1)], dim=1)


@lru_cache(maxsize=32)
def kept_positions(device: torch.device, *sizes: int) -> Tensor:
    """Return positions on a device, made once: copying them in each step would let the host wait.

    Args:
        sizes: arguments of :func:`sinusoidal_positions`, two, or of :func:`sinusoidal_positions_2d`, three.
    """
    make = sinusoidal_positions if len(sizes) == 2 else sinusoidal_positions_2d
    with torch.inference_mode(False):  # they are used in training, too
        return make(*sizes).to(device)
