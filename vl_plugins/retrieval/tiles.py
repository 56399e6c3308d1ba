"""Tiles of a matrix of pairs: how large they are, and in which order they come."""

from collections.abc import Iterator

import torch

__all__ = ["slices", "tile_shape"]

# Elements of a tile. On the CPU it should stay in a cache; elsewhere fewer, larger steps count.
CPU_TILE = 2**19
DEVICE_TILE = 2**24

# What the innermost loops of matrix products take at a time, or a multiple of it.
STEP = 16


def tile_shape(shape: tuple[int, int], device: torch.device, elements: int | None = None) -> tuple[int, int]:
    """Return rows and columns of tiles of about the same size, up to twice as wide as high.

    Args:
        shape: rows and columns of the whole.
        device: where the tile is.
        elements: at most so many, where that is possible; chosen by the device if left out.

    >>> tile_shape((2000, 2000), torch.device("cpu"))
    (512, 1008)
    >>> tile_shape((30, 100), torch.device("cpu"), elements=1)
    (16, 16)
    """
    if elements is None:
        elements = CPU_TILE if device.type == "cpu" else DEVICE_TILE
    rows = _even(shape[0], int((elements / 2) ** 0.5))
    return rows, _even(shape[1], elements // rows)


def _even(length: int, most: int) -> int:
    """Return the size of parts, a multiple of ``STEP``, of which as few as possible are needed."""
    most = max(STEP, most // STEP * STEP)
    parts = max(1, -(-length // most))
    return -(-length // (parts * STEP)) * STEP or STEP


def slices(length: int, step: int) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of ``step``, the last one smaller.

    >>> list(slices(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
