"""Errors that the command lines print as one line instead of a traceback."""

import difflib
from collections.abc import Collection, Iterable


class UserError(ValueError):
    """An error in the user's input; the message says what is wrong, where, and what would be right."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def first_line(error: Exception, otherwise: str | None = None) -> str:
    """Return the first line of an error's text; of an empty text ``otherwise``, or else the type of the error.

    >>> first_line(RuntimeError("no such device\\nC++ stack trace")), first_line(AssertionError())
    ('no such device', 'AssertionError')
    """
    return next(iter(str(error).splitlines()), otherwise or type(error).__name__)


def check_name(kind: str, name: str, known: Collection[str]) -> str:
    """Return ``name``; raise :func:`unknown_name` if it is not a known one."""
    if name not in known:
        raise unknown_name(kind, name, known)
    return name


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest match and the known names, or the nearest of many.

    >>> str(unknown_name("loss", "unifed", ["unified", "vlc"]))
    "unknown loss 'unifed' (did you mean 'unified'?); known: unified, vlc"
    """
    known = sorted(known)
    label, listed = "known", known
    if len(known) > 30:
        label, listed = f"the nearest of {len(known)}", _nearest(name, known, number=5, cutoff=0.0)
    return UserError(f"unknown {kind} {name!r}{did_you_mean(name, known)}; {label}: {', '.join(listed)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the nearest known name, or an empty string if none is near."""
    nearest = _nearest(name, known, number=1, cutoff=0.6)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _nearest(name: str, known: Iterable[str], number: int, cutoff: float) -> list[str]:
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(str(name).lower(), by_lower, number, cutoff)]
