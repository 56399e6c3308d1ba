"""The files of tables, read row by row: CSV, TSV, JSON Lines, JSON lists, Parquet, ``.token``, folders of pictures."""

import codecs
import csv
import io
import itertools
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import fsspec
import msgspec

from vl_plugins.data.files import read_bytes
from vl_plugins.data.records import all_have_lines, lines_of
from vl_plugins.errors import UserError, require, user_errors


class TableRow(NamedTuple):
    """A row of a table: where it is, its values by column, and what is wrong with it, if anything is."""

    place: str
    values: dict[str, Any]
    problem: str | None = None


# A reader yields the names of all columns, and then the rows.
NamesAndRows = Generator[Any, None, None]

DELIMITERS = ("\t", ",", "| ", ";")
TOKEN = re.compile(r"([^\t]+)#\d+\t(.*)")  # Flickr30K's "1000092795.jpg#0<tab>Two young guys ..."
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
NO_LIST = "it is no list of rows: `vl-plugins shards coco` reads Karpathy's splits, and `coco-captions` COCO's files"


def read_rows(
    file: str | Path, delimiter: str | None = None, has_lines: bool | None = None
) -> tuple[list[str], Iterator[TableRow]]:
    """Return the names of a table's columns, and its rows, which are read as they are taken.

    - Text, such as ``.csv`` and ``.tsv``: a row of column names, and fields quoted as spreadsheets do. A line whose
      quotes mean nothing to a spreadsheet is split as it stands. With the delimiter ``"| "``, as in Kaggle's
      ``results.csv``, quotes have no meaning. UTF-8, or the UTF-16 of spreadsheets.
    - Text without names whose lines are ``a.jpg#0<tab>caption``, such as Flickr30K's ``.token``.
    - ``.jsonl``: an object in each line. ``.json``: a list of objects.
    - ``.parquet`` with paths of images.
    - A folder: each picture in it with the ``.txt`` of the same name.

    Args:
        file: path; of text also a URL.
        delimiter: of text; by default the first of tab, comma, ``"| "`` and semicolon that the first line has.
        has_lines: of a folder, whether each line of a ``.txt`` is a caption; None: if each text has several.

    Raises:
        UserError: the file is none of these.
    """
    suffix = Path(file).suffix.lower()
    if Path(file).is_dir():
        table = _read_pictures(Path(file), has_lines)
    elif suffix == ".jsonl":
        table = _read_json_lines(file)
    elif suffix == ".json":
        table = _read_json_list(file)
    elif suffix == ".parquet":
        table = _read_parquet(file)
    else:
        table = _read_text(file, delimiter)
    names = list(next(table))
    return names, table


def _read_text(file: str | Path, delimiter: str | None) -> NamesAndRows:
    with open_text(file) as stream:
        lines = enumerate(stream, 1)
        number, header = next(((number, line) for number, line in lines if line.strip()), (0, ""))
        if not header:
            raise UserError(f"{file} is empty")
        if delimiter is None and TOKEN.match(header):
            yield from _read_tokens(itertools.chain([(number, header)], lines))
        else:
            texts = (line for _, line in lines)
            yield from _read_csv(file, number, itertools.chain([header], texts), delimiter or _delimiter_of(header))


@contextmanager
def open_text(file: str | Path) -> Iterator[TextIO]:
    with fsspec.open(str(file), "rb") as stream:
        first = stream.read(4)
        stream.seek(0)
        if first == b"PAR1":
            raise UserError(f"{file} is Parquet, not text: name it .parquet")
        # "surrogateescape": to find the line that is not UTF-8.
        encoding = "utf-16" if first[:2] in UTF_16 else "utf-8-sig"
        with io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="") as text:
            yield text


def _delimiter_of(header: str) -> str:
    return next((delimiter for delimiter in DELIMITERS if delimiter in header), ",")


def _read_tokens(lines: Iterator[tuple[int, str]]) -> NamesAndRows:
    yield ["image", "caption"]
    for number, line in lines:
        fields = TOKEN.match(line.rstrip("\r\n"))
        if fields is not None:
            yield TableRow(f"line {number}", {"image": fields[1], "caption": fields[2]})
        elif line.strip():
            yield TableRow(f"line {number}", {}, "expected an image, '#', a number, a tab and a caption")


def _read_csv(file: str | Path, first: int, lines: Iterator[str], delimiter: str) -> NamesAndRows:
    """Yield the rows of delimited text, whose line of names has the number ``first``."""
    options: dict[str, Any] = {"delimiter": delimiter, "strict": True}
    if delimiter[1:] == " ":
        options |= {"delimiter": delimiter[0], "skipinitialspace": True, "quoting": csv.QUOTE_NONE}
    latest = [""]  # line, as it is in the file
    reader = csv.reader(_remembered(lines, latest), **options)
    names = next(reader)
    if len({*names}) < len(names):
        raise UserError(f"{file}: two columns have the same name: {', '.join(map(repr, names))}")
    yield names
    while True:
        line = reader.line_num + first
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fields = latest[0].rstrip("\r\n").split(delimiter)
            last = reader.line_num + first - 1
            if last > line or len(fields) != len(names):
                place = f"line {line}" if last == line else f"lines {line} to {last}"
                yield TableRow(place, {}, f"{error}; is a quote missing, or one too many?")
                continue
        if fields:
            problem = None
            if len(fields) != len(names):
                problem = f"{len(fields)} fields, but {len(names)} column names"
            yield TableRow(f"line {line}", dict(zip(names, fields, strict=False)), problem)


def _remembered(lines: Iterator[str], latest: list[str]) -> Iterator[str]:
    for line in lines:
        latest[0] = line
        yield line


def _read_json_lines(file: str | Path) -> NamesAndRows:
    decode = msgspec.json.Decoder(dict[str, Any]).decode

    def objects() -> Iterator[TableRow]:
        with fsspec.open(str(file), "rb") as stream:
            for line, text in enumerate(stream, 1):
                if text.strip():
                    try:
                        yield TableRow(f"line {line}", decode(text.removeprefix(codecs.BOM_UTF8)))
                    except ValueError as error:
                        raise UserError(f"{file}: line {line}: it is not a JSON object: {error}") from error

    names: dict[str, None] = {}
    for row in objects():
        names |= dict.fromkeys(row.values)
    yield names
    yield from objects()


def _read_json_list(file: str | Path) -> NamesAndRows:
    content = read_bytes(file).removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"{":
        raise UserError(NO_LIST)
    with user_errors(str(file)):
        rows = msgspec.json.decode(content, type=list[dict[str, Any]])
    names: dict[str, None] = {}
    for values in rows:
        names |= dict.fromkeys(values)
    yield names
    for number, values in enumerate(rows):
        yield TableRow(f"row {number}", values)


def _read_parquet(file: str | Path) -> NamesAndRows:
    parquet = require("pyarrow.parquet", extra="hub")
    with user_errors(str(file), Exception), parquet.ParquetFile(file) as table:
        yield table.schema_arrow.names
        number = 0
        for batch in table.iter_batches():
            for values in batch.to_pylist():
                yield TableRow(f"row {number}", values)
                number += 1


def _read_pictures(folder: Path, has_lines: bool | None) -> NamesAndRows:
    pictures = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in PICTURES]
    texts = {path: path.with_suffix(".txt") for path in pictures}
    captions = {path: text.read_text("utf-8-sig") for path, text in texts.items() if text.is_file()}
    if not captions:
        raise UserError("there is no picture with a .txt of the same name")
    if has_lines is None:
        has_lines = all_have_lines(captions.values())
    yield ["image", "caption"]
    for path in pictures:
        name = path.relative_to(folder).as_posix()
        if path not in captions:
            yield TableRow(name, {"image": name}, f"there is no {texts[path].name}")
        else:
            yield TableRow(name, {"image": name, "caption": lines_of(captions[path]) if has_lines else captions[path]})
