"""Errors of the user, which command lines print as one line, and checks of names and numbers."""

import contextlib
import difflib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from types import ModuleType
from typing import Any

__all__ = [
    "MissingExtraError",
    "UserError",
    "all_values",
    "check_sizes",
    "exit_status",
    "message",
    "missing_extra",
    "number",
    "one_of",
    "require",
    "unknown_name",
    "user_errors",
]

TRACEBACK = "VL_PLUGINS_TRACEBACK"
MOST_VALUES = 10_000  # in a configuration
LARGEST_SIZE = 500_000  # of a model, such as its vocabulary


class UserError(ValueError):
    """An error in the user's input; command lines print its message as one line instead of a traceback."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def exit_status(program: str, run: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Return ``run()``, 2 after a ``UserError`` or ``OSError``, or 130 after Ctrl-C, with one line on standard error.

    With ``VL_PLUGINS_TRACEBACK=1`` the error is raised. Processes that ``torchrun`` started all meet the same error
    before they join: only the first one prints it.
    """
    try:
        return run() or 0
    except BrokenPipeError:
        raise
    except (UserError, OSError) as error:
        if os.environ.get(TRACEBACK):
            raise
        torch = sys.modules.get("torch")
        joined = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        if joined or _is_first_process():
            print(f"{program}: error: {message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if _is_first_process():
            print(f"{program}: {interrupted}", file=sys.stderr)
        return 130  # as shells report a process that Ctrl-C ended


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Raise any exception of the block as a ``UserError`` about ``what``, a file or flag that is being read."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise UserError(f"{what}: {reason}; set {TRACEBACK}=1 for the traceback") from error


def message(error: Exception) -> str:
    """Return the text of an error, without the traceback that a worker process of a ``DataLoader`` adds."""
    text = str(error)
    if text.startswith("Caught ") and "\nOriginal " in text:  # written by torch
        text = text.rstrip().rpartition(f"{UserError.__name__}: ")[2]
    return text


def one_of(kind: str, name: Any, known: Iterable[str]) -> Any:
    """Return ``name``; raise :func:`unknown_name` if it is not a known one."""
    known = list(known)
    if name not in known:
        raise unknown_name(kind, name, known)
    return name


def unknown_name(kind: str, name: Any, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest match and the known names."""
    known = sorted(known)
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")


def number(name: str, value: Any, least: float = -math.inf, above: float = -math.inf, kind: type = float) -> Any:
    """Return a finite number in a range as ``kind``, float or int; otherwise raise ``ValueError``."""
    expected = Real if kind is float else int
    is_number = isinstance(value, expected) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or value <= above:
        bound = f" >= {least:g}" if least > -math.inf else f" > {above:g}" if above > -math.inf else ""
        what = "a finite number" if kind is float else "an integer"
        raise ValueError(f"{name} must be {what}{bound}, got {value!r}")
    return kind(value)


def all_values(what: str, content: Any) -> Iterator[Any]:
    """Yield every value in nested mappings and lists; raise ``UserError`` for more than any configuration has.

    References to one list, as YAML has them, can make billions of a few lines.
    """
    waiting = [content]
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        yield (value := waiting.pop())
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    raise UserError(f"{what}: a configuration of more than {MOST_VALUES:,} values")


def check_sizes(what: str, settings: Any) -> None:
    """Raise ``UserError`` for a size that no model has, before memory is asked for."""
    for value in all_values(what, settings):
        if isinstance(value, (int, float)) and value > LARGEST_SIZE:
            raise UserError(f"{what}: {value:,} is more than {LARGEST_SIZE:,}, the largest size in a model")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; raise :class:`MissingExtraError` with the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # A module that is installed but broken is not missing.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str) -> MissingExtraError:
    """Return the error that says which extra brings a module."""
    return MissingExtraError(f"{module} is not installed; install it with: pip install 'vl_plugins[{extra}]'")


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
