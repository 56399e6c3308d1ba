"""Image-caption data sets of the Hugging Face hub, Parquet files, and local folders of what its library knows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.caption_table import PLAIN_ID, Columns, label_of
from vl_plugins.data.files import read_bytes
from vl_plugins.data.out_of_core import KeyedRows
from vl_plugins.data.sources import Images, join_rows
from vl_plugins.errors import UserError, require, user_errors

# Those of the image before `id`, which may be that of a caption where each row has one.
ID_COLUMNS = ("image_id", "cocoid", "img_id", "imgid", "filename", "file_name", "id", "__key__")
FILE_NAME_COLUMNS = ("filename", "file_name")
ROWS_TOGETHER = 1000
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes


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
            raise UserError(f"the row names the file {path}, which is not of the data set")
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
    dataset_name: str | None = None,
) -> tuple[Images, HubFiles]:
    """Read an image-caption data set with the library ``datasets``, which downloads and caches it.

    Rows of one split with the same id and the same picture are one image, where the first row is: with one path of a
    file, or with equal bytes. Caption ids are running numbers.

    Args:
        name: name on the hub, such as ``"jxie/coco_captions"``; or a Parquet file; or a local folder of Parquet files,
            of images with ``metadata.csv``, of WebDataset tars, of ``save_to_disk``, or of whatever else the library
            knows.
        columns: which column holds what. By default images are in the column of that type, and ids of images in the
            first present of :data:`ID_COLUMNS`; without any, each row is an image. Without a split column the splits
            are those of the data set.
        config, revision: configuration (subset), and branch, tag or commit on the hub.
        data_files: pattern of the files by split, ``{"test": "data/test-*"}``; by default all are downloaded.
        dataset_name: by default the last part of ``name``.

    Raises:
        UserError: the data set cannot be loaded; a column is not there or cannot be found.
    """
    datasets = require("datasets", extra="hub")
    # By default the library checks that all splits of the data set are there.
    some = {} if data_files is None else {"data_files": dict(data_files), "verification_mode": "no_checks"}
    columns = columns or Columns()
    has_id = columns.id is not None
    with user_errors(f"cannot load {name}", Exception):
        if any(Path(name, file).is_file() for file in SAVED):
            splits = datasets.load_from_disk(name)
            if isinstance(splits, datasets.Dataset):
                splits = datasets.DatasetDict(train=splits)
        elif Path(name).is_file():
            if not name.endswith(".parquet"):
                raise UserError(f"{name} is no Parquet file; `vl-plugins shards table` reads CSV, TSV and JSON Lines")
            splits = datasets.load_dataset("parquet", data_files={"train": str(Path(name).resolve())})
        else:
            path = str(Path(name).resolve()) if Path(name).is_dir() else name
            splits = datasets.load_dataset(path, config, revision=revision, **some)
        features = next(iter(splits.values())).features
        # Parquet files of other tools have no more than the type `binary`.
        types = datasets.Image().dtype, "binary"
        images = [column for column, feature in features.items() if getattr(feature, "dtype", None) in types]
        if columns.image is None and len(images) == 1:
            columns = replace(columns, image=images[0])
        columns = columns.find(list(features), ID_COLUMNS)
        splits = splits.cast_column(columns.image, datasets.Image(decode=False))
    dataset_name = dataset_name or label_of(Path(name).resolve().name.removesuffix(".parquet"))
    caches = datasets.config.HF_DATASETS_CACHE, require("huggingface_hub.constants", extra="hub").HF_HUB_CACHE
    files = HubFiles(splits.select_columns([columns.image]), [name] if Path(name).is_dir() else caches)
    has_plain_ids = columns.id == PLAIN_ID and not has_id
    return join_rows(_rows(splits, columns, has_plain_ids), dataset_name, f"{name}: ", has_plain_ids), files


def _rows(splits: Mapping[str, Any], columns: Columns, has_plain_ids: bool) -> KeyedRows:
    """Yield all rows with keys; those of one image have the same key.

    Equal pictures with different ids are different images, unless the ids may be those of captions.
    """
    compute = require("pyarrow.compute", extra="hub")
    for split, dataset in splits.items():
        file_names = [column for column in FILE_NAME_COLUMNS if column in {*dataset.features} - {columns.image}]
        wanted = [*columns.captions, columns.split, columns.id, columns.group, *file_names]
        names = list(dict.fromkeys(column for column in wanted if column is not None))
        number = 0
        for batch in dataset.select_columns([columns.image, *names]).with_format("arrow").iter(ROWS_TOGETHER):
            image = batch[columns.image]
            paths = compute.struct_field(image, "path").to_pylist()
            contents = compute.struct_field(image, "bytes")
            for values, path, content in zip(batch.select(names).to_pylist(), paths, contents, strict=True):
                row = columns.row(f"{split} row {number}", values, split)
                picture = _picture(path, content)
                path = next(filter(None, (values[column] for column in file_names)), path)
                row.filename = PurePosixPath(str(path or "")).name or str(number)
                row.file = f"{split}/{number}/{row.filename}"
                if picture is None:
                    yield row.file, row
                elif columns.id is None or has_plain_ids:
                    yield f"{split}/{picture}", row
                else:
                    yield f"{split}/{row.image_id}/{picture}", row
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
