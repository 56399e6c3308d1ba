"""The folder ``LOGS/NAME`` of a run: one training at a time uses it, and a failed start leaves the name free."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vl_plugins.data.files import lock
from vl_plugins.errors import UserError

__all__ = ["check_is_free", "occupied"]

# What the trainer logs when the first step is done.
FIRST_STEP = "Train Epoch: "


def check_is_free(folder: Path) -> None:
    """Raise ``UserError`` if the folder holds an earlier run; one that ended before its first step does not count."""
    trained = any(FIRST_STEP in log.read_text(errors="replace") for log in _logs(folder))
    saved = any((folder / "checkpoints").glob("[!.]*"))
    if trained or saved:
        raise UserError(
            f"--name {folder.name}: {folder} holds an earlier run; give another name, or --resume latest to go on"
        )


@contextlib.contextmanager
def occupied(folder: Path, *, resumes: bool) -> Iterator[None]:
    """Keep other trainings out of a run's folder, which is made if it is missing.

    Raises:
        UserError: the folder cannot be made, another training uses it, or it holds an earlier run that is not resumed.
    """
    with lock(folder / ".lock", f"to {folder}"):
        if not resumes:
            check_is_free(folder)  # again: another training may have used it since
            for log in _logs(folder):
                log.unlink()  # the trainer takes it for an earlier run
        yield


def _logs(folder: Path) -> list[Path]:
    """Return the trainer's logs; with ``--log-local`` each machine has its own."""
    return [*folder.glob("out.log"), *folder.glob("out-*")]
