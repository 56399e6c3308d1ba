"""Processes that ``torchrun`` has started: joining them, agreeing, leaving."""

import os
import time

from torch import distributed

__all__ = ["agree_to_begin", "start_processes", "stop_processes"]

SECONDS_FOR_THREADS = 0.2


def start_processes() -> tuple[int, int]:
    """Join the processes that ``torchrun`` has started, if it has.

    Returns:
        The number of this process and how many there are: (0, 1) without ``torchrun``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not distributed.is_initialized():
        # Embeddings are gathered in the memory of the machine: all of them need not fit beside a model.
        distributed.init_process_group("gloo")
    return distributed.get_rank(), distributed.get_world_size()


def stop_processes() -> None:
    """Leave the processes that this one has joined, if it has.

    gloo's threads drop what they have sent after the sender goes on, and take the GIL for that. Without
    pytorch/pytorch#154976, of June 2025, the GIL is kept while they are waited for: for ever where one of them is not
    done. So they are let through first.
    """
    if distributed.is_initialized():
        time.sleep(SECONDS_FOR_THREADS)
        distributed.destroy_process_group()


def agree_to_begin(begin: bool = False) -> bool:
    """Return in all processes what the first one says."""
    if not distributed.is_initialized():
        return begin
    said = [begin]
    distributed.broadcast_object_list(said, 0)
    return said[0]
