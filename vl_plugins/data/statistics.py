"""What is in shards: numbers, lengths and sizes, and the pictures and captions that occur more than once."""

import bisect
import hashlib
import io
import os
import re
import statistics
import tarfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, BinaryIO, NamedTuple

from vl_plugins.data.feature_arrays import FEATURE_EXTENSION
from vl_plugins.data.json_text import parse_json
from vl_plugins.data.manifest import MANIFEST_FILE, ForeignManifestError, SplitEntry, read_manifest, select_splits
from vl_plugins.data.repeats import Occurrence, Repeats, repeated_captions, repeats
from vl_plugins.data.shard_files import EXTENSIONS, TEXTS
from vl_plugins.data.shard_scanner import ScannedSample, scan_samples
from vl_plugins.data.storage import Folder, error_text
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = [
    "Place",
    "Range",
    "ShardSample",
    "SplitStatistics",
    "read_place",
    "shard_statistics",
    "spread_places",
]

# The first shorter side, in pixels, of each bin; 224 and 336 are what most models take.
SHORTER_SIDES = (0, 64, 128, 224, 336, 512, 768, 1024)

TAIL = 4096  # bytes
HEADER = 8192  # bytes, which hold the size of most pictures


class Range(NamedTuple):
    """Smallest, middle and largest of some whole numbers; the middle of an even number is a mean of two."""

    minimum: int
    median: float
    maximum: int


class Place(NamedTuple):
    """Where a sample is.

    Args:
        shard: name of the file.
        offset: of its first header, in bytes.
    """

    shard: str
    offset: int


@dataclass(frozen=True)
class SplitStatistics:
    """What the shards of one split contain.

    Args:
        shards: number of shards.
        bytes: their size.
        images: number of samples with a picture, or features, and a caption.
        captions: number of captions of these.
        unusable: number of samples without.
        rejected: number of images that conversion left out; None without a manifest, as is ``source``.
        source: where the samples come from, as the manifest has it.
        captions_per_image: number of images by number of captions.
        words: per caption, separated by white space.
        widths: of images, in pixels.
        heights: of images, in pixels.
        shorter_sides: number of images by the first shorter side, in pixels, of a bin; the last bin has no end.
        features: per image, where array files stand in place of pictures.
        feature_dims: number of images by the number of values that each of their features has.
        repeated_pictures: files, also of features, of the same content under different image ids.
        repeated_captions: captions of different images whose texts
            :func:`vl_plugins.data.captions.normalize_caption` makes equal.
        places: of all samples, unusable ones too.
        groups: number of groups of images, as the manifest has it.
    """

    shards: int
    bytes: int
    images: int
    captions: int
    unusable: int
    rejected: int | None
    source: Mapping[str, Any] | None
    captions_per_image: Mapping[int, int]
    words: Range | None
    widths: Range | None
    heights: Range | None
    shorter_sides: Mapping[int, int]
    features: Range | None
    feature_dims: Mapping[int, int]
    repeated_pictures: Repeats
    repeated_captions: Repeats
    places: Sequence[Place]
    groups: int = 0


class ShardSample(NamedTuple):
    """A sample as far as it can be read.

    Args:
        key: name of its files up to the first dot.
        picture: content of the image file; None when there is none.
        captions: none where there are none.
    """

    key: str
    picture: bytes | None
    captions: list[str]


def shard_statistics(
    folder: Folder | str | os.PathLike, *, splits: Sequence[str] | None = None, batch_size: int = 128
) -> dict[str, SplitStatistics]:
    """Read what the shards of a folder contain, by split.

    Of pictures only the end is read, to find those that occur more than once; the whole is read where two have the
    same end. Width and height are those of the json. Without a ``manifest.json`` of ours every ``name-000.tar``,
    ``name-001.tar``, ... is a split ``name``, and width and height come from the headers of the pictures. Number and
    size of features are always those of the json.

    Args:
        folder: of the shards, a path or a URL of fsspec.
        splits: only these, ``<dataset>-<split>`` or ``<split>``; by default all.
        batch_size: images in a batch, for the repeats expected in one.

    Raises:
        UserError: there are no shards, or none of one of ``splits``; a shard is missing or not a tar file; or
            ``batch_size`` is less than 1.
    """
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    folder = folder if isinstance(folder, Folder) else Folder(folder)
    shards, entries = _find_shards(folder)
    selected = {name: shards[name] for name in select_splits(shards, splits)}
    # disable=None: no bar where nobody watches, such as in a log file.
    number = sum(map(len, selected.values()))
    with require("tqdm", extra="data").tqdm(total=number, desc="read", unit="shard", disable=None) as bar:
        return {
            name: _split_statistics(folder, files, entries.get(name), batch_size, bar)
            for name, files in selected.items()
        }


def spread_places(places: Sequence[Place], number: int) -> list[Place]:
    """Return ``number`` places evenly spread over all of them, or all when there are fewer.

    >>> [place.offset for place in spread_places([Place("a.tar", offset) for offset in range(12)], 3)]
    [2, 6, 10]
    """
    number = min(number, len(places))
    return [places[(2 * index + 1) * len(places) // (2 * number)] for index in range(number)]


def read_place(folder: Folder, place: Place) -> ShardSample:
    """Read the sample at a place.

    Raises:
        UserError: the shard cannot be read there.
    """
    with _readable(folder, place.shard), folder.open(place.shard) as stream:
        stream.seek(place.offset)
        sample = next(scan_samples(stream, (*EXTENSIONS, *TEXTS)))
        picture = next((sample.data[extension] for extension in EXTENSIONS if extension in sample.data), None)
        return ShardSample(sample.key, picture, _captions(sample, _record(sample)))


def _find_shards(folder: Folder) -> tuple[dict[str, list[str]], dict[str, SplitEntry]]:
    """Return the shards of each split, and its entry in the manifest where there is one of ours."""
    try:
        entries = read_manifest(folder)
    except ForeignManifestError:
        entries = None
    if entries:
        # Neither is a name such as ../x.tar.
        present = set(folder.names())
        for entry in entries.values():
            for file in sorted(entry["shards"]):
                if file not in present:
                    raise UserError(f"{folder / file} does not exist, but {MANIFEST_FILE} lists it")
        return {name: sorted(entry["shards"]) for name, entry in entries.items()}, entries
    shards: dict[str, list[str]] = {}
    for file in folder.names():
        # Hidden files are those that are not complete.
        if file.endswith(".tar") and not file.startswith("."):
            prefix = re.sub(r"[-_.]?[0-9]*\.tar$", "", file)
            # Those of img2dataset are 00000.tar, 00001.tar, ....
            shards.setdefault(prefix or "shards", []).append(file)
    if not shards:
        raise UserError(f"{folder} holds no shards; expected .tar files")
    return shards, {}


def _split_statistics(
    folder: Folder, files: Sequence[str], entry: SplitEntry | None, batch_size: int, bar: Any
) -> SplitStatistics:
    places: list[Place] = []
    samples: list[_Scanned] = []
    size = 0
    for file in files:
        before = len(places)
        with _readable(folder, file), folder.open(file) as stream:
            for sample in scan_samples(stream, TEXTS):
                places.append(Place(file, next(iter(sample.members.values())).offset))
                scanned = _scan(stream, file, sample, has_sizes=entry is not None)
                if scanned is not None:
                    samples.append(scanned)
            size += stream.seek(0, os.SEEK_END)
        if entry is not None and len(places) - before != entry["shards"][file]["samples"]:
            raise UserError(
                f"{folder / file} has {len(places) - before:,} samples, {MANIFEST_FILE} says "
                f"{entry['shards'][file]['samples']:,}; `vl-plugins shards verify {folder}` says more"
            )
        bar.update()
    sizes = [sample.size for sample in samples if sample.size is not None]
    features = [sample.features for sample in samples if sample.features is not None]
    return SplitStatistics(
        shards=len(files),
        bytes=size,
        images=len(samples),
        captions=sum(len(sample.captions) for sample in samples),
        unusable=len(places) - len(samples),
        rejected=entry["rejected"] if entry is not None else None,
        source=entry["source"] if entry is not None else None,
        captions_per_image=_counts(len(sample.captions) for sample in samples),
        words=_range([len(caption.split()) for sample in samples for caption in sample.captions]),
        widths=_range([width for width, _ in sizes]),
        heights=_range([height for _, height in sizes]),
        shorter_sides=_bins([min(size) for size in sizes]),
        features=_range([number for number, _ in features]),
        feature_dims=_counts(dim for _, dim in features),
        repeated_pictures=_repeated_pictures(folder, [sample.picture for sample in samples], batch_size),
        repeated_captions=repeated_captions([sample.captions for sample in samples], batch_size),
        places=places,
        groups=entry.get("groups", 0) if entry is not None else 0,
    )


class _Picture(NamedTuple):
    """An image or array file in a shard: ``tail`` is a hash of its end, or of all of it when that is not longer."""

    shard: str
    offset: int
    size: int
    tail: bytes
    key: str
    image_id: int | str


class _Scanned(NamedTuple):
    """What is read of a sample: ``size`` is width and height in pixels, ``features`` their number and size."""

    picture: _Picture
    captions: list[str]
    size: tuple[int, int] | None
    features: tuple[int, int] | None


def _scan(stream: BinaryIO, file: str, sample: ScannedSample, *, has_sizes: bool) -> _Scanned | None:
    """Return what is in a sample, None when it has no picture, or features, or no caption."""
    record = _record(sample)
    captions = _captions(sample, record)
    extension = next((name for name in (*EXTENSIONS, FEATURE_EXTENSION) if name in sample.members), None)
    if extension is None or not captions:
        return None
    member, size, features = sample.members[extension], None, None
    if extension == FEATURE_EXTENSION:
        features = _two_numbers(record, "num_features", "feature_dim")
    elif has_sizes:
        size = _two_numbers(record, "width", "height")
    else:
        size = _header_size(stream, member)
    # A picture of other programs that nothing can be said of is none.
    if not has_sizes and size is None and features is None:
        return None
    image_id = record.get("image_id")
    # Without an id, every sample is an image of its own.
    image_id = image_id if type(image_id) in (int, str) else sample.key
    tail = min(member.size, TAIL)
    digest = hashlib.blake2b(_read(stream, member.offset_data + member.size - tail, tail), digest_size=16).digest()
    picture = _Picture(file, member.offset_data, member.size, digest, sample.key, image_id)
    return _Scanned(picture, captions, size, features)


def _record(sample: ScannedSample) -> dict[str, Any]:
    """Return the object of ``json``, an empty one where there is none that can be read."""
    try:
        record = parse_json(sample.data.get("json", b""), "json")
    except UserError:
        return {}
    return record if isinstance(record, dict) else {}


def _captions(sample: ScannedSample, record: Mapping[str, Any]) -> list[str]:
    captions = record.get("captions")
    if captions is None:
        # What is not UTF-8 is no caption.
        captions = [sample.data.get("txt", b"").decode(errors="ignore")]
    if not isinstance(captions, list):
        return []
    return [caption for caption in captions if isinstance(caption, str) and caption.strip()]


def _two_numbers(record: Mapping[str, Any], *fields: str) -> tuple[int, int] | None:
    """Return two fields of a json, None unless both are whole numbers."""
    numbers = tuple(record.get(field) for field in fields)
    return numbers if all(type(number) is int for number in numbers) else None


def _header_size(stream: BinaryIO, member: tarfile.TarInfo) -> tuple[int, int] | None:
    """Return width and height of a picture without decoding it, None when it is not one."""
    image_module = require("PIL.Image", extra="data")
    # All of it where the beginning is not enough, as for a long comment.
    for length in (min(HEADER, member.size), member.size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image_module.DecompressionBombWarning)
            try:
                with image_module.open(io.BytesIO(_read(stream, member.offset_data, length))) as image:
                    return image.size
            # Decoders of damaged files raise nearly anything.
            except Exception:
                continue
    return None


def _read(stream: BinaryIO, offset: int, size: int) -> bytes:
    stream.seek(offset)
    data = stream.read(size)
    if len(data) < size:
        raise tarfile.ReadError("it is cut off")
    return data


@contextmanager
def _readable(folder: Folder, file: str) -> Iterator[None]:
    try:
        yield
    except tarfile.TarError as error:
        raise UserError(f"cannot read {folder / file}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {folder / file}: {error_text(error)}") from error


def _repeated_pictures(folder: Folder, pictures: Sequence[_Picture], batch_size: int) -> Repeats:
    """Return the pictures of several image ids; only those of the same size and end are read."""
    candidates = _groups(pictures, lambda picture: (picture.size, picture.tail))
    short = [group for group in candidates if group[0].size <= TAIL]
    digests = _digests(folder, [picture for group in candidates if group[0].size > TAIL for picture in group])
    same = [*short, *_groups(digests, digests.get)]
    occurrences = [(group[0].key, [Occurrence(picture.image_id, 1, 1.0) for picture in group]) for group in same]
    return repeats(occurrences, len(pictures), len(pictures), batch_size)


def _groups(pictures: Iterable[_Picture], key: Callable[[_Picture], Any]) -> list[list[_Picture]]:
    """Return those that share their key with others."""
    groups: dict[Any, list[_Picture]] = defaultdict(list)
    for picture in pictures:
        groups[key(picture)].append(picture)
    return [group for group in groups.values() if len(group) > 1]


def _digests(folder: Folder, pictures: Iterable[_Picture]) -> dict[_Picture, bytes]:
    """Return a hash of the whole content of each picture, shard by shard."""
    digests = {}
    for shard, pictures_of_shard in groupby(sorted(pictures), key=attrgetter("shard")):
        with _readable(folder, shard), folder.open(shard) as stream:
            for picture in pictures_of_shard:
                digests[picture] = hashlib.sha256(_read(stream, picture.offset, picture.size)).digest()
    return digests


def _counts(numbers: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(numbers).items()))


def _range(numbers: Sequence[int]) -> Range | None:
    return Range(min(numbers), statistics.median(numbers), max(numbers)) if numbers else None


def _bins(sides: Iterable[int]) -> dict[int, int]:
    """Return the number of images by the first side of a bin."""
    counts = Counter(bisect.bisect_right(SHORTER_SIDES, side) - 1 for side in sides)
    return {first: counts[index] for index, first in enumerate(SHORTER_SIDES)}
