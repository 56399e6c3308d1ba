"""The scanner of shards: the samples of a tar archive, for reading, verification and statistics."""

import re
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

__all__ = ["MAX_MEMBER_BYTES", "ScannedSample", "scan_samples"]

# Far above any image, array of features or text: what is larger would fill the memory of a process that reads it.
MAX_MEMBER_BYTES = 1 << 30

# As webdataset splits names: folders and name up to the first dot, and what follows it.
NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
# Files of webdataset itself.
META_NAME = re.compile(r"__[^/]*__($|/)")


@dataclass(slots=True)
class ScannedSample:
    """Consecutive files of one key.

    Args:
        key: the name of its files up to the first dot.
        members: headers of its files by extension in lower case, in the order of the archive.
        data: content of the files that were asked for, by extension.
    """

    key: str
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)


def scan_samples(
    stream: BinaryIO,
    extensions: Collection[str],
    start: int = 0,
    stop: int | None = None,
    on_stray: Callable[[str], None] = lambda problem: None,
) -> Iterator[ScannedSample]:
    """Yield samples ``start`` to ``stop`` of an archive, from where the stream is.

    Of files that are not needed, or belong to a sample before ``start``, nothing is read but the header where the
    stream can seek. It may be moved between two samples.

    Args:
        stream: of a file or a pipe.
        extensions: those whose content is read.
        start: first sample.
        stop: the one after the last; all with None.
        on_stray: gets a line about each file that belongs to no sample; by default they are passed over.

    Raises:
        tarfile.TarError: there is no archive, or it is compressed, cut off or damaged; a sample has two files of the
            same extension; a file is sparse or larger than ``MAX_MEMBER_BYTES``. Complete samples before that place
            have been yielded.
    """
    try:
        yield from _scan(stream, extensions, start, stop, on_stray)
    # What tarfile raises for headers that lie about sizes and names.
    except (ValueError, OverflowError, EOFError, MemoryError, RecursionError) as error:
        raise tarfile.ReadError(f"it is damaged: {error or type(error).__name__}") from error


def _scan(
    stream: BinaryIO,
    extensions: Collection[str],
    start: int,
    stop: int | None,
    on_stray: Callable[[str], None],
) -> Iterator[ScannedSample]:
    can_seek = hasattr(stream, "seekable") and stream.seekable()
    tar = _open_tar(stream, "r:" if can_seek else "r|")
    sample, position = None, -1
    for member in _headers(tar):
        name = NAME.fullmatch(member.name)
        if not member.isreg():
            on_stray(f"{member.name} is not a plain file")
            continue
        if not name or META_NAME.match(member.name):
            on_stray(f"{member.name} is not named <key>.<extension>")
            continue
        key, extension = name[1], name[2].lower()
        if sample is None or key != sample.key:
            if sample is not None and position >= start:
                yield sample
            position += 1
            if position == stop:
                return
            sample = ScannedSample(key)
        if extension in sample.members:
            raise tarfile.ReadError(f"{member.name} is in it twice")
        sample.members[extension] = member
        if extension in extensions and position >= start:
            tar.fileobj.seek(member.offset_data)
            data = tar.fileobj.read(member.size)
            if len(data) < member.size:
                raise tarfile.ReadError(f"it is cut off in {member.name}")
            sample.data[extension] = data
    if can_seek:
        # tarfile takes a cut between two members, or garbage, for the end.
        stream.seek(tar.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it is cut off or damaged at byte {tar.offset:,}: an archive ends with zeros")
    if sample is not None and position >= start:
        yield sample


def _headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive that has just been opened, without keeping them."""
    if tar.firstmember is None:
        return  # nothing is in it, and `next` of Python 3.10 would seek to before its beginning
    while (member := tar.next()) is not None:
        tar.members.clear()  # the index of a large shard would grow in memory
        # By a negative size, some versions of tarfile would go back and read the same for ever.
        if not 0 <= member.size <= MAX_MEMBER_BYTES:
            raise tarfile.ReadError(f"the header of {member.name} says {member.size} bytes")
        if member.issparse():
            raise tarfile.ReadError(f"{member.name} is a sparse file, which may be zeros without end")
        yield member


def _open_tar(stream: BinaryIO, mode: str) -> tarfile.TarFile:
    try:
        # Never `*`: a compressed archive of kilobytes may go on without end.
        return tarfile.open(fileobj=stream, mode=mode)
    except tarfile.ReadError as error:
        hint = "; a compressed shard must be unpacked" if "header" in str(error) else ""
        raise tarfile.ReadError(f"{error}{hint}") from error
