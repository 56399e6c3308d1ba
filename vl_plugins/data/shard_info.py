"""What is known of shards before they are read: their numbers of samples and captions, and whether they can be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vl_plugins.data.decoding import ShardSlice, decode_input, parse_samples, raise_error, read_slices
from vl_plugins.data.manifest import MANIFEST_FILE, SIZES_FILE, ForeignManifestError, read_manifest, read_sizes
from vl_plugins.data.shard_files import INPUTS, expand_shards, locate, read_samples
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError, check_name

__all__ = ["ShardInfo", "check_first_sample", "check_shards", "read_shard_info", "read_shard_sizes"]


@dataclass(frozen=True)
class ShardInfo:
    """What ``manifest.json`` says of some shards.

    Args:
        num_samples: number of images in these shards.
        num_captions: number of captions in these shards.
        min_captions: smallest number of captions of an image in the splits that the shards belong to.
        max_captions: largest number of captions of an image in the splits that the shards belong to.
        has_groups: whether an image in these splits is in a group.
    """

    num_samples: int
    num_captions: int
    min_captions: int
    max_captions: int
    has_groups: bool = False


def read_shard_info(shards: str | Sequence[str]) -> ShardInfo | None:
    """Return what the ``manifest.json`` beside the shards says of them, or None when a shard has none of ours.

    Args:
        shards: shards, or a pattern for :func:`expand_shards`.

    Raises:
        UserError: a shard does not exist, or a manifest cannot be read or does not list a shard of its folder.
    """
    places = [locate(shard) for shard in expand_shards(shards)]
    if None in places:
        return None
    try:
        manifests = {folder: read_manifest(folder) for folder in dict.fromkeys(place.folder for place in places)}
    except ForeignManifestError:
        return None
    if None in manifests.values():
        return None
    entries, facts = [], []
    for place in places:
        entry = next((entry for entry in manifests[place.folder].values() if place.name in entry["shards"]), None)
        if entry is None:
            manifest = Folder(place.folder) / MANIFEST_FILE
            raise UserError(f"{manifest} does not list {place.name}; write these shards again")
        entries.append(entry)
        facts.append(entry["shards"][place.name])
    return ShardInfo(
        num_samples=sum(fact["samples"] for fact in facts),
        num_captions=sum(fact["captions"] for fact in facts),
        min_captions=min(entry["captions_per_image"]["min"] for entry in entries),
        max_captions=max(entry["captions_per_image"]["max"] for entry in entries),
        has_groups=any(entry.get("groups") for entry in entries),
    )


def check_first_sample(shard: str, *, inputs: str = "images") -> Any:
    """Read the first sample of a shard, to find before training that it holds no captioned images.

    A shard that webdataset opens with a program (``pipe:``, ``https://``) is left alone.

    Args:
        shard: path or URL.
        inputs: as for :func:`training_pipeline`.

    Returns:
        What an image transform would get: an RGB ``PIL.Image`` or features (N, W); None of a shard that is left alone.

    Raises:
        UserError: the shard cannot be read, is empty, or its first sample lacks an image, or features, or captions.
    """
    check_name("inputs", inputs, INPUTS)
    if locate(shard) is None:
        return None
    samples = read_slices([ShardSlice(shard, 0, None, 0)], inputs, raise_error)
    sample = next(parse_samples(samples, inputs, raise_error), None)
    if sample is None:
        raise UserError(f"shard {shard} holds no samples")
    return decode_input(sample, inputs, raise_error)


def check_shards(shards: str | Sequence[str], *, inputs: str = "images") -> None:
    """Read the first sample of each shard, and the headers of the others where it is a file of this machine.

    So a shard that is damaged, empty or cut off is found before training; no data of the other samples are read.
    Shards that webdataset opens with a program are left alone.

    Args:
        shards: as for :func:`training_pipeline`.
        inputs: likewise.

    Raises:
        UserError: a shard does not exist, cannot be read or has another number of samples than its ``sizes.json`` says,
            or its first sample is wrong, as for :func:`check_first_sample`.
    """
    shards = expand_shards(shards)
    for shard, size in zip(shards, read_shard_sizes(shards) or [None] * len(shards), strict=True):
        check_first_sample(shard, inputs=inputs)
        place = locate(shard)
        if place is None or not place.is_local:
            continue
        try:
            samples = sum(1 for _ in read_samples(shard, extensions=()))
            if size not in (None, samples):
                raise ValueError(f"it has {samples} samples, {SIZES_FILE} says {size}")
        # Damaged archives raise nearly anything.
        except Exception as error:
            raise_error(f"shard {shard}", error)


def read_shard_sizes(shards: Sequence[str]) -> list[int] | None:
    """Return the number of samples of each shard from ``sizes.json``, None when one has none beside it."""
    places = [locate(shard) for shard in shards]
    if None in places:
        return None
    sizes = {folder: read_sizes(folder) for folder in dict.fromkeys(place.folder for place in places)}
    if None in sizes.values():
        return None
    unlisted = next((place for place in places if place.name not in sizes[place.folder]), None)
    if unlisted is not None:
        raise UserError(f"{Folder(unlisted.folder) / SIZES_FILE} does not list {unlisted.name}")
    return [sizes[place.folder][place.name] for place in places]
