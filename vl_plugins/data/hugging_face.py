"""Image-caption data sets of the Hugging Face hub, and local folders of Parquet files, images or WebDataset tars."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.files import MAX_FILE_BYTES, read_bytes
from vl_plugins.data.images import FileFolder
from vl_plugins.data.out_of_core import KeyedRows, group_rows
from vl_plugins.data.sources import Columns, Images, join_rows
from vl_plugins.errors import UserError, first_line, require

__all__ = ["HuggingFaceFiles", "read_hugging_face"]

# Those of the image before `id`, which may be that of a caption where each row has one.
ID_COLUMNS = ("image_id", "cocoid", "img_id", "imgid", "filename", "file_name", "id", "__key__")
FILE_NAME_COLUMNS = ("filename", "file_name")
ROWS_TOGETHER = 1000


class HuggingFaceFiles(FileFolder):
    """Images named ``<split of the data set>/<row>/<file name>``, in columns of type ``datasets.Image(decode=False)``.

    Where a row has the path of a file in place of its bytes, the file must be in one of the folders.
    """

    def __init__(self, name: str, splits: dict[str, Any], folders: Sequence[Path]):
        self.name = name
        self.splits = splits
        self.folders = [folder.resolve() for folder in folders]

    def read(self, file: str) -> bytes:
        split, row, _ = file.split("/", 2)
        (image,) = self.splits[split][int(row)].values()
        if image is not None and image["bytes"] is not None:
            return image["bytes"]
        if image is None or image["path"] is None:
            raise UserError("the row has no image")
        path = Path(image["path"]).resolve()
        if not any(path.is_relative_to(folder) for folder in self.folders):
            raise UserError(f"the row names the file {path}, which is not of the data set")
        return read_bytes(path, name="the file", max_bytes=MAX_FILE_BYTES)  # of a folder of images

    def state(self, file: str) -> str:
        return self.splits[file.partition("/")[0]]._fingerprint  # of all rows, so that no image is read twice

    def place(self, file: str) -> str:
        return f"{self.name}: {file}"


def read_hugging_face(
    name: str,
    columns: Columns | None = None,
    *,
    config: str | None = None,
    revision: str | None = None,
    data_files: Mapping[str, str] | None = None,
    caption_lines: bool = False,
    join_restval: bool = True,
    dataset_name: str | None = None,
    on_error: str = "raise",
) -> tuple[Images, HuggingFaceFiles]:
    """Read an image-caption data set with the library ``datasets``, which downloads and caches it.

    Rows of one split with the same id and an image of as many bytes are one image, where the first row is. Caption ids
    are running numbers.

    Args:
        name: name on the hub, such as ``"jxie/coco_captions"``, or a local folder of Parquet files, of images with
            ``metadata.csv``, of WebDataset tars, or of whatever else the library knows.
        columns: which column holds what. By default images are in the column of that type, and ids of images in the
            first present of :data:`ID_COLUMNS`; without any, each row is an image. Without a split column the splits
            are those of the data set.
        config, revision: configuration (subset), and branch, tag or commit on the hub.
        data_files: pattern of the files by split, ``{"test": "data/test-*"}``; by default all are downloaded.
        caption_lines: whether each line of a text is a caption, as in CLIP_benchmark's ``.txt``.
        join_restval: whether ``restval`` counts as ``train``.
        dataset_name: by default the last part of ``name``.
        on_error: see :func:`~vl_plugins.data.sources.join_rows`.

    Raises:
        UserError: the data set cannot be loaded; a column is not there or cannot be found; an image cannot be used.
    """
    datasets = require("datasets", extra="hub")
    # By default the library checks that all splits of the data set are there.
    some = {} if data_files is None else {"data_files": dict(data_files), "verification_mode": "no_checks"}
    path = str(Path(name).resolve()) if Path(name).is_dir() else name
    try:
        splits = datasets.load_dataset(path, config, revision=revision, **some)
        features = next(iter(splits.values())).features
        columns = (columns or Columns()).find(name, list(features), _image_columns(datasets, features), ID_COLUMNS)
        splits = splits.cast_column(columns.image, datasets.Image(decode=False))
    except UserError:
        raise
    except Exception as error:  # whatever the readers of the many formats raise
        raise UserError(f"cannot load {name}: {first_line(error)}") from error
    if dataset_name is None:
        dataset_name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(name).resolve().name)
    rows = _rows(splits, columns, caption_lines, join_restval)
    images = join_rows(group_rows(rows, f"{name}: "), dataset_name, f"{name}: ", on_error)
    caches = datasets.config.HF_DATASETS_CACHE, require("huggingface_hub.constants", extra="hub").HF_HUB_CACHE
    folders = [Path(name)] if Path(name).is_dir() else [Path(cache) for cache in caches]
    return images, HuggingFaceFiles(name, splits.select_columns([columns.image]), folders)


def _image_columns(datasets: Any, features: Mapping[str, Any]) -> list[str]:
    """Return the column with the images by its type, or nothing where that is not clear."""
    found = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    # Parquet files of other tools have no more than that type.
    found = found or [column for column, feature in features.items() if getattr(feature, "dtype", "") == "binary"]
    return found if len(found) == 1 else [column for column in found if column == "image"]


def _rows(splits: Mapping[str, Any], columns: Columns, caption_lines: bool, join_restval: bool) -> KeyedRows:
    """Yield all rows with keys; those of one image have the same key."""
    compute = require("pyarrow.compute", extra="hub")
    wanted = [*columns.captions, columns.split, columns.id, columns.group]
    for split, dataset in splits.items():
        file_names = [column for column in FILE_NAME_COLUMNS if column in {*dataset.features} - {columns.image}]
        names = list(dict.fromkeys(column for column in (*wanted, *file_names) if column is not None))
        batches = dataset.select_columns([columns.image, *names]).with_format("arrow")
        pick = columns.picker(names, split, caption_lines)
        numbers = itertools.count()
        for batch in batches.iter(ROWS_TOGETHER):
            # Neither touches the bytes of the images, which stay on the disk.
            image = batch[columns.image]
            paths = compute.struct_field(image, "path").to_pylist()
            sizes = compute.binary_length(compute.struct_field(image, "bytes")).to_pylist()
            for values, path, size in zip(batch.select(names).to_pylist(), paths, sizes, strict=True):
                number = next(numbers)
                row = pick(f"{split} row {number}", list(values.values()))
                path = next(filter(None, (values[column] for column in file_names)), path)
                row.filename = PurePosixPath(str(path or "")).name or str(number)
                row.file = f"{split}/{number}/{row.filename}"
                if row.split == "restval" and join_restval:
                    row.split = "train"
                yield row.file if columns.id is None else f"{split}/{row.image_id}/{size}", row
