"""Tables as CSV or Parquet, written block by block, that appear complete or not at all."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from vl_plugins.data.files import file_errors, write_complete
from vl_plugins.errors import UserError, require

__all__ = ["TableFile", "check_table_file", "encodable"]

SUFFIXES = (".csv", ".parquet")
EXTRA = "judge"  # brings pyarrow


def check_table_file(file: str | os.PathLike[str]) -> None:
    """Raise ``UserError`` if no table can be written to a file of this name, before hours of encoding.

    Raises:
        UserError: the suffix is neither ``.csv`` nor ``.parquet``.
        MissingExtraError: pyarrow is not installed, for ``.parquet``.
    """
    suffix = Path(file).suffix
    if suffix not in SUFFIXES:
        raise UserError(f"{os.fspath(file)}: a table must end in {' or '.join(SUFFIXES)}")
    if suffix == ".parquet":
        require("pyarrow.parquet", extra=EXTRA)


def encodable(text: str) -> str:
    """Return a text with a question mark in place of half a surrogate pair, which UTF-8 cannot hold."""
    return text.encode(errors="replace").decode()


class TableFile:
    """A context manager that writes columns of equal length; when its block raises, nothing is left behind.

    CSV is UTF-8 with a heading, commas, lines that end in CR LF, and double quotes around texts that need them
    (RFC 4180). Numbers have all digits, and None is an empty field. In Parquet, None is null, and each block of rows is
    a row group.

    Args:
        file: ``.csv`` or ``.parquet``, a path or a URL of fsspec; its folder is created.
        types: pyarrow's name of the type of each column, such as ``string``.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """

    def __init__(self, file: str | os.PathLike[str], types: Mapping[str, str]):
        check_table_file(file)
        self.file = file
        self.types = types
        self._complete = write_complete(file)
        self._writer: _Writer | None = None

    def __enter__(self) -> "TableFile":
        stream = self._complete.__enter__()
        if Path(self.file).suffix == ".csv":
            self._writer = _CsvWriter(stream, self.types)
        else:
            self._writer = _ParquetWriter(stream, self.types)
        return self

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write rows, given as lists by column."""
        with file_errors("write", self.file):
            self._open_writer().write(columns)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                with file_errors("write", self.file):
                    self._open_writer().close()
            except BaseException:
                self._remove()
                raise
            self._complete.__exit__(None, None, None)
        else:
            self._remove()
        self._writer = None

    def _open_writer(self) -> "_Writer":
        if self._writer is None:
            raise ValueError("a TableFile is written in its `with` block")
        return self._writer

    def _remove(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        # The error itself may be of another file, and must not become "cannot write" this one.
        with suppress(_IncompleteError):
            self._complete.__exit__(_IncompleteError, _IncompleteError(), None)


class _IncompleteError(Exception):
    """Makes ``write_complete`` remove what is written so far."""


class _Writer(Protocol):
    def write(self, columns: Mapping[str, Sequence[Any]]) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class _CsvWriter:
    def __init__(self, stream: BinaryIO, types: Mapping[str, str]):
        self.stream = stream
        self.names = list(types)
        self._write_rows([self.names])

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        in_order = [columns[name] for name in self.names]
        self._write_rows(zip(*in_order, strict=True))

    def close(self) -> None:
        """All rows are in the stream already."""

    def abandon(self) -> None:
        """Nothing is open but the stream."""

    def _write_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows)
        self.stream.write(text.getvalue().encode())


class _ParquetWriter:
    def __init__(self, stream: BinaryIO, types: Mapping[str, str]):
        self.pyarrow = require("pyarrow", extra=EXTRA)
        fields = []
        for name, kind in types.items():
            fields.append((name, self.pyarrow.type_for_alias(kind)))
        self.schema = self.pyarrow.schema(fields)
        parquet = require("pyarrow.parquet", extra=EXTRA)
        self.writer = parquet.ParquetWriter(stream, self.schema)

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        table = self.pyarrow.table(dict(columns), schema=self.schema)
        self.writer.write_table(table)

    def close(self) -> None:
        self.writer.close()

    def abandon(self) -> None:
        # Otherwise the writer would write the end of the file when it is garbage, to a closed stream.
        with suppress(Exception):
            self.writer.close()
        self.writer.is_open = False
