"""Which implementation compares the embeddings: by device, size and memory, or as it is asked for."""

import functools
import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from vl_plugins.utils.errors import check_name

__all__ = ["BACKENDS", "choose_backend", "free_bytes", "log_choice", "triton_is_usable"]

BACKENDS = ("functional", "dense", "tiled", "triton")
"""From the plainest to the fastest on a GPU:

- ``functional``: the formulas of :mod:`vl_plugins.functional` on all similarities, in plain torch: several matrices
  (A, C).
- ``dense``: one matrix (A, C), which becomes its own gradient.
- ``tiled``: tile by tile, and again for the gradients: memory for the vectors, their gradients and a tile.
- ``triton``: fused tiles on a CUDA GPU.

On a GPU the gradients of several positives of an item, and of a hardest negative that several anchors share, are added
in any order, unless ``torch.use_deterministic_algorithms(True)`` asks for one; all else is the same to the last bit
each time.
"""

logger = logging.getLogger(__name__)

# A larger matrix is not worth the product that it saves.
DENSE_BYTES = 2**30
DENSE_SHARE = 0.25  # of the memory that is free
LITTLE_BYTES = 2**24  # not worth a question to the system in each step


def choose_backend(backend: str | None, x: Tensor, y: Tensor, *, name: str = "loss") -> str:
    """Return the backend to compare ``x`` (A, D) with ``y`` (C, D), and log what was chosen, once for each name.

    Args:
        backend: one of :data:`BACKENDS`, or None to choose.
        x, y: the vectors.
        name: for the log.

    Raises:
        ValueError: an unknown backend, or ``triton`` where it cannot run.
    """
    if backend is not None:
        check_name("backend", backend, BACKENDS)
        if backend == "triton" and not triton_is_usable(x.device):
            raise ValueError(
                f"backend 'triton' needs Triton and embeddings on a CUDA GPU of compute capability 8.0 or later, got "
                f"{x.device}; 'tiled' runs everywhere"
            )
        return backend
    if triton_is_usable(x.device):
        log_choice(name, "triton", f"on {x.device.type}")
        return "triton"
    needed = len(x) * len(y) * torch.promote_types(x.dtype, torch.float32).itemsize
    fits = needed <= DENSE_BYTES and (needed <= LITTLE_BYTES or needed <= DENSE_SHARE * free_bytes(x.device))
    chosen = "dense" if fits else "tiled"
    log_choice(name, chosen, f"{len(x)} x {len(y)} similarities on {x.device.type}")
    return chosen


def triton_is_usable(device: torch.device) -> bool:
    """Return whether Triton's kernels run on the device: Ampere or later, or Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _has_triton()
    return device.type == "cuda" and _has_triton() and _capability(device) >= (8, 0)


@functools.cache
def _has_triton() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return int(triton.__version__.partition(".")[0]) >= 3


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    # ROCm counts in its own way.
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def free_bytes(device: torch.device) -> float:
    """Return how much memory programs can still have; infinity where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # Counts what the system would give back, such as its cache of files, as free.
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return float("inf")


@functools.cache
def log_choice(name: str, backend: str, why: str) -> None:
    """Log which backend computes what, once for each choice."""
    logger.info("%s: backend %s (%s)", name, backend, why)
