"""Command lines: help that starts with examples, errors of the user as one line, and exit statuses."""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vl_plugins.errors import UserError

__all__ = ["CommandParser", "exit_status", "message", "naming"]


class CommandParser(argparse.ArgumentParser):
    """A parser whose help shows examples directly below the usage; the parsers of its subcommands are alike.

    Args:
        examples: command lines; a long one is continued after a backslash, its further lines indented by 4.
        description: one or two sentences, wrapped to 78 columns.
        options: of ``argparse.ArgumentParser``.
    """

    def __init__(self, *, examples: Sequence[str] = (), description: str = "", **options) -> None:
        heading = "example:" if len(examples) == 1 else "examples:"
        lines = textwrap.indent("\n".join(examples), "  ")
        super().__init__(
            description=f"{heading}\n{lines}\n\n{textwrap.fill(description, 78)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **{"allow_abbrev": False, **options},
        )


def exit_status(program: str, run: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Return ``run()``, 2 after a ``UserError`` or 130 after Ctrl-C, each with one line on standard error.

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


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Turn a ``ValueError``, as for an option out of its range, into a ``UserError`` that begins with the part."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{part}: {error}") from error


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
