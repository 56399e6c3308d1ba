"""Run functions in several processes at once, and commands as a terminal does."""

import datetime
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import distributed

from vl_plugins.distributed import stop_processes

__all__ = ["in_processes", "start_as_terminal"]

# After which a process that hangs shows where it is: before pytest ends the test, which would not show that.
SECONDS = 1200

# A server imports these once, and forks each process: importing them takes longer than most tests.
multiprocessing.set_forkserver_preload(
    ["torch.distributed", "open_clip_train.main", "accelerate", "timm", "tensorboard"]
)


def in_processes(function: Callable, world_size: int, *arguments, joined: bool = True) -> list:
    """Run ``function(rank, *arguments)`` in new processes with the environment of torchrun, and return their results.

    Args:
        function: of a module; it returns tensors, numbers and text, in lists, tuples and dicts.
        joined: whether the processes have joined by gloo when ``function`` starts.
    """
    store = distributed.TCPStore("localhost", 0, world_size, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _process,
            (world_size, store.port, joined, folder, function, arguments),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [torch.load(_result(folder, rank), weights_only=True) for rank in range(world_size)]


def _process(rank, world_size, port, joined, folder, function, arguments):
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    _as_started_by_itself()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # The process of the test has the port already.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if joined:
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    try:
        torch.save(function(rank, *arguments), _result(folder, rank))
        if joined:
            distributed.barrier()  # so that none leaves while another one is still answered
    finally:
        stop_processes()


def _as_started_by_itself():
    multiprocessing.set_start_method("fork", force=True)  # for loaders; a process of the server would start another one
    torch.set_num_threads(1)


def _result(folder, rank):
    return Path(folder) / f"{rank}.pt"


def start_as_terminal(command: Sequence, **options) -> subprocess.Popen:
    """Start a command as a terminal does: Ctrl-C, SIGINT to the group that its process leads, ends it."""
    return subprocess.Popen(
        [*map(str, command)],
        start_new_session=True,
        # Tests that a script runs in the background ignore Ctrl-C, and what they start would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )
