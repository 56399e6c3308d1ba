"""Tables of image paths and captions: CSV, TSV and JSON Lines."""

import codecs
import csv
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import msgspec

from vl_plugins.data.out_of_core import KeyedRows, Row
from vl_plugins.data.sources import Images, join_rows
from vl_plugins.errors import UserError, one_of, user_errors

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "path", "image_path")
PLAIN_ID = "id"  # of images, unless rows of one image have different ones: then of captions
ID_COLUMNS = ("image_id", PLAIN_ID)
CAPTION_COLUMNS = ("caption", "captions", "sentences", "sentence", "text", "texts", "title", "txt")
NUMBERED_CAPTIONS = re.compile(r"caption[_ ]?\d+")
# Keys of the texts in an object: Karpathy's sentences, COCO's annotations, the .json of WebDataset tars.
TEXT_KEYS = ("raw", "caption", "captions", "text")
DELIMITERS = ("\t", ",", "| ", ";")


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
        asked = [name for name in (self.image, *self.captions, self.split, self.id, self.group) if name is not None]
        for name in asked:
            one_of("column", name, names)
        free = [name for name in names if name not in asked]

        def first(candidates: Sequence[str]) -> str | None:
            return next((name for name in candidates if name in free), None)

        caption = first(CAPTION_COLUMNS)
        captions = self.captions or [name for name in free if name == caption or NUMBERED_CAPTIONS.fullmatch(name)]
        image = self.image or first(IMAGE_COLUMNS)
        if not image or not captions:
            raise UserError(f"name --image-column and --caption-column; columns: {', '.join(map(repr, names))}")
        return Columns(image, captions, self.split or first(["split"]), self.id or first(id_columns), self.group)

    def row(self, place: int | str, values: Mapping[Any, Any], split: str) -> Row:
        """Return a row by its values; ``split`` is for tables without a split column."""
        found = [values[name] for name in self.captions if values.get(name) is not None]
        texts = [text for value in found for text in _texts(value)]
        if len(self.captions) > 1:
            texts = [text for text in texts if not isinstance(text, str) or text.strip()]
        image_id = None if self.id is None else values.get(self.id)
        return Row(
            place,
            values.get(self.image),
            texts,
            split if self.split is None else values.get(self.split),
            "" if image_id is None and self.id is not None else image_id,
            None if self.group is None else values.get(self.group),
            problem=values.get(None),
        )


def read_table(
    file: str | Path,
    columns: Columns | None = None,
    *,
    image_root: str | Path | None = None,
    dataset_name: str | None = None,
    split_name: str = "train",
    val_fraction: float = 0.0,
    test_fraction: float = 0.0,
) -> Images:
    """Yield the images of a table whose rows have the path of an image, relative to the image root, and its captions.

    Text tables start with a row of column names and quote fields as spreadsheets do; JSON Lines have an object in each
    line. The delimiter is the first of tab, comma, ``"| "`` and semicolon that the first line has; with ``"| "``, as in
    Kaggle's ``results.csv``, quotes have no meaning. Rows with the same path are one image, where the first row is.
    With several caption columns an empty one means that the row has fewer captions. Caption ids are running numbers,
    image ids too if there is no id column. Tables of any size are grouped on disk, in the folder for temporary files.

    Args:
        file: UTF-8 text; JSON Lines if the name ends in ``.jsonl``.
        columns: which column holds what; by default they are found by their names.
        image_root: folder that absolute paths of the table are in.
        dataset_name: by default the name of the file.
        split_name: split of all rows when there is no split column.
        val_fraction, test_fraction: share of the images that a hash of the group, or else of the path, assigns to
            ``val`` and ``test`` instead; other rows of the table do not matter.

    Raises:
        UserError: the file has a line that cannot be read, which the message names; or the columns cannot be found.
    """
    file = Path(file)
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        raise UserError("val_fraction and test_fraction must be at least 0, and below 1 together")
    with user_errors(str(file)):
        table = _read_objects(file) if file.suffix.lower() == ".jsonl" else read_csv(file)
        _, names = next(table)
        found = (columns or Columns()).find([*names])
        if (val_fraction or test_fraction) and found.split is not None:
            raise UserError(f"{file} has splits in column {found.split!r}; leave out val_fraction and test_fraction")
        root = f"{os.path.abspath(image_root or '')}{os.sep}"

        def rows() -> KeyedRows:
            for line, values in table:
                row = found.row(line, values, split_name)
                if isinstance(row.file, str):
                    path = row.file.removeprefix(root)
                    if "://" not in path and ("./" in path or "//" in path):
                        path = str(PurePosixPath(path))
                    row.file = key = path
                else:
                    key = f"{line}/"  # no path ends so
                if val_fraction or test_fraction:
                    drawn_by = key if row.group in (None, "") else str(row.group)
                    digest = hashlib.sha256(drawn_by.encode(errors="surrogateescape")).digest()
                    drawn = int.from_bytes(digest[:8], "big") / 2**64
                    row.split = "test" if drawn < test_fraction else "val" if drawn >= 1 - val_fraction else split_name
                yield key, row

        has_plain_ids = found.id == PLAIN_ID and (columns is None or columns.id is None)
        name = label_of(file.stem) if dataset_name is None else dataset_name
        yield from join_rows(rows(), name, f"{file}: line ", has_plain_ids)


Table = Iterator[tuple[int, dict[Any, Any]]]


def _read_objects(file: Path) -> Table:
    """Yield a mapping with the names of all keys, and then each line that is not empty, with its number."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode

    def objects() -> Table:
        with open(file, "rb") as stream:
            for line, text in enumerate(stream, 1):
                if text.strip():
                    try:
                        yield line, decode(text.removeprefix(codecs.BOM_UTF8))
                    except ValueError as error:
                        raise UserError(f"{file}: line {line}: it is not a JSON object: {error}") from error

    yield 0, dict.fromkeys(name for _, row in objects() for name in row)
    yield from objects()


def read_csv(file: str | Path, delimiter: str | None = None) -> Table:
    """Yield a mapping with the column names, and then each row that is not empty, with the number of its first line.

    A row of another length has the problem under None. The delimiter is by default the first of :data:`DELIMITERS` that
    the first line has.
    """
    # "sig": spreadsheets put a byte order mark first. "surrogateescape": to find the line that is not UTF-8.
    open_text = fsspec.open if "://" in str(file) else open
    with open_text(str(file), "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        header = stream.readline()
        if header.startswith("PAR1"):
            raise UserError(f"{file} is Parquet, not text: `vl-plugins shards hugging-face` reads it")
        if delimiter is None:
            delimiter = next((candidate for candidate in DELIMITERS if candidate in header), ",")
        options: dict[str, Any] = {"delimiter": delimiter, "strict": True}
        if delimiter[1:] == " ":
            options |= {"delimiter": delimiter[0], "skipinitialspace": True, "quoting": csv.QUOTE_NONE}
        reader, line = csv.reader(itertools.chain([header], stream), **options), 1
        try:
            names = next(reader, [])
            if len({*names}) < len(names):
                raise UserError(f"{file}: two columns have the same name: {', '.join(map(repr, names))}")
            yield line, dict.fromkeys(names)
            line = reader.line_num + 1
            for fields in reader:
                if fields:
                    values: dict[Any, Any] = dict(zip(names, fields, strict=False))
                    if len(fields) != len(names):
                        values[None] = f"{len(fields)} fields, but {len(names)} column names"
                    yield line, values
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{file}: line {line}: {error}; is a quote missing, or one too many?") from error


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
