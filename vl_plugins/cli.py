"""The ``vl-plugins`` command. Each module of :mod:`vl_plugins.commands` adds one subcommand."""

import codecs
import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from vl_plugins import __version__
from vl_plugins.errors import InputWarning, exit_status
from vl_plugins.integrations.command_lines import CommandParser

__all__ = ["main"]

# What stands for signs that an output of ASCII, or of Windows, cannot encode; for others a question mark.
SUBSTITUTES = "vl_plugins.substitutes"
PLAIN_SIGNS = {"\N{MINUS SIGN}": "-", "\N{PLUS-MINUS SIGN}": "+/-", "\N{EN DASH}": "-"}
COMMANDS = ("demo", "losses", "toy", "shards", "encode", "evaluate", "merge", "export", "plot")


def build_parser() -> CommandParser:
    """Return the parser with every subcommand registered."""
    parser = CommandParser(
        prog="vl-plugins",
        examples=["vl-plugins demo"],
        description="Losses, data and evaluation for vision-language retrieval. To train, see "
        "`python -m vl_plugins.integrations.open_clip --help`.",
    )
    parser.add_argument("--version", action="version", version=f"vl_plugins {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"vl_plugins.commands.{name}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status.

    That is 0, 2 after one line on standard error when the input is wrong, 130 after Ctrl-C, or what the subcommand
    returns.
    """
    argv = sys.argv[1:] if argv is None else argv
    codecs.register_error(SUBSTITUTES, _substitute)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SUBSTITUTES)
    try:
        status = exit_status(" ".join(["vl-plugins", *argv[:1]]), lambda: _run(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe, `head` perhaps, has seen enough; Python would fail again on flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for characters that an output cannot encode, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(PLAIN_SIGNS.get(character, "?") for character in characters), error.end


def _run(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    with _short_warnings(f"vl-plugins {arguments.command}"):
        return arguments.run(arguments)


@contextlib.contextmanager
def _short_warnings(program: str) -> Iterator[None]:
    """Print each ``InputWarning`` as one line on standard error, and other warnings as Python does."""
    show_any = warnings.showwarning

    def show(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if issubclass(category, InputWarning):
            print(f"{program}: warning: {message}", file=sys.stderr)
        else:
            show_any(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_any


if __name__ == "__main__":
    sys.exit(main())
