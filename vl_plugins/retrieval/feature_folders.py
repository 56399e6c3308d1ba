"""Folders of features, whose parts can be written while embeddings are computed and read without a second copy.

A folder has

- ``images/``: files ``.npy`` of rows (rows, D) or sets (rows, K, D), one type and one D, K in all of them. They are
  joined in the order of their names, in which numbers count as numbers: ``part_2.npy`` before ``part_10.npy``. A part
  may have any number of rows. Names that start with a dot are skipped; any other file there is an error.
- ``captions/``: the same for captions, with the D of the images.
- ``image_of_caption.npy``: (C,) integers, the index of each caption's image among the rows of ``images/``. It is
  written last, so that a folder whose writer was stopped is not read as complete.
- ``ids.json``, if there are ids or a description: an object with ``image_ids`` (a list of I integers or strings),
  ``caption_ids`` (of C) and ``description`` (an object), each optional.

Other files beside these are not read. Arrays may be float16, float32 or float64, in either byte order, in C or Fortran
order; two bytes without a type (``V2``), as which NumPy saves bfloat16 of other packages, are bfloat16. Nothing outside
the folder is read, also through symbolic links.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vl_plugins.data.files import file_errors, lock, partial_folder, write_complete, write_file
from vl_plugins.errors import UserError
from vl_plugins.retrieval.feature_arrays import (
    Content,
    Header,
    check_header,
    read_array,
    read_header,
    tensor_from_array,
)

__all__ = ["UnfinishedFolder", "check_folder", "read_folder", "write_folder"]

PART_FOLDERS = {"image_features": "images", "caption_features": "captions"}
OWNERS = "image_of_caption.npy"
VALUES = "ids.json"
NAMES = {"image_features": "images/", "caption_features": "captions/", "image_of_caption": OWNERS}
PART_BYTES = 1 << 28
SETTINGS, LOCK = "settings.json", ".lock"  # of an unfinished folder


def read_folder(folder: Path) -> Content:
    """Return the arrays and values of a folder.

    Raises:
        UserError: a part is damaged or does not fit the others, or leads out of the folder.
    """
    listed = {}
    for path in folder.iterdir():
        if path.is_dir():
            listed[f"{path.name}/"] = ""
        elif path.suffix == ".npy":
            listed[path.name] = str(_header(path, folder).shape)
    tensors = {}
    for array, name in PART_FOLDERS.items():
        if f"{name}/" in listed:
            tensors[array] = tensor_from_array(_read_parts(folder, name), f"{name}/")
    if OWNERS in listed:
        _check_array(folder / OWNERS, folder)
        with open(folder / OWNERS, "rb") as stream:
            tensors["image_of_caption"] = tensor_from_array(read_array(stream), OWNERS)
    values = {}
    if (folder / VALUES).exists():
        _check_inside(folder / VALUES, folder)
        values = json.loads((folder / VALUES).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise UserError(f"{VALUES} must be a JSON object")
    return Content(tensors, values, NAMES, listed)


def _read_parts(folder: Path, name: str) -> np.ndarray:
    """Return the rows of all parts, each copied once from the mapped file."""
    paths = _part_paths(folder, name)
    headers = [_check_array(path, folder) for path in paths]
    _check_equal_types(paths, headers, folder)
    rows = sum(header.shape[0] for header in headers)
    array = np.empty((rows, *headers[0].shape[1:]), dtype=headers[0].dtype.newbyteorder("="))
    start = 0
    for path, header in zip(paths, headers, strict=True):
        stop = start + header.shape[0]
        if array[start:stop].size:  # nothing can be mapped of an empty array
            array[start:stop] = np.load(path, mmap_mode="r", allow_pickle=False)
        start = stop
    return array


def _part_paths(folder: Path, name: str) -> list[Path]:
    """Return the files of a side in order, numbers in names as numbers."""
    _check_inside(folder / name, folder)
    paths = [path for path in (folder / name).iterdir() if not path.name.startswith(".")]
    for path in paths:
        if path.suffix != ".npy":
            raise UserError(f"{name}/ must have .npy files only, got {path.name}")
    if not paths:
        raise UserError(f"{name}/ has no .npy files")
    return sorted(paths, key=_numeric_order)


def _numeric_order(path: Path) -> tuple[list[str | int], str]:
    words: list[str | int] = []
    for word in re.split(r"([0-9]+)", path.name):
        words.append(int(word) if word.isdigit() else word)
    return words, path.name


def _check_equal_types(paths: list[Path], headers: list[Header], folder: Path) -> None:
    first = headers[0]
    for path, header in zip(paths, headers, strict=True):
        name = path.relative_to(folder)
        if len(header.shape) not in (2, 3):
            raise UserError(f"{name} must have rows (N, D) or sets (N, K, D), got {header.shape}")
        if header.shape[1:] != first.shape[1:] or header.dtype != first.dtype:
            state = f"{header.shape} of {header.dtype}"
            raise UserError(f"{name} has shape {state}, unlike {paths[0].name}: {first.shape} of {first.dtype}")


def _header(path: Path, folder: Path) -> Header:
    _check_inside(path, folder)
    with open(path, "rb") as stream:
        return read_header(stream, str(path.relative_to(folder)))


def _check_array(path: Path, folder: Path) -> Header:
    header = _header(path, folder)
    check_header(header, str(path.relative_to(folder)), path.stat().st_size)
    return header


def _check_inside(path: Path, folder: Path) -> None:
    """Raise ``UserError`` unless a path is a file or folder inside the folder, also when links are followed."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{path.relative_to(folder)} leads out of the folder: copy it there")
    if not path.is_file() and not path.is_dir():  # a pipe would be waited for, forever
        raise UserError(f"{path.relative_to(folder)} is no file")


def check_folder(folder: str | os.PathLike) -> None:
    """Raise ``UserError`` if no features can be written to a folder, because something else is there."""
    path = Path(folder)
    if "://" in os.fspath(folder):
        raise UserError(f"a folder of features must be on a disk, got {folder}; .safetensors and .npz may be elsewhere")
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{folder} is a file, and a folder of features would replace it: choose another name")
    for entry in sorted(path.iterdir()):
        if not _is_of_layout(entry):
            raise UserError(f"{folder} is a folder with something else ({entry.name}): choose another name")


def _is_of_layout(entry: Path) -> bool:
    if entry.name in PART_FOLDERS.values():
        return entry.is_dir() and all(path.suffix == ".npy" for path in entry.iterdir())
    return entry.name in (OWNERS, VALUES)


def write_folder(arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], folder: str | os.PathLike) -> None:
    """Write arrays and JSON values as a folder that appears complete, or not at all.

    Arrays of one side alone make a folder of that side. It is written under another name beside its place,
    ``.<name>.<eight digits>.partial``, and renamed. A folder of features there is replaced; between two renames there
    is none.
    """
    with partial_folder(folder) as partial:
        for array, name in PART_FOLDERS.items():
            if array in arrays:
                _write_parts(arrays[array], partial / name)
        _write_rest(partial, values, arrays.get("image_of_caption"))
        _replace(Path(folder).resolve(), partial)


def _write_parts(array: np.ndarray, folder: Path) -> None:
    row_bytes = max(1, array[:1].nbytes)
    rows = max(1, PART_BYTES // row_bytes)
    for number, start in enumerate(range(0, len(array), rows)):
        _write_array(_part(folder, number), array[start : start + rows])


def _part(folder: Path, number: int) -> Path:
    return folder / f"part_{number:06d}.npy"


def _write_array(file: Path, array: np.ndarray) -> None:
    with write_complete(file) as stream:
        np.save(stream, array)


def _write_rest(folder: Path, values: Mapping[str, Any], image_of_caption: np.ndarray | None) -> None:
    """Write what a folder has beside its parts; the image of each caption last."""
    write_file(folder / VALUES, json.dumps(values).encode())
    if image_of_caption is not None:
        _write_array(folder / OWNERS, image_of_caption)


def _replace(target: Path, partial: Path) -> None:
    """Give a folder its name; one of that name is put back if this fails, and removed otherwise."""
    if not target.exists():
        partial.rename(target)
        return
    former = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.former")
    target.rename(former)
    try:
        partial.rename(target)
    except BaseException:
        former.rename(target)
        raise
    shutil.rmtree(former)


class UnfinishedFolder:
    """A folder of features that several processes write part by part, and that another run can continue.

    The parts lie in ``.<name>.unfinished`` beside the folder's place. When all are there, that folder gets its name;
    a folder of features there is replaced.

    Args:
        folder: its place, on a disk that all processes see.
        rows: of each part, the number of rows by array: ``image_features``, ``caption_features`` or both.
    """

    def __init__(self, folder: str | os.PathLike, rows: Sequence[Mapping[str, int]]):
        self.target, self.rows = Path(folder).resolve(), rows
        self.folder = self.target.with_name(f".{self.target.name}.unfinished")

    @contextmanager
    def begun(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Begin or continue, in the first process, while no other run may write the same folder.

        Args:
            settings: JSON values on which the embeddings depend.

        Raises:
            UserError: parts are there, of other settings; or another run is writing.
        """
        with lock(self.folder / LOCK, str(self.target)):
            self._check_settings(json.loads(json.dumps(settings)))
            yield

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        file = self.folder / SETTINGS
        if not file.exists():
            for name in PART_FOLDERS.values():  # of unknown settings
                shutil.rmtree(self.folder / name, ignore_errors=True)
            write_file(file, json.dumps(settings).encode())
            return
        former = json.loads(file.read_bytes())
        for name in settings | former:
            if former.get(name) != settings.get(name):
                difference = f"{name} {former.get(name)!r}, now {settings.get(name)!r}"
                state = f"{self.folder} has parts of another run"
                raise UserError(f"{state} ({difference}): remove it, or choose another name")

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not there, or not whole."""
        numbers = []
        for number, rows in enumerate(self.rows):
            if not all(self._has_rows(_part(self.folder / PART_FOLDERS[array], number), rows[array]) for array in rows):
                numbers.append(number)
        return numbers

    def _has_rows(self, file: Path, rows: int) -> bool:
        if not file.exists():
            return False
        try:
            return _check_array(file, self.folder).shape[0] == rows
        except UserError:
            return False

    def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a part, each array completely or not at all."""
        for array, values in arrays.items():
            _write_array(_part(self.folder / PART_FOLDERS[array], number), values)

    def finish(self, values: Mapping[str, Any], image_of_caption: np.ndarray | None) -> None:
        """Give the folder its name, in the first process.

        Args:
            values: ids and description.
            image_of_caption: (C,), or None of one side.

        Raises:
            UserError: a part is missing.
        """
        missing = self.missing()
        if missing:
            raise UserError(
                f"{self.folder} has no part {missing[0]}: do all processes write to one disk? run the command again"
            )
        with file_errors("write", self.target):
            _write_rest(self.folder, values, image_of_caption)
            for name in (SETTINGS, LOCK):
                (self.folder / name).unlink(missing_ok=True)
            _replace(self.target, self.folder)
