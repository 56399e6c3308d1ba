"""How much memory an operation asks for at once."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["extra_bytes", "free_bytes", "peak_bytes"]


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return by how many bytes the memory of tensors on the device grows at most while ``function()`` runs."""
    if device.type == "cpu":
        with _without_notes():
            return extra_bytes(function)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def extra_bytes(function: Callable[[], object], *, kept: int = 0) -> int:
    """Return by how much the memory of tensors grows at most while ``function()`` runs, beyond ``kept`` bytes.

    What it keeps is measured too: give the bytes of its results as ``kept``.

    Raises:
        RuntimeError: nothing was allocated, or the profiler of this torch does not say so.

    >>> import torch
    >>> extra_bytes(lambda: torch.ones(1000).double())
    12000
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    # The averages that the profiler offers know no peak.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    if not events:
        raise RuntimeError("the profiler of torch saw no allocation")
    total = largest = 0
    for event in sorted(events, key=_start):
        total += event.nbytes()
        largest = max(largest, total)
    return largest - kept


def free_bytes(device: torch.device) -> float:
    """Return how much memory programs can still have; infinity where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # Counts what the system would give back, such as its cache of files, as free.
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux
        return float("inf")


def _start(event) -> int:
    # torch 2.2 counts microseconds.
    return event.start_ns() if hasattr(event, "start_ns") else event.start_us()


@contextmanager
def _without_notes() -> Iterator[None]:
    """Keep what native code writes to standard error, as torch's profiler does when it starts and stops, off it."""
    original = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(nowhere)
