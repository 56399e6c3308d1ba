"""Checkpoints of open_clip's trainer that a training can go on from.

A checkpoint holds the model (heads and a learned similarity included), the optimizer, the gradient scaler and the
number of epochs. The rest follows from the seed and the epoch: the order of the data, captions, augmentation, all other
random numbers, and the warm-up of the loss.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from vl_plugins.errors import UserError
from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file

__all__ = ["check_resume", "latest_checkpoint"]

logger = logging.getLogger(__name__)

EPOCH_FILE = re.compile(r"epoch_(\d+)\.pt")
MOST_RECENT = "epoch_latest.pt"  # of --save-most-recent


def check_resume(resume: str | None, folder: Path | None, *, save_most_recent: bool) -> None:
    """Check the checkpoint that ``--resume`` names, also that of ``--resume latest --save-most-recent``.

    Args:
        resume: a file, ``latest``, or a URL, which is not checked.
        folder: ``LOGS/NAME``; None without a name.
        save_most_recent: open_clip's flag.

    Raises:
        UserError: there is no ``folder`` for ``latest``, or the file is damaged, or not a checkpoint or weights.
    """
    if resume == "latest":
        if folder is None:
            raise UserError("--resume latest goes on with an earlier run: give its --name")
        file = folder / "checkpoints" / MOST_RECENT
        if not save_most_recent or not file.is_file():
            return
    elif resume and ":" not in resume:
        file = Path(resume)
        if file.is_dir():  # sharded, as 4.x saves under FSDP
            return
    else:
        return
    problem = _problem(file)
    if problem is not None:
        raise UserError(f"--resume {file}: {problem}")


def latest_checkpoint(path: str, remote: bool, *, host_latest: Callable) -> str | None:
    """Return the newest checkpoint that can be read, in place of open_clip's ``get_latest_checkpoint``.

    Newer ones that cannot be read, or whose weights are not finite, are named in the log.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """
    newest = host_latest(path, remote)
    if remote or (newest is not None and Path(newest).is_dir()):
        return newest
    problems: dict[Path, str] = {}
    for file in _checkpoints(Path(path)):
        problem = _problem(file)
        if problem is None:
            for damaged, reason in problems.items():
                logger.warning(f"checkpoint {damaged}: {reason}; going on from the one before it, {file.name}")
            return str(file)
        problems[file] = problem
    if problems:
        each = ", ".join(f"{file.name} ({reason})" for file, reason in problems.items())
        raise UserError(f"--resume latest: no checkpoint in {path} can be read: {each}; delete them to start over")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of epochs, the newest first."""
    found = [(int(match[1]), file) for file in folder.glob("epoch_*.pt") if (match := EPOCH_FILE.fullmatch(file.name))]
    return [file for _, file in sorted(found, reverse=True)]


def _problem(file: Path) -> str | None:
    """Return why a training cannot go on from a file, or None."""
    try:
        content = read_torch_file(file, mmap=True)
    except UnreadableFileError as error:
        return str(error)
    weights = content.get("state_dict") if isinstance(content, Mapping) and "epoch" in content else content
    named = weights.items() if isinstance(weights, Mapping) else ()
    tensors = {name: weight for name, weight in named if isinstance(name, str) and isinstance(weight, Tensor)}
    if not tensors:
        return "it holds neither a checkpoint of open_clip's trainer nor weights by name"
    bad = [name for name, weight in tensors.items() if not _is_finite(weight)]
    return f"{len(bad)} of its weights are not finite, such as {bad[0]}" if bad else None


def _is_finite(weight: Tensor) -> bool:
    # By its extremes: `isfinite` of the weight itself would need a copy as large as it is.
    return weight.numel() == 0 or all(extreme.isfinite() for extreme in weight.aminmax())
