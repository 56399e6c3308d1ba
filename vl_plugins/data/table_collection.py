"""Tables and folders of pictures as data for training and evaluation, without shards."""

import glob
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vl_plugins.data.caption_table import Columns, read_table
from vl_plugins.data.captions import RejectedImage, describe_rejected
from vl_plugins.data.collection import Collection
from vl_plugins.data.files import names
from vl_plugins.data.grouping import Images
from vl_plugins.data.hub import has_pictures, is_data_set, read_hugging_face
from vl_plugins.data.index import IndexHead, make_head
from vl_plugins.data.records import DEFAULT_RULE, CaptionRule, Record, record_of
from vl_plugins.data.rows import read_rows
from vl_plugins.data.shard_names import SHARDS
from vl_plugins.data.writer import FileFolder
from vl_plugins.errors import UserError

TABLES = (".csv", ".tsv", ".txt", ".token", ".json", ".jsonl", ".parquet")
READABLE = (
    "shards (.tar), a table (.csv, .tsv, .jsonl, .json, .parquet), a data set of `save_to_disk`, or a folder of "
    "Parquet files or of pictures with a .txt each; `vl-plugins shards` writes shards of more"
)
IMAGES_TOGETHER = 10_000


def is_table(data: Any) -> bool:
    """Return whether data are read as a table: its file, or a folder without shards."""
    if not isinstance(data, (str, os.PathLike)):
        return False
    if os.path.isdir(data):
        return not names(data, SHARDS)
    suffix = Path(data).suffix.lower()
    if os.path.isfile(data) and suffix not in (".tar", *TABLES):
        raise UserError(f"{os.fspath(data)}: it cannot be read; what can be: {READABLE}")
    return suffix in TABLES


def check_exists(data: str) -> None:
    """Raise :class:`UserError` if there is no such table or folder; a URL is not asked for."""
    if "://" not in data and not os.path.exists(data) and not glob.glob(data):
        raise UserError(f"{data} does not exist")


def is_picture_folder(data: str) -> bool:
    """Return whether a folder is one of pictures with ``.txt`` files."""
    if not os.path.isdir(data) or is_data_set(data) or any(Path(data).rglob("*.tar")):
        return False
    return any(Path(data).rglob("*.txt"))


def read_local(
    data: str, columns: Columns | None = None, delimiter: str | None = None, has_lines: bool | None = None
) -> tuple[Images, Any]:
    """Return the images of a table or a folder, and what their files are read from.

    Args:
        data: path of a table whose paths are relative to the working directory, of any kind that
            :func:`~vl_plugins.data.rows.read_rows` takes; of Parquet with pictures, or a pattern of such files;
            or of a folder that :func:`~vl_plugins.data.hub.read_hugging_face` takes.
        columns: which column holds what; by default they are found by their names.
        delimiter: of text; by default it is found.
        has_lines: of a folder of pictures with ``.txt``, whether each line is a caption; None: if each has several.

    Raises:
        UserError: the data cannot be read.
    """
    root = Path.cwd().anchor  # paths lead anywhere, as in open_clip
    if is_picture_folder(data):
        return read_table(data, columns, has_lines=has_lines), FileFolder(data)
    if is_data_set(data) or (data.endswith(".parquet") and has_pictures(data, columns)):
        return read_hugging_face(data, columns, image_root=root)
    if os.path.isdir(data):
        raise UserError(f"{data}: it cannot be read; what can be: {READABLE}")
    images = read_table(data, columns, image_root=root, folder=os.getcwd(), delimiter=delimiter)
    return images, FileFolder(root)


class TableCollection(Collection):
    """The images of a table or a folder, see :func:`read_local`. All captions are held, encoded.

    Args:
        data, columns, delimiter: see :func:`read_local`.
        on_error: ``"skip"`` leaves out rows that cannot be used.
        rule: whether each line of a ``.txt`` in a folder of pictures is a caption.

    Raises:
        UserError: the data cannot be read, have no images, or images of several splits.
    """

    ARRAYS = (*Collection.ARRAYS, "_encoded", "_first_byte")

    def __init__(
        self,
        data: str,
        on_error: str = "raise",
        rule: CaptionRule = DEFAULT_RULE,
        columns: Columns | None = None,
        delimiter: str | None = None,
    ):
        check_exists(data)
        images, self.files = read_local(data, columns, delimiter, rule.lines)
        self.data = data
        self._has_rows = _has_row_for_each_caption(data, columns, delimiter)
        rejected: list[RejectedImage] = []
        encoded: list[bytes] = []
        heads = list(self._heads(images, on_error, encoded, rejected))
        if not encoded:
            raise UserError(f"{data}: there is no image with a caption; left out: {describe_rejected(rejected)}")
        super().__init__([data] * len(heads), heads, on_error, rule)
        self.rejected = rejected
        self._encoded = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._first_byte = np.cumsum([0, *map(len, encoded)])

    def _heads(
        self, images: Images, on_error: str, encoded: list[bytes], rejected: list[RejectedImage]
    ) -> Iterator[IndexHead]:
        """Yield an index for every so many images, which are encoded."""
        encode = msgspec.msgpack.Encoder().encode
        splits: dict[str, int] = {}
        images = iter(images)
        while together := list(itertools.islice(images, IMAGES_TOGETHER)):
            records = []
            for image in together:
                if isinstance(image, RejectedImage):
                    if on_error == "raise":
                        raise UserError(f"{image.image}: {image.reason}")
                    rejected.append(image)
                    continue
                records.append(record_of(image.file, image))
                splits[image.split] = splits.get(image.split, 0) + 1
            encoded += map(encode, records)
            nowhere = [0] * len(records)
            yield make_head(records, nowhere, nowhere, size=0)
        if len(splits) > 1:
            counts = ", ".join(f"{split} ({count:,} images)" for split, count in splits.items())
            raise UserError(f"{self.data} has images of several splits, {counts}: {self._choice([*splits])}")

    def _choice(self, splits: Sequence[str]) -> str:
        """Return how to choose a split."""
        if os.path.isdir(os.path.join(self.data, splits[0])):
            return f"choose one, such as {os.path.join(self.data, splits[0])}"
        if os.path.isdir(self.data):
            return f"choose the files of one, such as '{os.path.join(self.data, splits[0])}-*.parquet'"
        return "make a table of each, or shards with `vl-plugins shards`"

    @property
    def kind(self) -> str:  # type: ignore[override]
        if is_picture_folder(self.data):
            return "pictures with a .txt each"
        return "a data set" if os.path.isdir(self.data) else "a table"

    def describe(self) -> str:
        text = super().describe()
        if self.rows is not None:
            text = f"{self.rows:,} rows, {text}"
        return f"{text}; left out: {describe_rejected(self.rejected)}" if self.rejected else text

    @property
    def rows(self) -> int | None:
        """Number of rows of a table that has one caption in each; None if that is not known."""
        return len(self.caption_hashes) + len(self.rejected) if self._has_rows else None

    def record(self, image: int) -> Record:
        """Return the file and the captions of an image."""
        start, end = self._first_byte[image : image + 2]
        return _decode(self._encoded[start:end].data)

    @cached_property
    def records(self) -> list[Record]:
        return [self.record(image) for image in range(len(self))]

    def place_of(self, image: int) -> str:
        return f"{super().place_of(image)} ({self.record(image).key})"

    def read(self, images: Sequence[int]) -> list[bytes | Exception]:
        contents: list[bytes | Exception] = []
        for image in images:
            try:
                contents.append(self.files.read(self.record(image).key))
            except UserError as error:
                contents.append(error)
        return contents

    def parse(self, image: int, data: bytes | Exception) -> tuple[Record, dict[str, bytes]]:
        if isinstance(data, Exception):
            raise data
        return self.record(image), {"jpg": data}

    def digest(self) -> str:
        return hashlib.sha256(self._encoded.data).hexdigest()


def _has_row_for_each_caption(data: str, columns: Columns | None, delimiter: str | None) -> bool:
    if Path(data).suffix.lower() not in (".csv", ".tsv") and delimiter is None:
        return False
    names, _ = read_rows(data, delimiter)
    return len((columns or Columns()).find(names).captions) == 1


_decode = msgspec.msgpack.Decoder(Record).decode
