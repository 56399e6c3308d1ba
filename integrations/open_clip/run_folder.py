"""The folder ``LOGS/NAME`` of a run: one process at a time trains in it, and a failed start leaves it free."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError

__all__ = ["check_is_free", "files_named", "occupied"]

# What the trainer logs when the first step is done.
FIRST_STEP = "Train Epoch: "


def check_is_free(folder: Path) -> None:
    """Raise ``UserError`` where the folder holds an earlier run; one that ended before its first step is none."""
    trained = any(FIRST_STEP in log.read_text(errors="replace") for log in _logs(folder))
    checkpoints = folder / "checkpoints"
    saved = checkpoints.is_dir() and any(not file.name.startswith(".") for file in checkpoints.iterdir())
    if trained or saved:
        raise UserError(
            f"--name {folder.name}: {folder} holds an earlier run; give another name, or --resume latest to go on"
        )


@contextlib.contextmanager
def occupied(folder: Path, *, continues: bool) -> Iterator[None]:
    """Keep other processes out of a run's folder, and remove what a killed or failed run left in it.

    Args:
        folder: made where it is missing.
        continues: the run goes on with what is in the folder.

    Raises:
        UserError: the folder cannot be made, another process trains in it, or it holds an earlier run.
    """
    files = Folder(folder)
    files.make()
    with files.lock(wait=False):
        if not continues:
            check_is_free(folder)  # again: another process may have trained since
            for log in _logs(folder):
                log.unlink()  # the trainer takes it for an earlier run
        Folder(folder / "checkpoints").remove_partial(".*")
        yield


@contextlib.contextmanager
def files_named(training: Any) -> Iterator[None]:
    """Turn what files, disks and networks fail with into one line.

    Raises:
        UserError: an ``OSError``; the message names the file, or for a file that was open already the run's folder.
    """
    try:
        yield
    except OSError as error:
        lines = (error.strerror or str(error)).rstrip().splitlines() or [type(error).__name__]
        reason = lines[-1 if lines[0].startswith("Caught ") else 0]  # of one from a loader's process, the last
        file = error.filename
        if file is None and error.errno is not None and training.args is not None:
            file = Path(training.args.logs, training.args.name or "")
        raise UserError(reason if file is None else f"{file}: {reason}") from error


def _logs(folder: Path) -> list[Path]:
    """Return the trainer's logs; with ``--log-local`` each machine has its own."""
    return [*folder.glob("out.log"), *folder.glob("out-*")]
