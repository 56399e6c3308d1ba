"""Features in Parquet files, a row for each caption.

Columns are

- ``caption_features``: a list of D floats, of any of Parquet's list types.
- ``image_features``: the same for the caption's image. It may be null where another row of that image has it.
- ``image_id``: an integer or a string. Rows of one id are captions of one image, wherever they stand; images are in the
  order of their first rows.
- ``caption_id``, if wanted: an integer or a string.

Other columns are not read. Sets have no place here; folders and other files do.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vl_plugins.errors import UserError, reason, require
from vl_plugins.retrieval.feature_arrays import MOST_DECLARED, Content, tensor_from_array
from vl_plugins.retrieval.feature_layouts import check_names, check_same_image

__all__ = ["read_parquet"]

NAMES = {"image_features": "image_features", "caption_features": "caption_features", "image_of_caption": "image_id"}
CAPTION_ID = "caption_id"
BATCH_ROWS = 1024
LEAST_BYTES = 4  # of a value in memory, where the file repeats one value in few bytes


def read_parquet(file: Path) -> Content:
    """Return the embeddings of a file, read in batches of rows.

    Raises:
        UserError: columns are missing or of another type, lists have several lengths, an image has no embedding or
            several that differ, or the file declares far more data than it has bytes.
    """
    parquet = require("pyarrow.parquet", extra="judge")
    with open(file, "rb") as stream:
        try:
            return _read(parquet.ParquetFile(stream), os.fstat(stream.fileno()).st_size)
        except OSError as error:  # which pyarrow raises for damaged bytes, too
            raise UserError(reason(error)) from error


def _read(table: Any, size: int) -> Content:
    listed = {field.name: str(field.type) for field in table.schema_arrow}
    check_names(NAMES, listed)
    if "image_id" not in listed:
        raise UserError(f"must have image_id, the image of each caption, got {', '.join(listed)}")
    _check_declared(table.metadata, size)
    columns = list(NAMES.values())
    if CAPTION_ID in listed:
        columns.append(CAPTION_ID)
    rows = _Rows(table.metadata.num_rows)
    for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
        rows.add(batch)
    return rows.content(listed)


def _check_declared(metadata: Any, size: int) -> None:
    declared = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for number in range(group.num_columns):
            column = group.column(number)
            declared += max(column.total_uncompressed_size, LEAST_BYTES * column.num_values)
    if declared > MOST_DECLARED * size:
        raise UserError(f"{declared:,} bytes, compressed more than {MOST_DECLARED} times")


class _Rows:
    """Embeddings of the batches so far."""

    def __init__(self, captions: int) -> None:
        self.expected = captions
        self.width: int | None = None  # D
        self.captions: np.ndarray | None = None
        self.image_of_caption: list[int] = []
        self.caption_ids: list[int | str] = []
        self.images: list[Tensor | None] = []
        self.image_of_id: dict[int | str, int] = {}

    def add(self, batch: Any) -> None:
        """Add the rows of a batch of records."""
        captions, has_caption = self._vectors(batch, "caption_features")
        if not has_caption.all():
            raise UserError(f"row {len(self.image_of_caption) + int(np.argmin(has_caption)):,} has no caption_features")
        start = len(self.image_of_caption)
        if self.captions is None:
            self.captions = np.empty((self.expected, captions.shape[1]), dtype=captions.dtype)
        self.captions[start : start + len(captions)] = captions
        if CAPTION_ID in batch.schema.names:
            self.caption_ids += batch.column(CAPTION_ID).to_pylist()
        images, has_image = self._vectors(batch, "image_features")
        embeddings = iter(tensor_from_array(images, "image_features"))
        for image_id, is_there in zip(batch.column("image_id").to_pylist(), has_image, strict=True):
            self._add_image(image_id, next(embeddings) if is_there else None)

    def _vectors(self, batch: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of a column that are not null, and which rows have one."""
        vectors, is_there = _vectors(batch.column(name), name)
        if len(vectors) and self.width is None:
            self.width = vectors.shape[1]
        if len(vectors) and vectors.shape[1] != self.width:
            raise UserError(
                f"{name} must have one length, that of all vectors, got {self.width} and {vectors.shape[1]}"
            )
        return vectors, is_there

    def _add_image(self, image_id: Any, embedding: Tensor | None) -> None:
        if not isinstance(image_id, (int, str)):
            row = len(self.image_of_caption)
            raise UserError(f"image_id must be integers or strings, got {image_id!r} in row {row:,}")
        if image_id not in self.image_of_id:
            self.image_of_id[image_id] = len(self.images)
            self.images.append(None)
        image = self.image_of_id[image_id]
        first = self.images[image]
        if first is None:
            if embedding is not None:
                self.images[image] = embedding.clone()
        elif embedding is not None:
            check_same_image(first, embedding, image_id)
        self.image_of_caption.append(image)

    def content(self, listed: dict[str, str]) -> Content:
        """Return all rows."""
        if self.captions is None:
            raise UserError("has no rows")
        if len(self.image_of_caption) != self.expected:
            raise UserError(f"has {len(self.image_of_caption):,} rows, and {self.expected:,} are declared")
        images = []
        for image_id, image in zip(self.image_of_id, self.images, strict=True):
            if image is None:
                raise UserError(f"image_id {image_id!r} has image_features in none of its rows")
            images.append(image)
        tensors = {
            "image_features": torch.stack(images),
            "caption_features": tensor_from_array(self.captions, "caption_features"),
            "image_of_caption": torch.tensor(self.image_of_caption),
        }
        values: dict[str, Any] = {"image_ids": list(self.image_of_id)}
        if self.caption_ids:
            values["caption_ids"] = self.caption_ids
        return Content(tensors, values, NAMES, listed)


def _vectors(column: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the lists of a column that are not null, (rows, D), and which rows have one."""
    arrow = require("pyarrow", extra="judge")
    compute = require("pyarrow.compute", extra="judge")
    types = arrow.types
    is_list = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    if not is_list or not types.is_floating(column.type.value_type):
        raise UserError(f"{name} must be lists of floats, got {column.type}")
    lists = column.drop_null()
    numbers = lists.flatten()
    if numbers.null_count:
        raise UserError(f"{name} has lists with null among their numbers")
    lengths = compute.list_value_length(lists).unique().to_pylist()
    if len(lengths) > 1:
        raise UserError(f"{name} must have one length, that of all vectors, got {lengths[0]} and {lengths[1]}")
    width = lengths[0] if lengths else 0
    vectors = np.array(numbers.to_numpy(zero_copy_only=False))  # a copy, since pyarrow's arrays are read-only
    return vectors.reshape(len(lists), width), column.is_valid().to_numpy(zero_copy_only=False)
