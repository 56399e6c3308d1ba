"""Where the writer of shards gets the bytes of image files and array files from."""

import os
from pathlib import Path
from typing import Protocol

from vl_plugins.data.shard_scanner import MAX_MEMBER_BYTES
from vl_plugins.data.storage import error_text, open_regular
from vl_plugins.utils.errors import UserError

__all__ = ["FileFolder", "FileSource", "read_file"]


class FileSource(Protocol):
    """The files of a data set by ``CaptionedImage.file``; it is pickled for worker processes."""

    def read(self, file: str) -> bytes:
        """Return the content of a file; raise :class:`UserError` if it cannot be read."""

    def state(self, file: str) -> tuple[int, int | str] | None:
        """Return the number of bytes of a file and what else changes with its content; None if it cannot be read."""

    def place(self, file: str) -> str:
        """Return how messages call a file."""


class FileFolder:
    """Files relative to a folder."""

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)

    def read(self, file: str) -> bytes:
        return read_file(self.root / file)

    def state(self, file: str) -> tuple[int, int] | None:
        try:
            status = (self.root / file).stat()
        except (OSError, ValueError):
            return None
        return status.st_size, status.st_mtime_ns

    def place(self, file: str) -> str:
        return str(self.root / file)


def read_file(path: str | os.PathLike) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: it cannot be read, is no regular file, or is too large for a sample.
    """
    try:
        with open_regular(path) as stream:
            if os.fstat(stream.fileno()).st_size <= MAX_MEMBER_BYTES:
                return stream.read()
    except OSError as error:
        raise UserError(f"cannot read the file: {error_text(error)}") from error
    except ValueError as error:  # a null character in the path
        raise UserError(f"cannot read the file: {error}") from error
    raise UserError(f"the file is larger than {MAX_MEMBER_BYTES >> 30} GiB")
