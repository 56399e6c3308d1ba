"""Work shared out over processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from vl_plugins.utils.errors import UserError

__all__ = ["map_in_processes", "usable_cores"]

Task = TypeVar("Task")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield ``function(task)`` for each task, in the order of the tasks.

    With one worker the work is done here, otherwise in so many new processes, which end with this one even if it is
    killed. The first task that fails stops the rest: what has not begun is not begun.

    Args:
        function: a function of a module; it, the tasks and the results are pickled.
        tasks: what to do.
        workers: number of processes, at least 1.

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
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        for future in [executor.submit(function, task) for task in tasks]:
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps because the memory was full; try again with fewer --workers"
        ) from error
    finally:
        # Not by `with`, which would take back that pending tasks are cancelled.
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # Ctrl-C reaches the whole group of processes; the one that waits for the others decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
