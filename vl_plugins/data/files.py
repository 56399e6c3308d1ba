"""Files on a disk or behind a URL of fsspec, written so that they appear complete or not at all."""

import contextlib
import errno
import fnmatch
import hashlib
import os
import posixpath
import re
import stat
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

import filelock
import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from vl_plugins.errors import UserError

__all__ = [
    "MAX_FILE_BYTES",
    "exists",
    "file_errors",
    "join",
    "lock",
    "names",
    "open_regular",
    "read_bytes",
    "remove",
    "remove_partial",
    "sha256",
    "write_complete",
    "write_file",
]

# Far above any image, array of features or text; more would fill the memory of a process that reads it.
MAX_FILE_BYTES = 1 << 30

Url = str | os.PathLike


def join(folder: Url, name: str) -> str:
    """Return the location of a file in a folder, both paths or URLs."""
    return posixpath.join(os.fspath(folder), name)


def read_bytes(url: Url, *, name: str | None = None, max_bytes: int | None = None) -> bytes:
    """Return the content of a file, which errors call ``name``; with ``max_bytes`` of a local one that is not larger.

    Raises:
        UserError: the file cannot be read.
    """
    with file_errors("read", url if name is None else name):
        if max_bytes is None:
            files, path = _locate(url)
            return files.cat_file(path)
        with open_regular(url) as stream:
            if os.fstat(stream.fileno()).st_size > max_bytes:
                raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 30} GiB")
            return stream.read()


def open_regular(file: Url) -> BinaryIO:
    """Open a local file for reading; raise ``OSError`` for a FIFO or device, which may block or never end."""
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `open` has the best error for a folder
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(file))
    return open(file, "rb")


def exists(url: Url) -> bool:
    """Return whether there is a file; a folder does not count."""
    with file_errors("look for", url):
        files, path = _locate(url)
        try:
            return files.info(path)["type"] == "file"  # `isfile` would start to download an HTTP file
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error.__cause__, OSError):  # no connection to an HTTP server
                raise error.__cause__ from error
            return False


def names(folder: Url, pattern: str = "*") -> list[str]:
    """Return the sorted names of the files in a folder that match a pattern, such as ``*.tar``; [] without a folder."""
    with file_errors("list", folder):
        files, root = _locate(folder)
        files.invalidate_cache(root)
        try:
            entries = files.ls(root, detail=True)
        except FileNotFoundError:
            return []
    # Of a file, `ls` lists the file itself.
    paths = (entry["name"] for entry in entries if entry["type"] == "file" and entry["name"] != root)
    return sorted(name for name in map(posixpath.basename, paths) if fnmatch.fnmatchcase(name, pattern))


def sha256(url: Url) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    digest = hashlib.sha256()
    with file_errors("read", url), fsspec.open(os.fspath(url), "rb") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def remove(url: Url) -> None:
    """Remove a file, if it exists."""
    with file_errors("remove", url), contextlib.suppress(FileNotFoundError):
        files, path = _locate(url)
        files.rm_file(path)


@contextlib.contextmanager
def write_complete(url: Url) -> Iterator[BinaryIO]:
    """Open a file for writing; its folder is made when missing.

    The file gets its name, perhaps in place of another file, when the block ends and the content is on the disk. When
    the block raises, nothing is left behind. A killed process leaves a file that :func:`remove_partial` removes.
    """
    with file_errors("write", url):
        files, path = _locate(url)
        is_local = isinstance(files, LocalFileSystem)
        folder, name = posixpath.split(path)
        partial = posixpath.join(folder, f".{name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            files.makedirs(folder, exist_ok=True)
            with files.open(partial, "wb") as stream:
                yield stream
                if is_local:
                    stream.flush()
                    os.fsync(stream.fileno())
            # On a local disk `os.replace` is atomic, unlike `mv`.
            (os.replace if is_local else files.mv)(partial, path)
        except BaseException:
            with contextlib.suppress(Exception):
                files.rm_file(partial)
            raise


def write_file(url: Url, data: bytes | memoryview) -> None:
    """Write a whole file as :func:`write_complete` does, and remove what killed processes left of it."""
    folder, name = os.path.split(os.fspath(url))
    remove_partial(folder or ".", re.escape(name))
    with write_complete(url) as stream:
        stream.write(data)


def remove_partial(folder: Url, pattern: str = ".+") -> None:
    """Remove what killed processes left of files whose names match a regular expression.

    Another process must not be writing these files; hold their :func:`lock`.
    """
    for name in names(folder, ".*.partial"):
        if re.fullmatch(rf"\.(?:{pattern})\.[0-9a-f]{{8}}\.partial", name):
            remove(join(folder, name))


@contextlib.contextmanager
def lock(file: Url, what: str | None = None, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock between processes, on a local disk only; the lock file is made when missing.

    Raises:
        UserError: another process holds it, and ``wait`` is False; "another process is writing <what, or the file>".
    """
    files, path = _locate(file)
    if not isinstance(files, LocalFileSystem):
        yield
        return
    with file_errors("lock", file):
        files.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            held = filelock.FileLock(path).acquire(timeout=-1 if wait else 0)
        except filelock.Timeout:
            busy = f"another process is writing {what or os.fspath(file)}: wait for it, or choose another folder"
            raise UserError(busy) from None
    with held:
        yield


@contextlib.contextmanager
def file_errors(action: str, url: Url) -> Iterator[None]:
    """Raise errors of a file system as :class:`UserError`, ``cannot <action> <url>: <reason>``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # The zip writer of torch.save raises a RuntimeError after the OSError of the file, or Ctrl-C.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause) or type(cause).__name__
        raise UserError(f"cannot {action} {os.fspath(url)}: {reason}") from error


def _locate(url: Url) -> tuple[Any, str]:
    """Return the file system of a location, and the path there."""
    try:
        if "\0" in (url := os.fspath(url)):
            raise ValueError("embedded null character")
        return url_to_fs(url)
    except (ImportError, ValueError) as error:  # for file systems that fsspec does not know
        raise UserError(f"cannot use {url!r}: {error}") from error
