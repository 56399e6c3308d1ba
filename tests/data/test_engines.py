import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from vl_plugins.data.engines import executor, run_jobs, usable_cores
from vl_plugins.errors import UserError

ENGINES = ("threads", "processes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dask", "ray")))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    """The name of an engine, and its executor with two workers."""
    if request.param in ("dask", "ray"):
        pytest.importorskip("distributed" if request.param == "dask" else "ray", reason="the engine is not installed")
    with executor(request.param, 2) as pool:
        yield request.param, pool


def double(value):
    if value == 0:
        time.sleep(0.2)  # the first one to begin is not the first one to end
    if value == 7:
        raise UserError("seven is wrong")
    return 2 * value


def test_results_come_in_the_order_of_the_jobs(engine):
    assert list(run_jobs(double, range(5), engine[1], 3)) == [0, 2, 4, 6, 8]


def test_an_error_is_that_of_the_job(engine):
    results = run_jobs(double, itertools.count(5), engine[1], 2)
    assert [next(results), next(results)] == [10, 12]
    with pytest.raises(UserError) as raised:
        next(results)
    assert str(raised.value) == "seven is wrong"


def die_once(file):
    """End the process that runs this, the first time."""
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


@pytest.mark.parametrize("engine", ENGINES[1:], indirect=True)
def test_clusters_repeat_the_job_of_a_worker_that_was_killed(engine, tmp_path):
    name, pool = engine
    files = [tmp_path / str(number) for number in range(4)]
    for file in files[1:]:
        file.touch()
    results = run_jobs(die_once, files, pool, 2)
    if name == "processes":
        with pytest.raises(UserError, match="a worker process was killed, perhaps for lack of memory"):
            next(results)
    else:
        assert list(results) == ["0", "1", "2", "3"]


class Recorder:
    """An executor whose jobs end when they are asked for their result."""

    def __init__(self):
        self.submitted, self.futures = [], []

    def submit(self, function, job):
        self.submitted.append(job)
        self.futures.append(Future())
        if job != "pending":
            self.futures[-1].set_result(function(job))
        return self.futures[-1]


def test_so_many_jobs_are_submitted_at_a_time():
    recorder = Recorder()
    results = run_jobs(str, itertools.count(), recorder, 3)
    for number in range(4):
        assert next(results) == str(number)
        assert recorder.submitted == list(range(number + 3))


def test_after_an_error_of_the_source_no_job_begins():
    def jobs():
        yield from (0, "pending", "pending")
        raise UserError("the source is damaged")

    recorder = Recorder()
    with pytest.raises(UserError, match="the source is damaged"):
        list(run_jobs(str, jobs(), recorder, 5))
    assert [future.cancelled() for future in recorder.futures] == [False, True, True]


def test_arguments(monkeypatch):
    assert 1 <= usable_cores() <= os.cpu_count()
    with executor() as pool:
        assert isinstance(pool, ThreadPoolExecutor)
    monkeypatch.setitem(sys.modules, "ray", None)
    for engine, workers, message in (
        ("thread", 1, "unknown engine 'thread'"),
        ("threads", 0, "at least 1, got 0"),
        ("ray", 1, r"pip install 'vl_plugins\[ray\]'"),
    ):
        with pytest.raises(UserError, match=message), executor(engine, workers):
            pass


PARENT = """
import os, sys, time
from vl_plugins.data.engines import executor, run_jobs

def wait(value):
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    with executor("processes", 2) as pool:
        list(run_jobs(wait, range(2), pool, 2))
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        parent.wait()
    while any(map(is_alive, workers)):  # longer than a test may take if they outlive their parent
        time.sleep(0.05)


def is_alive(process):
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False
