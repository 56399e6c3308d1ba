"""What a benchmark ran on."""

import platform
from pathlib import Path

import torch

from vl_plugins.data.parallel import usable_cores

__all__ = ["describe_machine"]


def describe_machine(device: torch.device, threads: int) -> str:
    """Return the processor or GPU, how much of it is used, and the version of torch; nothing that names a computer."""
    if device.type == "cuda":
        used = torch.cuda.get_device_name(device)
    else:
        used = f"{_processor()}, {threads} of {usable_cores()} cores"
    return f"{used}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    # Of ARM there is no such line.
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]
