"""What is in shards: counts, lengths, sizes and repeats, and a contact sheet of samples."""

import io
import math
import os
import posixpath
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import fsspec
import numpy as np
from tqdm import tqdm

from vl_plugins.data.captions import caption_hash, hash64, normalize_caption
from vl_plugins.data.collection import read_collection
from vl_plugins.data.engines import run_jobs
from vl_plugins.data.files import exists, write_file
from vl_plugins.data.images import inspect_image, scaled_picture
from vl_plugins.data.index import group_hash, index_file, read_head
from vl_plugins.data.out_of_core import insert, workspace
from vl_plugins.data.samples import (
    FEATURES,
    INPUTS,
    Record,
    Sample,
    decode_features,
    input_of,
    parse_record,
    parse_sample,
    read_samples,
)
from vl_plugins.errors import UserError, require
from vl_plugins.tables import printable

__all__ = ["draw_contact_sheet", "inspect_shards", "read_sample", "split_of"]

LINE_LENGTH = 40  # characters
FAINT = "#6b7280"
SIZES = ("widths", "heights", "features", "feature_dims")
IMAGE_COLUMNS = ("start", "captions_per_image", *SIZES, "picture_hash", "group_hash")
CAPTION_COLUMNS = ("image", "words", "caption_hash")
GROUPED_AT_A_TIME = 200_000  # captions, for which DuckDB's memory suffices


def split_of(shard: str) -> str:
    """Return the name of a shard without its number, or ``shards`` for names such as img2dataset's.

    >>> split_of("s3://bucket/coco-train-000000.tar"), split_of("00000.tar")
    ('coco-train', 'shards')
    """
    return re.sub(r"[-_.]?[0-9]*\.tar$", "", posixpath.basename(shard)) or "shards"


def read_sample(sample: Sample, *, decode: bool) -> tuple[Record, bytes, tuple[int, int, int, int]]:
    """Return the names and captions of a sample, its picture or array file, and width, height, features and their
    dimension, -1 where there is none.

    Without ``decode`` a JPEG file is only looked at, see :func:`~vl_plugins.data.images.inspect_image`.

    Raises:
        UserError: readers cannot use the sample.
    """
    record = parse_record(sample.key, sample.members)
    if FEATURES in sample.members and sample.members.keys().isdisjoint(INPUTS["images"]):
        data = sample.members[FEATURES]
        return record, data, (-1, -1, *decode_features(data).shape)
    data = input_of(sample.members)
    return record, data, (*inspect_image(data, decode=decode)[1:], -1, -1)


def inspect_shards(
    shards: Sequence[str], *, workers: int | None = None, executor: Any = None
) -> dict[str, dict[str, Any]]:
    """Read shards once and return statistics of each split, ready for JSON.

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
        workers, executor: see :func:`~vl_plugins.data.engines.run_jobs`; a job is a shard.

    Raises:
        UserError: a shard, or the first line of its index, cannot be read.
    """
    splits: dict[str, dict[str, Any]] = {}
    images = captions = 0
    with workspace() as (database, _):
        for table, columns in (("images", IMAGE_COLUMNS), ("captions", CAPTION_COLUMNS)):
            names = ", ".join(f"{name} BIGINT" for name in ("split", "shard", "position", *columns))
            database.execute(f"CREATE TEMP TABLE {table} ({names})")
        parts = run_jobs(_inspect_shard, shards, workers, executor)
        for shard, part in enumerate(tqdm(parts, "read", len(shards), unit="shard", disable=None)):
            totals, image_rows, caption_rows = part
            name = split_of(shards[shard])
            found = splits.setdefault(name, {"shards": 0, "bytes": 0, "unusable": 0, "rejected": None, "source": None})
            for key in ("shards", "bytes", "unusable"):
                found[key] += totals[key]
            if "source" in totals:
                found["rejected"] = (found["rejected"] or 0) + totals["rejected"]
                found["source"] = found["source"] or totals["source"]
            caption_rows[:, 0] += images
            for table, rows, first in (("images", image_rows, images), ("captions", caption_rows, captions)):
                place = np.full((2, len(rows)), [[list(splits).index(name)], [shard]])
                insert(database, table, [*place, np.arange(first, first + len(rows)), *rows.T])
            images, captions = images + len(image_rows), captions + len(caption_rows)
        for number, (name, found) in enumerate(splits.items()):
            splits[name] = found | _summarize(database, number, shards)
    return splits


def _inspect_shard(shard: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Return facts about a shard, and the columns of its images and of their captions, int64."""
    images: list[tuple[int, ...]] = []
    captions: list[tuple[int, ...]] = []
    unusable = 0
    for sample in read_samples(shard):
        try:
            record, data, sizes = read_sample(sample, decode=False)
        except UserError:
            unusable += 1
            continue
        captions += [(len(images), len(text.split()), caption_hash(text)) for text in record.captions]
        images.append((sample.start, len(record.captions), *sizes, hash64(data), group_hash(record)))
    files, path = fsspec.core.url_to_fs(shard)
    facts = {"shards": 1, "bytes": files.size(path), "unusable": unusable}
    if exists(index_file(shard)):
        head = read_head(shard)
        facts |= {"rejected": len(head.rejected), "source": head.source}
    return facts, np.array(images, np.int64).reshape(-1, 8), np.array(captions, np.int64).reshape(-1, 3)


def _summarize(database: Any, split: int, shards: Sequence[str]) -> dict[str, Any]:
    def counts(column: str, table: str = "images") -> dict[int, int]:
        where = f"FROM {table} WHERE split = {split} AND {column} >= 0"
        return dict(database.execute(f"SELECT {column}, count(*) {where} GROUP BY 1 ORDER BY 1").fetchall())

    words, captions_per_image = counts("words", "captions"), counts("captions_per_image")
    images, captions = sum(captions_per_image.values()), sum(words.values())
    parts = 1 + captions // GROUPED_AT_A_TIME
    where = f"split = {split} AND group_hash != 0 AND abs(group_hash % {parts}) ="
    groups = f"SELECT count(DISTINCT group_hash) FROM images WHERE {where} "
    return {
        "images": images,
        "captions": captions,
        "groups": sum(database.execute(f"{groups}{part}").fetchone()[0] for part in range(parts)),
        "captions_per_image": captions_per_image,
        "feature_dims": counts("feature_dims"),
        "words": _range(words),
        **{name: _range(counts(name)) for name in ("widths", "heights", "features")},
        "repeated_pictures": _find_repeats(database, split, shards, "images", "picture_hash", images, parts),
        "repeated_captions": _find_repeats(database, split, shards, "captions", "caption_hash", captions, parts),
    }


def _find_repeats(
    database: Any, split: int, shards: Sequence[str], table: str, column: str, total: int, parts: int
) -> dict[str, Any]:
    """Return the statistics of values that several images have, given their number in all."""
    image = "position" if table == "images" else "image"
    database.execute("CREATE OR REPLACE TEMP TABLE repeats (value BIGINT, number BIGINT, images BIGINT, first BIGINT)")
    for part in range(parts):
        of_images = (
            f"SELECT {column} AS value, count(*) AS number, min(position) AS first FROM {table} "
            f"WHERE split = {split} AND abs({column} % {parts}) = {part} GROUP BY {column}, {image}"
        )
        database.execute(
            "INSERT INTO repeats SELECT value, sum(number), count(*), min(first) "
            f"FROM ({of_images}) GROUP BY value HAVING count(*) > 1"
        )
    number, different = database.execute("SELECT coalesce(sum(number), 0)::BIGINT, count(*) FROM repeats").fetchone()
    found = {"number": number, "share": 0.0, "different": different, "example": None, "example_images": 0}
    if different:
        value, owners, shard, start = database.execute(
            "SELECT value, best.images, images.shard, images.start "
            "FROM (SELECT * FROM repeats ORDER BY images DESC, first LIMIT 1) AS best "
            f"JOIN {table} AS rows ON rows.position = first JOIN images ON images.position = rows.{image}"
        ).fetchone()
        sample = next(read_samples(shards[shard], start=start))
        texts = {caption_hash(text): text for text in parse_record(sample.key, sample.members).captions}
        example = sample.key if table == "images" else normalize_caption(texts[value])
        found |= {"share": number / total, "example": example, "example_images": owners}
    return found


def _range(counts: dict[int, int]) -> dict[str, float] | None:
    if not counts:
        return None
    values, ends = list(counts), np.cumsum(list(counts.values()))
    middle = [values[np.searchsorted(ends, place, side="right")] for place in ((ends[-1] - 1) // 2, ends[-1] // 2)]
    return {"minimum": values[0], "median": sum(middle) / 2, "maximum": values[-1]}


def draw_contact_sheet(shards: Sequence[str], file: str | os.PathLike, number: int, title: str) -> None:
    """Draw samples, evenly from all, with their keys and first captions to a PNG file.

    A sample whose picture is missing or damaged becomes an empty frame with a note. Letters that the fonts of
    matplotlib's ``font.family`` lack are drawn as boxes.

    Args:
        shards: paths or URLs.
        file: appears complete or not at all; its folder is made when missing.
        number: of samples, at least 1.
        title: stands at the top, before the number of samples.

    Raises:
        UserError: a shard cannot be read, or the file cannot be written.
    """
    collection = read_collection(shards)
    total, number = len(collection), min(number, len(collection))
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    # A Figure of its own, not pyplot's, needs no display. Captions hold dollar signs, which are no formulas.
    figure = require("matplotlib.figure", extra="eval").Figure(
        (3.4 * columns, 0.6 + 3.6 * rows), dpi=100, layout="constrained"
    )
    plain = {"parse_math": False}
    figure.suptitle(_wrap(f"{title}: {number:,} of {total:,} samples", LINE_LENGTH * columns), **plain)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[number:]:
        axes.set_axis_off()
    chosen = [(2 * index + 1) * total // (2 * number) for index in range(number)]  # the middles of equal parts
    for axes, data in zip(grid, collection.read(chosen), strict=False):
        if isinstance(data, Exception):
            raise data
        sample = parse_sample(data)
        axes.set(xticks=[], yticks=[], anchor="N")
        axes.set_title(printable(sample.key)[-LINE_LENGTH:], color=FAINT, fontsize=8, **plain)
        axes.set_xlabel(_wrap(parse_record(sample.key, sample.members).captions[0]), fontsize=9, **plain)
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
