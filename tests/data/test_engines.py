import itertools
import os
import signal
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from vl_plugins.data.engines import open_executor, run_jobs
from vl_plugins.errors import UserError

CLUSTERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("dask", "ray")]


@pytest.fixture(scope="module", params=["threads", "processes", *CLUSTERS])
def pool(request):
    """An executor with two workers."""
    if request.param in ("dask", "ray"):
        pytest.importorskip("distributed" if request.param == "dask" else "ray", reason="the engine is not installed")
    with ProcessPoolExecutor(2) if request.param == "processes" else open_executor(request.param, 2) as pool:
        yield pool


def double(value):
    if value == 0:
        time.sleep(0.2)  # the first one to begin is not the first one to end
    if value == 7:
        raise UserError("seven is wrong")
    return 2 * value


def test_results_and_errors_come_in_the_order_of_the_jobs(pool):
    results = run_jobs(double, itertools.chain([0], itertools.count(3)), 1, pool)
    assert list(itertools.islice(results, 5)) == [0, 6, 8, 10, 12]
    with pytest.raises(UserError) as raised:
        next(results)
    assert str(raised.value) == "seven is wrong"


def die_once(file):
    """End the process that runs this, the first time."""
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


@pytest.mark.parametrize("pool", CLUSTERS, indirect=True)
def test_clusters_repeat_the_job_of_a_worker_that_was_killed(pool, tmp_path):
    files = [tmp_path / str(number) for number in range(4)]
    for file in files[1:]:
        file.touch()
    assert list(run_jobs(die_once, files, 1, pool)) == ["0", "1", "2", "3"]


class Recorder:
    """An executor whose jobs end at once, but for ``"pending"``."""

    def __init__(self):
        self.submitted, self.futures = [], []

    def submit(self, function, job):
        self.submitted.append(job)
        self.futures.append(Future())
        if job != "pending":
            self.futures[-1].set_result(function(job))
        return self.futures[-1]


def test_two_jobs_per_worker_are_submitted_at_a_time():
    recorder = Recorder()
    results = run_jobs(str, itertools.count(), 2, recorder)
    for number in range(4):
        assert next(results) == str(number)
        assert recorder.submitted == list(range(number + 4))


def test_after_an_error_of_the_source_no_job_begins():
    def jobs():
        yield from (0, "pending", "pending")
        raise UserError("the source is damaged")

    recorder = Recorder()
    with pytest.raises(UserError, match="the source is damaged"):
        list(run_jobs(str, jobs(), 3, recorder))
    assert [future.cancelled() for future in recorder.futures] == [False, True, True]


@pytest.mark.parametrize(
    ("engine", "workers", "message"),
    [
        ("thread", 1, "unknown engine 'thread'"),
        ("threads", 0, "at least 1, got 0"),
        ("ray", 1, r"pip install 'vl_plugins\[ray\]'"),
    ],
)
def test_wrong_arguments(monkeypatch, engine, workers, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=message):
        list(run_jobs(str, [1], workers, engine))
