"""Tables of captioned images (CSV, TSV and JSON Lines), read into one checked record per image."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.annotations import (
    CaptionedImage,
    ImageCollector,
    RejectedImage,
    check_caption,
    check_name,
    get_group,
    place_of,
)
from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.storage import open_regular
from vl_plugins.utils.errors import UserError, unknown_name

__all__ = ["Columns", "Row", "gather_rows", "read_caption_table"]

IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "path", "image_path")
CAPTION_COLUMNS = re.compile(r"captions?|title|text|caption[_ ]?\d+")
SPLIT_COLUMNS = ("split",)
ID_COLUMNS = ("image_id", "id")
DELIMITERS = {".csv": ",", ".tsv": "\t"}

# 18 digits fit into 64 bits, whatever reads the shards.
CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")

# A row by column, or why it cannot be read, with the number of its first line.
Row = tuple[int, dict[str, Any] | UserError]


@dataclass(frozen=True)
class Columns:
    """The columns of a table by what they have; None for what it does not have."""

    image: str
    captions: tuple[str, ...]
    split: str | None
    id: str | None
    group: str | None


@dataclass
class _Gathered:
    """The rows of one image while they are gathered; ``problem`` is the first wrong one, with its place."""

    line: int
    file: str
    filename: str
    split: str
    id: str | None = None
    group: int | str | None = None
    captions: list[str] = field(default_factory=list)
    caption_ids: list[int] = field(default_factory=list)
    problem: tuple[str, UserError] | None = None


def read_caption_table(
    file: str | Path,
    *,
    image_column: str | None = None,
    caption_columns: Sequence[str] | None = None,
    split_column: str | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
    delimiter: str | None = None,
    dataset_name: str | None = None,
    split_name: str = "train",
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Read a table with the path of an image and one or several of its captions in each row.

    CSV and TSV start with a row of column names; fields with the delimiter, quotes or line breaks are quoted as
    spreadsheets do it. JSON Lines have an object in each line, and a caption column may hold a list of captions.

    Rows with the same path are one image, at the place of the first, with the captions of all in their order; their
    split, id and group must agree. With several caption columns an empty one means that the row has fewer captions.
    Image ids are integers when every id of the table is a plain decimal one of up to 18 digits and strings otherwise;
    without an id column they are running numbers of the images. Caption ids are running numbers of the captions.

    Args:
        file: UTF-8 text whose name ends in ``.csv``, ``.tsv`` or ``.jsonl``.
        image_column: column with the path relative to the image root; by default the first present of ``image``,
            ``filepath``, ``file_name``, ``filename``, ``path`` and ``image_path``.
        caption_columns: columns with captions; by default all of ``caption``, ``captions``, ``title``, ``text``,
            ``caption1``, ``caption_2``, ``caption 3``, ... in the order of the table.
        split_column: column with the split; by default ``split``, if present.
        id_column: column with the image id; by default the first present of ``image_id`` and ``id``, if any.
        group_column: column with the ``group`` of the image; by default there are no groups.
        delimiter: one character between fields; by default a comma in CSV and a tab in TSV.
        dataset_name: name given to the data set; by default that of the file, with ``_`` for characters other than
            letters, digits, ``_`` and ``-``.
        split_name: split of all rows when there is no split column.
        rejected: a list to which images with a wrong row are appended, once each with the place of that row; all
            other rows of such an image are left out too. None raises on the first one.

    Returns:
        The images in the order in which they first appear.

    Raises:
        UserError: the file is missing, has another suffix or no rows, a byte that is not UTF-8 text, a quote that is
            not closed or a field larger than the limit of :mod:`csv`; a column is not there, there twice or asked for
            twice; the delimiter or a name cannot be one. Also, unless ``rejected`` is given: a row with too many or
            too few fields or malformed JSON, a value of a wrong type, a caption that is blank or missing, rows of
            an image that disagree, a path that leads out of the image root, or the id of another image. A row whose
            split is unknown cannot be counted and always raises. The message names file and line.
    """
    file = Path(file)
    suffix = file.suffix.lower()
    if suffix not in (*DELIMITERS, ".jsonl"):
        raise UserError(f"{file} is no table that can be read; its name must end in .csv, .tsv or .jsonl")
    if dataset_name is None:
        dataset_name = re.sub(r"[^A-Za-z0-9_-]", "_", file.stem)
    check_name("data set", dataset_name)
    check_name("split", split_name)
    if suffix == ".jsonl":
        if delimiter is not None:
            raise UserError(f"{file} has no delimiter; only CSV and TSV have one")
        names, rows = _read_json_lines(file)
    else:
        names, rows = _read_delimited(file, DELIMITERS[suffix] if delimiter is None else delimiter)
    columns = _choose_columns(file, names, image_column, caption_columns, split_column, id_column, group_column)
    return gather_rows(file, rows, columns, dataset_name, split_name, rejected)


def gather_rows(
    source: str | Path,
    rows: Iterable[Row],
    columns: Columns,
    dataset_name: str,
    split_name: str,
    rejected: list[RejectedImage] | None,
    unit: str = "line",
) -> list[CaptionedImage]:
    """Return the images of rows, as :func:`read_caption_table` does.

    Args:
        source: what messages call the table.
        rows: the number of each row with its values by column, or with what is wrong with it.
        columns: the columns that count.
        dataset_name: as for :func:`read_caption_table`.
        split_name: likewise.
        rejected: likewise.
        unit: what messages count rows in.

    Raises:
        UserError: there is no row, or one is wrong, as for :func:`read_caption_table`.
    """
    collector = ImageCollector(rejected)
    gathered = _gather_by_path(source, rows, columns, split_name, collector, unit)
    ids = [image.id for image in gathered if image.id is not None]
    as_integers = all(CANONICAL_INT.fullmatch(value) for value in ids)
    for number, image in enumerate(gathered):
        place = place_of(unit, image.line, image.filename)
        try:
            if image.problem is not None:
                place, error = image.problem
                raise error
            image_id = number if image.id is None else int(image.id) if as_integers else image.id
            collector.add(
                CaptionedImage(
                    image_id=image_id,
                    file=image.file,
                    captions=tuple(image.captions),
                    caption_ids=tuple(image.caption_ids),
                    split=image.split,
                    dataset=dataset_name,
                    filename=image.filename,
                    group=image.group,
                )
            )
        except UserError as error:
            collector.reject(source, place, image.split, error)
    return collector.images


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines with their ends; only a line feed ends one, so numbers are those of an editor."""
    try:
        with open_regular(file) as stream:
            for number, line in enumerate(stream, 1):
                if b"\0" in line:
                    raise UserError(f"{file}: line {number}: a NUL byte; expected UTF-8 text")
                # "sig": spreadsheets put a byte order mark first, which would become a part of the first name.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: line {number}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_delimited(file: Path, delimiter: str) -> tuple[list[str], Iterator[Row]]:
    """Return the column names and an iterator over the rows, each a string by column."""
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise UserError(f"the delimiter must be one character, not a quote or line break, got {delimiter!r}")
    records = _delimited_records(file, delimiter)
    _, header = next(records, (0, []))
    names = [name.strip() for name in header]
    repeated = [name for name in names if name and names.count(name) > 1]
    if repeated:
        raise UserError(f"{file}: column {repeated[0]!r} is there {names.count(repeated[0])} times; rename one")
    return names, ((line, _row(names, fields)) for line, fields in records)


def _row(names: list[str], fields: list[str]) -> dict[str, Any] | UserError:
    if len(fields) == len(names):
        return dict(zip(names, fields, strict=True))
    return UserError(
        f"the number of fields is {len(fields)}, of column names {len(names)}; a field with the delimiter in it must "
        "be quoted"
    )


def _delimited_records(file: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row that is not empty, with the number of its first line."""
    reader = csv.reader(_lines(file), delimiter=delimiter, strict=True)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    # Not a matter of one row: where the next one starts is unknown.
    except csv.Error as error:
        # Python's own words are advice on how to open the file.
        reason = "a carriage return within a field" if str(error).startswith("new-line character") else error
        raise UserError(f"{file}: line {line}: {reason}; is a quote missing, or one too many?") from error


def _read_json_lines(file: Path) -> tuple[list[str], list[Row]]:
    """Return the keys of all objects in order of appearance, and the objects."""
    names: dict[str, None] = {}
    rows: list[Row] = []
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            row = check_type(parse_json(line.encode(), "the line"), dict[str, Any])
            names.update(dict.fromkeys(row))
        except UserError as error:
            row = error
        rows.append((number, row))
    if rows and not names:
        number, row = rows[0]
        raise UserError(f"{file}: line {number}: {row if isinstance(row, UserError) else 'the object is empty'}")
    return list(names), rows


def _choose_columns(
    file: Path,
    names: list[str],
    image: str | None,
    captions: Sequence[str] | None,
    split: str | None,
    id_: str | None,
    group: str | None,
) -> Columns:
    """Check the columns asked for and choose the others."""
    if not names:
        raise UserError(f"{file} has no rows")
    asked = [name for name in (image, *(captions or ()), split, id_, group) if name is not None]
    for name in asked:
        if name not in names:
            raise UserError(f"{file}: {unknown_name('column', name, names)}")
        if asked.count(name) > 1:
            raise UserError(f"{file}: column {name!r} is asked for more than once; each can be one thing only")

    free = [name for name in names if name not in asked]
    image = _first_present(IMAGE_COLUMNS, free) if image is None else image
    captions = tuple(captions or (name for name in free if CAPTION_COLUMNS.fullmatch(name)))
    listed = ", ".join(map(repr, names))
    if image is None:
        raise UserError(f"{file}: which column has the images? name it with --image-column; columns: {listed}")
    if not captions:
        raise UserError(f"{file}: which column has the captions? name it with --caption-column; columns: {listed}")
    return Columns(
        image=image,
        captions=captions,
        split=_first_present(SPLIT_COLUMNS, free) if split is None else split,
        id=_first_present(ID_COLUMNS, free) if id_ is None else id_,
        group=group,
    )


def _first_present(candidates: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in candidates if name in names), None)


def _gather_by_path(
    source: str | Path,
    rows: Iterable[Row],
    columns: Columns,
    split_name: str,
    collector: ImageCollector,
    unit: str,
) -> list[_Gathered]:
    """Return the images in order of appearance; rows that belong to none are rejected."""
    gathered: dict[str, _Gathered] = {}
    number_of_captions = 0
    empty = True
    for line, row in rows:
        empty = False
        place, split, image = place_of(unit, line), None if columns.split is not None else split_name, None
        try:
            if isinstance(row, UserError):
                raise row
            filename = _text(row, columns.image)
            place = place_of(unit, line, filename)
            if columns.split is not None:
                named = _text(row, columns.split)
                check_name("split", named)
                split = named
            path = str(PurePosixPath(filename))
            image = gathered.get(path)
            if image is None:
                image = gathered[path] = _Gathered(line, path, filename, split)
                image.id, image.group = _id(row, columns.id), get_group(row, columns.group)
            else:
                _check_agreement(image, split, _id(row, columns.id), get_group(row, columns.group), unit)
            captions = _captions(row, columns.captions)
        except UserError as error:
            if image is None:
                collector.reject(source, place, split, error)
            else:
                image.problem = image.problem or (place, error)
            continue
        image.captions += captions
        image.caption_ids += range(number_of_captions, number_of_captions + len(captions))
        number_of_captions += len(captions)
    if empty:
        raise UserError(f"{source} has no rows")
    return list(gathered.values())


def _check_agreement(image: _Gathered, split: str, image_id: str | None, group: int | str | None, unit: str) -> None:
    for kind, value, first in (
        ("split", split, image.split),
        ("id", image_id, image.id),
        ("group", group, image.group),
    ):
        if value != first:
            raise UserError(
                f"{kind} {value!r}, but {first!r} for the same image in {unit} {image.line}; "
                "rows of one image must agree"
            )


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{column!r} must be text, got {value!r:.60}")
    return value


def _id(row: dict[str, Any], column: str | None) -> str | None:
    if column is None:
        return None
    # JSON Lines may have numbers; they are compared with ids in quotes as text.
    return str(row[column]) if type(row.get(column)) is int else _text(row, column)


def _captions(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """Return the captions of one row, at least one."""
    captions: list[str] = []
    for column in columns:
        value = row.get(column)
        if len(columns) > 1 and (value is None or (isinstance(value, str) and not value.strip())):
            continue
        values = value if isinstance(value, list) else [value]
        try:
            check_type(values, list[str])
        except UserError as error:
            raise UserError(f"{column!r} must hold captions: {error}") from None
        for caption in values:
            check_caption(caption)
        captions += values
    if not captions:
        raise UserError(f"it has no caption in {', '.join(map(repr, columns))}")
    return captions
