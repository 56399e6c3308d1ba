"""The ``vl-plugins`` command. Each module of :mod:`vl_plugins.commands` adds one subcommand."""

import importlib
import sys
from collections.abc import Sequence

from vl_plugins import __version__
from vl_plugins.errors import exit_status
from vl_plugins.integrations.command_lines import CommandParser

__all__ = ["main"]

COMMANDS = ("demo", "losses", "toy", "shards", "encode", "evaluate", "plot")


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
    arguments = build_parser().parse_args(argv)
    return exit_status(f"vl-plugins {arguments.command}", lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
