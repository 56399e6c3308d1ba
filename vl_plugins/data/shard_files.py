"""Shards as files: where they are, and the samples in them."""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlparse

from vl_plugins.data.feature_arrays import FEATURE_EXTENSION
from vl_plugins.data.images import IMAGE_EXTENSIONS
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = [
    "EXTENSIONS",
    "INPUTS",
    "MAX_MEMBER_BYTES",
    "TEXTS",
    "Place",
    "expand_shards",
    "headers",
    "input_of",
    "locate",
    "missing_shards",
    "opened_by_fsspec",
    "read_samples",
]

# Of images; where a sample has several, the first counts.
EXTENSIONS = (*dict.fromkeys(IMAGE_EXTENSIONS.values()), "jpeg")
TEXTS = ("json", "txt")
MEMBERS = {*EXTENSIONS, *TEXTS}

# Far above any image, array of features or text: what is larger would fill the memory of a process that reads it.
MAX_MEMBER_BYTES = 1 << 30

# What a model takes of an image -> extensions.
INPUTS = {"images": EXTENSIONS, "features": (FEATURE_EXTENSION,)}


class Place(NamedTuple):
    """A shard in a folder that can be listed.

    Args:
        url: of the shard, or its path.
        folder: path or URL, for :class:`vl_plugins.data.storage.Folder`.
        name: of the file in it.
        is_local: whether webdataset opens it as a file of this machine; otherwise fsspec opens it.
    """

    url: str
    folder: str
    name: str
    is_local: bool


def locate(shard: str) -> Place | None:
    """Return where a shard is, or None for what webdataset reads from a program (``pipe:``, ``https://``, ``gs://``).

    >>> locate("shards/coco-train-000000.tar")
    Place(url='shards/coco-train-000000.tar', folder='shards', name='coco-train-000000.tar', is_local=True)
    >>> locate("s3://bucket/coco-train-000000.tar").folder
    's3://bucket'
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
        UserError: the pattern is empty or malformed, a shard is listed twice, a shard does not exist, a URL contains
            a quote, or fsspec cannot open it; the message says what exists, or which package is missing.

    >>> expand_shards("https://host/toy-{00..02}.tar::pipe:cat other.tar")
    ['https://host/toy-00.tar', 'https://host/toy-01.tar', 'https://host/toy-02.tar', 'pipe:cat other.tar']
    """
    try:
        urls = _expand(pattern) if isinstance(pattern, str) else pattern
        shards = [shard for shard in urls if shard]
    # An AssertionError is webdataset's way to say that a ${variable} is not set.
    except (ValueError, AssertionError) as error:
        raise UserError(f"cannot expand the shard pattern {pattern!r}: {error}") from error
    if not shards:
        raise UserError(f"the shard pattern {pattern!r} names no shards")
    twice = next((shard for shard, count in Counter(map(_absolute_path, shards)).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"the shard {twice} is listed more than once, so its images would count more than once")
    for shard in shards:
        # webdataset puts such URLs into the command line of a shell.
        if not shard.startswith("pipe:") and locate(shard) is None and {"'", '"'}.intersection(shard):
            raise UserError(f"the URL {shard} contains a quote: write it as %27 or %22")
    missing = missing_shards(shards)
    if missing:
        folder = missing[0].folder
        present = [name for name in Folder(folder).names() if name.endswith(".tar")]
        beside = f"{present[0]} ... {present[-1]} ({len(present)} files)" if present else "no .tar files"
        raise UserError(
            f"{len(missing)} of {len(shards)} shards do not exist: {missing[0].url}; {folder} holds {beside}"
        )
    return shards


def _absolute_path(shard: str) -> str:
    place = locate(shard)
    return os.path.abspath(Path(place.folder, place.name)) if place is not None and place.is_local else shard


def _expand(pattern: str) -> list[str]:
    if "${" in pattern:
        return require("webdataset", extra="data").shardlists.expand_urls(pattern)
    # The same without variables, but without importing torch, so that a missing shard is reported at once.
    braceexpand = require("braceexpand", extra="data").braceexpand
    return [url for part in pattern.split("::") for url in braceexpand(part)]


def opened_by_fsspec(shard: str) -> bool:
    """Return whether a shard is behind a URL that webdataset, and so open_clip's reader, cannot open."""
    place = locate(shard)
    return place is not None and not place.is_local


def missing_shards(shards: Sequence[str]) -> list[Place]:
    """Return the shards that do not exist, of those that :func:`locate` knows a place for.

    Raises:
        UserError: fsspec cannot open a URL; the message says which package is missing.
    """
    places = [place for place in map(locate, shards) if place is not None]
    # One listing of a folder instead of a request for each shard.
    remote_folders = dict.fromkeys(place.folder for place in places if not place.is_local)
    listings = {folder: set(Folder(folder).names()) for folder in remote_folders}
    return [
        place
        for place in places
        if not (Path(place.folder, place.name).is_file() if place.is_local else place.name in listings[place.folder])
    ]


def read_samples(
    shard: str, start: int = 0, stop: int | None = None, members: Collection[str] = MEMBERS
) -> Iterator[dict[str, Any]]:
    """Yield samples ``start`` to ``stop`` of a shard: ``__key__``, and bytes by extension of what readers need.

    ``__others__`` lists the extensions of what else a sample has. Consecutive files of the same name up to the first
    dot are a sample, as for webdataset. Of a file that is not needed, or belongs to a sample before ``start``, nothing
    is read but its header where the shard is a file.

    Args:
        shard: path or URL.
        start: first sample.
        stop: the one after the last; all with None.
        members: extensions of the files that are needed.

    Raises:
        Exception: the shard cannot be read, or ends too early; samples before that place have been yielded.
    """
    split_name = require("webdataset.tariterators", extra="data").base_plus_ext
    with _open(shard) as stream:
        is_seekable = hasattr(stream, "seekable") and stream.seekable()
        tar = _open_tar(stream, "r:" if is_seekable else "r|")
        sample: dict[str, Any] = {"__key__": None, "__others__": []}
        position, end = -1, 0
        for member in headers(tar):
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            key, extension = split_name(member.name)
            if key is None or not member.isreg() or re.match(r"__[^/]*__($|/)", member.name):
                continue
            if key != sample["__key__"]:
                if position >= start:
                    yield sample
                position += 1
                if position == stop:
                    return
                sample = {"__key__": key, "__others__": []}
            extension = extension.lower()
            if extension not in members:
                sample["__others__"].append(extension)
            elif position >= start:
                if extension in sample:
                    raise ValueError(f"{member.name} is in it twice")
                sample[extension] = tar.extractfile(member).read()
        if is_seekable:
            # tarfile takes a cut between two members, or garbage, for the end.
            stream.seek(end)
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError("it is cut off: an archive ends with zeros")
        if position >= start:
            yield sample


def input_of(sample: dict[str, Any], inputs: str = "images") -> bytes:
    """Return the file that a sample of :func:`read_samples` has for its image: a picture, or an array of features.

    Args:
        sample: read with ``INPUTS[inputs]`` among its members.
        inputs: ``"images"`` or ``"features"``.

    Raises:
        ValueError: there is none; the message says what the sample has instead.
    """
    found = next((sample[extension] for extension in INPUTS[inputs] if extension in sample), None)
    if found is not None:
        return found
    expected, others = ", ".join(INPUTS[inputs]), sample["__others__"]
    if inputs == "features":
        problem = f"no features; expected {expected}"
        pictures = [extension for extension in others if extension in EXTENSIONS]
        hint = f", but it has a picture ({pictures[0]}); were the shards written with --features?" if pictures else ""
    else:
        problem = f"no image; expected one of {expected}"
        hint = f", but it has features ({FEATURE_EXTENSION}) in its place" if FEATURE_EXTENSION in others else ""
    raise ValueError(f"sample {sample['__key__']} has {problem}{hint}")


def headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive that has just been opened, without keeping them.

    Raises:
        tarfile.TarError: the archive is cut off or damaged, as far as ``tarfile`` sees it; a member is sparse or
            larger than ``MAX_MEMBER_BYTES``.
    """
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


def _open(shard: str) -> AbstractContextManager[BinaryIO]:
    place = locate(shard)
    if place is not None and not place.is_local:
        return Folder(place.folder).open(place.name)
    stream = require("webdataset.gopen", extra="data").gopen(shard)
    # To close the pipe of a program that has not finished is an error; it ends when the stream is dropped.
    return stream if place is not None else nullcontext(stream)


def _open_tar(stream: BinaryIO, mode: str) -> tarfile.TarFile:
    try:
        # Never `*`: a compressed archive of kilobytes may go on without end.
        return tarfile.open(fileobj=stream, mode=mode)
    except tarfile.ReadError as error:
        hint = "; a compressed shard must be unpacked" if "header" in str(error) else ""
        raise tarfile.ReadError(f"{error}{hint}") from error
