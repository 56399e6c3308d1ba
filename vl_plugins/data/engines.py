"""Jobs in threads, or on a Ray or Dask cluster."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

from vl_plugins.errors import UserError, one_of, require

Job = TypeVar("Job")
Result = TypeVar("Result")


@contextlib.contextmanager
def open_executor(engine: str | None = None, workers: int | None = None) -> Iterator[Any]:
    """Yield an executor with the ``submit`` of ``concurrent.futures``, and so many threads or processes started here.

    ``"ray"`` and ``"dask"`` use the cluster of the environment variable ``RAY_ADDRESS`` or ``DASK_SCHEDULER_ADDRESS``,
    or start one here. Clusters repeat the job of a killed worker.
    """
    workers = _workers(workers)
    if one_of("engine", engine or "threads", ("threads", "ray", "dask")) == "threads":
        with ThreadPoolExecutor(workers) as pool:
            yield pool
    elif engine == "dask":
        distributed = require("dask.distributed", extra="dask")
        address = os.environ.get("DASK_SCHEDULER_ADDRESS")
        local = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
        with distributed.Client(address, **({} if address else local)) as client:
            yield client.get_executor(pure=False)  # True would take a job with equal arguments for the same one
    else:
        ray = require("ray", extra="ray")
        address = os.environ.get("RAY_ADDRESS")
        local = {"num_cpus": workers, "include_dashboard": False}
        with ray.init(address or "local", log_to_driver=False, **({} if address else local)):
            call = ray.remote(lambda function, *arguments: function(*arguments))
            yield SimpleNamespace(submit=lambda *job: call.remote(*job).future())


def run_jobs(
    function: Callable[[Job], Result], jobs: Iterable[Job], workers: int | None = None, executor: Any = None
) -> Generator[Result, None, None]:
    """Yield ``function(job)`` in the order of the jobs, of which two per worker are submitted at a time.

    ``executor`` is ``"ray"`` or ``"dask"``, see :func:`open_executor`, or anything with the ``submit`` of
    ``concurrent.futures``; by default threads, one per core. After an error no other job begins.
    """
    pending, at_a_time = deque[Any](), 2 * _workers(workers)
    with contextlib.nullcontext(executor) if hasattr(executor, "submit") else open_executor(executor, workers) as pool:
        try:
            for job in jobs:
                if len(pending) >= at_a_time:
                    yield pending.popleft().result()
                pending.append(pool.submit(function, job))
            while pending:
                yield pending.popleft().result()
        except Exception as error:
            cause = getattr(error, "cause", None)  # in an error of Ray, whose text is a traceback
            if isinstance(cause, Exception):
                raise cause from None
            raise
        finally:
            for future in pending:
                future.cancel()


def _workers(number: int | None) -> int:
    if number is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if number < 1:
        raise UserError(f"workers must be at least 1, got {number}")
    return number
