import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from vl_plugins.data.parallel import map_in_processes, usable_cores
from vl_plugins.errors import UserError


def double_after(task):
    value, seconds = task
    time.sleep(seconds)
    return 2 * value, os.getpid()


def touch(task):
    """Write the file; the tasks after the failure go on when its ``gate`` is there."""
    file, gate = task
    file.touch()
    if file.name == "2":
        raise UserError("two is wrong")
    while int(file.name) > 2 and not gate.exists():
        time.sleep(0.01)
    return file


def die(value):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_results_come_in_the_order_of_the_tasks(workers):
    tasks = [(value, 0.2 if value == 0 else 0) for value in range(5)]
    results = list(map_in_processes(double_after, tasks, workers))
    assert [value for value, _ in results] == [0, 2, 4, 6, 8]
    processes = {process for _, process in results}
    assert (processes == {os.getpid()}) == (workers == 1)
    assert len(processes) <= workers


@pytest.mark.parametrize("workers", [1, 2])
def test_what_has_not_begun_does_not_begin_after_a_failure(tmp_path, workers, monkeypatch):
    """The executor hands a few more tasks to its processes than they can begin."""
    gate, shutdown = tmp_path / "gate", ProcessPoolExecutor.shutdown

    def open_gate(executor, **options):
        gate.touch()
        shutdown(executor, **options)

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", open_gate)
    files = [tmp_path / str(number) for number in range(40)]
    results = map_in_processes(touch, [(file, gate) for file in files], workers)
    assert [next(results) for _ in range(2)] == files[:2]
    with pytest.raises(UserError, match="two is wrong"):
        next(results)
    assert gate.exists() is (workers > 1)
    assert len(os.listdir(tmp_path)) < 12


def test_a_worker_that_is_killed_is_an_error():
    with pytest.raises(UserError, match="a worker process was killed, perhaps because the memory was full"):
        list(map_in_processes(die, range(4), 2))


def test_number_of_workers():
    assert 1 <= usable_cores() <= os.cpu_count()
    with pytest.raises(UserError, match="workers must be at least 1, got 0"):
        list(map_in_processes(double_after, [(1, 0)], 0))


PARENT = """
import os, sys, time
from vl_plugins.data.parallel import map_in_processes

def wait(value):
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    list(map_in_processes(wait, range(2), 2))
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        parent.wait()
    while any(_runs(worker) for worker in workers):  # longer than a test may take if they outlive their parent
        time.sleep(0.05)


def _runs(process):
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
