"""Arrays of features in files of NumPy's format, read without running any code that a file holds.

The header of an array declares its type and shape. It must agree with the number of bytes that follow, so that a small
file cannot ask for much memory.
"""

import math
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vl_plugins.errors import UserError

__all__ = [
    "ARRAYS",
    "IDS",
    "MOST_DECLARED",
    "Content",
    "Header",
    "check_header",
    "read_array",
    "read_header",
    "tensor_from_array",
]

ARRAYS = ("image_features", "caption_features", "image_of_caption")
IDS = ("image_ids", "caption_ids")
MOST_DECLARED = 100  # times the size of a compressed file; embeddings are hardly compressed
BFLOAT16 = np.dtype("V2")  # NumPy has no such type; ml_dtypes and JAX save it as two bytes without a meaning


class Content(NamedTuple):
    """What a reader returns of a file.

    ``names`` maps each of ``ARRAYS`` to what this kind of file calls it, ``listed`` each array in the file to its shape
    or type, for errors. ``values`` has ids and the description.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    names: dict[str, str]
    listed: dict[str, str]


class Header(NamedTuple):
    """Type and shape of an array, and the bytes of the header itself."""

    dtype: np.dtype
    shape: tuple[int, ...]
    length: int

    @property
    def declared(self) -> int:
        """Bytes of the file with the array."""
        return self.length + math.prod(self.shape) * self.dtype.itemsize


def read_header(stream: BinaryIO, name: str) -> Header:
    """Return the header at the start of a ``.npy`` file; raise ``UserError`` with the array's name without one."""
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read = np.lib.format.read_array_header_1_0
        shape, _, dtype = read(stream)
    except Exception as error:  # damaged bytes raise nearly anything
        raise UserError(f"{name} is not an array of NumPy, or its header is damaged") from error
    return Header(dtype, shape, stream.tell())


def check_header(header: Header, name: str, size: int) -> None:
    """Raise ``UserError`` if an array holds Python objects, or does not fill its file as its header declares.

    Args:
        header: of the array.
        name: of the array, for errors.
        size: bytes of the file.
    """
    if header.dtype.hasobject:
        raise UserError(
            f"{name} has Python objects, which are not read because they can run code: "
            "save numbers, or strings as array.astype(str)"
        )
    if min(header.shape, default=0) < 0 or header.declared != size:
        raise UserError(f"{name} has {size:,} bytes where its header declares {header.declared:,}: is it truncated?")


def read_array(stream: BinaryIO) -> np.ndarray:
    """Return the array of a stream whose header :func:`check_header` has checked."""
    return np.lib.format.read_array(stream, allow_pickle=False)


def tensor_from_array(array: np.ndarray, name: str) -> Tensor:
    """Return an array of numbers as a tensor, whatever its byte order and memory layout.

    Integers become int64, numbers of more than eight bytes float64. Two bytes without a type are bfloat16.

    Args:
        array: is shared with the tensor where it can be.
        name: for errors.

    Raises:
        UserError: the array has no real numbers.
    """
    if array.dtype == BFLOAT16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind in "iu":
        dtype = np.dtype(np.int64)
    elif dtype.kind != "f":
        raise UserError(f"{name} must have real numbers, got an array of type {dtype}")
    elif dtype.itemsize > 8:
        dtype = np.dtype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
