"""Functions of tests that run in several processes at once."""

import datetime
import faulthandler
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from vl_plugins.commands.torchrun import stop_processes

__all__ = ["in_processes"]

# A process that waits for another one says so after the first time, one that waits for something else after the second:
# both before the test is ended, which would not tell where the processes are.
OTHERS_SECONDS = 120
SECONDS = 60


def in_processes(function: Callable, world_size: int, *arguments) -> list:
    """Run ``function(rank, *arguments)`` in new processes that talk by gloo, and return what each of them returns.

    They meet, and leave what they return, in files: a free port can be taken by another test before it is used.

    Args:
        function: of a module; it returns tensors, numbers and text, in lists, tuples and dicts.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (world_size, folder, function, arguments), nprocs=world_size)
        return [torch.load(_result(folder, rank), weights_only=True) for rank in range(world_size)]


def _process(rank, world_size, folder, function, arguments):
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(Path(folder) / "meeting").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=OTHERS_SECONDS),
    )
    try:
        torch.save(function(rank, *arguments), _result(folder, rank))
        distributed.barrier()  # so that none leaves while another one is still answered
    finally:
        stop_processes()


def _result(folder, rank):
    return Path(folder) / f"{rank}.pt"
