"""Processes started by ``torchrun``: their group and their devices."""

import os
import time

import torch
from torch import distributed

__all__ = ["process_device", "start_processes", "stop_processes"]

SECONDS_FOR_THREADS = 0.2


def start_processes() -> tuple[int, int]:
    """Initialize the process group if ``torchrun`` has started several processes.

    Returns:
        Rank and number of processes: (0, 1) without ``torchrun``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not distributed.is_initialized():
        # gloo gathers embeddings in CPU memory: on the GPU, all of them may not fit beside a model.
        distributed.init_process_group("gloo")
    return distributed.get_rank(), distributed.get_world_size()


def process_device(device: str | None = None) -> str:
    """Return where this process computes: ``device``, or a GPU of its own where there is one."""
    if device is not None:
        return device
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def stop_processes() -> None:
    """Destroy the process group if there is one.

    gloo's threads free what they have sent only later, and need the GIL for that. Before pytorch/pytorch#154976 (June
    2025), destroying the group waited for these threads while it held the GIL: a deadlock. So they get time to finish.
    """
    if distributed.is_initialized():
        time.sleep(SECONDS_FOR_THREADS)
        distributed.destroy_process_group()
