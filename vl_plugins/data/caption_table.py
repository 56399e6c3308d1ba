"""Tables of captioned images (CSV, TSV and JSON Lines), and how the rows of any table become images."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vl_plugins.data.annotations import CaptionedImage, RejectedImage, gather_images, place_of
from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.storage import read_file
from vl_plugins.errors import UserError, unknown_name

__all__ = ["Columns", "read_caption_table"]

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "path", "image_path")
ID_COLUMNS = ("image_id", "id")
CAPTION_COLUMNS = ("caption", "captions", "sentences", "sentence", "text", "texts", "title", "txt")
NUMBERED_CAPTIONS = re.compile(r"caption[_ ]?\d+")
# Where an object has its captions: Karpathy's sentences, COCO's annotations, the .json of WebDataset tars.
TEXT_KEYS = ("raw", "caption", "captions", "text")

DELIMITERS = {".csv": ",", ".tsv": "\t", ".jsonl": ""}


@dataclass(frozen=True)
class Columns:
    """The columns of a table by what they hold; those that are None or empty are found by their names.

    A caption is a text, an object with texts under ``raw``, ``caption``, ``captions`` or ``text``, or a list of these.

    Args:
        image: by default the first present of ``image``, ``filepath``, ``file_name``, ``filename``, ``path`` and
            ``image_path``.
        captions: by default the first present of ``caption``, ``captions``, ``sentences``, ``sentence``, ``text``,
            ``texts``, ``title`` and ``txt``, and all of ``caption1``, ``caption_2``, ``caption 3``, ...
        split: by default ``split``, if present.
        id: id of the image; by default the first present of ``image_id`` and ``id``, if any.
        group: ``group`` of the image; by default there are no groups.
    """

    image: str | None = None
    captions: Sequence[str] = ()
    split: str | None = None
    id: str | None = None
    group: str | None = None

    def find(
        self,
        source: str | Path,
        names: Sequence[str],
        image_columns: Sequence[str] = IMAGE_COLUMNS,
        id_columns: Sequence[str] = ID_COLUMNS,
    ) -> "Columns":
        """Return the columns that a table with these names has.

        Raises:
            UserError: a column that was asked for is not there, or there is none with images or captions.
        """
        asked = [name for name in (self.image, *self.captions, self.split, self.id, self.group) if name is not None]
        for name in asked:
            if name not in names:
                raise UserError(f"{source}: {unknown_name('column', name, names)}")
        free = [name for name in names if name not in asked]

        def first(candidates: Sequence[str]) -> str | None:
            return next((name for name in candidates if name in free), None)

        image = self.image or first(image_columns)
        captions = self.captions or [
            name for name in free if name == first(CAPTION_COLUMNS) or NUMBERED_CAPTIONS.fullmatch(name)
        ]
        for what, found in (("image", image), ("caption", captions)):
            if not found:
                raise UserError(
                    f"{source}: which column has the {what}s? name it with --{what}-column; "
                    f"columns: {', '.join(map(repr, names))}"
                )
        return Columns(image, captions, self.split or first(["split"]), self.id or first(id_columns), self.group)

    def pick(self, row: Mapping[Any, Any], dataset: str, split: str, caption_lines: bool = False) -> dict[str, Any]:
        """Return a row as :func:`~vl_plugins.data.annotations.gather_images` takes it.

        ``split`` is for tables without a split column; with ``caption_lines`` each line of a text is a caption.
        """
        values = [row.get(column) for column in self.captions]
        if len(values) > 1:
            values = [value for value in values if not isinstance(value, str) or value.strip()]
        image_id = row.get(self.id)
        return {
            "image_id": "" if image_id is None and self.id is not None else image_id,
            "file": row.get(self.image),
            "captions": [text for value in values for text in _texts(value, caption_lines)],
            "split": split if self.split is None else row.get(self.split),
            "dataset": dataset,
            "filename": row.get(self.image),
            "group": row.get(self.group),
        }


def read_caption_table(
    file: str | Path,
    columns: Columns | None = None,
    *,
    delimiter: str | None = None,
    dataset_name: str | None = None,
    split_name: str = "train",
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Read a table with the path of an image, relative to the image root, and captions of it in each row.

    CSV and TSV start with a row of column names and quote fields as spreadsheets do; JSON Lines have an object in each
    line. Rows with the same path are one image, see :func:`~vl_plugins.data.annotations.gather_images`. With several
    caption columns an empty one means that the row has fewer captions. Without an id column ids are running numbers.

    Args:
        file: UTF-8 text whose name ends in ``.csv``, ``.tsv`` or ``.jsonl``.
        columns: which column holds what; by default they are found by their names.
        delimiter: one character between fields; by default a comma in CSV and a tab in TSV.
        dataset_name: by default the name of the file.
        split_name: split of all rows when there is no split column.
        rejected: a list for images that cannot be used, see :func:`~vl_plugins.data.annotations.gather_images`.

    Returns:
        The images in the order in which they first appear; the caption ids are running numbers.

    Raises:
        UserError: the file is missing, has another suffix, no rows, or a line that cannot be read; the columns cannot
            be found; an image cannot be used. The message names file and line.
    """
    file = Path(file)
    names, rows = _read_rows(file, delimiter)
    if not rows:
        raise UserError(f"{file} has no rows")
    found = (columns or Columns()).find(file, names)
    name = re.sub(r"[^A-Za-z0-9_-]", "_", file.stem) if dataset_name is None else dataset_name
    picked = ((line, found.pick(row, name, split_name)) for line, row in rows)
    return gather_images(((place_of(file, "line", line, row["file"]), row) for line, row in picked), rejected)


def _read_rows(file: Path, delimiter: str | None) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """Return the column names, and the rows that are not empty with the numbers of their first lines."""
    suffix = file.suffix.lower()
    if suffix not in DELIMITERS:
        raise UserError(f"{file} is no table that can be read; its name must end in {', '.join(DELIMITERS)}")
    # "sig": spreadsheets put a byte order mark first, which would become a part of the first name. Bytes that are not
    # UTF-8 become characters that no caption or path may have, so that they are found with the row they are in.
    stream = io.StringIO(read_file(file).decode("utf-8-sig", "surrogateescape"), newline="")
    line, rows = 1, []
    try:
        if suffix == ".jsonl":
            for line, text in enumerate(stream, 1):
                if text.strip():
                    rows.append((line, check_type(parse_json(text.encode(), "it"), dict[str, Any])))
            return list(dict.fromkeys(name for _, row in rows for name in row)), rows
        delimiter = DELIMITERS[suffix] if delimiter is None else delimiter
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise UserError(f"two columns have the same name: {', '.join(map(repr, names))}")
        line = reader.line_num + 1
        for fields in reader:
            if fields:
                if len(fields) != len(names):
                    raise UserError(f"{len(fields)} fields, but {len(names)} column names")
                rows.append((line, dict(zip(names, fields, strict=True))))
            line = reader.line_num + 1
        return names, rows
    except (csv.Error, TypeError, ValueError) as error:
        hint = "; is a quote missing, or one too many?" if isinstance(error, csv.Error) else ""
        raise UserError(f"{file}: line {line}: {error}{hint}") from error


def _texts(value: Any, lines: bool) -> list[Any]:
    """Return the texts of a caption; anything else is kept, for the error."""
    texts: list[Any] = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(item, dict):
            item = next((item[key] for key in TEXT_KEYS if key in item), item)
        for text in item if isinstance(item, list) else [item]:
            if lines and isinstance(text, str):
                texts += [line for line in text.splitlines() if line.strip()]
            else:
                texts.append(text)
    return texts
