"""Rows grouped into images, and images shuffled, by DuckDB on disk: memory does not grow with their number."""

import contextlib
import hashlib
import itertools
import operator
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from vl_plugins.data.captions import CaptionedImage, RejectedImage
from vl_plugins.errors import UserError, require

__all__ = ["KeyedRows", "Row", "group_rows", "shuffled"]

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
        The rows of each image in their order, images by their first rows; and whether another image has the same id.

    Raises:
        UserError: a text is not valid Unicode.
    """
    integers = True
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Row).decode
    with _workspace() as (database, stream):
        database.execute("CREATE TEMP TABLE rows (position BIGINT, size BIGINT, image VARCHAR, id VARCHAR)")

        def places() -> Iterator[tuple]:
            nonlocal integers
            position = 0
            for key, row in rows:
                image_id = ""  # DuckDB 1.1 cannot read a part that is None throughout
                if row.image_id is not None:
                    image_id, integers = str(row.image_id), integers and _is_integer(row.image_id)
                try:
                    size = stream.write(encode(row))
                except UnicodeEncodeError as error:
                    raise UserError(f"{source}{row.place}: it is not UTF-8") from error
                yield position, size, key, image_id
                position += size

        rest = places()
        while part := list(itertools.islice(rest, ROWS_INSERTED)):
            _insert(database, "rows", part)
        stream.flush()
        # Rows of one image that have different ids raise an error later, so any of them will do.
        database.execute(
            "CREATE TEMP TABLE images AS SELECT image, min(position) AS first, any_value(nullif(id, '')) AS image_id "
            "FROM rows GROUP BY image"
        )
        ordered = database.execute(
            "SELECT position, size, first, "
            "image_id IN (SELECT image_id FROM images GROUP BY image_id HAVING count(*) > 1) "
            "FROM rows JOIN images USING (image) ORDER BY first, position"
        )
        for _, members in itertools.groupby(_fetch(ordered, stream), lambda place: place[0][2]):
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
    with _workspace() as (database, stream):
        database.execute("CREATE TEMP TABLE images (rank BIGINT, position BIGINT, size BIGINT)")
        places: list[tuple[int, int, int]] = []
        total = 0
        for image in images:
            if isinstance(image, RejectedImage) or not image.split.startswith(("train", "restval")):
                yield image
                continue
            digest = hashlib.blake2b(f"{seed}/{image.split}/{image.image_id}".encode(), digest_size=8).digest()
            size = stream.write(encode(image))
            places.append((int.from_bytes(digest, "little", signed=True), total, size))
            total += size
            if len(places) == ROWS_INSERTED:
                _insert(database, "images", places)
                places.clear()
        if places:
            _insert(database, "images", places)
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
def _workspace() -> Iterator[tuple[Any, Any]]:
    """Open a database and a file. Rows go to the file: DuckDB runs out of memory if it sorts long texts."""
    duckdb = require("duckdb", extra="data")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stream:
        limits = {"memory_limit": "100MB", "temp_directory": folder, "threads": 1}
        with duckdb.connect(config=limits) as database:
            yield database, stream


def _insert(database: Any, table: str, rows: Sequence[tuple]) -> None:
    columns = zip(*rows, strict=True)
    types = (np.int64 if isinstance(value, int) else object for value in rows[0])
    arrays = [np.array(column, dtype=dtype) for column, dtype in zip(columns, types, strict=True)]
    database.register("part", {f"c{index}": array for index, array in enumerate(arrays)})
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
