"""Files on a disk or behind a URL of fsspec, written so that they appear complete or not at all."""

import contextlib
import glob
import hashlib
import os
import posixpath
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import filelock
import fsspec
from fsspec.asyn import reset_lock
from fsspec.implementations.local import LocalFileSystem

from vl_plugins.errors import UserError, is_network_error, reason, user_errors

Url = str | os.PathLike
Content = TypeVar("Content")

# Seconds before a server that was too busy, or did not answer, is asked again.
PAUSES = (0.5, 1.0, 2.0, 4.0)
MOST_OPEN = 128  # files of a data set
# Answers of HTTP that another try may change: a timeout, too many requests, errors of the server.
BUSY = {408, 429, *range(500, 600)}

# What file systems of fsspec tell of a file that changes with its content: sums, and times.
CHANGING = ("size", "ETag", "etag", "Content-MD5", "md5Hash", "blob_id", "sha", "hex", "CRC")
CHANGING += ("LastModified", "last_modified", "Last-Modified", "modified", "modify", "modificationTime", "updated")
CHANGING += ("mtime", "created")

# Workers of a loader are forked. There older versions of fsspec, such as 2025.3, wait for a thread of the parent,
# forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_lock)
# Newer ones clear their cache. What is then unused closes its connections, and so removes them from the event loop of
# the parent, which waits for their answers forever.
_OPENED: set[Any] = set()


def join(folder: Url, name: str) -> str:
    """Return the location of a file in a folder, both paths or URLs."""
    return posixpath.join(os.fspath(folder), name)


def locate(url: Url) -> tuple[Any, str]:
    """Return the file system of a location, and the path there."""
    with user_errors(os.fspath(url), ImportError):  # of the package for this kind of URL
        files, path = fsspec.core.url_to_fs(os.fspath(url))
    _OPENED.add(files)
    return files, path


def is_transient(error: Any) -> bool:
    """Return whether another try may succeed: a server is busy, or a connection has failed."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # fsspec's, of whatever went wrong
        return is_transient(error.__cause__)
    status = getattr(error, "status", None)
    if status is not None:
        return status in BUSY
    return isinstance(error, (TimeoutError, ConnectionError)) or is_network_error(error)


def with_retries(read: Callable[[], Content]) -> Content:
    """Return what a function reads, which is called again after growing pauses while its errors are transient."""
    for pause in PAUSES:
        try:
            return read()
        except Exception as error:
            if not is_transient(error):
                raise
        time.sleep(pause)
    return read()


def check_answer(url: Url, error: Exception) -> None:
    """Raise :class:`UserError` if a file seems to be missing because a server does not answer."""
    if is_transient(error):
        raise UserError(f"cannot read {os.fspath(url)}: {reason(error)}") from error


def read_bytes(url: Url) -> bytes:
    """Return the content of a file; raise :class:`UserError` if it cannot be read."""
    with file_errors("read", url):
        files, path = locate(url)
        return with_retries(lambda: files.cat_file(path))


def exists(url: Url) -> bool:
    """True if there is such a file; a folder does not count."""
    with file_errors("look for", url):
        files, path = locate(url)
        try:
            # `exists` and `isfile` would start to download an HTTP file.
            return with_retries(lambda: files.info(path))["type"] == "file"
        except (FileNotFoundError, NotADirectoryError) as error:
            check_answer(url, error)
            return False


def is_folder(url: Url) -> bool:
    """True if there is such a folder."""
    files, path = locate(url)
    return files.isdir(path)


def state(url: Url) -> list[list[str]] | None:
    """Return what changes with the content of a file behind a URL, as far as its server tells; None without a file.

    Raises:
        UserError: the server does not answer.
    """
    with file_errors("read", url):
        files, path = locate(url)
        with contextlib.suppress(KeyError):  # of another thread that does the same
            files.invalidate_cache(path)  # or a listing that is remembered is the answer
        try:
            info = with_retries(lambda: files.info(path))
        except OSError as error:
            check_answer(url, error)
            return None
    return [[name, str(info[name])] for name in CHANGING if name in info]


def names(folder: Url, pattern: str = "*") -> list[str]:
    """Return the sorted names in a folder that match a pattern, such as ``*.tar``; [] without a folder."""
    files, root = locate(folder)
    files.invalidate_cache(root)
    return sorted(map(posixpath.basename, files.glob(posixpath.join(glob.escape(root), pattern))))


def sha256(url: Url) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    digest = hashlib.sha256()
    with file_errors("read", url), fsspec.open(os.fspath(url), "rb") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def remove(url: Url) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        files, path = locate(url)
        files.rm_file(path)


@contextlib.contextmanager
def write_complete(url: Url) -> Iterator[BinaryIO]:
    """Open a file for writing; its folder is made when missing.

    The file gets its name, perhaps in place of another file, when the block ends and the content is on the disk. When
    the block raises, nothing is left behind. A killed process leaves ``.<name>.<eight digits>.partial``. A link stays,
    and the file that it names is replaced; a device or a pipe is written to, and never replaced.
    """
    with file_errors("write", url):
        files, path = locate(url)
        is_local = isinstance(files, LocalFileSystem)
        if is_local and is_special(path):
            with open(path, "wb") as stream:
                yield stream
            return
        if is_local:
            path = os.path.realpath(path)
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


def is_special(path: str) -> bool:
    """Return whether there is something else than a file, such as a device, a pipe or a folder."""
    return os.path.exists(path) and not os.path.isfile(path)


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


class OpenFiles:
    """Local files that stay open, so that parts of them are read without opening them again.

    A copy, such as that of another process, has none.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}  # the latest last
        weakref.finalize(self, _close, self._descriptors)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OpenFiles, ()

    def read(self, paths: Sequence[str], starts: Sequence[int], sizes: Sequence[int]) -> list[bytes | Exception]:
        """Return parts of files, or the errors. They are read in the order in which they are on the disk."""
        contents: list[bytes | Exception] = [b""] * len(paths)
        for place in sorted(range(len(paths)), key=lambda place: (paths[place], starts[place])):
            try:
                contents[place] = os.pread(self._open(paths[place]), sizes[place], starts[place])
            except OSError as error:
                contents[place] = error.with_traceback(None)  # which would keep this object
        return contents

    def _open(self, path: str) -> int:
        descriptor = self._descriptors.pop(path, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY)
        self._descriptors[path] = descriptor
        if len(self._descriptors) > MOST_OPEN:
            oldest = next(iter(self._descriptors))
            os.close(self._descriptors.pop(oldest))
        return descriptor


def write_file(url: Url, data: bytes | memoryview) -> None:
    """Write a whole file as :func:`write_complete` does."""
    with write_complete(url) as stream:
        stream.write(data)


@contextlib.contextmanager
def partial_folder(folder: Url) -> Iterator[Path]:
    """Return the place of a local folder that is not complete, ``.<name>.<eight digits>.partial`` beside its own.

    The block writes into it, and renames it at the end. When the block raises, nothing is left behind.
    """
    target = Path(folder).resolve()
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    with file_errors("write", folder):
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def lock(file: Url, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock between processes, on a local disk only; the lock file is made when missing.

    Raises:
        UserError: another process holds it, and ``wait`` is False; "another process is writing <what>".
    """
    files, path = locate(file)
    if not isinstance(files, LocalFileSystem):
        yield
        return
    files.makedirs(posixpath.dirname(path), exist_ok=True)
    try:
        held = filelock.FileLock(path).acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        raise UserError(f"another process is writing {what}: wait for it, or choose another folder") from None
    with held:
        yield


@contextlib.contextmanager
def file_errors(action: str, url: Url) -> Iterator[None]:
    """Raise errors of a file system as :class:`UserError`, ``cannot <action> <url>: <reason>``."""
    try:
        yield
    except Exception as error:
        name = os.fspath(url)
        if name != name.strip():
            name = repr(name)
        if is_network_error(error):
            raise UserError(f"cannot {action} {name}: {reason(error)}") from error
        if not isinstance(error, (OSError, RuntimeError)):
            raise
        # The zip writer of torch.save raises a RuntimeError after the OSError of the file, or Ctrl-C.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        if not isinstance(cause, OSError):
            raise
        text = cause.strerror or str(cause) or type(cause).__name__
        raise UserError(f"cannot {action} {name}: {text}") from error
