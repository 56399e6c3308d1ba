"""What is in shards: numbers, lengths and sizes, and the pictures and captions that occur more than once."""

import hashlib
import os
import re
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, BinaryIO, NamedTuple

from vl_plugins.data.captions import normalise_caption
from vl_plugins.data.feature_arrays import FEATURE_EXTENSION
from vl_plugins.data.json_text import parse_json
from vl_plugins.data.manifest import MANIFEST_FILE, ForeignManifestError, read_manifest, select_splits
from vl_plugins.data.shard_files import EXTENSIONS, headers
from vl_plugins.data.storage import Folder, error_text
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = [
    "Place",
    "Range",
    "Repeats",
    "ShardSample",
    "SplitStatistics",
    "read_place",
    "shard_statistics",
    "spread_places",
]

# The first shorter side, in pixels, of each bin; 224 and 336 are what most models take.
SHORTER_SIDES = (0, 64, 128, 224, 336, 512, 768, 1024)

TAIL = 4096  # bytes
# No captions are so long; only a wrong header claims that.
LARGEST_TEXT = 1 << 24  # bytes


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
class Repeats:
    """Pictures, or texts of captions, that more than one image has.

    Args:
        number: how many images, or captions, have one of them.
        share: the same as part of all, [0, 1].
        different: how many different pictures, or texts, they are.
        batch_size: images in a batch; no more than there are.
        expected_pairs: expected number of pairs of images that repeat one another in a batch drawn at random without
            replacement, each image with one of its captions at random.
        example: the key of the first image with the most frequent picture, or the most frequent text as
            :func:`vl_plugins.data.captions.normalise_caption` returns it; None when nothing repeats.
        example_images: how many images have that.
    """

    number: int
    share: float
    different: int
    batch_size: int
    expected_pairs: float
    example: str | None
    example_images: int


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
            :func:`vl_plugins.data.captions.normalise_caption` makes equal.
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
        files = next(_files_of_samples(stream))
        picture = _picture(files)
        captions = _captions(_text_files(stream, files))
        return ShardSample(_key(files), None if picture is None else _read(stream, picture), captions)


def _find_shards(folder: Folder) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the shards of each split, and its entry in the manifest where there is one of ours."""
    try:
        entries = read_manifest(folder)
    except ForeignManifestError:
        entries = None
    if entries:
        if not all(map(_is_entry, entries.values())):
            raise UserError(f"{folder / MANIFEST_FILE} is damaged; `vl-plugins shards verify {folder}` says more")
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


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of the manifest has what is used here."""
    if not isinstance(entry, dict) or type(entry.get("rejected")) is not int:
        return False
    if type(entry.get("groups", 0)) is not int:
        return False
    shards = entry.get("shards")
    return (
        isinstance(entry.get("source"), dict)
        and isinstance(shards, dict)
        and all(isinstance(facts, dict) and type(facts.get("samples")) is int for facts in shards.values())
    )


def _split_statistics(
    folder: Folder, files: Sequence[str], entry: Mapping[str, Any] | None, batch_size: int, bar: Any
) -> SplitStatistics:
    places, pictures, size = [], [], 0
    captions_per_image: Counter[int] = Counter()
    words: Counter[int] = Counter()
    widths: Counter[int] = Counter()
    heights: Counter[int] = Counter()
    shorter_sides: Counter[int] = Counter()
    features: Counter[int] = Counter()
    feature_dims: Counter[int] = Counter()
    texts = _CaptionTexts()
    for file in files:
        before = len(places)
        for sample in _scan(folder, file, own=entry is not None):
            places.append(Place(file, sample.offset))
            if sample.picture is None or not sample.captions:
                continue
            pictures.append(sample.picture)
            captions_per_image[len(sample.captions)] += 1
            words.update(len(caption.split()) for caption in sample.captions)
            texts.add(sample.captions)
            if sample.features is not None:
                features[sample.features[0]] += 1
                feature_dims[sample.features[1]] += 1
            if sample.size is not None:
                widths[sample.size[0]] += 1
                heights[sample.size[1]] += 1
                shorter_sides[min(sample.size)] += 1
        if entry is not None and len(places) - before != entry["shards"][file]["samples"]:
            raise UserError(
                f"{folder / file} has {len(places) - before:,} samples, {MANIFEST_FILE} says "
                f"{entry['shards'][file]['samples']:,}; `vl-plugins shards verify {folder}` says more"
            )
        with _readable(folder, file), folder.open(file) as stream:
            size += stream.seek(0, os.SEEK_END)
        bar.update()
    return SplitStatistics(
        shards=len(files),
        bytes=size,
        images=len(pictures),
        captions=words.total(),
        unusable=len(places) - len(pictures),
        rejected=entry["rejected"] if entry is not None else None,
        source=entry["source"] if entry is not None else None,
        captions_per_image=dict(sorted(captions_per_image.items())),
        words=_range(words),
        widths=_range(widths),
        heights=_range(heights),
        shorter_sides=_bins(shorter_sides),
        features=_range(features),
        feature_dims=dict(sorted(feature_dims.items())),
        repeated_pictures=_repeated_pictures(folder, pictures, batch_size),
        repeated_captions=texts.repeats(batch_size),
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

    offset: int
    picture: _Picture | None
    captions: list[str]
    size: tuple[int, int] | None
    features: tuple[int, int] | None


def _scan(folder: Folder, file: str, *, own: bool) -> Iterator[_Scanned]:
    """Yield the samples of a shard in order. ``own``: the json of the samples has their width and height."""
    with _readable(folder, file), folder.open(file) as stream:
        for files in _files_of_samples(stream):
            texts = _text_files(stream, files)
            record = texts.get("json", {})
            member, picture, size, features = _picture(files), None, None, None
            if member is not None:
                size = _recorded(record, "width", "height") if own else _header_size(stream, member)
            elif FEATURE_EXTENSION in files:
                member, features = files[FEATURE_EXTENSION], _recorded(record, "num_features", "feature_dim")
            # A picture that nothing can be said of is none.
            if member is not None and (own or size is not None or features is not None):
                key = _key(files)
                image_id = record.get("image_id")
                # Without an id, every sample is an image of its own.
                image_id = image_id if type(image_id) in (int, str) else key
                picture = _Picture(file, member.offset_data, member.size, _tail(stream, member), key, image_id)
            yield _Scanned(next(iter(files.values())).offset, picture, _captions(texts), size, features)


def _files_of_samples(stream: BinaryIO) -> Iterator[dict[str, tarfile.TarInfo]]:
    """Yield the headers of the files of each sample, by extension, from where the stream is."""
    key, files = None, {}
    for member in _headers(stream):
        # As webdataset splits names.
        match = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name, re.DOTALL)
        if not match or not member.isreg():
            continue
        if match[1] != key and files:
            yield files
            files = {}
        key = match[1]
        files.setdefault(match[2].lower(), member)
    if files:
        yield files


def _headers(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive from where the stream is; it may be moved meanwhile.

    Raises:
        tarfile.TarError: there is no archive, or it is cut off or damaged.
    """
    start = stream.tell()
    end = stream.seek(0, os.SEEK_END)
    stream.seek(start)
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in headers(tar):
                if member.size > end - member.offset_data:
                    raise tarfile.ReadError(
                        f"it is cut off or damaged: {member.name!r} cannot have {member.size:,} bytes"
                    )
                yield member
            # tarfile takes a cut between two files, or garbage, for the end.
            stream.seek(tar.offset)
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it is cut off or damaged: an archive ends with zeros")
    # A header that says how long the name of the next one is may be wrong in ways that tarfile does not expect.
    except (ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise tarfile.ReadError(f"it is damaged: {error or type(error).__name__}") from error


def _key(files: Mapping[str, tarfile.TarInfo]) -> str:
    extension, member = next(iter(files.items()))
    return member.name[: -len(extension) - 1]


def _picture(files: Mapping[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    return next((files[extension] for extension in EXTENSIONS if extension in files), None)


def _text_files(stream: BinaryIO, files: Mapping[str, tarfile.TarInfo]) -> dict[str, Any]:
    """Return the text of ``txt`` and the object of ``json``, where they are there and can be read."""
    texts = {}
    for extension in ("txt", "json"):
        member = files.get(extension)
        if member is None or member.size > LARGEST_TEXT:
            continue
        data = _read(stream, member)
        try:
            content = data.decode() if extension == "txt" else parse_json(data, member.name)
        except ValueError:  # not UTF-8, or a UserError
            continue
        if extension == "txt" or isinstance(content, dict):
            texts[extension] = content
    return texts


def _captions(texts: Mapping[str, Any]) -> list[str]:
    captions = texts.get("json", {}).get("captions", [texts.get("txt")])
    if not isinstance(captions, list):
        return []
    return [caption for caption in captions if isinstance(caption, str) and caption.strip()]


def _recorded(record: Mapping[str, Any], *fields: str) -> tuple[int, int] | None:
    """Return two fields of a json, None unless both are whole numbers."""
    numbers = tuple(record.get(field) for field in fields)
    return numbers if all(type(number) is int for number in numbers) else None


def _header_size(stream: BinaryIO, member: tarfile.TarInfo) -> tuple[int, int] | None:
    """Return width and height of a picture without decoding it, None when it is not one."""
    image_module = require("PIL.Image", extra="data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", image_module.DecompressionBombWarning)
        try:
            with image_module.open(_Section(stream, member)) as image:
                return image.size
        # Decoders of damaged files raise nearly anything.
        except Exception:
            return None


class _Section:
    """The part of a stream that is one file of an archive, for reading.

    ``TarFile.extractfile`` returns the same, ten times as slowly for the few bytes of a header.
    """

    def __init__(self, stream: BinaryIO, member: tarfile.TarInfo):
        self._stream, self._start, self._size, self._position = stream, member.offset_data, member.size, 0

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        self._stream.seek(self._start + self._position)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position


def _read(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    stream.seek(member.offset_data)
    data = stream.read(member.size)
    if len(data) < member.size:
        raise tarfile.ReadError(f"it is cut off in {member.name!r}")
    return data


def _tail(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    size = min(member.size, TAIL)
    stream.seek(member.offset_data + member.size - size)
    return hashlib.blake2b(stream.read(size), digest_size=16).digest()


@contextmanager
def _readable(folder: Folder, file: str) -> Iterator[None]:
    try:
        yield
    except tarfile.TarError as error:
        raise UserError(f"cannot read {folder / file}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {folder / file}: {error_text(error)}") from error


class _CaptionTexts:
    """Counts which texts occur with which images."""

    def __init__(self) -> None:
        # Most texts occur with one image, and need no more than this.
        self._of_one_image: dict[str, tuple[int, int]] = {}  # captions of this text, captions of the image
        self._of_several: dict[str, list[tuple[int, int]]] = {}
        self._images = 0
        self._captions = 0

    def add(self, captions: Sequence[str]) -> None:
        """Count the captions of another image."""
        self._images += 1
        self._captions += len(captions)
        for text, number in Counter(map(normalise_caption, captions)).items():
            counts = (number, len(captions))
            if text in self._of_several:
                self._of_several[text].append(counts)
            elif text in self._of_one_image:
                self._of_several[text] = [self._of_one_image.pop(text), counts]
            else:
                self._of_one_image[text] = counts

    def repeats(self, batch_size: int) -> Repeats:
        """Return the texts of several images."""
        pairs = 0.0
        for images in self._of_several.values():
            # That an image shows the text has this probability; that two do, the product of theirs. The square of
            # the sum is the sum over all ordered pairs, which contains each image with itself.
            probabilities = [number / captions for number, captions in images]
            pairs += (sum(probabilities) ** 2 - sum(value**2 for value in probabilities)) / 2
        example = max(self._of_several, key=lambda text: len(self._of_several[text]), default=None)
        return _repeats(
            number=sum(number for images in self._of_several.values() for number, _ in images),
            total=self._captions,
            different=len(self._of_several),
            pairs=pairs,
            images=self._images,
            batch_size=batch_size,
            example=example,
            example_images=len(self._of_several.get(example, ())),
        )


def _repeated_pictures(folder: Folder, pictures: Sequence[_Picture], batch_size: int) -> Repeats:
    """Return the pictures of several image ids; only those of the same size and end are read."""
    candidates = _groups(pictures, lambda picture: (picture.size, picture.tail))
    short = [group for group in candidates if group[0].size <= TAIL]
    digests = _digests(folder, [picture for group in candidates if group[0].size > TAIL for picture in group])
    same = [*short, *_groups(digests, digests.get)]
    # Of one image that occurs twice, nothing is a negative of the other.
    groups = [group for group in same if len({picture.image_id for picture in group}) > 1]
    pairs = 0
    for group in groups:
        of_one_image = Counter(picture.image_id for picture in group).values()
        pairs += _number_of_pairs(len(group)) - sum(map(_number_of_pairs, of_one_image))
    largest = max(groups, key=len, default=[])
    return _repeats(
        number=sum(map(len, groups)),
        total=len(pictures),
        different=len(groups),
        pairs=pairs,
        images=len(pictures),
        batch_size=batch_size,
        example=largest[0].key if largest else None,
        example_images=len(largest),
    )


def _groups(pictures: Iterable[_Picture], key: Callable[[_Picture], Any]) -> list[list[_Picture]]:
    """Return those that share their key with others."""
    groups: dict[Any, list[_Picture]] = {}
    for picture in pictures:
        groups.setdefault(key(picture), []).append(picture)
    return [group for group in groups.values() if len(group) > 1]


def _digests(folder: Folder, pictures: Iterable[_Picture]) -> dict[_Picture, bytes]:
    """Return a hash of the whole content of each picture, shard by shard."""
    digests = {}
    for shard, of_shard in groupby(sorted(pictures), key=attrgetter("shard")):
        with _readable(folder, shard), folder.open(shard) as stream:
            for picture in of_shard:
                stream.seek(picture.offset)
                digests[picture] = hashlib.sha256(stream.read(picture.size)).digest()
    return digests


def _repeats(
    *,
    number: int,
    total: int,
    different: int,
    pairs: float,
    images: int,
    batch_size: int,
    example: str | None,
    example_images: int,
) -> Repeats:
    """Return repeats of which ``pairs`` pairs of all ``images`` images collide, on average over their captions."""
    batch_size = min(batch_size, images)
    all_pairs = _number_of_pairs(images)
    return Repeats(
        number=number,
        share=number / total if total else 0.0,
        different=different,
        batch_size=batch_size,
        # Every pair of images is as likely to be in the batch as any other.
        expected_pairs=_number_of_pairs(batch_size) * pairs / all_pairs if all_pairs else 0.0,
        example=example,
        example_images=example_images,
    )


def _number_of_pairs(number: int) -> int:
    return number * (number - 1) // 2


def _range(numbers: Mapping[int, int]) -> Range | None:
    """Return the range of numbers that occur so many times."""
    total = sum(numbers.values())
    if not total:
        return None
    middle, seen = [], 0
    for number in sorted(numbers):
        # Of an even number of them, two are in the middle.
        middle += [number for index in {(total - 1) // 2, total // 2} if seen <= index < seen + numbers[number]]
        seen += numbers[number]
    return Range(min(numbers), sum(middle) / len(middle), max(numbers))


def _bins(sides: Mapping[int, int]) -> dict[int, int]:
    ends = (*SHORTER_SIDES[1:], float("inf"))
    return {
        first: sum(images for side, images in sides.items() if first <= side < end)
        for first, end in zip(SHORTER_SIDES, ends, strict=True)
    }
