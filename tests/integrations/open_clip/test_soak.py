"""Training in two processes: memory, open files and processes stay what they are."""

import ctypes
import json
import os
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers.open_clip_training import TINY, small_shard_flags
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.launcher import main

FLAGS = "--workers 1 --loss unified --captions-per-image 2 --local-loss --gather-with-grad".split()
FLAGS += "--log-every-n-steps 100 --save-most-recent --save-frequency 0".split()

M_MMAP_THRESHOLD = -3  # of malloc.h


def look():
    """Return the memory (bytes) and open files of this process and of its children."""
    own = os.getpid()
    children = [
        int(pid) for task in Path(f"/proc/{own}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return {
        "memory": resident(own),
        "files": len(os.listdir(f"/proc/{own}/fd")),
        "children": sorted(children),
        "memory of children": sum(resident(pid) for pid in children),
        "files of children": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in children),
    }


def resident(pid):
    """Return the memory without files: how much of torch's libraries is in memory depends on the machine."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def measure_steps(rank, folder, flags):
    """Train, with a look at the process after each step."""
    os.chdir(folder)
    # Large arrays go back to the system at once: glibc keeps some, in one run more of them than in another.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    rows = []
    register_optimizer_step_post_hook(lambda *_: rows.append(look()))
    assert main(flags) == 0
    return json.dumps(rows)


def test_nothing_grows(tmp_path, toy_shards):
    flags = [*TINY, *FLAGS, *small_shard_flags(toy_shards), "--epochs", "8", "--batch-size", "2"]
    for rank, measured in enumerate(in_processes(measure_steps, 2, tmp_path, flags, joined=False)):
        rows = json.loads(measured)
        assert len(rows) == 32
        rows = rows[4:]  # the worker that reads the validation split begins after the first epoch
        children = {tuple(row["children"]) for row in rows}
        assert len(children) == 1, "the same workers from the second epoch on"
        assert not any(Path(f"/proc/{pid}").exists() for pid in next(iter(children))), "none is left behind"
        first, last = rows[:12], rows[12:]
        for what in ("files", "files of children"):
            assert max(row[what] for row in last) <= max(row[what] for row in first), what
        for what in ("memory", "memory of children"):
            means = [sum(row[what] for row in part) / len(part) for part in (first, last)]
            print(f"process {rank}, {what}: {means[0] / 2**20:.1f} MB, then {means[1] / 2**20:.1f} MB")
            assert means[1] <= 1.02 * means[0], what
