"""Shards as files: where they are, and the samples in them."""

import os
import re
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlparse

from vl_plugins.data.feature_arrays import FEATURE_EXTENSION
from vl_plugins.data.images import IMAGE_EXTENSIONS
from vl_plugins.data.json_text import parse_json
from vl_plugins.data.storage import MAX_FILE_BYTES, Folder
from vl_plugins.errors import UserError, require

__all__ = [
    "EXTENSIONS",
    "INPUTS",
    "TEXTS",
    "Place",
    "ScannedSample",
    "expand_shards",
    "input_of",
    "locate",
    "read_samples",
    "read_texts",
    "scan_samples",
]

# Of images; where a sample has several, the first counts.
EXTENSIONS = (*dict.fromkeys(IMAGE_EXTENSIONS.values()), "jpeg")
TEXTS = ("json", "txt")
MEMBERS = {*EXTENSIONS, *TEXTS}

# What a model takes of an image -> extensions.
INPUTS = {"images": EXTENSIONS, "features": (FEATURE_EXTENSION,)}


# As webdataset splits names: folders and name up to the first dot, and what follows it.
NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
# Files of webdataset itself.
META_NAME = re.compile(r"__[^/]*__($|/)")


@dataclass(slots=True)
class ScannedSample:
    """Consecutive files of one key: their headers, and the content of those asked for, by extension in lower case."""

    key: str
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)


class Place(NamedTuple):
    """A shard as a file of a folder that can be listed; ``is_local`` if webdataset opens it, otherwise fsspec does."""

    url: str
    folder: str
    name: str
    is_local: bool


def locate(shard: str) -> Place | None:
    """Return where a shard is, or None for what webdataset reads from a program (``pipe:``, ``https://``, ``gs://``).

    >>> locate("s3://bucket/coco-train-000000.tar")
    Place(url='s3://bucket/coco-train-000000.tar', folder='s3://bucket', name='coco-train-000000.tar', is_local=False)
    >>> locate("pipe:cat coco-train-000000.tar")
    """
    url = urlparse(shard)
    if url.scheme in ("", "file"):
        path = Path(url.path if url.scheme else shard)
        return Place(shard, str(path.parent), path.name, is_local=True)
    gopen = require("webdataset.gopen", extra="data")
    # A user may have given a scheme another opener.
    if urlparse(gopen.rewrite_url(shard)).scheme in {"", "file", *gopen.gopen_schemes}:
        return None
    folder, _, name = shard.rpartition("/")
    return Place(shard, f"{folder}/" if folder.endswith(":/") else folder, name, is_local=False)


def expand_shards(pattern: str | Sequence[str]) -> list[str]:
    """Return the shards that a pattern stands for, as open_clip's ``--train-data`` understands it.

    Args:
        pattern: a path or URL, with brace ranges such as ``coco-train-{000000..000113}.tar``; several of them joined by
            ``::``; or a list of single shards. URLs that webdataset opens with a program (``pipe:``, ``https://``,
            ``gs://``) are not checked; others are fsspec's (``s3://``, ``memory://``).

    Raises:
        UserError: the pattern is empty or malformed, a shard does not exist or is listed twice, a URL contains a quote,
            or fsspec cannot open it.

    >>> expand_shards("https://host/toy-{00..02}.tar::pipe:cat other.tar")
    ['https://host/toy-00.tar', 'https://host/toy-01.tar', 'https://host/toy-02.tar', 'pipe:cat other.tar']
    """
    # As webdataset does, but without importing torch, so that a missing shard is reported at once.
    braceexpand = require("braceexpand", extra="data").braceexpand
    try:
        parts = map(braceexpand, pattern.split("::")) if isinstance(pattern, str) else [pattern]
        shards = [shard for part in parts for shard in part if shard]
    except ValueError as error:
        raise UserError(f"cannot expand the shard pattern {pattern!r}: {error}") from error
    if not shards:
        raise UserError(f"the shard pattern {pattern!r} names no shards")
    places = [locate(shard) for shard in shards]
    seen: set[str] = set()
    for shard, place in zip(shards, places, strict=True):
        # webdataset puts such URLs into the command line of a shell.
        if place is None and not shard.startswith("pipe:") and {"'", '"'}.intersection(shard):
            raise UserError(f"the URL {shard} contains a quote: write it as %27 or %22")
        path = os.path.abspath(Path(place.folder, place.name)) if place is not None and place.is_local else shard
        if path in seen:
            raise UserError(f"the shard {path} is listed more than once, so its images would count more than once")
        seen.add(path)
    # One listing of a remote folder instead of a request for each shard.
    listing = cache(lambda folder: frozenset(Folder(folder).names()))
    missing = [
        place
        for place in places
        if place is not None
        and not (Path(place.folder, place.name).is_file() if place.is_local else place.name in listing(place.folder))
    ]
    if missing:
        folder = missing[0].folder
        present = [name for name in Folder(folder).names() if name.endswith(".tar")]
        others = f"{present[0]} ... {present[-1]} ({len(present)} files)" if present else "no .tar files"
        raise UserError(
            f"{len(missing)} of {len(shards)} shards do not exist: {missing[0].url}; {folder} holds {others}"
        )
    return shards


def read_samples(
    shard: str, start: int = 0, stop: int | None = None, extensions: Collection[str] = MEMBERS
) -> Iterator[ScannedSample]:
    """Yield samples ``start`` to ``stop`` of a shard; see :func:`scan_samples`. Damaged archives raise any error."""
    place = locate(shard)
    gopen = require("webdataset.gopen", extra="data").gopen
    if place is None:
        # Not closed: for the pipe of a program that has not finished that is an error; it ends when it is dropped.
        yield from scan_samples(gopen(shard), extensions, start, stop)
        return
    with gopen(shard) if place.is_local else Folder(place.folder).open(place.name) as stream:
        yield from scan_samples(stream, extensions, start, stop)


def input_of(sample: ScannedSample, inputs: str = "images") -> bytes:
    """Return the file with a sample's picture, or its features; raise :class:`UserError` if there is none."""
    for extension in INPUTS[inputs]:
        if extension in sample.data:
            return sample.data[extension]
    others = {FEATURE_EXTENSION, *EXTENSIONS}.intersection(sample.members)
    hint = f", but it has {', '.join(sorted(others))} in its place" if others else ""
    raise UserError(f"it has no {inputs}; expected {' or '.join(INPUTS[inputs])}{hint}")


def read_texts(sample: ScannedSample) -> tuple[dict[str, Any], list[str]]:
    """Return the object of ``json``, empty without one, and the captions in it, or else the one in ``txt``.

    Raises:
        ValueError: there are no captions, or something else in their place.
    """
    metadata = parse_json(sample.data["json"], "its json") if "json" in sample.data else {}
    metadata = metadata if isinstance(metadata, dict) else {}
    captions = metadata.get("captions")
    if captions is None:
        if "txt" not in sample.data:
            raise UserError("it has no captions; expected a list 'captions' in json, or txt")
        captions = [sample.data["txt"].decode()]
    if not isinstance(captions, list) or not captions or not all(isinstance(caption, str) for caption in captions):
        raise UserError(f"'captions' must be a list of strings, got {captions!r:.60}")
    return metadata, captions


def scan_samples(
    stream: BinaryIO, extensions: Collection[str], start: int = 0, stop: int | None = None
) -> Iterator[ScannedSample]:
    """Yield samples ``start`` to ``stop`` of an archive, from where the stream is.

    Args:
        stream: of a file, of which only headers are read where ``data`` is not needed, or a pipe.
        extensions: those whose content is read. Files that belong to no sample are passed over.
        start, stop: first sample, and the one after the last; all with None.

    Raises:
        tarfile.TarError: there is no archive, or it is compressed, cut off or damaged; a sample has two files of the
            same extension; a file is sparse or larger than ``MAX_FILE_BYTES``. Complete samples before that place
            have been yielded.
    """
    try:
        yield from _scan(stream, extensions, start, stop)
    # What tarfile raises for headers that lie about sizes and names.
    except (ValueError, OverflowError, EOFError, MemoryError, RecursionError) as error:
        raise tarfile.ReadError(f"it is damaged: {error or type(error).__name__}") from error


def _scan(stream: BinaryIO, extensions: Collection[str], start: int, stop: int | None) -> Iterator[ScannedSample]:
    can_seek = hasattr(stream, "seekable") and stream.seekable()
    try:
        # Never `r:*`: a compressed archive of kilobytes may go on without end.
        tar = tarfile.open(fileobj=stream, mode="r:" if can_seek else "r|")  # noqa: SIM115
    except tarfile.ReadError as error:
        hint = "; a compressed shard must be unpacked" if "header" in str(error) else ""
        raise tarfile.ReadError(f"{error}{hint}") from error
    sample, position = None, -1
    for member in _headers(tar):
        name = NAME.fullmatch(member.name)
        if not member.isreg() or not name or META_NAME.match(member.name):
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
    if tar.firstmember is None:  # type: ignore[attr-defined]
        return  # nothing is in it, and `next` of Python 3.10 would seek to before its beginning
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # the index of a large shard would grow in memory
        # By a negative size, some versions of tarfile would go back and read the same forever.
        if not 0 <= member.size <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"the header of {member.name} says {member.size} bytes")
        if member.issparse():
            raise tarfile.ReadError(f"{member.name} is a sparse file, which may be zeros without end")
        yield member
