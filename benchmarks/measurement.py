"""Time and memory of several ways to compute one thing, compared with one of them.

They run in one process, one after another in each round, forward in one round and backward in the next. A ratio is of
two times of the same round, so that whatever slows the machine for a while slows both.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from vl_plugins.tables import align_columns


def clock(device: str | torch.device = "cpu") -> Callable[[], float]:
    """Return a clock in seconds: of the processor with one thread on the CPU, otherwise of the wall."""
    if torch.device(device).type == "cuda":
        return lambda: torch.cuda.synchronize(device) or time.perf_counter()
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def time_rounds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Return the seconds that each function, by name, takes in each round, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name in list(functions)[:: 1 if number % 2 else -1]:
            started = clock()
            functions[name]()
            if number:
                seconds[name].append(clock() - started)
    return seconds


def extra_bytes(function: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """Return by how much the memory of tensors grows at most while ``function()`` runs; its results count too.

    Raises:
        RuntimeError: nothing was allocated on the CPU, or the profiler of this torch does not report it.
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    # The profiler's averages have no peak.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    if not events:
        raise RuntimeError("the profiler of torch saw no allocation")
    total = largest = 0
    started = "start_ns" if hasattr(events[0], "start_ns") else "start_us"  # of torch 2.2
    for event in sorted(events, key=lambda event: getattr(event, started)()):
        total += event.nbytes()
        largest = max(largest, total)
    return largest


def print_table(
    title: str,
    seconds: Mapping[str, Sequence[float]],
    peer: str,
    memory: Mapping[str, int] | None = None,
) -> None:
    """Print a row for each name: the median of its seconds over the rounds, and the ratio to those of ``peer``.

    With ``memory``, bytes by name, there are two more columns.
    """
    rows = [[title, "ms", f"ratio to {peer}", "least", "most", *(["MB", "ratio"] if memory else [])]]
    for name, times in seconds.items():
        ratios = [taken / by_peer for taken, by_peer in zip(times, seconds[peer], strict=True)]
        row = [name, f"{1e3 * statistics.median(times):,.1f}"]
        row += [f"{ratio:.3f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
        if memory:
            row += [f"{memory[name] / 1e6:,.2f}", f"{memory[name] / memory[peer]:.4f}"]
        rows.append(row)
    print_rows(rows)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table, its headings in the first row."""
    print("\n".join("  ".join(row).rstrip() for row in align_columns(rows)), end="\n\n", flush=True)
