"""What can be encoded: images with captions, a folder of pictures alone, or a file with one caption a line."""

import csv
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from vl_plugins.data.caption_table import Columns
from vl_plugins.data.collection import Collection
from vl_plugins.data.hub import is_data_set
from vl_plugins.data.reading import read_collection
from vl_plugins.data.records import CaptionRule
from vl_plugins.data.rows import PICTURES, open_text, read_rows
from vl_plugins.data.shard_names import SHARDS
from vl_plugins.data.table_collection import TABLES
from vl_plugins.errors import UserError, user_errors, warn_of_input

__all__ = ["CaptionFile", "Encodable", "PictureFolder", "read_encodable"]

FILES_LISTED = 3  # in a warning


class PictureFolder:
    """The pictures in a folder and in its folders, without captions, in the order of their names.

    Files and folders whose names start with a dot are left out.

    Args:
        folder: on a disk.

    Attributes:
        image_ids: paths in the folder.
        tables: files in the folder that may have captions, which are not read.
    """

    kind = "a folder of pictures"
    caption_ids = None
    splits: Sequence[str] = ()

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.image_ids: list[int | str] = []
        self.tables: list[str] = []
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if name.startswith(".") or "/." in name:
                continue
            if path.suffix.lower() in PICTURES:
                self.image_ids.append(name)
            elif path.suffix.lower() in TABLES:
                self.tables.append(name)

    def __len__(self) -> int:
        return len(self.image_ids)

    def describe(self) -> str:
        """Return a part of a line, such as ``"24 pictures, no captions"``."""
        return f"{len(self):,} pictures, no captions"

    def digest(self) -> str:
        """Return a SHA-256 of the names and sizes of the files."""
        digest = hashlib.sha256()
        for name in self.image_ids:
            digest.update(f"{name}\0{os.path.getsize(self.folder / str(name))}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()


class CaptionFile:
    """A text file with one caption a line.

    Attributes:
        captions: without space around them; blank lines are left out.
        caption_ids: the numbers of their lines, from 1.
    """

    kind = "captions"
    image_ids = None
    splits: Sequence[str] = ()

    def __init__(self, file: str | os.PathLike[str]):
        self.captions: list[str] = []
        self.caption_ids: list[int | str] = []
        self.blank_lines = 0
        with user_errors(os.fspath(file)), open_text(os.fspath(file)) as stream:
            for number, line in enumerate(stream, 1):
                caption = line.strip()
                if not caption:
                    self.blank_lines += 1
                    continue
                if any("\udc80" <= character <= "\udcff" for character in caption):
                    raise UserError(f"{os.fspath(file)}: line {number} is not UTF-8")
                self.captions.append(caption)
                self.caption_ids.append(number)
        if not self.captions:
            raise UserError(f"{os.fspath(file)} has no captions, one a line")

    def __len__(self) -> int:
        return len(self.captions)

    def describe(self) -> str:
        """Return a part of a line, such as ``"100 captions, one a line"``."""
        text = f"{len(self):,} captions, one a line"
        return f"{text}; {self.blank_lines:,} blank lines left out" if self.blank_lines else text

    def digest(self) -> str:
        """Return a SHA-256 of the captions."""
        return hashlib.sha256("\n".join(self.captions).encode()).hexdigest()


Encodable = Collection | PictureFolder | CaptionFile


def read_encodable(data: str, rule: CaptionRule) -> Encodable:
    """Read where images and captions are, or one of both.

    A folder is one of pictures alone if no picture in it has a ``.txt`` of its name, and it has neither shards nor
    Parquet files. A ``.txt`` has a caption in each line, unless its first line has the names of a table's columns.

    Args:
        data: as for :func:`~vl_plugins.data.reading.read_collection`; or a folder of pictures, or a ``.txt``.
        rule: of captions.

    Raises:
        UserError: the data cannot be read, or there are none.

    Warns:
        InputWarning: beside pictures without captions are files that may have them.
    """
    if os.path.isdir(data) and not is_data_set(data) and not any(Path(data).rglob(SHARDS)):
        folder = PictureFolder(data)
        texts = set(folder.tables)
        has_texts = any(Path(str(name)).with_suffix(".txt").as_posix() in texts for name in folder.image_ids)
        if folder.image_ids and not has_texts:
            if folder.tables:
                listed = ", ".join(folder.tables[:FILES_LISTED])
                if len(folder.tables) > FILES_LISTED:
                    listed += ", ..."
                warn_of_input(
                    f"{data} is read as pictures without captions; if {listed} has captions of them, give that file in "
                    "place of the folder"
                )
            return folder
    if os.path.isfile(data) and Path(data).suffix.lower() == ".txt" and not _is_table(data):
        return CaptionFile(data)
    return read_collection(data, caption_lines=rule)


def _is_table(file: str) -> bool:
    """Return whether a text has the names of columns with images and captions in its first line, or Flickr30K's."""
    try:
        column_names, _ = read_rows(file)
        Columns().find(column_names)
    except (UserError, csv.Error):
        return False
    return True
