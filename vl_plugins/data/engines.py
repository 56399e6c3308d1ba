"""Jobs in threads, in processes, or on a Ray or Dask cluster."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeVar

from vl_plugins.errors import UserError, first_line, one_of, require

__all__ = ["ENGINES", "executor", "run_jobs", "usable_cores"]

ENGINES = ("threads", "processes", "ray", "dask")

Job = TypeVar("Job")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def executor(engine: str = "threads", workers: int | None = None) -> Iterator[Any]:
    """Yield an executor with the interface of ``concurrent.futures``.

    Args:
        engine: ``"threads"``; ``"processes"``, which import the main script again, so that it needs
            ``if __name__ == "__main__":``; ``"ray"`` or ``"dask"``: the cluster of the environment variable
            ``RAY_ADDRESS`` or ``DASK_SCHEDULER_ADDRESS``, or one that is started here. Clusters repeat the job of a
            worker that was killed; in local processes it is an error.
        workers: number of threads or processes on this machine; by default one per core.

    Raises:
        UserError: the engine is unknown or not installed.
    """
    workers = usable_cores() if workers is None else workers
    if workers < 1:
        raise UserError(f"workers must be at least 1, got {workers}")
    engines = {"threads": _threads, "processes": _processes, "ray": _ray, "dask": _dask}
    with engines[one_of("engine", engine, engines)](workers) as pool:
        yield pool


def run_jobs(
    function: Callable[[Job], Result], jobs: Iterable[Job], executor: Any, in_flight: int
) -> Generator[Result, None, None]:
    """Yield ``function(job)`` in the order of the jobs, of which at most ``in_flight`` are submitted at a time.

    Raises:
        UserError: a worker process was killed. Also whatever ``function`` or ``jobs`` raise; no other job begins then.
    """
    pending: deque[Any] = deque()
    try:
        for job in jobs:
            if len(pending) >= in_flight:
                yield pending.popleft().result()
            pending.append(executor.submit(function, job))
        while pending:
            yield pending.popleft().result()
    except BrokenExecutor as error:
        raise UserError("a worker process was killed, perhaps for lack of memory; try fewer workers") from error
    finally:
        for future in pending:
            future.cancel()


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[Any]:
    with ThreadPoolExecutor(workers) as pool:
        yield pool


@contextlib.contextmanager
def _processes(workers: int) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")  # a fork copies the locks of threads, such as torch's
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        yield pool


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides what to do
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


@contextlib.contextmanager
def _dask(workers: int) -> Iterator[Any]:
    distributed = require("dask.distributed", extra="dask")
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    local = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.Client(address, **({} if address else local)) as client:
        yield client.get_executor(pure=False)  # True would take a job with equal arguments for the same one


@contextlib.contextmanager
def _ray(workers: int) -> Iterator[Any]:
    ray = require("ray", extra="ray")
    address = os.environ.get("RAY_ADDRESS")
    local = {"num_cpus": workers, "include_dashboard": False}
    with ray.init(address or "local", log_to_driver=False, **({} if address else local)):
        yield _RayExecutor(ray)


class _RayExecutor:
    """What :func:`run_jobs` needs of an executor."""

    def __init__(self, ray: Any):
        self.ray, self.call = ray, ray.remote(_call)

    def submit(self, function: Callable, *arguments: Any) -> Any:
        return _RayFuture(self.ray, self.call.remote(function, *arguments))


class _RayFuture:
    def __init__(self, ray: Any, reference: Any):
        self.ray, self.reference = ray, reference

    def result(self) -> Any:
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # what the job raised
        except self.ray.exceptions.RayError as error:
            raise UserError(f"Ray: {first_line(error)}") from error

    def cancel(self) -> None:
        self.ray.cancel(self.reference)


def _call(function: Callable, *arguments: Any) -> Any:
    return function(*arguments)
