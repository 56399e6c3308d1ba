"""Image-caption data sets of the Hugging Face hub, and local folders of Parquet files, images or WebDataset tars."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.annotations import CaptionedImage, RejectedImage, check_name
from vl_plugins.data.caption_table import Columns, Row, gather_rows
from vl_plugins.data.image_files import read_file
from vl_plugins.utils.errors import UserError, first_line, unknown_name
from vl_plugins.utils.optional import require

__all__ = ["HuggingFaceFiles", "read_hugging_face"]

# Columns by what they have, the first that is present; txt and __key__ are what the library makes of WebDataset tars.
CAPTION_COLUMNS = ("caption", "captions", "sentences", "sentence", "text", "texts", "title", "txt")
NUMBERED_CAPTIONS = re.compile(r"caption[_ ]?\d+")
# Those of the image before `id`, which may be that of a caption where each row has one.
ID_COLUMNS = ("image_id", "cocoid", "img_id", "imgid", "filename", "file_name", "id", "__key__")
FILE_NAME_COLUMNS = ("filename", "file_name")
SPLIT_COLUMN = "split"

# Where an object has its captions: Karpathy's sentences, COCO's annotations, the .json of WebDataset tars.
TEXT_KEYS = ("raw", "caption", "captions", "text")

SPLIT_NAMES = {"validation": "val"}
ROWS_TOGETHER = 1000


class HuggingFaceFiles:
    """The images of a data set, read from the library's memory-mapped files.

    A file is called ``<split of the data set>/<row>/<file name>``.

    Args:
        name: of the data set.
        splits: ``datasets.Dataset`` by its split, with one column, of type ``datasets.Image(decode=False)``.
        folders: the folder of the data set, or the caches of the library; no image is read from elsewhere.
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
        return read_file(path)  # of a folder of images

    def state(self, file: str) -> tuple[int, str] | None:
        try:
            data = self.read(file)
        except UserError:
            return None
        # No time: a copy that is downloaded again is the same.
        return len(data), hashlib.sha256(data).hexdigest()

    def place(self, file: str) -> str:
        return f"{self.name}: {file}"


def read_hugging_face(
    name: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    data_files: Mapping[str, str] | None = None,
    image_column: str | None = None,
    caption_columns: Sequence[str] | None = None,
    caption_lines: bool = False,
    id_column: str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    join_restval: bool = True,
    dataset_name: str | None = None,
    rejected: list[RejectedImage] | None = None,
) -> tuple[list[CaptionedImage], HuggingFaceFiles]:
    """Read an image-caption data set with the library ``datasets``, which downloads and caches it.

    A caption column has a text, an object with texts under ``raw``, ``caption``, ``captions`` or ``text``, or a list of
    these. Rows of one split with the same id and an image of as many bytes are one image, at the place of the first,
    with the captions of all in their order. Ids are integers or strings as in
    :func:`~vl_plugins.data.caption_table.read_caption_table`; caption ids are running numbers.

    Args:
        name: name on the hub, such as ``"jxie/coco_captions"``, or a local folder of Parquet files, of images with
            ``metadata.csv``, of WebDataset tars, or of whatever else the library knows.
        config: configuration (subset) of a data set that has several.
        revision: branch, tag or commit on the hub.
        data_files: pattern of the files by split, ``{"test": "data/test-*"}``; only these are downloaded. By default
            the library finds all splits.
        image_column: column with images; by default the one of that type.
        caption_columns: columns with captions; by default the first present of ``caption``, ``captions``,
            ``sentences``, ``sentence``, ``text``, ``texts``, ``title`` and ``txt``, or else all of ``caption_0``, ...
        caption_lines: whether each line of a text is a caption, as in CLIP_benchmark's ``.txt``.
        id_column: column with the id of the image; by default the first present of ``image_id``, ``cocoid``,
            ``img_id``, ``imgid``, ``filename``, ``file_name``, ``id`` and ``__key__``. Without any, each row
            is an image.
        split_column: column with the split; by default ``split``, if present, or else the splits of the data set.
            ``validation`` is called ``val``.
        group_column: column with the ``group`` of the image.
        join_restval: whether ``restval`` counts as ``train``.
        dataset_name: name given to the data set; by default the last part of ``name``.
        rejected: a list to which images with a wrong row are appended; None raises on the first one.

    Returns:
        The images in the order in which they first appear, and their files.

    Raises:
        UserError: the data set cannot be loaded; a column is not there, or cannot be found: the message lists the
            columns. Also, unless ``rejected`` is given: a row without captions or with something else in their
            place, an id that another image has, rows of an image that disagree.
        MissingExtraError: ``datasets`` is not installed.
    """
    if dataset_name is None:
        dataset_name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(name).resolve().name)
    check_name("data set", dataset_name)
    datasets = require("datasets", extra="hub")
    splits = _load(datasets, name, config, revision, data_files)
    features = next(iter(splits.values())).features
    image_column = image_column or _image_column(datasets, name, features)
    asked = [image_column, *(caption_columns or ()), id_column, split_column, group_column]
    for column in filter(None, asked):
        if column not in features:
            raise UserError(f"{name}: {unknown_name('column', column, features)}")
        if asked.count(column) > 1:
            raise UserError(f"{name}: column {column!r} is asked for more than once; each can be one thing only")
    free = [column for column in features if column not in asked]
    caption_columns = caption_columns or [column for column in CAPTION_COLUMNS if column in free][:1]
    caption_columns = caption_columns or [column for column in free if NUMBERED_CAPTIONS.fullmatch(column)]
    if not caption_columns:
        raise UserError(f"{name}: which column has the captions? name it with --caption-column; {_listed(features)}")
    try:
        splits = {split: rows.cast_column(image_column, datasets.Image(decode=False)) for split, rows in splits.items()}
    except Exception as error:  # of many types
        raise UserError(f"{name}: column {image_column!r} has no images; {_listed(features)}") from error

    columns = Columns(
        image=image_column,
        captions=tuple(caption_columns),
        split=split_column or (SPLIT_COLUMN if SPLIT_COLUMN in free else None),
        id=id_column or next((column for column in ID_COLUMNS if column in free), None),
        group=group_column,
    )
    # What `gather_rows` takes: the captions in one column, and a split in each row.
    table = Columns("image", ("captions",), "split", "id" if columns.id else None, "group" if columns.group else None)
    rows = _rows(splits, columns, caption_lines, {**SPLIT_NAMES, **({"restval": "train"} if join_restval else {})})
    images = gather_rows(name, rows, table, dataset_name, "train", rejected, unit="row")
    images_only = {split: rows.select_columns([image_column]) for split, rows in splits.items()}
    images = [replace(image, filename=PurePosixPath(image.file).name) for image in images]
    caches = datasets.config.HF_DATASETS_CACHE, require("huggingface_hub.constants", extra="hub").HF_HUB_CACHE
    folders = [Path(name)] if Path(name).is_dir() else [Path(cache) for cache in caches]
    return images, HuggingFaceFiles(name, images_only, folders)


def _load(
    datasets: Any, name: str, config: str | None, revision: str | None, data_files: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the rows of each split."""
    # By default the library checks that all splits of the data set are there.
    some = {} if data_files is None else {"data_files": dict(data_files), "verification_mode": "no_checks"}
    path = str(Path(name).resolve()) if Path(name).is_dir() else name
    try:
        return dict(datasets.load_dataset(path, config, revision=revision, **some))
    except ConnectionError as error:
        raise UserError(
            f"cannot load {name}: there is no such folder, the Hugging Face hub cannot be reached, and the cache "
            f"does not have it ({first_line(error)})"
        ) from error
    # Whatever the readers of the many formats raise.
    except Exception as error:
        raise UserError(f"cannot load {name}: {first_line(error)}") from error


def _image_column(datasets: Any, name: str, features: dict[str, Any]) -> str:
    found = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    # Parquet files of other tools say no more than that.
    found = found or [column for column, feature in features.items() if getattr(feature, "dtype", "") == "binary"]
    if len(found) > 1 and "image" in found:
        return "image"
    if len(found) != 1:
        raise UserError(f"{name}: which column has the images? name it with --image-column; {_listed(features)}")
    return found[0]


def _listed(features: dict[str, Any]) -> str:
    described = (f"{column!r} ({getattr(feature, 'dtype', 'nested')})" for column, feature in features.items())
    return f"columns: {', '.join(described)}"


def _rows(splits: dict[str, Any], columns: Columns, caption_lines: bool, names: dict[str, str]) -> Iterator[Row]:
    """Yield all rows as `gather_rows` takes them; those of one image have the same path.

    Args:
        splits: rows by split of the data set.
        columns: of the data set.
        caption_lines: whether each line of a text is a caption.
        names: what splits are called instead.
    """
    compute = require("pyarrow.compute", extra="hub")
    needed = {columns.image, *columns.captions, columns.split, columns.id, columns.group} - {None}
    for split, dataset in splits.items():
        file_names = [column for column in FILE_NAME_COLUMNS if column in {*dataset.features} - {columns.image}]
        batches = dataset.select_columns([*needed, *(set(file_names) - needed)]).with_format("arrow")
        files: dict[Any, str] = {}
        number = 0
        for batch in batches.iter(ROWS_TOGETHER):
            # Neither touches the bytes of the images, which stay on the disk.
            image = batch[columns.image]
            paths = compute.struct_field(image, "path").to_pylist()
            sizes = compute.binary_length(compute.struct_field(image, "bytes")).to_pylist()
            for row, path, size in zip(batch.drop_columns([columns.image]).to_pylist(), paths, sizes, strict=True):
                file_name = next((row[column] for column in file_names if row[column]), path)
                file = f"{split}/{number}/{PurePosixPath(str(file_name or '')).name or number}"
                image_id = None if columns.id is None else row[columns.id]
                if image_id is not None:
                    file = files.setdefault((str(image_id), size), file)
                row_split = split if columns.split is None else row[columns.split]
                row_split = names.get(row_split, row_split) if isinstance(row_split, str) else row_split
                texts = [text for column in columns.captions for text in _texts(row[column], caption_lines)]
                yield (
                    number,
                    {
                        "image": file,
                        "captions": texts,
                        "split": row_split,
                        "id": image_id,
                        "group": None if columns.group is None else row[columns.group],
                    },
                )
                number += 1


def _texts(value: Any, lines: bool) -> list[Any]:
    """Return the texts of a caption column; what is none of them as it is, for the error."""
    if value is None:
        return []
    if isinstance(value, list):
        return [text for item in value for text in _texts(item, lines)]
    if isinstance(value, dict):
        key = next((key for key in TEXT_KEYS if key in value), None)
        return [value] if key is None else _texts(value[key], lines)
    if lines and isinstance(value, str):
        return [line for line in value.splitlines() if line.strip()]
    return [value]
