"""Errors of open_clip's trainer, of torch and of files as one line."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import open_clip

from vl_plugins.errors import UserError, first_line

__all__ = ["one_line_errors"]

MOST_SHOWN = 200  # characters of a list of weights


@contextlib.contextmanager
def one_line_errors(args: Namespace) -> Iterator[None]:
    """Turn errors that the user can fix into one line.

    Args:
        args: options of the training; the trainer replaces ``--resume latest`` in it by the file.

    Raises:
        UserError: a file, disk or download failed, or the checkpoint of ``--resume`` fits neither model nor optimizer.
    """
    try:
        yield
    except OSError as error:
        lines = (error.strerror or str(error)).rstrip().splitlines() or [type(error).__name__]
        reason = lines[-1 if lines[0].startswith("Caught ") else 0]  # the last one, if a loader process wrote it
        place = error.filename
        if place is None and error.errno is not None:  # a file that was open already
            place = Path(args.logs, args.name or "")
        raise UserError(reason if place is None else f"{place}: {reason}") from error
    except RuntimeError as error:
        if re.search("PytorchStreamWriter|unexpected pos", str(error)):  # of torch.save
            raise UserError(
                f"{Path(args.logs, args.name)}: a checkpoint cannot be written; is the disk full?"
            ) from error
        if str(error).startswith("Failed to download"):
            raise UserError(f"--model {args.model}: {first_line(error)}") from error
        if not args.resume or not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise UserError(
            f"--resume {args.resume}: its weights do not fit --model {args.model} with these flags: "
            f"{str(error).splitlines()[1].strip()[:MOST_SHOWN]}"
        ) from error
    except (KeyError, ValueError) as error:
        is_missing = isinstance(error, KeyError) and error.args[0] in ("optimizer", "param_groups")
        if not is_missing and not str(error).startswith("loaded state dict"):
            raise
        # The parameter groups depend on open_clip's version, and on flags such as --lock-image.
        raise UserError(
            f"--resume {args.resume}: its optimizer state does not fit the parameters that open_clip "
            f"{open_clip.__version__} trains with these flags; resume with the version and flags that wrote it"
        ) from error
