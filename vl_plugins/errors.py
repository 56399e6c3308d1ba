"""Errors that the command lines print as one line instead of a traceback."""

import difflib
from collections.abc import Iterable

__all__ = ["MissingExtraError", "UserError", "unknown_name"]


class UserError(ValueError):
    """Something the user gave is wrong; the message says what, where, and what would be right."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Build the error for a name that is not among the known ones, with the nearest match.

    >>> str(unknown_name("loss", "unifed", ["unified", "vlc"]))
    "unknown loss 'unifed' (did you mean 'unified'?); known: unified, vlc"
    """
    known = sorted(known)
    by_lower = {candidate.lower(): candidate for candidate in known}
    nearest = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    hint = f" (did you mean {by_lower[nearest[0]]!r}?)" if nearest else ""
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")
