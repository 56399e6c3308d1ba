"""Folders on disk or behind a URL of fsspec, with files that appear complete or not at all."""

import errno
import hashlib
import os
import posixpath
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from vl_plugins.errors import UserError, require

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["MAX_FILE_BYTES", "Folder", "error_text", "open_regular", "read_file", "write_file"]

READ_BYTES = 1 << 20
# Far above any image, array of features or text; more would fill the memory of a process that reads it.
MAX_FILE_BYTES = 1 << 30


class Folder:
    """A folder, local or of any file system that fsspec knows; a path or a URL such as ``s3://bucket/shards``.

    It can be pickled. All methods raise :class:`UserError` for what the file system raises.
    """

    def __init__(self, location: "str | os.PathLike | Folder"):
        self.location = os.fspath(location)
        core = require("fsspec.core", extra="data")
        try:
            self._files, self._root = core.url_to_fs(self.location)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot use {self.location}: {error}") from error
        self._is_local = isinstance(self._files, require("fsspec.implementations.local", extra="data").LocalFileSystem)

    def __fspath__(self) -> str:
        return self.location

    def __str__(self) -> str:
        return self.location

    def __truediv__(self, name: str) -> str:
        """Return the location of a file."""
        return posixpath.join(self.location, name) if "://" in self.location else str(Path(self.location, name))

    def make(self) -> None:
        """Make the folder and its parents."""
        with _errors("cannot make the folder", self.location):
            self._files.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        """Return the names of the files in the folder, sorted; none when the folder does not exist."""
        with _errors("cannot list", self.location):
            self._files.invalidate_cache(self._root)
            try:
                entries = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        # Of a file, `ls` lists the file itself.
        files = (entry["name"] for entry in entries if entry["type"] == "file" and entry["name"] != self._root)
        return sorted(map(posixpath.basename, files))

    def exists(self, name: str) -> bool:
        with _errors("cannot look for", self / name):
            return self._files.isfile(self._path(name))

    def read(self, name: str) -> bytes:
        with _errors("cannot read", self / name):
            return self._files.cat_file(self._path(name))

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; it can seek."""
        with _errors("cannot read", self / name):
            return self._files.open(self._path(name), "rb")

    def sha256(self, name: str) -> str:
        """Return the hash of a file's content as hexadecimal digits."""
        digest = hashlib.sha256()
        with _errors("cannot read", self / name), self.open(name) as stream:
            while data := stream.read(READ_BYTES):
                digest.update(data)
        return digest.hexdigest()

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with _errors("cannot remove", self / name), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing that gets its name, perhaps in place of another file, when it is complete and stored.

        When the block raises, nothing is left behind. A killed process leaves a file that :meth:`remove_partial`
        removes.
        """
        # Two processes that write the same file do not write into one another's.
        temporary = self._path(f".{name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with _errors("cannot write", self / name):
                with self._files.open(temporary, "wb") as stream:
                    yield stream
                    if self._is_local:
                        stream.flush()
                        os.fsync(stream.fileno())
                # On a local disk `os.replace` is atomic, unlike `mv`.
                (os.replace if self._is_local else self._files.mv)(temporary, self._path(name))
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(temporary)
            raise

    def write_bytes(self, name: str, data: bytes | memoryview) -> None:
        """Write a whole file, see :meth:`write`."""
        with self.write(name) as stream:
            stream.write(data)

    def remove_partial(self, pattern: str = ".+") -> None:
        """Remove what killed processes left of files whose name matches; hold the :meth:`lock` meanwhile."""
        for name in self.names():
            if re.fullmatch(rf"\.(?:{pattern})\.[0-9a-f]{{8}}\.partial", name):
                with suppress(UserError):
                    self.remove(name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock, or raise an error if another process holds it; without effect where there are no locks."""
        if not self._is_local or fcntl is None:
            yield
            return
        descriptor = os.open(self._root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is writing to {self}: wait for it or choose another folder") from None
            except OSError:  # some network file systems have no locks
                pass
            yield
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def write_file(file: Path, data: bytes | memoryview) -> None:
    """Write a local file that appears complete or not at all, make its folder, and remove what killed processes left.

    Raises:
        UserError: the file cannot be written; one that was there before stays.
    """
    folder = Folder(file.parent)
    with _errors("cannot write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
    folder.remove_partial(re.escape(file.name))
    folder.write_bytes(file.name, data)


def open_regular(file: str | os.PathLike) -> BinaryIO:
    """Open a file for reading; raise ``OSError`` for a FIFO or device, which may block or never end."""
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `open` has the best error for a folder
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(file))
    return open(file, "rb")


def read_file(file: str | os.PathLike, name: str | None = None, most_bytes: int | None = None) -> bytes:
    """Return the content of a regular file; raise :class:`UserError` if it cannot be read, or is larger."""
    name = str(file) if name is None else name
    try:
        with open_regular(file) as stream:
            if most_bytes is None or os.fstat(stream.fileno()).st_size <= most_bytes:
                return stream.read()
    except (OSError, ValueError) as error:  # of a null character in the path
        raise UserError(f"cannot read {name}: {error_text(error)}") from error
    raise UserError(f"{name} is larger than {most_bytes >> 30} GiB")


def error_text(error: Exception) -> str:
    """Return an error's message; of one of the system without the path, which our messages name already."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def _errors(action: str, place: str | os.PathLike) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        # The zip writer of torch.save raises a RuntimeError after the file's OSError.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"{action} {place}: {error_text(cause)}") from error
