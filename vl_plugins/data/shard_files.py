"""Shards as files: where they are, and the samples in them."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlparse

from vl_plugins.data.feature_arrays import FEATURE_EXTENSION
from vl_plugins.data.images import IMAGE_EXTENSIONS
from vl_plugins.data.shard_scanner import ScannedSample, scan_samples
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = [
    "EXTENSIONS",
    "INPUTS",
    "TEXTS",
    "Place",
    "expand_shards",
    "input_of",
    "locate",
    "missing_shards",
    "read_samples",
]

# Of images; where a sample has several, the first counts.
EXTENSIONS = (*dict.fromkeys(IMAGE_EXTENSIONS.values()), "jpeg")
TEXTS = ("json", "txt")
MEMBERS = {*EXTENSIONS, *TEXTS}

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
    shard: str, start: int = 0, stop: int | None = None, extensions: Collection[str] = MEMBERS
) -> Iterator[ScannedSample]:
    """Yield samples ``start`` to ``stop`` of a shard, see :func:`vl_plugins.data.shard_scanner.scan_samples`.

    Args:
        shard: path or URL.
        start: first sample.
        stop: the one after the last; all with None.
        extensions: of the files whose content is read.

    Raises:
        Exception: the shard cannot be read, or ends too early; samples before that place have been yielded.
    """
    with _open(shard) as stream:
        yield from scan_samples(stream, extensions, start, stop)


def input_of(sample: ScannedSample, inputs: str = "images") -> bytes:
    """Return the file that a sample of :func:`read_samples` has for its image: a picture, or an array of features.

    Args:
        sample: read with ``INPUTS[inputs]`` among the extensions.
        inputs: ``"images"`` or ``"features"``.

    Raises:
        ValueError: there is none; the message says what the sample has instead.
    """
    found = next((sample.data[extension] for extension in INPUTS[inputs] if extension in sample.data), None)
    if found is not None:
        return found
    expected, others = ", ".join(INPUTS[inputs]), sample.members
    if inputs == "features":
        problem = f"no features; expected {expected}"
        pictures = [extension for extension in others if extension in EXTENSIONS]
        hint = f", but it has a picture ({pictures[0]}); were the shards written with --features?" if pictures else ""
    else:
        problem = f"no image; expected one of {expected}"
        hint = f", but it has features ({FEATURE_EXTENSION}) in its place" if FEATURE_EXTENSION in others else ""
    raise ValueError(f"sample {sample.key} has {problem}{hint}")


def _open(shard: str) -> AbstractContextManager[BinaryIO]:
    place = locate(shard)
    if place is not None and not place.is_local:
        return Folder(place.folder).open(place.name)
    stream = require("webdataset.gopen", extra="data").gopen(shard)
    # To close the pipe of a program that has not finished is an error; it ends when the stream is dropped.
    return stream if place is not None else nullcontext(stream)
