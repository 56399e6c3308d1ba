"""What is known of shards before they are read: their numbers of samples and captions, and whether they can be read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from vl_plugins.data.decoding import ShardSlice, decode_input, parse_samples, raise_error, read_slices
from vl_plugins.data.manifest import MANIFEST_FILE, SIZES_FILE, ForeignManifestError, read_manifest, read_sizes
from vl_plugins.data.shard_files import INPUTS, Place, expand_shards, locate, read_samples
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError, one_of

__all__ = ["ShardInfo", "check_first_sample", "check_shards", "read_shard_info", "read_shard_sizes"]


@dataclass(frozen=True)
class ShardInfo:
    """What ``manifest.json`` says of some shards, and of the whole splits that they belong to."""

    num_samples: int  # in the shards
    max_captions: int  # of an image in the splits
    has_groups: bool = False  # in the splits


def read_shard_info(shards: str | Sequence[str]) -> ShardInfo | None:
    """Return what the ``manifest.json`` beside the shards says of them, or None when a shard has none of ours.

    Raises:
        UserError: a shard does not exist, or a manifest cannot be read or does not list it.
    """
    try:
        indexes = _read_indexes(expand_shards(shards), read_manifest)
    except ForeignManifestError:
        return None
    if indexes is None:
        return None
    entries, facts = [], []
    for place, manifest in indexes:
        entry = next((entry for entry in manifest.values() if place.name in entry["shards"]), None)
        if entry is None:
            file = Folder(place.folder) / MANIFEST_FILE
            raise UserError(f"{file} does not list {place.name}; write these shards again")
        entries.append(entry)
        facts.append(entry["shards"][place.name])
    return ShardInfo(
        num_samples=sum(fact["samples"] for fact in facts),
        max_captions=max(entry["captions_per_image"]["max"] for entry in entries),
        has_groups=any(entry.get("groups") for entry in entries),
    )


def read_shard_sizes(shards: Sequence[str]) -> list[int] | None:
    """Return the number of samples of each shard from ``sizes.json``, None when one has none beside it."""
    indexes = _read_indexes(shards, read_sizes)
    for place, sizes in indexes or ():
        if place.name not in sizes:
            raise UserError(f"{Folder(place.folder) / SIZES_FILE} does not list {place.name}")
    return None if indexes is None else [sizes[place.name] for place, sizes in indexes]


def _read_indexes(shards: Sequence[str], read: Callable[[str], Any]) -> list[tuple[Place, Any]] | None:
    """Return each shard with what ``read`` finds in its folder, None when one is in no folder or nothing is there."""
    places = [place for shard in shards if (place := locate(shard)) is not None]
    if len(places) < len(shards):
        return None
    indexes = {folder: read(folder) for folder in dict.fromkeys(place.folder for place in places)}
    return None if None in indexes.values() else [(place, indexes[place.folder]) for place in places]


def check_first_sample(shard: str, *, inputs: str = "images") -> None:
    """Read the first sample of a shard, ``"images"`` or ``"features"``, unless a program opens it (``https://``).

    Raises:
        UserError: the shard cannot be read, is empty, or its first sample lacks an image, or features, or captions.
    """
    one_of("inputs", inputs, INPUTS)
    if locate(shard) is None:
        return
    samples = read_slices([ShardSlice(shard, 0, None, 0)], inputs, raise_error)
    first = next(parse_samples(samples, inputs, raise_error), None)
    if first is None:
        raise UserError(f"shard {shard} holds no samples")
    decode_input(first, inputs, raise_error)


def check_shards(shards: str | Sequence[str]) -> None:
    """Check the first sample of each shard, and by their headers how many there are in each local one.

    Raises:
        UserError: as for :func:`expand_shards` and :func:`check_first_sample`, or a shard has another number of samples
            than its ``sizes.json`` says.
    """
    shards = expand_shards(shards)
    for shard, size in zip(shards, read_shard_sizes(shards) or repeat(None), strict=False):
        check_first_sample(shard)
        if (place := locate(shard)) is not None and place.is_local:
            try:
                samples = sum(1 for _ in read_samples(shard, extensions=()))
            except Exception as error:  # damaged archives raise nearly anything
                raise_error(f"shard {shard}", error)
            if size not in (None, samples):
                raise UserError(f"shard {shard} has {samples} samples, {SIZES_FILE} says {size}")
