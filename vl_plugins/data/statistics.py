"""What is in shards: numbers, lengths and sizes, and the pictures and captions that occur more than once."""

import hashlib
import os
import re
import statistics
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, BinaryIO

from vl_plugins.data.batching import normalize_caption
from vl_plugins.data.feature_arrays import FEATURE_EXTENSION, decode_features
from vl_plugins.data.images import inspect_image
from vl_plugins.data.manifest import MANIFEST_FILE, ForeignManifestError, SplitEntry, read_manifest, select_splits
from vl_plugins.data.shard_files import EXTENSIONS, TEXTS, ScannedSample, input_of, read_texts, scan_samples
from vl_plugins.data.storage import Folder, error_text
from vl_plugins.errors import MissingExtraError, UserError, require

__all__ = ["Range", "Repeats", "SplitStatistics", "find_repeats", "read_place", "shard_statistics"]


@dataclass(frozen=True)
class Range:
    """Smallest, middle and largest of some whole numbers; the middle of an even number is a mean of two."""

    minimum: int
    median: float
    maximum: int


@dataclass(frozen=True)
class Repeats:
    """Pictures, or texts of captions, that more than one image has.

    Args:
        number, share: how many images, or captions, have one of them, and as part of all, [0, 1].
        different: how many different pictures, or texts, they are.
        example: the most frequent text, or the key of the first image with the most frequent picture, if any.
        example_images: how many images have it.
    """

    number: int
    share: float
    different: int
    example: str | None
    example_images: int


@dataclass(frozen=True)
class SplitStatistics:
    """What the shards of one split contain.

    Args:
        shards, bytes: number of shards, and their size.
        images, captions: number of samples that readers can use, and of their captions.
        unusable: number of other samples, without a caption, or a picture or features.
        rejected: number of images that conversion left out; None without a manifest, as is ``source``.
        source, groups: where the samples come from, and the number of groups, as the manifest has them.
        captions_per_image: number of images by number of captions.
        words: per caption, separated by white space.
        widths, heights: of images, in pixels.
        features: per image, where array files stand in place of pictures.
        feature_dims: number of images by the number of values that each of their features has.
        repeated_pictures: files, also of features, that are the same in several samples.
        repeated_captions: captions of different images that are equal after
            :func:`vl_plugins.data.batching.normalize_caption`.
        places: of all samples, for :func:`read_place`: name of the shard, and offset of the first header in bytes.
    """

    shards: int
    bytes: int
    images: int
    captions: int
    unusable: int
    rejected: int | None
    source: Mapping[str, Any] | None
    groups: int
    captions_per_image: Mapping[int, int]
    words: Range | None
    widths: Range | None
    heights: Range | None
    features: Range | None
    feature_dims: Mapping[int, int]
    repeated_pictures: Repeats
    repeated_captions: Repeats
    places: Sequence[tuple[str, int]]


def shard_statistics(
    folder: Folder | str | os.PathLike, *, splits: Sequence[str] | None = None
) -> dict[str, SplitStatistics]:
    """Read all bytes of a folder's shards once and return what they contain, by split, or by those in ``splits``.

    JPEG files are not decoded. Without a ``manifest.json`` of ours every ``name-000.tar``, ``name-001.tar``, ... is a
    split ``name``.

    Raises:
        UserError: there are no shards, or none of one of ``splits``; or a shard is missing or not a tar file.
    """
    folder = Folder(folder)
    shards, entries = _find_shards(folder)
    selected = {name: shards[name] for name in select_splits(shards, splits)}
    number = sum(map(len, selected.values()))
    # disable=None: no bar where nobody watches, such as in a log file.
    with require("tqdm", extra="data").tqdm(total=number, desc="read", unit="shard", disable=None) as bar:
        return {name: _split_statistics(folder, files, entries.get(name), bar) for name, files in selected.items()}


def read_place(folder: Folder, place: tuple[str, int]) -> ScannedSample:
    """Read the pictures and texts of the sample at one of the ``places`` of :class:`SplitStatistics`.

    Raises:
        UserError: the shard cannot be read there.
    """
    file, offset = place
    with _opened(folder, file) as stream:
        stream.seek(offset)
        return next(scan_samples(stream, (*EXTENSIONS, *TEXTS)))


def find_repeats(images: Sequence[Collection[str]]) -> Repeats:
    """Return the texts that several images have, given the texts of each image."""
    numbers = Counter(chain.from_iterable(images))
    owners = Counter(chain.from_iterable(map(dict.fromkeys, images)))  # images by text
    repeated = [text for text, images_with_it in owners.items() if images_with_it > 1]
    number = sum(numbers[text] for text in repeated)
    example = max(repeated, key=owners.__getitem__, default=None)
    return Repeats(
        number=number,
        share=number / numbers.total() if number else 0.0,
        different=len(repeated),
        example=example,
        example_images=0 if example is None else owners[example],
    )


def _find_shards(folder: Folder) -> tuple[dict[str, list[str]], Mapping[str, SplitEntry]]:
    """Return the shards of each split, and its entry in the manifest where there is one of ours."""
    try:
        entries = read_manifest(folder) or {}
    except ForeignManifestError:
        entries = {}
    shards = {name: sorted(entry["shards"]) for name, entry in entries.items()}
    names = folder.names()
    # A name such as ../x.tar is not in the folder either.
    missing = sorted({file for files in shards.values() for file in files} - set(names))
    if missing:
        raise UserError(f"{folder / missing[0]} does not exist, but {MANIFEST_FILE} lists it")
    for file in [] if entries else names:
        # Hidden files are those that are not complete.
        if file.endswith(".tar") and not file.startswith("."):
            # Those of img2dataset are 00000.tar, 00001.tar, ....
            shards.setdefault(re.sub(r"[-_.]?[0-9]*\.tar$", "", file) or "shards", []).append(file)
    if not shards:
        raise UserError(f"{folder} holds no shards; expected .tar files")
    return shards, entries


def _split_statistics(folder: Folder, files: Sequence[str], entry: SplitEntry | None, bar: Any) -> SplitStatistics:
    places: list[tuple[str, int]] = []
    size = 0
    # Of the usable samples: keys, hashes of their files, and captions; widths and heights; shapes of features.
    keys: list[str] = []
    hashes: list[str] = []
    texts: list[list[str]] = []
    pictures: list[tuple[int, int]] = []
    features: list[tuple[int, int]] = []
    for file in files:
        with _opened(folder, file) as stream:
            for sample in scan_samples(stream, (*EXTENSIONS, FEATURE_EXTENSION, *TEXTS)):
                places.append((file, next(iter(sample.members.values())).offset))
                try:
                    _, captions = read_texts(sample)
                    if sample.data.keys().isdisjoint(EXTENSIONS):
                        data = input_of(sample, "features")
                        features.append(decode_features(data).shape)
                    else:
                        data = input_of(sample)
                        pictures.append(inspect_image(data, decode=False)[1:3])
                except MissingExtraError:
                    raise
                except ValueError:
                    continue
                keys.append(sample.key)
                hashes.append(hashlib.sha256(data).hexdigest())
                texts.append(captions)
            size += stream.seek(0, os.SEEK_END)
        bar.update()
    repeated = find_repeats([[value] for value in hashes])
    return SplitStatistics(
        shards=len(files),
        bytes=size,
        images=len(keys),
        captions=sum(map(len, texts)),
        unusable=len(places) - len(keys),
        rejected=None if entry is None else entry["rejected"],
        source=None if entry is None else entry["source"],
        groups=0 if entry is None else entry.get("groups", 0),
        captions_per_image=dict(sorted(Counter(map(len, texts)).items())),
        words=_range([len(caption.split()) for captions in texts for caption in captions]),
        widths=_range([width for width, _ in pictures]),
        heights=_range([height for _, height in pictures]),
        features=_range([number for number, _ in features]),
        feature_dims=dict(sorted(Counter(dim for _, dim in features).items())),
        repeated_pictures=replace(repeated, example=repeated.example and keys[hashes.index(repeated.example)]),
        repeated_captions=find_repeats([list(map(normalize_caption, captions)) for captions in texts]),
        places=places,
    )


@contextmanager
def _opened(folder: Folder, file: str) -> Iterator[BinaryIO]:
    try:
        with folder.open(file) as stream:
            yield stream
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"cannot read {folder / file}: {error_text(error)}") from error


def _range(numbers: Sequence[int]) -> Range | None:
    return Range(min(numbers), statistics.median(numbers), max(numbers)) if numbers else None
