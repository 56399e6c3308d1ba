"""What is in shards: statistics, and whether it is what was written and can be decoded."""

import posixpath
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from vl_plugins.data.captions import caption_hash, hash64, normalize_caption
from vl_plugins.data.engines import run_jobs
from vl_plugins.data.files import exists, join, locate, names, read_bytes, sha256
from vl_plugins.data.images import inspect_image
from vl_plugins.data.index import INDEX_FOLDER, index_file, read_head, read_records, scan_shard
from vl_plugins.data.samples import (
    FEATURES,
    INPUTS,
    TEXTS,
    Record,
    Sample,
    decode_features,
    input_of,
    parse_record,
    read_samples,
)
from vl_plugins.errors import UserError, user_errors
from vl_plugins.tables import printable

TOTALS = ("shards", "bytes", "images", "captions", "unusable", "rejected")


def split_of(shard: str) -> str:
    """Return the name of a shard without its number, or ``shards`` for names such as img2dataset's.

    >>> split_of("s3://bucket/coco-train-000000.tar"), split_of("00000.tar")
    ('coco-train', 'shards')
    """
    return re.sub(r"[-_.]?[0-9]*\.tar$", "", posixpath.basename(shard)) or "shards"


def _read_sample(sample: Sample, *, decode: bool) -> tuple[Record, bytes]:
    """Return the names and captions of a sample, and its picture or array file.

    Without ``decode`` a JPEG file is only looked at, see :func:`~vl_plugins.data.images.inspect_image`.

    Raises:
        UserError: readers cannot use the sample.
    """
    record = parse_record(sample.key, sample.members)
    if FEATURES in sample.members and sample.members.keys().isdisjoint(INPUTS["images"]):
        data = sample.members[FEATURES]
        decode_features(data)
    else:
        data = input_of(sample.members)
        inspect_image(data, decode=decode)
    return record, data


class _Hashes:
    """Hashes in files ``<prefix><number>``, one of which is in memory at a time."""

    def __init__(self, prefix: str):
        self.files = [f"{prefix}{number}" for number in range(16)]

    def extend(self, hashes: array) -> None:
        values = np.frombuffer(hashes, np.int64)
        for number, file in enumerate(self.files):
            with open(file, "ab") as stream:
                stream.write(values[values % len(self.files) == number].tobytes())

    def find_repeats(self) -> tuple[dict[str, Any], int]:
        """Return statistics of hashes that are there several times, and the most frequent one."""
        total = number = different = most = value = 0
        for file in self.files:
            values, counts = np.unique(np.fromfile(file, np.int64), return_counts=True)
            repeated = counts[counts > 1]
            total, number, different = total + counts.sum(), number + repeated.sum(), different + len(repeated)
            if repeated.max(initial=0) > most:
                most, value = repeated.max(), values[counts.argmax()]
        share = float(number / max(total, 1))
        found = {"number": int(number), "share": share, "different": int(different), "most_frequent": int(most)}
        return found, int(value)


class _Contents:
    """What is in some shards: totals, images by number of captions, and hashes of pictures and captions."""

    def __init__(self, pictures: Any, captions: Any):
        self.totals = Counter(dict.fromkeys(TOTALS, 0))
        self.captions_per_image, self.pictures, self.captions = Counter[int](), pictures, captions

    def add(self, other: "_Contents") -> None:
        for name, values in vars(other).items():
            own = getattr(self, name)
            (own.update if isinstance(own, Counter) else own.extend)(values)


def inspect_shards(
    shards: Sequence[str], *, workers: int | None = None, executor: Any = None
) -> dict[str, dict[str, Any]]:
    """Read shards once and return statistics of each split, ready for JSON.

    A split is what :func:`split_of` returns. Its statistics are numbers of ``shards``, ``bytes``, ``images`` that
    readers can use, their ``captions``, ``unusable`` samples, and images that the conversion ``rejected``; numbers of
    images by ``captions_per_image``; and ``repeated_pictures`` and ``repeated_captions``, which several images have:
    their ``number`` and ``share``, [0, 1], how many ``different`` ones, and how many images have the
    ``most_frequent``; of captions it is the ``example``. Captions are compared by
    :func:`~vl_plugins.data.captions.normalize_caption` and count once an image, pictures are compared by their files;
    JPEG files are not decoded.

    Args:
        shards: paths or URLs.
        workers, executor: see :func:`~vl_plugins.data.engines.run_jobs`; a job is a shard.

    Raises:
        UserError: a shard, or the first line of its index, cannot be read.
    """
    splits: dict[str, _Contents] = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = run_jobs(_inspect_shard, shards, workers, executor)
        for shard, part in zip(shards, tqdm(parts, "read", len(shards), unit="shard", disable=None), strict=True):
            if (name := split_of(shard)) not in splits:
                splits[name] = _Contents(*(_Hashes(f"{folder}/{name}-{unit}-") for unit in ("pictures", "captions")))
            splits[name].add(part)
        return {
            name: {
                **found.totals,
                "captions_per_image": dict(sorted(found.captions_per_image.items())),
                "repeated_pictures": found.pictures.find_repeats()[0],
                "repeated_captions": _find_repeated_captions(
                    found.captions, [shard for shard in shards if split_of(shard) == name]
                ),
            }
            for name, found in splits.items()
        }


def _inspect_shard(shard: str) -> _Contents:
    files, path = locate(shard)
    found = _Contents(array("q"), array("q"))
    found.totals.update(shards=1, bytes=files.size(path))
    for sample in read_samples(shard):
        try:
            record, data = _read_sample(sample, decode=False)
        except UserError:
            found.totals["unusable"] += 1
            continue
        found.totals.update(images=1, captions=len(record.captions))
        found.captions_per_image[len(record.captions)] += 1
        found.pictures.append(hash64(data))
        found.captions.extend({caption_hash(text) for text in record.captions})
    if exists(index_file(shard)):
        found.totals["rejected"] = len(read_head(shard).rejected)
    return found


def _find_repeated_captions(hashes: _Hashes, shards: Sequence[str]) -> dict[str, Any]:
    """Return statistics of captions that several images have, with the most frequent one as ``example``."""
    statistics, value = hashes.find_repeats()
    for shard in shards if statistics["number"] else ():
        for sample in read_samples(shard, TEXTS):
            with suppress(UserError):
                texts = {caption_hash(text): text for text in parse_record(sample.key, sample.members).captions}
                if value in texts:
                    return statistics | {"example": normalize_caption(texts[value])}
    return statistics


class Verification(NamedTuple):
    """Numbers of shards, samples and captions, and problems: ``<shard>: <problem>`` or ``<shard>: <key>: ...``."""

    shards: int
    samples: int
    captions: int
    problems: list[str]


def verify_shards(
    shards: Sequence[str], *, folders: Sequence[str] = (), workers: int | None = None, executor: Any = None
) -> Verification:
    """Compare shards with their indexes, and decode all pictures and arrays; without an index they are only decoded.

    Args:
        shards: paths or URLs.
        folders: those with all of their shards in ``shards``; their other files are checked too.
        workers, executor: see :func:`~vl_plugins.data.engines.run_jobs`; a job is a shard.

    Raises:
        UserError: a folder cannot be listed, or its ``sizes.json`` cannot be read.
    """
    results = run_jobs(_verify_shard, shards, workers, executor)
    results = list(tqdm(results, "verify", len(shards), unit="shard", disable=None))
    problems = [f"{shard}: {each}" for shard, (*_, found) in zip(shards, results, strict=True) for each in found]
    samples = {shard: number for shard, (number, *_) in zip(shards, results, strict=True)}
    for folder in folders:
        here = {posixpath.basename(shard): samples[shard] for shard in shards if posixpath.dirname(shard) == folder}
        problems += _check_folder(folder, here)
    captions = sum(number for _, number, _ in results)
    return Verification(len(shards), sum(samples.values()), captions, list(map(printable, problems)))


def _verify_shard(shard: str) -> tuple[int, int, list[str]]:
    """Return the numbers of samples and usable captions of a shard, and its problems."""
    problems, samples, captions = [], 0, 0
    try:
        for sample in read_samples(shard):
            samples += 1
            try:
                record, _ = _read_sample(sample, decode=True)
                captions += len(record.captions)
            except UserError as error:
                problems.append(f"{sample.key}: {error}")
        if not samples:
            problems.append("it has no samples")
        if exists(index_file(shard)):
            head = read_head(shard)
            places = msgspec.structs.replace(head, sha256="", fingerprint="", source={}, options={}, rejected=[])
            if head.sha256 not in ("", sha256(shard)):
                problems.append("it is not what was written: its index has another SHA-256")
            elif not problems and (places, read_records(shard)) != scan_shard(shard):
                problems.append("its index is that of other images")
    except (UserError, OSError) as error:
        problems.append(str(error))
    return samples, captions, problems


def _check_folder(folder: str, samples: Mapping[str, int]) -> Iterator[str]:
    """Yield the problems of a folder, given the number of samples of each shard in it."""
    indexes, file = names(join(folder, INDEX_FOLDER), "*.tar.jsonl"), join(folder, "sizes.json")
    with user_errors(file):
        sizes = msgspec.json.decode(read_bytes(file), type=dict[str, int]) if exists(file) else {}
    for name in sorted({*samples, *sizes, *(index.removesuffix(".jsonl") for index in indexes)}):
        if name not in samples:
            yield f"{join(folder, name)}: does not exist, but sizes.json or an index has it"
        elif (indexes or sizes) and sizes.get(name) != samples[name]:
            yield f"{join(folder, name)}: has {samples[name]:,} samples, sizes.json says {sizes.get(name)}"
