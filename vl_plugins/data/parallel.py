"""Work shared out over processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from vl_plugins.errors import UserError

__all__ = ["map_in_processes", "usable_cores"]

Task = TypeVar("Task")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield ``function(task)`` for each task, in the order of the tasks; when one fails, no other begins.

    With several workers, function, tasks and results are pickled; the processes end with this one even if it is killed.

    Raises:
        UserError: ``workers`` is less than 1, or a process died. Also whatever ``function`` raises.
    """
    if workers < 1:
        raise UserError(f"workers must be at least 1, got {workers}")
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from map(function, tasks)
        return
    # Not forked: this process may have threads, of torch for example, whose locks a fork would copy.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as executor:
            yield from executor.map(function, tasks)
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed, perhaps because the memory was full; lower --workers") from error


def _start_worker() -> None:
    # Ctrl-C reaches the whole group of processes; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)
