"""How the command lines end: errors of the user as one line instead of a traceback, and exit statuses."""

import os
import sys
from collections.abc import Callable

from vl_plugins.utils.errors import UserError

__all__ = ["exit_status", "message"]


def exit_status(program: str, run: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Return that of ``run()``, 2 after a ``UserError`` or 130 after Ctrl-C, each with one line on standard error.

    Processes that ``torchrun`` started all meet the same error before they join: only the first one prints it.
    """
    try:
        return run() or 0
    except UserError as error:
        torch = sys.modules.get("torch")
        joined = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        if joined or _is_first_process():
            print(f"{program}: error: {message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if _is_first_process():
            print(f"{program}: {interrupted}", file=sys.stderr)
        return 130  # as shells report a process that Ctrl-C ended


def message(error: UserError) -> str:
    """Return the text of an error, without the traceback that a worker process of a ``DataLoader`` adds."""
    text = str(error)
    if text.startswith("Caught ") and "\nOriginal " in text:  # written by torch
        text = text.rstrip().rpartition(f"{UserError.__name__}: ")[2]
    return text


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
