"""Rows grouped into images, and images shuffled, by DuckDB on disk: memory does not grow with their number."""

import contextlib
import functools
import itertools
import operator
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from vl_plugins.data.captions import CaptionedImage, RejectedImage, hash64
from vl_plugins.errors import UserError, require

__all__ = ["KeyedRows", "Row", "group_rows", "insert", "shuffled", "workspace"]

CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # fits into 64 bits
ROWS_INSERTED, ROWS_FETCHED = 10_000, 2_000
BLOCK_BYTES = 1 << 24


class Row(msgspec.Struct, array_like=True, gc=False):
    """A row of a source: its place, for messages, and the fields of an image, not checked yet.

    Where ``image_id`` or ``caption_ids`` is None, ids are running numbers. Where ``filename`` is None, it is ``file``.
    A row with a ``problem`` cannot be used.
    """

    place: int | str
    file: Any
    captions: list[Any]
    split: Any
    image_id: Any = None
    group: Any = None
    filename: str | None = None
    caption_ids: list[Any] | None = None
    problem: str | None = None


KeyedRows = Iterator[tuple[str, Row]]


def group_rows(rows: KeyedRows, source: str) -> Iterator[tuple[list[Row], bool]]:
    """Group rows by image. Image ids become ints if all are ints or canonical decimal strings of up to 18 digits.

    Args:
        rows: pairs of a key, equal for rows of one image, and a row.
        source: begins the message about a row.

    Yields:
        The rows of each image in their order, images by their first rows; and whether another image may have its id.

    Raises:
        UserError: a text is not valid Unicode.
    """
    integers, position = True, 0
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Row).decode
    # Most tables have the rows of an image together.
    hash_key = functools.lru_cache(1)(lambda key: hash64(key.encode()))
    with workspace() as (database, stream):
        database.execute("CREATE TEMP TABLE rows (position BIGINT, size BIGINT, image BIGINT, id BIGINT)")
        while part := list(itertools.islice(rows, ROWS_INSERTED)):
            found = []
            for key, row in part:
                image_id = 0
                if row.image_id is not None:
                    integers = integers and _is_integer(row.image_id)
                    image_id = hash64(str(row.image_id).encode(errors="replace"))
                try:
                    size = stream.write(encode(row))
                except UnicodeEncodeError as error:
                    raise UserError(f"{source}{row.place}: it is not UTF-8") from error
                found.append((position, size, hash_key(key), image_id))
                position += size
            insert(database, "rows", np.array(found).T)
        stream.flush()
        # Rows of one image that have different ids raise an error later, so any of them will do.
        database.execute(
            "CREATE TEMP TABLE images AS SELECT image, min(position) AS first, any_value(nullif(id, 0)) AS id "
            "FROM rows GROUP BY image"
        )
        ordered = database.execute(
            "SELECT position, size, first, images.id IN (SELECT id FROM images GROUP BY id HAVING count(*) > 1) "
            "FROM rows JOIN images USING (image) ORDER BY first, position"
        )
        for _, members in itertools.groupby(_fetch(ordered, stream), lambda row: row[0][2]):
            group = list(members)
            joined = [decode(text) for _, text in group]
            for row in joined:
                row.image_id = _as_id(row.image_id, integers)
            yield joined, bool(group[0][0][3])


def shuffled(images: Iterable[CaptionedImage | RejectedImage], seed: int) -> Iterator[CaptionedImage | RejectedImage]:
    """Yield the images of splits named ``train...`` or ``restval...`` in the order of a hash of seed, split and id.

    All others come first and keep their order.
    """
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(CaptionedImage).decode
    with workspace() as (database, stream):
        database.execute("CREATE TEMP TABLE images (rank BIGINT, position BIGINT, size BIGINT)")
        found, position = [], 0
        for image in images:
            if isinstance(image, RejectedImage) or not image.split.startswith(("train", "restval")):
                yield image
                continue
            size = stream.write(encode(image))
            found.append((hash64(f"{seed}/{image.split}/{image.image_id}".encode()), position, size))
            position += size
            if len(found) == ROWS_INSERTED:
                insert(database, "images", np.array(found).T)
                found.clear()
        insert(database, "images", np.array(found, np.int64).reshape(-1, 3).T)
        stream.flush()
        ordered = database.execute("SELECT position, size FROM images ORDER BY rank, position")
        for _, text in _fetch(ordered, stream):
            yield decode(text)


def _is_integer(image_id: Any) -> bool:
    """Return whether an id does not keep the others from being ints: blank text and wrong types are errors later."""
    return not isinstance(image_id, str) or not image_id.strip() or CANONICAL_INT.fullmatch(image_id) is not None


def _as_id(image_id: Any, integers: bool) -> Any:
    if integers:
        return int(image_id) if isinstance(image_id, str) and image_id.strip() else image_id
    return str(image_id) if type(image_id) is int else image_id


@contextlib.contextmanager
def workspace() -> Iterator[tuple[Any, Any]]:
    """Open a database for fixed-size rows, and a file for the texts that DuckDB would have to sort in memory."""
    duckdb = require("duckdb", extra="data")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stream:
        limits = {"memory_limit": "32MB", "temp_directory": folder, "threads": 1}
        with duckdb.connect(config=limits) as database:
            database.execute("SET enable_progress_bar = false")  # DuckDB 1.1 prints one
            yield database, stream


def insert(database: Any, table: str, columns: Iterable[np.ndarray]) -> None:
    """Append columns of equal lengths to a table."""
    database.register("part", {f"c{index}": np.ascontiguousarray(column) for index, column in enumerate(columns)})
    database.execute(f"INSERT INTO {table} SELECT * FROM part")


def _fetch(result: Any, stream: Any) -> Iterator[tuple[tuple, bytes]]:
    """Yield the rows of a result, which begin with a position and a size in the file, each with the text there."""
    while part := result.fetchmany(ROWS_FETCHED):
        positions, sizes, *_ = zip(*part, strict=True)
        start, end = min(positions), max(map(operator.add, positions, sizes))
        if end - start <= min(2 * sum(sizes), BLOCK_BYTES):  # most tables have the rows of an image together
            stream.raw.seek(start)
            block = stream.raw.read(end - start)
            yield from ((row, block[row[0] - start : row[0] - start + row[1]]) for row in part)
        else:
            for row in part:
                stream.raw.seek(row[0])
                yield row, stream.raw.read(row[1])
