"""What is in shards: counts, lengths, sizes and repeats, and a contact sheet of samples."""

import bisect
import contextlib
import hashlib
import io
import math
import os
import posixpath
import re
import tempfile
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
from tqdm import tqdm

from vl_plugins.data import engines
from vl_plugins.data.captions import caption_hash, normalize_caption
from vl_plugins.data.files import exists, file_errors, write_file
from vl_plugins.data.images import inspect_image, scaled_picture
from vl_plugins.data.index import index_file, read_head
from vl_plugins.data.samples import (
    FEATURES,
    INPUTS,
    TEXTS,
    Record,
    Sample,
    decode_features,
    input_of,
    parse_record,
    scan,
)
from vl_plugins.errors import UserError, require
from vl_plugins.tables import printable

__all__ = ["MEMBERS", "draw_contact_sheet", "inspect_shards", "read_sample", "split_of"]

MEMBERS = {*INPUTS["images"], FEATURES, *TEXTS}
LINE_LENGTH = 40  # characters
FAINT = "#6b7280"


def split_of(shard: str) -> str:
    """Return the name of a shard without its number, or ``shards`` for names such as img2dataset's.

    >>> split_of("s3://bucket/coco-train-000000.tar"), split_of("00000.tar")
    ('coco-train', 'shards')
    """
    return re.sub(r"[-_.]?[0-9]*\.tar$", "", posixpath.basename(shard)) or "shards"


def read_sample(sample: Sample, *, decode: bool) -> tuple[Record, bytes, dict[str, int]]:
    """Return the names and captions of a sample, its picture or array file, and the sizes of that.

    Without ``decode`` a JPEG file is only looked at, see :func:`~vl_plugins.data.images.inspect_image`.

    Raises:
        UserError: readers cannot use the sample.
    """
    record = parse_record(sample.key, sample.members)
    if FEATURES in sample.members and sample.members.keys().isdisjoint(INPUTS["images"]):
        data = sample.members[FEATURES]
        return record, data, dict(zip(("features", "feature_dims"), decode_features(data).shape, strict=True))
    data = input_of(sample.members)
    return record, data, dict(zip(("widths", "heights"), inspect_image(data, decode=decode)[1:], strict=True))


def inspect_shards(
    shards: Sequence[str], *, workers: int | None = None, executor: Any = None
) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
    """Read shards once; return statistics of each split, ready for JSON, and the first byte of each sample by shard.

    A split is what :func:`split_of` returns. Its statistics are numbers of ``shards``, ``bytes``, ``images`` that
    readers can use, their ``captions`` and ``groups``, ``unusable`` samples, and images that the conversion
    ``rejected`` (None, like ``source``, without indexes); numbers of images by ``captions_per_image`` and
    ``feature_dims``; the range of ``words`` per caption, of ``widths`` and ``heights`` in pixels, and of ``features``
    per image; and ``repeated_pictures`` and ``repeated_captions``, which several images have: their ``number`` and
    ``share``, [0, 1], how many ``different`` ones, and as ``example`` the most frequent text or the key of the first
    image with the most frequent picture. Captions are compared by
    :func:`~vl_plugins.data.captions.normalize_caption`, pictures by their files; JPEG files are not decoded.

    Args:
        shards: paths or URLs.
        workers: number of shards that are read at a time; by default one per core.
        executor: runs the jobs in place of threads, see :func:`vl_plugins.data.engines.executor`.

    Raises:
        UserError: a shard, or the first line of its index, cannot be read.
    """
    workers = engines.usable_cores() if workers is None else workers
    splits: dict[str, _Split] = {}
    starts = {}
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(engines.executor("threads", workers))
        parts = engines.run_jobs(_inspect_shard, shards, pool, 2 * workers)
        for shard, part in zip(shards, tqdm(parts, "read", len(shards), unit="shard", disable=None), strict=True):
            if (name := split_of(shard)) not in splits:
                splits[name] = _Split(stack)
            starts[shard] = splits[name].add(shard, *part)
        return {name: split.summarize() for name, split in splits.items()}, starts


def _inspect_shard(shard: str) -> tuple[np.ndarray, dict[str, Counter], dict[str, np.ndarray], dict[str, Any] | None]:
    """Return the first byte of each sample; how often values occur, by name, and sums, as ``totals``; hashes; source.

    Hashes of captions are once for each image in ``captions``, those it has again in ``again``.
    """
    starts, source = [], None
    counts: dict[str, Counter] = defaultdict(Counter)
    hashes: dict[str, list[int]] = {"pictures": [], "groups": [], "captions": [], "again": []}
    for sample, record, data, sizes in _scan(shard):
        starts.append(sample.start)
        if record is None:
            continue
        for name, value in {"captions_per_image": len(record.captions), **sizes}.items():
            counts[name][value] += 1
        counts["words"].update(len(caption.split()) for caption in record.captions)
        texts = Counter(map(caption_hash, record.captions))
        hashes["captions"] += texts
        hashes["again"] += (texts - Counter(list(texts))).elements()
        hashes["pictures"].append(_hash(data))
        if record.group is not None:
            hashes["groups"].append(_hash(repr((record.dataset, record.group)).encode()))
    files, path = fsspec.core.url_to_fs(shard)
    counts["totals"].update(shards=1, bytes=files.size(path), samples=len(starts))
    if exists(index_file(shard)):
        head = read_head(shard)
        counts["totals"].update(indexes=1, rejected=len(head.rejected))
        source = head.source
    arrays = {name: np.array(values, np.int64) for name, values in hashes.items()}
    return np.array(starts, np.int64), counts, arrays, source


def _scan(shard: str, start: int = 0) -> Iterator[tuple[Sample, Record | None, bytes, dict[str, int]]]:
    """Yield samples with what :func:`read_sample` returns of them, no record if readers cannot use them."""
    with file_errors("read", shard), fsspec.open(shard, "rb") as stream:
        stream.seek(start)
        try:
            for sample in scan(stream, MEMBERS):
                try:
                    found = read_sample(sample, decode=False)
                except UserError:
                    found = None, b"", {}
                yield sample, *found
        except UserError as error:
            raise UserError(f"cannot read {shard}: {error}") from error


def _label(shard: str, value: int) -> str | None:
    """Return the key of the first image with a picture of this hash, or the text of the first caption with it."""
    for sample, record, data, _ in _scan(shard):
        if record is not None:
            hashes = {caption_hash(caption): normalize_caption(caption) for caption in record.captions}
            if (label := (hashes | {_hash(data): sample.key}).get(value)) is not None:
                return label
    return None


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


class _Split:
    """What the shards of a split contain."""

    def __init__(self, stack: contextlib.ExitStack):
        self.shards: list[str] = []
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.hashes = {name: _Hashes(stack) for name in ("pictures", "groups", "captions", "again", "none")}
        self.source: dict[str, Any] | None = None

    def add(self, shard: str, starts: np.ndarray, counts: Mapping, hashes: Mapping, source: Any) -> np.ndarray:
        self.shards.append(shard)
        for name, numbers in counts.items():
            self.counts[name] += numbers
        for name, values in hashes.items():
            self.hashes[name].add(values)
        self.source = source if self.source is None else self.source
        return starts

    def summarize(self) -> dict[str, Any]:
        counts, totals = self.counts, self.counts["totals"]
        images = counts["captions_per_image"].total()
        return {
            "shards": totals["shards"],
            "bytes": totals["bytes"],
            "images": images,
            "captions": counts["words"].total(),
            "unusable": totals["samples"] - images,
            "rejected": totals["rejected"] if totals["indexes"] else None,
            "source": self.source,
            "groups": sum(len(values) for values, *_ in self.hashes["groups"].parts()),
            **{name: dict(sorted(counts[name].items())) for name in ("captions_per_image", "feature_dims")},
            **{name: _range(counts[name]) for name in ("words", "widths", "heights", "features")},
            "repeated_pictures": self._find_repeats(self.hashes["pictures"], self.hashes["none"]),
            "repeated_captions": self._find_repeats(self.hashes["captions"], self.hashes["again"]),
        }

    def _find_repeats(self, hashes: "_Hashes", again: "_Hashes") -> dict[str, Any]:
        total = number = different = 0
        best = (1, 0, 0)  # number of images, -position, hash
        for (values, first, counts), (more, _, times) in zip(hashes.parts(), again.parts(), strict=True):
            repeated = counts > 1
            total += int(counts.sum() + times.sum())
            number += int(counts[repeated].sum() + times[np.isin(more, values[repeated])].sum())
            different += int(repeated.sum())
            if len(values):
                top = np.lexsort((first, -counts))[0]
                best = max(best, (int(counts[top]), -int(first[top]), int(values[top])))
        found: dict[str, Any] = {
            "number": number,
            "share": 0.0,
            "different": different,
            "example": None,
            "example_images": 0,
        }
        if different:
            example = _label(self.shards[bisect.bisect_right(hashes.ends, -best[1])], best[2])
            found |= {"share": number / total, "example": example, "example_images": best[0]}
        return found


class _Hashes:
    """64-bit hashes in a temporary file, so that memory does not grow with their number."""

    def __init__(self, stack: contextlib.ExitStack):
        self.file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self.ends: list[int] = []

    def add(self, values: np.ndarray) -> None:
        self.file.write(values.tobytes())
        self.ends.append(len(values) + (self.ends[-1] if self.ends else 0))

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield different hashes, the position of the first of each, and their frequencies, 1/64 at a time."""
        for last in range(64):
            self.file.seek(0)
            start, found = 0, [np.empty((2, 0), np.int64)]
            while len(block := np.frombuffer(self.file.read(1 << 20), np.int64)):
                here = np.flatnonzero(block & 63 == last)
                found.append(np.stack([block[here], here + start]))
                start += len(block)
            hashes, positions = np.concatenate(found, axis=1)
            values, first, counts = np.unique(hashes, return_index=True, return_counts=True)
            yield values, positions[first], counts


def _range(counts: Counter) -> dict[str, float] | None:
    if not counts:
        return None
    values = sorted(counts)
    ends = np.cumsum([counts[value] for value in values])
    middle = [values[np.searchsorted(ends, place, side="right")] for place in ((ends[-1] - 1) // 2, ends[-1] // 2)]
    return {"minimum": values[0], "median": sum(middle) / 2, "maximum": values[-1]}


def draw_contact_sheet(starts: Mapping[str, np.ndarray], file: str | os.PathLike, number: int, title: str) -> None:
    """Draw samples, evenly from all, with their keys and first captions to a PNG file.

    A sample whose picture is missing or damaged becomes an empty frame with a note. Letters that the fonts of
    matplotlib's ``font.family`` lack are drawn as boxes.

    Args:
        starts: by shard, the first byte of each sample, from :func:`inspect_shards`.
        file: appears complete or not at all; its folder is made when missing.
        number: of samples, at least 1.
        title: stands at the top, before the number of samples.

    Raises:
        UserError: there are no samples, a shard cannot be read, or the file cannot be written.
    """
    shards, ends = list(starts), np.cumsum([len(places) for places in starts.values()], dtype=np.int64).tolist()
    if not any(ends):
        raise UserError("no contact sheet: the shards hold no pictures")
    number = min(number, ends[-1])
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    # A Figure of its own, not pyplot's, needs no display. Captions hold dollar signs, which are no formulas.
    figure = require("matplotlib.figure", extra="eval").Figure(
        (3.4 * columns, 0.6 + 3.6 * rows), dpi=100, layout="constrained"
    )
    plain = {"parse_math": False}
    figure.suptitle(_wrap(f"{title}: {number:,} of {ends[-1]:,} samples", LINE_LENGTH * columns), **plain)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[number:]:
        axes.set_axis_off()
    for index, axes in enumerate(grid[:number]):
        place = (2 * index + 1) * ends[-1] // (2 * number)  # the middle of an equal part of all
        shard = bisect.bisect_right(ends, place)
        sample, *_ = next(_scan(shards[shard], starts[shards[shard]][place - ends[shard]]))
        axes.set(xticks=[], yticks=[], anchor="N")
        axes.set_title(printable(sample.key)[-LINE_LENGTH:], color=FAINT, fontsize=8, **plain)
        try:
            caption = parse_record(sample.key, sample.members).captions[0]
        except UserError as error:
            caption = f"({error})"
        axes.set_xlabel(_wrap(caption), fontsize=9, **plain)
        try:
            axes.imshow(scaled_picture(input_of(sample.members), 300))
        except UserError as error:
            axes.set_box_aspect(0.75)
            note = {"color": FAINT, "fontsize": 8, "ha": "center", "va": "center", **plain}
            axes.text(0.5, 0.5, _wrap(str(error)), transform=axes.transAxes, **note)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that no font has
        figure.savefig(picture, format="png")
    write_file(file, picture.getbuffer())


def _wrap(text: str, length: int = LINE_LENGTH) -> str:
    lines = textwrap.wrap(printable(" ".join(text[: 16 * length].split())), length, max_lines=8, placeholder=" …")
    return "\n".join(lines)
