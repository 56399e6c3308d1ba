"""Region or grid features of images: array files (``.npy``), which stand in shards in place of pictures."""

import io
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.storage import error_text
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

if TYPE_CHECKING:
    import numpy

__all__ = ["FEATURE_EXTENSION", "FeatureInfo", "decode_features", "inspect_features", "with_array_files"]

FEATURE_EXTENSION = "npy"

# The first bytes of an array file.
MAGIC = b"\x93NUMPY"


class FeatureInfo(NamedTuple):
    """What :func:`inspect_features` finds.

    Args:
        num_features: number N of features of the image.
        feature_dim: number W of values of each.
    """

    num_features: int
    feature_dim: int


def decode_features(data: bytes) -> "numpy.ndarray":
    """Return the features of an image, (N, W) float32: a row for each region, or each cell of a grid.

    A row of zeros is a region that is not there: batches are padded with such rows. A grid ``(W, rows, columns)`` is
    stored as ``(rows * columns, W)``, which is ``grid.reshape(len(grid), -1).T``.

    Args:
        data: content of an array file (``.npy``) as ``numpy.save`` writes it, of 16, 32 or 64 bit floats.

    Raises:
        UserError: the content is empty, damaged, pickled or something else; the array is not two-dimensional or of
            another type, or without a row that is not zero; a value is not finite, or too large for 32 bits.
    """
    numpy = require("numpy", extra="data")
    if not data:
        raise UserError("the file is empty")
    if not data.startswith(MAGIC):
        raise UserError("the file is not an array file (.npy, as numpy.save writes it)")
    try:
        array = numpy.load(io.BytesIO(data), allow_pickle=False)
    # Headers of damaged files raise nearly anything: ValueError, EOFError, MemoryError, SyntaxError, TokenError.
    except Exception as error:
        raise UserError(f"the array cannot be read: {error}") from error
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise UserError(f"the array must be of float16, float32 or float64, it is of {array.dtype}")
    if array.ndim != 2:
        raise UserError(
            f"the array must be (N, W), a row for each of N features, it is {array.shape}; store a grid (W, rows, "
            "columns) as grid.reshape(len(grid), -1).T"
        )
    with numpy.errstate(over="ignore"):
        features = numpy.ascontiguousarray(array, dtype=numpy.float32)
    if not numpy.isfinite(features).all():
        raise UserError("the array has values that are not finite, or too large for 32 bits")
    if not features.any():
        raise UserError(f"the array {array.shape} has no features; a row of zeros is one that is not there")
    return features


def inspect_features(data: bytes) -> FeatureInfo:
    """Find out whether readers of shards can use an array file.

    Raises:
        UserError: as for :func:`decode_features`.
    """
    return FeatureInfo(*decode_features(data).shape)


def with_array_files(images: Iterable[CaptionedImage], folder: str | os.PathLike) -> list[CaptionedImage]:
    """Return the images with the array file of each in ``folder`` as their ``file``, in the same order.

    That is ``<image id>.npy``, or else the name of the image file with ``.npy`` in place of its extension, in the
    folder itself whatever folder the image is in. An image without either gets the second name, which is then missing.

    Raises:
        UserError: the folder cannot be listed; it has both for an image, or none for any; a file is that of two images.
    """
    try:
        # Names that lead elsewhere are not among these.
        present = set(os.listdir(folder))
    except OSError as error:
        raise UserError(f"cannot list the folder of features {folder}: {error_text(error)}") from error
    owners: dict[str, CaptionedImage] = {}
    found = []
    for image in images:
        by_id = f"{image.image_id}.{FEATURE_EXTENSION}"
        by_name = f"{PureWindowsPath(image.filename).stem}.{FEATURE_EXTENSION}"
        if by_id != by_name and {by_id, by_name} <= present:
            raise UserError(
                f"{folder} has both {by_id}, by image id, and {by_name}, by file name, for image {image.filename}; "
                "name all array files by image id, or all by file name"
            )
        file = by_id if by_id in present else by_name
        if file in present and owners.setdefault(file, image) is not image:
            raise UserError(
                f"{folder} has one {file} for two images, {owners[file].filename} (image id {owners[file].image_id}) "
                f"and {image.filename} (image id {image.image_id}); name the array files by image id"
            )
        found.append(replace(image, file=file))
    if found and not owners:
        raise UserError(f"{folder} has no array file of the images; expected names such as {by_id} or {by_name}")
    return found
