"""Rows grouped into images, and shuffled images, by DuckDB on disk, so memory does not grow with their number."""

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

__all__ = ["Row", "group_rows", "shuffled"]

CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # fits into 64 bits
ROWS_INSERTED, ROWS_FETCHED = 10_000, 2_000


class Row(msgspec.Struct, array_like=True):
    """A row of a source: its place, for messages, and the fields of an image, not checked yet.

    Where ``image_id`` or ``caption_ids`` is None, ids are running numbers. A row with a ``problem`` cannot be used.
    """

    place: int | str
    file: Any
    captions: list[Any]
    split: Any
    image_id: Any = None
    filename: Any = None
    group: Any = None
    caption_ids: list[Any] | None = None
    problem: str | None = None


def group_rows(rows: Iterable[tuple[str, Row]], source: str) -> Iterator[tuple[list[Row], bool]]:
    """Group rows by image. Image ids become ints if all are ints or canonical decimal strings of up to 18 digits.

    Args:
        rows: pairs of a key, equal for rows of one image, and a row.
        source: begins the message about a row.

    Yields:
        The rows of each image in their order, images by their first rows; and whether another image has the same id.

    Raises:
        UserError: a text is not valid Unicode.
    """
    integers, total = True, 0
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Row).decode
    with _database() as database:
        database.execute("CREATE TEMP TABLE rows (number BIGINT, image VARCHAR, id VARCHAR, row VARCHAR)")
        for part in _batches(rows):
            texts = []
            for _, row in part:
                try:
                    texts.append(encode(row).decode())
                except UnicodeEncodeError as error:
                    raise UserError(f"{source}{row.place}: it is not UTF-8") from error
            ids = [row.image_id for _, row in part]
            integers = integers and all(map(_is_integer, ids))
            names = [None if value is None else str(value) for value in ids]
            _insert(database, "rows", np.arange(total, total + len(part)), [key for key, _ in part], names, texts)
            total += len(part)
        # An image whose rows have different ids is an error, so any of them will do.
        database.execute(
            "CREATE TEMP TABLE images AS SELECT image, min(number) AS first, any_value(id) AS image_id "
            "FROM rows GROUP BY image"
        )
        ordered = database.execute(
            "SELECT first, row, image_id IN (SELECT image_id FROM images GROUP BY image_id HAVING count(*) > 1) "
            "FROM rows JOIN images USING (image) ORDER BY first, number"
        )
        for _, members in itertools.groupby(_fetch(ordered), operator.itemgetter(0)):
            fetched = list(members)
            joined = [decode(text) for _, text, _ in fetched]
            for row in joined:
                row.image_id = _as_id(row.image_id, integers)
            yield joined, bool(fetched[0][2])


def shuffled(images: Iterable[CaptionedImage | RejectedImage], seed: int) -> Iterator[CaptionedImage | RejectedImage]:
    """Yield the images of splits named ``train...`` or ``restval...`` in the order of a hash of seed, split and id.

    All others come first and keep their order.
    """
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(CaptionedImage).decode
    with _database() as database:
        database.execute("CREATE TEMP TABLE images (position BIGINT, image VARCHAR)")
        for part in _batches(images):
            positions, texts = [], []
            for image in part:
                if isinstance(image, RejectedImage) or not image.split.startswith(("train", "restval")):
                    yield image
                    continue
                digest = hashlib.blake2b(f"{seed}/{image.split}/{image.image_id}".encode(), digest_size=8).digest()
                positions.append(int.from_bytes(digest, "little", signed=True))
                texts.append(encode(image).decode())
            _insert(database, "images", np.array(positions, dtype=np.int64), texts)
        for (text,) in _fetch(database.execute("SELECT image FROM images ORDER BY position, image")):
            yield decode(text)


def _is_integer(image_id: Any) -> bool:
    """Return whether an id does not keep the others from being ints: blank text and wrong types are errors later."""
    return not isinstance(image_id, str) or not image_id.strip() or CANONICAL_INT.fullmatch(image_id) is not None


def _as_id(image_id: Any, integers: bool) -> Any:
    if integers:
        return int(image_id) if isinstance(image_id, str) and image_id.strip() else image_id
    return str(image_id) if type(image_id) is int else image_id


@contextlib.contextmanager
def _database() -> Iterator[Any]:
    duckdb = require("duckdb", extra="data")
    with tempfile.TemporaryDirectory() as folder:
        limits = {"memory_limit": "100MB", "temp_directory": folder, "threads": 1}
        with duckdb.connect(config=limits) as database:
            yield database


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    return iter(lambda: list(itertools.islice(iterator, ROWS_INSERTED)), [])


def _insert(database: Any, table: str, numbers: np.ndarray, *columns: Sequence[str | None]) -> None:
    arrays = [numbers, *(np.array(column, dtype=object) for column in columns)]
    database.register("part", {f"c{index}": array for index, array in enumerate(arrays)})
    database.execute(f"INSERT INTO {table} SELECT * FROM part")


def _fetch(result: Any) -> Iterator[tuple]:
    return itertools.chain.from_iterable(iter(lambda: result.fetchmany(ROWS_FETCHED), []))
