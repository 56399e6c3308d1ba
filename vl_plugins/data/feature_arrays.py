"""Region or grid features of images: array files (``.npy``), which stand in shards in place of pictures."""

import io
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PureWindowsPath
from typing import Any

from vl_plugins.data.sources import CaptionedImage
from vl_plugins.data.storage import error_text
from vl_plugins.errors import UserError, require

__all__ = ["FEATURE_EXTENSION", "decode_features", "with_array_files"]

FEATURE_EXTENSION = "npy"


def decode_features(data: bytes) -> Any:
    """Return the features of an image, a NumPy array (N, W) float32: a row for each region, or each cell of a grid.

    A row of zeros is a region that is not there: batches are padded with such rows. A grid ``(W, rows, columns)`` is
    stored as ``grid.reshape(len(grid), -1).T``.

    Args:
        data: content of an array file (``.npy``), of 16, 32 or 64 bit floats.

    Raises:
        UserError: the content is empty, damaged, pickled or something else; the array is not two-dimensional or of
            another type, or without a row that is not zero; a value is not finite, or too large for 32 bits.
    """
    numpy = require("numpy", extra="data")
    if not data:
        raise UserError("the file is empty")
    if not data.startswith(b"\x93NUMPY"):
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
            f"the array must be (N, W), a row for each feature, it is {array.shape}; "
            "store a grid (W, rows, columns) as grid.reshape(len(grid), -1).T"
        )
    with numpy.errstate(over="ignore"):
        features = numpy.ascontiguousarray(array, dtype=numpy.float32)
    if not numpy.isfinite(features).all():
        raise UserError("the array has values that are not finite, or too large for 32 bits")
    if not features.any():
        raise UserError(f"the array {array.shape} has no features; a row of zeros is one that is not there")
    return features


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
        stems = dict.fromkeys((str(image.image_id), PureWindowsPath(image.filename).stem))
        names = [f"{stem}.{FEATURE_EXTENSION}" for stem in stems]
        files = [name for name in names if name in present]
        if len(files) > 1:
            raise UserError(f"{folder} has both {files[0]} and {files[1]} for {image.filename}; name all files one way")
        for file in files:
            owner = owners.setdefault(file, image)
            if owner is not image:
                raise UserError(
                    f"{folder} has one {file} for {owner.filename} (image id {owner.image_id}) and {image.filename} "
                    f"(image id {image.image_id}); name the array files by image id"
                )
        found.append(replace(image, file=files[0] if files else names[-1]))
    if found and not owners:
        raise UserError(f"{folder} has no array file of the images; expected names such as {' or '.join(names)}")
    return found
