"""Files of ``torch.save`` that the user names; they may be damaged or malicious."""

import os
import pickle
import re
from typing import Any

import torch

from vl_plugins.errors import UserError, first_line

__all__ = ["UnreadableFileError", "read_torch_file"]


class UnreadableFileError(UserError):
    """A file cannot be read; the message is the reason, without the file's name."""


def read_torch_file(file: str | os.PathLike, *, mmap: bool = False) -> Any:
    """Read tensors, numbers, text and containers of them on the CPU; no code of the file is run.

    Args:
        file: its path.
        mmap: leave the tensors in the file until they are used.

    Raises:
        UnreadableFileError: the file is missing, not readable, cut off, damaged or of another format.
    """
    try:
        # torch 2.2 cannot map a file that is given as a Path.
        return torch.load(os.fspath(file), map_location="cpu", weights_only=True, mmap=mmap)
    except torch.cuda.OutOfMemoryError:  # nothing is wrong with the file
        raise
    except Exception as error:  # a damaged file can raise any error
        if isinstance(error, FileNotFoundError):
            raise UnreadableFileError("no such file") from error
        if isinstance(error, OSError) and error.filename is not None:
            raise UnreadableFileError(f"it cannot be opened ({error.strerror})") from error
        if not _begins_as_torch_writes(file):
            raise UnreadableFileError("it is empty or not a file of torch.save") from error
        # torch's own messages explain how to load such a file without protection.
        if re.search("Unsupported (global|class)|TorchScript", str(error)):
            raise UnreadableFileError("it holds more than tensors and text, and such files can run code") from error
        reason = type(error).__name__ if isinstance(error, pickle.UnpicklingError) else first_line(error)
        raise UnreadableFileError(f"it is cut off or damaged ({reason})") from error


def _begins_as_torch_writes(file: str | os.PathLike) -> bool:
    with open(file, "rb") as stream:
        return stream.read(1) in (b"P", b"\x80")  # of a zip archive, or of a pickle as before torch 1.6
