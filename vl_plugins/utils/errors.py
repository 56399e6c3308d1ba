"""Errors that the command lines print as one line instead of a traceback."""

import difflib
import os
import sys
from collections.abc import Collection, Iterable

__all__ = [
    "MissingExtraError",
    "UserError",
    "check_device",
    "check_name",
    "did_you_mean",
    "first_line",
    "message",
    "print_error",
    "unknown_name",
]

MOST_NAMES_LISTED = 30


class UserError(ValueError):
    """Something the user gave is wrong; the message says what, where, and what would be right."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def message(error: UserError) -> str:
    """Return what the error says; of one from a worker process of a ``DataLoader``, without its traceback."""
    text = str(error)
    if text.startswith("Caught ") and "\nOriginal " in text:  # as torch writes it
        text = text.rstrip().rpartition(f"{UserError.__name__}: ")[2]
    return text


def print_error(program: str, error: UserError) -> None:
    """Print one line on standard error, once for all processes that ``torchrun`` started."""
    torch = sys.modules.get("torch")
    joined = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    # Before the processes join, all find the same; afterwards an error may be that of one process alone.
    if joined or os.environ.get("RANK", "0") == "0":
        print(f"{program}: error: {message(error)}", file=sys.stderr)


def first_line(error: Exception, otherwise: str | None = None) -> str:
    """Return the first line of what any error says; where it says nothing ``otherwise``, or else its type.

    >>> first_line(RuntimeError("no such device\\nC++ stack trace")), first_line(AssertionError())
    ('no such device', 'AssertionError')
    """
    return next(iter(str(error).splitlines()), otherwise or type(error).__name__)


def check_device(flag: str, device: str) -> str:
    """Return ``device``, or raise ``UserError`` unless torch can put a tensor there."""
    import torch  # here, because command lines without a device need no torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"{flag} {device}: {first_line(error)}") from error
    return device


def check_name(kind: str, name: str, known: Collection[str]) -> str:
    """Return ``name``, or raise ``UserError`` unless it is among the known ones.

    >>> check_name("mining", "hardest", ["hardest", "all"])
    'hardest'
    """
    if name not in known:
        raise unknown_name(kind, name, known)
    return name


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Build the error for a name that is not among the known ones, with the nearest match.

    Of many known names only the nearest are listed.

    >>> str(unknown_name("loss", "unifed", ["unified", "vlc"]))
    "unknown loss 'unifed' (did you mean 'unified'?); known: unified, vlc"
    """
    known = sorted(known)
    hint = did_you_mean(name, known)
    if len(known) > MOST_NAMES_LISTED:
        nearest = ", ".join(_nearest(name, known, number=5, cutoff=0.0))
        return UserError(f"unknown {kind} {name!r}{hint}; the nearest of {len(known)}: {nearest}")
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is nearest, or an empty string where none is near.

    >>> did_you_mean("marge", ["margin", "scale"])
    " (did you mean 'margin'?)"
    """
    nearest = _nearest(name, known, number=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _nearest(name: str, known: Iterable[str], number: int, cutoff: float) -> list[str]:
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(str(name).lower(), by_lower, number, cutoff)]
