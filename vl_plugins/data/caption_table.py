"""Tables of image paths and captions: which column holds what, and which rows are one image."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.grouping import Images, KeyedRows, Row, join_rows
from vl_plugins.data.rows import TableRow, read_rows
from vl_plugins.errors import UserError, one_of, user_errors

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "path", "image_path")
PLAIN_ID = "id"  # of images, unless rows of one image have different ones: then of captions
ID_COLUMNS = ("image_id", PLAIN_ID)
CAPTION_COLUMNS = ("caption", "captions", "sentences", "sentence", "text", "texts", "title", "txt")
NUMBERED_CAPTIONS = re.compile(r"caption[_ ]?\d+")
# Keys of the texts in an object: Karpathy's sentences, COCO's annotations, the .json of WebDataset tars.
TEXT_KEYS = ("raw", "caption", "captions", "text")


@dataclass(frozen=True)
class Columns:
    """The columns of a table by what they hold; those that are None or empty are found by their names.

    A caption is a text, an object with texts under ``raw``, ``caption``, ``captions`` or ``text``, or a list of these.

    Args:
        image: by default the first present of :data:`IMAGE_COLUMNS`.
        captions: by default the first present of :data:`CAPTION_COLUMNS`, and all of ``caption1``, ``caption_2``, ...
        split: by default ``split``, if present.
        id: id of the image; by default the first present of :data:`ID_COLUMNS`, if any. Where nobody names it, and
            rows of one image have different ``id``, it is that of the caption.
        group: ``group`` of the image; by default there are no groups.
    """

    image: str | None = None
    captions: Sequence[str] = ()
    split: str | None = None
    id: str | None = None
    group: str | None = None

    def find(self, names: Sequence[str], id_columns: Sequence[str] = ID_COLUMNS) -> "Columns":
        """Return the columns of a table with these names.

        Raises:
            UserError: a column that was asked for is not there, or there is none with images or captions.
        """
        chosen = [self.image, *self.captions, self.split, self.id, self.group]
        for name in filter(None, chosen):
            one_of("column", name, names)
        free = [name for name in names if name not in chosen]
        captions = list(self.captions)
        if not captions:
            captions += filter(NUMBERED_CAPTIONS.fullmatch, free)
            text = _first(CAPTION_COLUMNS, free)
            if text is not None:
                captions = sorted([text, *captions], key=free.index)
        image = self.image or _first(IMAGE_COLUMNS, free)
        if not image or not captions:
            raise UserError(f"name --image-column and --caption-column; columns: {', '.join(map(repr, names))}")
        split = self.split or _first(["split"], free)
        return Columns(image, captions, split, self.id or _first(id_columns, free), self.group)

    def row(self, place: int | str, values: Mapping[Any, Any], split: str) -> Row:
        """Return a row by its values; ``split`` is for tables without a split column."""
        texts = []
        for name in self.captions:
            value = values.get(name)
            if value is not None:
                texts += _texts(value)
        if len(self.captions) > 1:
            texts = [text for text in texts if not isinstance(text, str) or text.strip()]
        row = Row(place, values.get(self.image), texts, split)
        if self.split is not None:
            row.split = values.get(self.split)
        if self.id is not None:
            image_id = values.get(self.id)
            row.image_id = "" if image_id is None else image_id
        if self.group is not None:
            row.group = values.get(self.group)
        return row


def _first(candidates: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first of some names that a table has, or None."""
    for name in candidates:
        if name in names:
            return name
    return None


def read_table(
    file: str | Path,
    columns: Columns | None = None,
    *,
    image_root: str | Path | None = None,
    folder: str | Path | None = None,
    delimiter: str | None = None,
    dataset_name: str | None = None,
    split_name: str = "train",
    val_fraction: float = 0.0,
    test_fraction: float = 0.0,
    has_lines: bool | None = None,
) -> Images:
    """Yield the images of a table whose rows have the path of an image, relative to the image root, and its captions.

    :func:`~vl_plugins.data.rows.read_rows` tells which files are tables. Rows with the same path are one image,
    where the first row is. With several caption columns an empty one means that the row has fewer captions. Caption ids
    are running numbers, image ids too if there is no id column. A table is held in memory, some 460 bytes a row.

    Args:
        file: the table, or a folder of pictures that have a ``.txt`` of the same name.
        columns: which column holds what; by default they are found by their names.
        image_root: folder of the images. Absolute paths have to be in it.
        folder: that relative paths start from, if this is not ``image_root``, but a folder in it.
        delimiter: of text, see :func:`~vl_plugins.data.rows.read_rows`.
        dataset_name: by default the name of the file.
        split_name: split of all rows when there is no split column.
        val_fraction, test_fraction: share of the images that a hash of the group, or else of the path, assigns to
            ``val`` and ``test`` instead; other rows of the table do not matter.
        has_lines: of a folder of pictures, whether each line of a ``.txt`` is a caption; None: if each has several.

    Raises:
        UserError: the file cannot be read as a table, or the columns cannot be found.
    """
    file = os.fspath(file)
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        raise UserError("val_fraction and test_fraction must be at least 0, and below 1 together")
    with user_errors(file):
        names, table = read_rows(file, delimiter, has_lines)
        chosen = (columns or Columns()).find(names)
        fractions = val_fraction, test_fraction
        if any(fractions) and chosen.split is not None:
            raise UserError(f"{file} has splits in column {chosen.split!r}; leave out val_fraction and test_fraction")
        root = os.path.join(os.path.abspath(image_root or ""), "")
        rows = _keyed(table, chosen, root, folder, split_name, fractions)
        has_plain_ids = chosen.id == PLAIN_ID and (columns is None or columns.id is None)
        name = label_of(PurePosixPath(file).stem) if dataset_name is None else dataset_name
        yield from join_rows(rows, name, f"{file}: ", has_plain_ids)


def _keyed(
    table: Iterable[TableRow],
    columns: Columns,
    root: str,
    folder: str | Path | None,
    split_name: str,
    fractions: tuple[float, float],
) -> KeyedRows:
    """Yield the rows of a table with their paths as keys."""
    val_fraction, test_fraction = fractions
    for place, values, problem in table:
        row = columns.row(place, values, split_name)
        row.problem = problem
        key = f"{place}/"  # no path ends so
        if isinstance(row.file, str):
            _set_path(row, root, folder)
            key = row.file
        if any(fractions):
            share = _share(key if row.group in (None, "") else str(row.group))
            if share < test_fraction:
                row.split = "test"
            elif share >= 1 - val_fraction:
                row.split = "val"
        yield key, row


def _set_path(row: Row, root: str, folder: str | Path | None) -> None:
    """Let the path of a row be relative to the root, without ``./`` and ``//``, which name one file in several ways."""
    path = row.file
    if "://" in path:
        return
    if folder is not None:
        row.filename = path
        path = os.path.abspath(os.path.join(folder, path))
    path = path.removeprefix(root)
    if "./" in path or "//" in path:
        path = str(PurePosixPath(path))
    row.file = path


def _share(text: str) -> float:
    """Return a number in [0, 1) that depends on a text alone."""
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def label_of(name: str) -> str:
    """Return a name as shards can have it, with ``_`` in place of other characters than letters, digits and ``-``."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _texts(value: Any) -> list[Any]:
    """Return the texts of a caption; anything else remains for the error."""
    if isinstance(value, dict):
        value = next((value[key] for key in TEXT_KEYS if key in value), value)
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value]
