"""Plain text: tables, and names that a terminal can print."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pad the cells of each column to one width: names on the left, the numbers after them to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]


def printable(text: str) -> str:
    r"""Return a text of unknown origin so that a terminal can print it on one line.

    >>> printable("a\nb\x1b[31m")
    'a\\nb\\x1b[31m'
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
