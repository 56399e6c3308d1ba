"""Image-caption data sets of the Hugging Face hub, Parquet files, and local folders of what its library knows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.caption_table import PLAIN_ID, Columns, label_of
from vl_plugins.data.files import read_bytes
from vl_plugins.data.grouping import Images, KeyedRows, join_rows
from vl_plugins.data.records import all_have_lines, lines_of
from vl_plugins.errors import UserError, require, user_errors

# Those of the image before `id`, which may be that of a caption where each row has one.
ID_COLUMNS = ("image_id", "cocoid", "img_id", "imgid", "filename", "file_name", "id", "__key__")
FILE_NAME_COLUMNS = ("filename", "file_name")
ROWS_TOGETHER = 1000
PICTURES = ("struct<bytes", "struct<path", "binary", "large_binary")  # types of Parquet
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes
DATA_SET_FILES = (*SAVED, "metadata.csv", "metadata.jsonl")


class HubFiles:
    """Images named ``<split>/<row>/<file name>``, in columns of type ``datasets.Image(decode=False)``.

    It has the methods of :class:`~vl_plugins.data.writer.FileFolder`. A row may have the path of a file in place of its
    bytes, if the file is in one of the folders.
    """

    def __init__(self, splits: dict[str, Any], folders: Sequence[str | Path]):
        self.splits = splits
        self.folders = [Path(folder).resolve() for folder in folders]

    def read(self, file: str) -> bytes:
        split, row, _ = file.split("/", 2)
        (image,) = self.splits[split][int(row)].values()
        if image is None or not (image["bytes"] or image["path"]):
            raise UserError("the row has no image")
        if image["bytes"]:
            return image["bytes"]
        path = Path(image["path"]).resolve()
        if not any(path.is_relative_to(folder) for folder in self.folders):
            raise UserError(f"the row names the file {path}, which is not of the data set: give its folder as --images")
        return read_bytes(path)

    def state(self, file: str) -> str:
        return self.splits[file.partition("/")[0]]._fingerprint  # of all rows, so that no image is read twice


def read_hugging_face(
    name: str,
    columns: Columns | None = None,
    *,
    config: str | None = None,
    revision: str | None = None,
    data_files: Mapping[str, str] | None = None,
    image_root: str | Path | None = None,
    dataset_name: str | None = None,
) -> tuple[Images, HubFiles]:
    """Read an image-caption data set with the library ``datasets``, which downloads and caches it.

    Rows of one split with the same picture are one image, where the first row is: with one path of a file, or with
    equal bytes. With a column of image ids, these have to be the same, too. Caption ids are running numbers.

    Args:
        name: name on the hub, such as ``"jxie/coco_captions"``; or a Parquet file; or a local folder of Parquet files,
            of images with ``metadata.csv``, of WebDataset tars, of ``save_to_disk``, or of whatever else the library
            knows.
        columns: which column holds what. By default images are in the column of that type, and ids of images in the
            first present of :data:`ID_COLUMNS`, if any. Without a split column the splits are those of the data set.
        config, revision: configuration (subset), and branch, tag or commit on the hub.
        data_files: pattern of the files by split, ``{"test": "data/test-*"}``; by default all are downloaded.
        image_root: rows may name files in this folder; otherwise only files of the data set itself.
        dataset_name: by default the last part of ``name``.

    Raises:
        UserError: the data set cannot be loaded; a column is not there or cannot be found.
    """
    datasets = require("datasets", extra="hub")
    columns = columns or Columns()
    names_ids = columns.id is not None
    with user_errors(f"cannot load {name}", Exception):
        splits = _load(name, config, revision, data_files)
        columns = _find_columns(columns, next(iter(splits.values())).features)
        splits = splits.cast_column(columns.image, datasets.Image(decode=False))
    dataset_name = dataset_name or label_of(Path(name).resolve().name.removesuffix(".parquet"))
    caches = datasets.config.HF_DATASETS_CACHE, require("huggingface_hub.constants", extra="hub").HF_HUB_CACHE
    folders = [name] if Path(name).is_dir() else list(caches)
    if image_root is not None:
        folders.append(image_root)
    files = HubFiles(splits.select_columns([columns.image]), folders)
    has_plain_ids = columns.id == PLAIN_ID and not names_ids
    return join_rows(_rows(splits, columns, has_plain_ids), dataset_name, f"{name}: ", has_plain_ids), files


def _load(name: str, config: str | None, revision: str | None, data_files: Mapping[str, str] | None) -> Any:
    """Return the splits of a data set, a ``DatasetDict``."""
    datasets = require("datasets", extra="hub")
    path = Path(name)
    if any((path / file).is_file() for file in SAVED):
        saved = datasets.load_from_disk(name)
        return datasets.DatasetDict(train=saved) if isinstance(saved, datasets.Dataset) else saved
    if path.is_file() or _is_pattern(name):
        if not name.endswith(".parquet"):
            raise UserError(f"{name} is no Parquet file; `vl-plugins shards table` reads CSV, TSV and JSON Lines")
        files = [str(file.resolve()) for file in sorted(path.parent.glob(path.name))]
        return datasets.load_dataset("parquet", data_files={"train": files})
    if path.is_dir():
        name = str(path.resolve())
    options: dict[str, Any] = {"revision": revision}
    if data_files is not None:
        # By default the library checks that all splits of the data set are there.
        options |= {"data_files": dict(data_files), "verification_mode": "no_checks"}
    return datasets.load_dataset(name, config, **options)


def _find_columns(columns: Columns, features: Mapping[str, Any]) -> Columns:
    """Return the columns of a data set with these features; that of the images has their type."""
    # Parquet files of other tools have no more than the type `binary`.
    types = require("datasets", extra="hub").Image().dtype, "binary"
    images = [name for name, feature in features.items() if getattr(feature, "dtype", None) in types]
    if columns.image is None and len(images) == 1:
        columns = replace(columns, image=images[0])
    return columns.find(list(features), ID_COLUMNS)


def is_data_set(data: str) -> bool:
    """Return whether a folder is one of ``save_to_disk``, of Parquet files, or of images with ``metadata.csv``."""
    return any(path.name in DATA_SET_FILES or path.suffix == ".parquet" for path in Path(data).rglob("*"))


def has_pictures(file: str, columns: Columns | None = None) -> bool:
    """Return whether a Parquet file has pictures, and not their paths; True for a pattern of such files."""
    if _is_pattern(file):
        return True
    parquet = require("pyarrow.parquet", extra="hub")
    with user_errors(file, Exception):
        schema = parquet.read_schema(file)
    names = schema.names if columns is None or columns.image is None else [columns.image]
    return any(str(schema.field(name).type).startswith(PICTURES) for name in schema.names if name in names)


def _is_pattern(name: str) -> bool:
    return name.endswith(".parquet") and any(sign in Path(name).name for sign in "*?[")


def _have_lines(splits: Mapping[str, Any]) -> bool:
    """Return whether each text of WebDataset tars has several lines, which are captions then."""
    batches = (dataset.select_columns(["txt"]).iter(ROWS_TOGETHER) for dataset in splits.values())
    return all_have_lines(text or "" for batch in chain.from_iterable(batches) for text in batch["txt"])


def _rows(splits: Mapping[str, Any], columns: Columns, has_plain_ids: bool) -> KeyedRows:
    """Yield all rows with keys; those of one image have the same key.

    Equal pictures with different ids are different images, unless the ids may be those of captions.
    """
    compute = require("pyarrow.compute", extra="hub")
    has_lines = list(columns.captions) == ["txt"] and _have_lines(splits)
    has_image_ids = columns.id is not None and not has_plain_ids
    for split, dataset in splits.items():
        file_names = [name for name in FILE_NAME_COLUMNS if name in dataset.features and name != columns.image]
        used = [*columns.captions, columns.split, columns.id, columns.group, *file_names]
        names = list(dict.fromkeys(filter(None, used)))
        number = 0
        for batch in dataset.select_columns([columns.image, *names]).with_format("arrow").iter(ROWS_TOGETHER):
            image = batch[columns.image]
            paths = compute.struct_field(image, "path").to_pylist()
            contents = compute.struct_field(image, "bytes")
            for values, path, content in zip(batch.select(names).to_pylist(), paths, contents, strict=True):
                row = columns.row(f"{split} row {number}", values, split)
                if has_lines:
                    row.captions = lines_of(row.captions[0])
                picture = _picture(path, content)
                for name in reversed(file_names):
                    path = values[name] or path
                row.filename = PurePosixPath(str(path or "")).name or str(number)
                row.file = f"{split}/{number}/{row.filename}"
                key = row.file
                if picture is not None:
                    key = f"{split}/{row.image_id}/{picture}" if has_image_ids else f"{split}/{picture}"
                yield key, row
                number += 1


def _picture(path: str | None, content: Any) -> str | None:
    """Return what is equal for rows of one picture, and for no others; None for a row without one.

    Args:
        path: of the file; of a picture in the table, any name.
        content: bytes of a picture in the table, as an Arrow value.
    """
    data = content.as_buffer() if content.is_valid else b""
    if len(data) > 0:
        return hashlib.blake2b(data, digest_size=16).hexdigest()
    return path or None
