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
from typing import Any, BinaryIO

from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["Folder", "error_text", "open_regular", "write_file"]

COPY_BYTES = 1 << 20


class Folder:
    """A folder, local or of any file system that fsspec knows. It can be pickled.

    Args:
        location: a path, or a URL such as ``s3://bucket/shards`` or ``memory://shards``.

    Raises:
        UserError: fsspec does not know the file system, or its package is not installed.
    """

    def __init__(self, location: str | os.PathLike):
        self.location = os.fspath(location)
        core = require("fsspec.core", extra="data")
        try:
            self._files, self._root = core.url_to_fs(self.location)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot use {self.location}: {error}") from error
        self.is_local = isinstance(self._files, require("fsspec.implementations.local", extra="data").LocalFileSystem)

    def __reduce__(self) -> tuple[Any, ...]:
        # Connections do not travel between processes.
        return Folder, (self.location,)

    def __truediv__(self, name: str) -> str:
        """Return the location of a file, as messages and readers name it."""
        return str(Path(self.location) / name) if self._is_plain_path() else posixpath.join(self.location, name)

    def __str__(self) -> str:
        return self.location

    def make(self) -> None:
        """Make the folder and its parents where they are missing."""
        with self._errors("cannot make the folder", self.location):
            self._files.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        """Return the names of the files in the folder, sorted; none when the folder does not exist."""
        with self._errors("cannot list", self.location):
            self._files.invalidate_cache(self._root)
            try:
                entries = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        # Of a file, `ls` lists the file itself.
        files = (entry["name"].rstrip("/") for entry in entries if entry["type"] == "file")
        return sorted(posixpath.basename(file) for file in files if file != self._root)

    def exists(self, name: str) -> bool:
        with self._errors("cannot look for", self / name):
            return self._files.isfile(self._path(name))

    def read(self, name: str) -> bytes:
        with self._errors("cannot read", self / name):
            return self._files.cat_file(self._path(name))

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; it can seek."""
        with self._errors("cannot read", self / name):
            return self._files.open(self._path(name), "rb")

    def sha256(self, name: str) -> str:
        """Return the hash of a file's content as hexadecimal digits."""
        digest = hashlib.sha256()
        with self._errors("cannot read", self / name), self.open(name) as stream:
            while data := stream.read(COPY_BYTES):
                digest.update(data)
        return digest.hexdigest()

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with self._errors("cannot remove", self / name), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing that gets its name when it is complete and stored, or not at all.

        It replaces a file of that name. When the block raises, nothing is left behind; a process that is killed leaves
        a file ``.<name>.<8 hexadecimal digits>.partial``, which :meth:`remove_partial` removes.

        Raises:
            UserError: the file cannot be written, because the disk is full for example.
        """
        temporary = None
        try:
            with self._errors("cannot write", self / name):
                temporary, opened = self._open_partial(name)
                with opened as stream:
                    yield stream
                    if self.is_local:
                        stream.flush()
                        os.fsync(stream.fileno())
                        if fcntl is not None:  # still locked; Windows renames no open file
                            os.replace(temporary, self._path(name))
                            return
                if self.is_local:
                    # Unlike `mv`, atomic by definition.
                    os.replace(temporary, self._path(name))
                else:
                    self._files.mv(temporary, self._path(name))
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(temporary)
            raise

    def _open_partial(self, name: str) -> tuple[str, BinaryIO]:
        while True:
            # Its own name in every process: two that write the same file do not write into one another's.
            path = self._path(f".{name}.{uuid.uuid4().hex[:8]}.partial")
            stream = self._files.open(path, "wb")
            if not self.is_local:
                return path, stream
            _lock(stream, wait=True)
            # Until it was locked, another process could take it for that of a killed one.
            if os.path.exists(path):
                return path, stream
            stream.close()

    def remove_partial(self, pattern: str) -> None:
        """Remove what killed processes left of the files whose name matches a regular expression.

        On a local disk, a file that another process is still writing stays, and so do all where files cannot be locked.
        """
        for name in self.names():
            if not re.fullmatch(rf"\.(?:{pattern})\.[0-9a-f]{{8}}\.partial", name):
                continue
            if not self.is_local:
                self.remove(name)
                continue
            # For writing: NFS locks no file that is open for reading only.
            with suppress(OSError), open(self._path(name), "r+b") as stream:
                if _lock(stream, wait=False):
                    os.remove(stream.name)

    @contextmanager
    def lock(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock that one process of this machine can have at a time, where the system knows locks.

        Raises:
            UserError: another process holds it, with ``wait=False``.
        """
        if not self.is_local or fcntl is None:
            yield
            return
        descriptor = os.open(self._root, os.O_RDONLY)
        try:
            if _lock(descriptor, wait=wait) is False:
                raise UserError(f"another process is writing to {self}: wait for it or choose another folder")
            yield
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _is_plain_path(self) -> bool:
        return self.is_local and "://" not in self.location

    @contextmanager
    def _errors(self, action: str, place: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            # The zip writer of torch.save fails with a RuntimeError of its own after the file's error.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise UserError(f"{action} {place}: {error_text(cause)}") from error


def write_file(file: Path, data: bytes | memoryview) -> None:
    """Write a local file that appears complete or not at all; its folder is made when missing.

    What killed processes left when they wrote it is removed.

    Raises:
        UserError: the file cannot be written; one that was there before stays.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error_text(error)}") from error
    folder = Folder(file.parent)
    folder.remove_partial(re.escape(file.name))
    with folder.write(file.name) as stream:
        stream.write(data)


def open_regular(file: str | os.PathLike) -> BinaryIO:
    """Open a file of the user's for reading, but no FIFO or device, which may block or never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `open` says best what a folder is
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(file))
    return open(file, "rb")


def error_text(error: OSError) -> str:
    """Return what the system says, without the path that our messages name already."""
    return error.strerror or str(error) or type(error).__name__


def _lock(file: Any, *, wait: bool) -> bool | None:
    """Lock an open file as long as it is open; return whether it is locked, None where it cannot be."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:  # another process has locked it
        return False
    except OSError:  # some network file systems have no locks
        return None
    return True
