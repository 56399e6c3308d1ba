"""Rows grouped into images, and images shuffled, by DuckDB on disk: memory does not grow with their number."""

import contextlib
import functools
import itertools
import operator
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from vl_plugins.data.captions import CaptionedImage, RejectedImage, hash64
from vl_plugins.errors import UserError, require

CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # fits into 64 bits
ROWS_INSERTED, ROWS_FETCHED = 10_000, 2_000
INTEGERS_COUNTED = 200_000  # at a time, in the memory of DuckDB


class Row(msgspec.Struct, array_like=True, gc=False):
    """A row of a source: its place, for messages, and the fields of an image, not checked yet.

    Where ``image_id`` or ``caption_ids`` is None, ids are running numbers. Where ``filename`` is None, it is ``file``.
    A row with a ``problem`` cannot be used. ``dataset`` is set later.
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
    dataset: str = ""


KeyedRows = Iterator[tuple[str, Row]]


def group_rows(rows: KeyedRows, source: str, has_plain_ids: bool = False) -> Iterator[tuple[list[Row], bool]]:
    """Yield the rows of each image, which have one key, and whether another image may have its id.

    Images are in the order of their first rows. Image ids become ints if all are ints or canonical decimal strings of
    up to 18 digits. ``source`` precedes the place of a row in messages. With ``has_plain_ids``, nobody said whose ids
    these are: where rows of one image differ in them, all are ids of captions.
    """
    integers = True
    # Most tables have the rows of an image together.
    hash_text = functools.lru_cache(4)(lambda text: hash64(text.encode(errors="replace")))
    with _spool("image BIGINT, id BIGINT", Row) as spool:
        for key, row in rows:
            image_id = row.image_id
            if image_id is not None and integers:
                integers = type(image_id) is int or CANONICAL_INT.fullmatch(str(image_id)) is not None
            try:
                spool.add(row, hash_text(key), 0 if image_id is None else hash_text(str(image_id)))
            except (UnicodeEncodeError, OverflowError) as error:
                raise UserError(f"{source}{row.place}: {error}") from error
        # Rows of one image that have different ids raise an error later, so any of them will do.
        query = (
            "WITH images AS (SELECT image, min(position) AS first, any_value(nullif(id, 0)) AS id FROM rows "
            "GROUP BY image) SELECT position, size, first, images.id IN (SELECT id FROM images GROUP BY id HAVING "
            "count(*) > 1) FROM rows JOIN images USING (image) ORDER BY first, position"
        )
        of_captions = has_plain_ids and spool.count(
            "SELECT count(*) FROM (SELECT image FROM rows GROUP BY image HAVING count(DISTINCT id) > 1)"
        )
        for _, members in itertools.groupby(spool.select(query), operator.itemgetter(1)):
            found = list(members)
            group = [row for row, *_ in found]
            for row in group:
                if of_captions:
                    row.caption_ids, row.image_id = _ids_of_captions(row, integers), None
                elif integers and row.image_id is not None:
                    row.image_id = int(row.image_id)
                elif type(row.image_id) is int:
                    row.image_id = str(row.image_id)
            yield group, bool(found[0][2]) and not of_captions


def _ids_of_captions(row: Row, are_integers: bool) -> list[Any]:
    """Return the id of a row as that of its caption, or of each of them."""
    if len(row.captions) == 1:
        return [int(row.image_id) if are_integers else str(row.image_id)]
    return [f"{row.image_id}#{number}" for number in range(len(row.captions))]


def shuffled(images: Iterable[CaptionedImage | RejectedImage], seed: int) -> Iterator[CaptionedImage | RejectedImage]:
    """Yield the images of splits named ``train...`` in the order of a hash of seed, split and id.

    All others come first and keep their order.
    """
    with _spool("rank BIGINT", CaptionedImage) as spool:
        for image in images:
            if isinstance(image, RejectedImage) or not image.split.startswith("train"):
                yield image
            else:
                spool.add(image, hash64(f"{seed}/{image.split}/{image.image_id}".encode()))
        for (image,) in spool.select("SELECT position, size FROM rows ORDER BY rank, position"):
            yield image


def count_repeats(parts: Iterable[np.ndarray]) -> tuple[int, int, int, int]:
    """Return the number of integers; how many occur several times, as how many different ones, and the most often."""
    query = (
        "SELECT coalesce(sum(number), 0), count(*), coalesce(max(number), 0) FROM (SELECT count(*) AS number FROM rows "
        "WHERE (hash & 9223372036854775807) % ? = ? GROUP BY hash HAVING number > 1)"
    )
    with _database("hash BIGINT", "24MB") as database:
        for part in parts:
            _insert(database, part)
        (total,) = database.execute("SELECT count(*) FROM rows").fetchone()
        buckets = 1 + total // INTEGERS_COUNTED
        found = [database.execute(query, [buckets, bucket]).fetchone() for bucket in range(buckets)]
    numbers, different, most = map(list, zip(*found, strict=True))
    return total, int(sum(numbers)), sum(different), max(most)


@contextlib.contextmanager
def _database(columns: str, memory_limit: str = "32MB") -> Iterator[Any]:
    """Open a database in the folder for temporary files, with an empty table ``rows``."""
    duckdb = require("duckdb", extra="data")
    with tempfile.TemporaryDirectory() as folder:
        limits = {"memory_limit": memory_limit, "temp_directory": folder, "threads": 1}
        with duckdb.connect(config=limits) as database:
            database.execute("SET enable_progress_bar = false")  # DuckDB 1.1 prints one
            database.execute(f"CREATE TEMP TABLE rows ({columns})")
            yield database


def _insert(database: Any, *columns: np.ndarray) -> None:
    database.register("part", {f"c{index}": np.ascontiguousarray(column) for index, column in enumerate(columns)})
    database.execute("INSERT INTO rows SELECT * FROM part")


@contextlib.contextmanager
def _spool(columns: str, kind: type) -> Iterator["_Spool"]:
    """Open an empty :class:`_Spool` of objects with integers, whose names and types are in ``columns``."""
    with _database(f"position BIGINT, size BIGINT, {columns}") as database, tempfile.TemporaryFile() as stream:
        yield _Spool(database, stream, kind)


class _Spool:
    """Objects in a file, because DuckDB would sort texts in memory, and integers about each in its table ``rows``."""

    def __init__(self, database: Any, stream: Any, kind: type):
        self.database, self.stream = database, stream
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind).decode
        self.position, self.rows = 0, list[tuple[int, ...]]()

    def add(self, item: Any, *numbers: int) -> None:
        size = self.stream.write(self.encode(item))
        self.rows.append((self.position, size, *numbers))
        self.position += size
        if len(self.rows) == ROWS_INSERTED:
            self._insert()

    def _insert(self) -> None:
        if self.rows:
            _insert(self.database, *np.array(self.rows, np.int64).T)
            self.rows.clear()

    def count(self, query: str) -> int:
        """Return the number that a query gives."""
        self._insert()
        return self.database.execute(query).fetchone()[0]

    def select(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the object of each row of a result, which begins with its position and size, and the other columns."""
        self._insert()
        self.stream.flush()
        result = self.database.execute(query)
        while part := result.fetchmany(ROWS_FETCHED):
            for position, size, *others in part:
                self.stream.seek(position)  # within the buffer where objects follow each other
                yield self.decode(self.stream.read(size)), *others
