"""Files beside shards: ``manifest.json``, ``sizes.json`` and ``rejected.jsonl``, and what they say."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from vl_plugins import __version__
from vl_plugins.data.json_text import check_type, parse_json, to_json
from vl_plugins.data.sources import RejectedImage
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError, unknown_name

__all__ = [
    "MANIFEST_FILE",
    "REJECTED_FILE",
    "SIZES_FILE",
    "ForeignManifestError",
    "ShardFacts",
    "SplitEntry",
    "is_shard_of",
    "read_manifest",
    "read_sizes",
    "select_splits",
    "shard_name",
    "update_index",
]

MANIFEST_FILE = "manifest.json"
SIZES_FILE = "sizes.json"
REJECTED_FILE = "rejected.jsonl"

# Of a shard, which has 1,000 to 100,000: a number far off would make an epoch that does not end.
MAX_SAMPLES = 10**7


class ShardFacts(TypedDict):
    """What the manifest says of a shard."""

    samples: int
    captions: int
    bytes: int
    sha256: str


class _CaptionsPerImage(TypedDict):
    max: int


class _RequiredFields(TypedDict):
    source: dict[str, Any]
    options: dict[str, Any]
    rejected: int
    captions_per_image: _CaptionsPerImage
    shards: dict[str, ShardFacts]


class SplitEntry(_RequiredFields, total=False):
    """What the manifest says of a split, as far as it is read again."""

    groups: int


class ForeignManifestError(UserError):
    """A ``manifest.json`` that ``vl-plugins shards`` did not write."""


def read_manifest(folder: Folder | str | os.PathLike) -> dict[str, SplitEntry] | None:
    """Return the entries of a folder's ``manifest.json`` by ``<dataset>-<split>``; None when there is no manifest.

    A file that cannot be read, or a damaged entry, is a :class:`UserError`.
    """
    manifest, place = _read_json(folder, MANIFEST_FILE)
    if manifest is None:
        return None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("splits"), dict):
        raise ForeignManifestError(f"{place} is not a manifest of vl-plugins shards")
    try:
        check_type(manifest["splits"], dict[str, SplitEntry])
    except UserError as error:
        raise UserError(f"{place} is damaged: {error} (below 'splits')") from None
    return manifest["splits"]


def read_sizes(folder: Folder | str | os.PathLike) -> dict[str, int] | None:
    """Return the number of samples by shard from ``sizes.json``, None without one; anything else is an error."""
    sizes, place = _read_json(folder, SIZES_FILE)
    if sizes is None:
        return None
    try:
        sizes = check_type(sizes, dict[str, int])
        if not all(0 <= size <= MAX_SAMPLES for size in sizes.values()):
            raise UserError(f"a number is not 0 to {MAX_SAMPLES:,}")
    except UserError as error:
        raise UserError(f"{place} must hold numbers of samples by name of shard: {error}") from None
    return sizes


def update_index(
    folder: Folder, name: str, entry: Mapping[str, Any] | None, rejected: Sequence[RejectedImage] = ()
) -> None:
    """Put the entry of one split into the files beside the shards, or with None take it out of them."""
    splits: dict[str, Any] = read_manifest(folder) or {}
    sizes = read_sizes(folder) or {}
    lines = folder.read(REJECTED_FILE).splitlines(keepends=True) if folder.exists(REJECTED_FILE) else []

    splits.pop(name, None)
    sizes = {shard: samples for shard, samples in sizes.items() if not is_shard_of(name, shard)}
    lines = [line for line in lines if not line.startswith(b'{"shards": "%s", ' % name.encode())]
    if entry is not None:
        splits[name] = entry
        sizes |= {shard: facts["samples"] for shard, facts in entry["shards"].items()}
        records = ({"shards": name, **asdict(item)} for item in rejected)
        lines += [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]

    if lines:
        folder.write_bytes(REJECTED_FILE, b"".join(lines))
    else:
        folder.remove(REJECTED_FILE)
    folder.write_bytes(SIZES_FILE, to_json(sizes, indent=2))
    # Last: what it lists is complete.
    folder.write_bytes(MANIFEST_FILE, to_json({"tool": f"vl_plugins {__version__}", "splits": splits}, indent=2))


def select_splits(names: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the splits that are wanted by name, or by ``<split>`` for that of every data set; None is all.

    Raises:
        UserError: one is not there.

    >>> select_splits(["coco-train", "coco-val", "flickr30k-train"], ["train"])
    ['coco-train', 'flickr30k-train']
    """
    names = list(names)
    selected = set(names if wanted is None else ())
    for split in wanted or ():
        found = {name for name in names if name == split or name.endswith(f"-{split}")}
        if not found:
            raise unknown_name("split", split, names)
        selected |= found
    return [name for name in names if name in selected]


def shard_name(name: str, index: int) -> str:
    """Return the file name of a shard of the split ``<dataset>-<split>``."""
    return f"{name}-{index:06d}.tar"


def is_shard_of(name: str, file: str) -> bool:
    """Return whether a file name is one of :func:`shard_name`."""
    return re.fullmatch(rf"{re.escape(name)}-\d{{6}}\.tar", file) is not None


def _read_json(folder: Folder | str | os.PathLike, name: str) -> tuple[Any, str]:
    """Return the content of a file, None when there is none, and its location."""
    folder = Folder(folder)
    return parse_json(folder.read(name), folder / name) if folder.exists(name) else None, folder / name
