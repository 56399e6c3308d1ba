"""Errors of the user, which command lines print as one line, and checks of names and numbers."""

import contextlib
import csv
import difflib
import importlib
import math
import os
import struct
import sys
import tarfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any

__all__ = [
    "MALFORMED_CONTENT",
    "InputWarning",
    "MissingExtraError",
    "UserError",
    "all_values",
    "check_sizes",
    "exit_status",
    "is_network_error",
    "message",
    "missing_extra",
    "number",
    "one_of",
    "reason",
    "require",
    "unknown_name",
    "user_errors",
    "warn_of_input",
]

TRACEBACK = "VL_PLUGINS_TRACEBACK"
MOST_VALUES = 10_000  # in a configuration
LARGEST_SIZE = 500_000  # of a model, such as its vocabulary
LONGEST_REASON = 600  # characters; torch lists every missing weight

# What parsers of files raise, besides OSError. Errors of JSON, text encodings, pandas and numpy are ValueErrors. Deep
# nesting is a RecursionError, a number of too many digits an OverflowError.
PARSER_ERRORS = (ValueError, EOFError, RecursionError, OverflowError, csv.Error, struct.error)
PARSER_ERRORS += (tarfile.TarError, zipfile.BadZipFile, zlib.error)
# Errors of optional packages, by module.
PARSERS = {"yaml": ["YAMLError"], "msgspec": ["MsgspecError"], "safetensors": ["SafetensorError"]}

# Failed connections, by module; like an OSError, the message of one says all.
NETWORK_ERRORS = {"aiohttp": ["ClientError"], "botocore.exceptions": ["BotoCoreError", "ClientError"]}

# What code raises where the plain data of a file, such as a checkpoint or a configuration, have the wrong structure.
MALFORMED_CONTENT = (LookupError, TypeError, AttributeError, AssertionError, RuntimeError, ArithmeticError)

# Failures of a GPU or of the network between processes, by the names of torch's classes and the start of the message.
# They are RuntimeErrors, but no file is to blame.
DEVICE_ERRORS = ("AcceleratorError", "OutOfMemoryError", "DistError", "DistBackendError", "DistNetworkError")
DEVICE_MESSAGES = ("CUDA", "NCCL", "HIP", "cuDNN", "CUBLAS", "MPS")


class UserError(ValueError):
    """An error in the user's input; command lines print its message as one line instead of a traceback."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class InputWarning(UserWarning):
    """Input that can be read, but may not be as its user means it; command lines print the message as one line."""


def warn_of_input(message: str) -> None:
    """Issue an ``InputWarning`` that names the line of the user that led here, not one of this package or of torch."""
    level = 1
    for frame, _ in traceback.walk_stack(sys._getframe()):
        package, _, _ = frame.f_globals.get("__name__", "").partition(".")
        if package not in ("vl_plugins", "torch"):
            break
        level += 1
    warnings.warn(message, InputWarning, stacklevel=level)


def exit_status(program: str, run: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run a command and return its exit status.

    A ``UserError``, an ``OSError`` or a failed connection ends in one line on standard error and status 2, Ctrl-C in
    one line and status 130.
    Any other exception is a bug or a failure of the machine: it keeps its traceback, which ends the process with
    status 1. ``VL_PLUGINS_TRACEBACK=1`` shows the traceback of user errors, too.

    In several processes, each one prints its own error, marked with ``[rank N]``. Files may differ between machines, so
    an error in one process says nothing about the others.

    Args:
        program: name at the start of the line.
        run: the command; its return value is the status, None for 0.
        interrupted: what to print after Ctrl-C, in the first process.
    """
    try:
        return run() or 0
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"{program}: {interrupted}", file=sys.stderr)
        return 130  # as shells report a process that Ctrl-C ended
    except Exception as error:
        is_foreseen = isinstance(error, (UserError, OSError)) or is_network_error(error)
        if is_foreseen and not os.environ.get(TRACEBACK):
            print(f"{_rank_label()}{program}: error: {message(error)}", file=sys.stderr)
            return 2
        if not hasattr(error, "add_note"):  # before Python 3.11, tracebacks have no notes
            for note in getattr(error, "__notes__", []):
                print(f"{_rank_label()}{note}", file=sys.stderr)
        if not _rank_label():
            raise
        for line in traceback.format_exc().splitlines():
            print(f"{_rank_label()}{line}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def user_errors(subject: str, *expected: type[Exception]) -> Iterator[None]:
    """Re-raise what parsers of user input raise as a ``UserError`` that names the file or flag.

    A ``UserError``, an ``OSError`` and a failed connection pass unchanged. Other exceptions are bugs: they keep their
    type and traceback, and get the note "while reading <subject>".

    Args:
        subject: the file or flag that is read.
        expected: exceptions that wrong input raises here, besides ``ValueError`` and the errors of the parsers of YAML,
            JSON, archives and tables. ``Exception`` is right where the block calls a decoder on the bytes of a file
            and does nothing else: damaged bytes make decoders raise nearly anything.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        if is_network_error(error):
            raise
        if (isinstance(error, expected) or _is_parser_error(error)) and not _is_device_error(error):
            raise UserError(f"{subject}: {reason(error)}; set {TRACEBACK}=1 for the traceback") from error
        _add_note(error, f"while reading {subject}")
        raise


def reason(error: Exception) -> str:
    """Return the message of an exception as one line, with its type where the message alone says little.

    >>> reason(KeyError("caption"))
    "KeyError: 'caption'"
    >>> reason(ValueError("columns must match\\nbut differ"))
    'columns must match but differ'
    """
    text = " ".join(str(error).split())
    cause = error.__cause__
    if cause is not None and str(cause).strip() not in str(error):
        text = f"{text}: {reason(cause)}"  # type: ignore[arg-type]
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} [...]"
    if text and not isinstance(error, (LookupError, AssertionError, AttributeError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def message(error: Exception) -> str:
    """Return the text of an error as one line, without the traceback that a worker of a ``DataLoader`` adds."""
    text = str(error)
    if text.startswith("Caught ") and "\nOriginal " in text:  # written by torch
        text = text.rstrip().rpartition(f"{type(error).__name__}: ")[2]
    return " ".join(text.split())


def is_network_error(error: Exception) -> bool:
    """Return whether a connection to a server failed."""
    return _is_of_packages(error, NETWORK_ERRORS)


def _is_parser_error(error: Exception) -> bool:
    """Return whether a parser of a file or a check of an argument raised this error.

    Tokenizers of Hugging Face raise ``Exception`` itself.
    """
    return type(error) is Exception or isinstance(error, PARSER_ERRORS) or _is_of_packages(error, PARSERS)


def _is_of_packages(error: Exception, classes: Mapping[str, Sequence[str]]) -> bool:
    """Return whether an error is of one of the classes, by module. A package that raised it is imported already."""
    for module, names in classes.items():
        if module not in sys.modules:
            continue
        for name in names:
            if isinstance(error, getattr(sys.modules[module], name)):
                return True
    return False


def _is_device_error(error: Exception) -> bool:
    class_names = [base.__name__ for base in type(error).__mro__]
    return not set(DEVICE_ERRORS).isdisjoint(class_names) or str(error).startswith(DEVICE_MESSAGES)


def _add_note(error: Exception, note: str) -> None:
    """Do what ``error.add_note`` does; Python 3.10 has none, and ``exit_status`` prints the notes there."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def _rank_label() -> str:
    """Return ``"[rank N] "`` in a process that ``torchrun`` started with others, otherwise nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return ""
    return f"[rank {os.environ.get('RANK', '0')}] "


def one_of(kind: str, name: Any, known: Iterable[str]) -> Any:
    """Return ``name``; raise :func:`unknown_name` if it is not a known one."""
    known = list(known)
    if name not in known:
        raise unknown_name(kind, name, known)
    return name


def unknown_name(kind: str, name: Any, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest match and the known names."""
    known = sorted(known, key=lambda name: (str(name)[:1].isupper(), name))  # classes of hosts come last
    nearest = _nearest(str(name), known)
    hint = "" if nearest is None else f" (did you mean {nearest!r}?)"
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")


def _nearest(name: str, known: list[str]) -> str | None:
    """Return the name that was probably meant: ``scale`` for ``logit_scale``, ``CosineSimilarity`` for ``cosine``."""
    name = name.casefold()
    by_folded = {str(known_name).casefold(): known_name for known_name in reversed(known)}  # equal ones: the first
    endings = [folded for folded in by_folded if name.endswith("_" + folded)]
    similar = difflib.get_close_matches(name, by_folded, n=1)
    beginnings = sorted((folded for folded in by_folded if len(name) > 2 and folded.startswith(name)), key=len)
    candidates = [*endings, *similar, *beginnings]
    return by_folded[candidates[0]] if candidates else None


def number(name: str, value: Any, least: float = -math.inf, above: float = -math.inf, kind: type = float) -> Any:
    """Return a finite number in a range as ``kind``, float or int; otherwise raise ``ValueError``."""
    expected = Real if kind is float else Integral  # numpy has both
    is_number = isinstance(value, expected) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or value <= above:
        bound = f" >= {least:g}" if least > -math.inf else f" > {above:g}" if above > -math.inf else ""
        what = "a finite number" if kind is float else "an integer"
        got = repr(value)
        if hasattr(value, "shape") and not isinstance(value, Real):
            got = f"{type(value).__name__} of the shape {tuple(value.shape)}"
        raise ValueError(f"{name} must be {what}{bound}, got {got}")
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
