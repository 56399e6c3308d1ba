"""Files beside shards: ``manifest.json``, ``sizes.json`` and ``rejected.jsonl``, and what they say."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from vl_plugins import __version__
from vl_plugins.data.annotations import RejectedImage
from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError, unknown_name

__all__ = [
    "MANIFEST_FILE",
    "REJECTED_FILE",
    "SIZES_FILE",
    "CaptionsPerImage",
    "ForeignManifestError",
    "ShardFacts",
    "SplitEntry",
    "is_shard_of",
    "number_of_captions",
    "read_manifest",
    "read_sizes",
    "select_splits",
    "shard_name",
    "to_json",
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


class CaptionsPerImage(TypedDict):
    """How many captions images have; the histogram is the number of images by number of captions."""

    min: int
    max: int
    histogram: dict[int, int]


class _RequiredFields(TypedDict):
    source: dict[str, Any]
    options: dict[str, Any]
    images: int
    captions: int
    rejected: int
    captions_per_image: CaptionsPerImage
    shards: dict[str, ShardFacts]


class SplitEntry(_RequiredFields, total=False):
    """What the manifest says of a split."""

    groups: int


class ForeignManifestError(UserError):
    """A ``manifest.json`` that ``vl-plugins shards`` did not write."""


def read_manifest(folder: Folder | str | os.PathLike) -> dict[str, SplitEntry] | None:
    """Return the entries of a folder's ``manifest.json`` by ``<dataset>-<split>``; None when there is no manifest.

    Raises:
        UserError: the file cannot be read, or an entry is damaged.
        ForeignManifestError: it is something else.
    """
    manifest = _read_json(_folder(folder), MANIFEST_FILE)
    if manifest is None:
        return None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("splits"), dict):
        raise ForeignManifestError(f"{_folder(folder) / MANIFEST_FILE} is not a manifest of vl-plugins shards")
    try:
        check_type(manifest["splits"], dict[str, SplitEntry])
    except UserError as error:
        raise UserError(f"{_folder(folder) / MANIFEST_FILE} is damaged: {error} (below 'splits')") from None
    return manifest["splits"]


def read_sizes(folder: Folder | str | os.PathLike) -> dict[str, int] | None:
    """Return the number of samples by shard from a folder's ``sizes.json``; None when there is none.

    Raises:
        UserError: the file cannot be read, or is something else.
    """
    sizes = _read_json(_folder(folder), SIZES_FILE)
    if sizes is None:
        return None
    try:
        sizes = check_type(sizes, dict[str, int])
        if all(0 <= size <= MAX_SAMPLES for size in sizes.values()):
            return sizes
        problem = f"a number is not 0 to {MAX_SAMPLES:,}"
    except UserError as error:
        problem = str(error)
    raise UserError(f"{_folder(folder) / SIZES_FILE} must hold numbers of samples by name of shard: {problem}")


def update_index(folder: Folder, name: str, entry: SplitEntry | None, rejected: Sequence[RejectedImage] = ()) -> None:
    """Put the entry of one split into the files beside the shards, or with None take it out of them.

    Other entries stay, also those that another process writes at the same time into the same local folder.
    """
    with folder.lock():
        splits = read_manifest(folder) or {}
        sizes = read_sizes(folder) or {}
        # Not `splitlines`: a file name may hold other characters that end a line.
        lines = folder.read(REJECTED_FILE).decode().split("\n")[:-1] if folder.exists(REJECTED_FILE) else []

        splits.pop(name, None)
        sizes = {shard: samples for shard, samples in sizes.items() if not is_shard_of(name, shard)}
        lines = [line for line in lines if json.loads(line)["shards"] != name]
        if entry is not None:
            splits[name] = entry
            sizes |= {shard: facts["samples"] for shard, facts in entry["shards"].items()}
            lines += [json.dumps({"shards": name, **asdict(item)}, ensure_ascii=False) for item in rejected]

        if lines:
            _write(folder, REJECTED_FILE, "".join(f"{line}\n" for line in lines).encode())
        else:
            folder.remove(REJECTED_FILE)
        _write(folder, SIZES_FILE, to_json(sizes, indent=2))
        # Last: what it lists is complete.
        _write(folder, MANIFEST_FILE, to_json({"tool": f"vl_plugins {__version__}", "splits": splits}, indent=2))


def select_splits(names: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the splits that are wanted, of those that are there.

    Args:
        names: of the splits that are there, ``<dataset>-<split>``.
        wanted: such names, or ``<split>`` for that split of every data set; None for all.

    Raises:
        UserError: one of them is not there.

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


def number_of_captions(captions_per_image: Mapping[int, int]) -> int:
    """Return how many captions there are, given how many images have how many."""
    return sum(captions * images for captions, images in captions_per_image.items())


def to_json(value: Any, **options: Any) -> bytes:
    """Return JSON, readable in any language, and the same bytes whatever order the keys were set in."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, **options).encode()


def _folder(folder: Folder | str | os.PathLike) -> Folder:
    return folder if isinstance(folder, Folder) else Folder(folder)


def _read_json(folder: Folder, name: str) -> Any:
    return parse_json(folder.read(name), folder / name) if folder.exists(name) else None


def _write(folder: Folder, name: str, data: bytes) -> None:
    with folder.write(name) as stream:
        stream.write(data)
