"""Leaving the processes of a run."""

import torch
from torch import distributed

from tests.helpers.processes import in_processes
from vl_plugins.distributed import stop_processes

WORLD_SIZE = 2


def join_and_leave(rank, folder):
    """Leave just after something was sent, again and again."""
    for number in range(10):
        stop_processes()
        distributed.init_process_group(
            "gloo", init_method=f"{folder.as_uri()}/{number}", rank=rank, world_size=WORLD_SIZE
        )
        for _ in range(20):
            distributed.all_reduce(torch.ones(100))
    return rank


def test_processes_leave_at_once(tmp_path):
    """With torch 2.2 they would wait forever, every few times."""
    assert in_processes(join_and_leave, WORLD_SIZE, tmp_path) == [0, 1]
