"""Command lines: help that starts with examples."""

import argparse
import textwrap
from collections.abc import Sequence

__all__ = ["CommandParser"]


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
