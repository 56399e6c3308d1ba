"""The files of one image: found in an archive, taken out of its bytes, checked and decoded."""

import io
import re
import struct
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import ImageOps

from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.data.picture_formats import UPRIGHT, inspect_image, open_image, orientation_of
from vl_plugins.errors import UserError, one_of, user_errors

# Far above any image, array of features or text; more would fill the memory of a process that reads it.
MAX_FILE_BYTES = 1 << 30

FEATURES = "npy"
# What a model takes of an image -> extensions of its file. Where a sample has several, the first counts.
INPUTS = {"images": ("jpg", "png", "webp", "jpeg"), "features": (FEATURES,)}
# As webdataset splits names, which would import torch; and files of its own.
NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
META_NAME = re.compile(r"__[^/]*__($|/)")


@dataclass(slots=True)
class Sample:
    """Files of one key in an archive, from byte ``start`` to ``end`` with headers; ``members`` by extension."""

    key: str
    start: int
    end: int
    members: dict[str, bytes]


def scan(stream: BinaryIO, extensions: Collection[str] = ()) -> Iterator[Sample]:
    """Yield the samples of an archive; with ``extensions``, only the headers of files with others are read.

    Files that belong to no sample are passed over. Names are split as webdataset splits them.

    Raises:
        Exception: there is no archive, or it is compressed, cut off or damaged; or a sample has a file twice. Complete
            samples before that place have been yielded.
    """
    sample = None
    # Never `r:*`: a compressed archive of kilobytes may go on without end.
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # or the list of a large archive fills the memory
            if not 0 <= member.size <= MAX_FILE_BYTES or member.issparse():
                raise ValueError(f"the header of {member.name} says {member.size} bytes, or a sparse file")
            name = NAME.fullmatch(member.name)
            if not member.isreg() or not name or META_NAME.match(member.name):
                continue
            key, extension = name[1], name[2].lower()
            if sample is None or key != sample.key:
                if sample is not None:
                    yield sample
                sample = Sample(key, member.offset, 0, {})
            if extension in sample.members:
                raise ValueError(f"{member.name} is in it twice")
            wanted = not extensions or extension in extensions
            sample.members[extension] = archive.extractfile(member).read() if wanted else b""  # type: ignore[union-attr]
            sample.end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        # tarfile takes a cut between two members, garbage, or the first of two joined archives for the end.
        stream.seek(archive.offset)
        end = stream.read(tarfile.RECORDSIZE + 2 * tarfile.BLOCKSIZE)  # a block more than the zeros of an archive
        if len(end) < tarfile.BLOCKSIZE or any(end):
            raise ValueError("it is cut off, or something follows its end; write the shard again")
    if sample is not None:
        yield sample


# The header of a file in an archive (POSIX ustar), with numbers as octal digits.
HEADER = struct.Struct("100s 8s 8s 8s 12s 12s 8s c 100s 8s 32s 32s 8s 8s 155s 12x")


class _Header(NamedTuple):
    name: bytes
    mode: bytes = b"0000644"
    owner: bytes = b"0000000"
    group: bytes = b"0000000"
    size: bytes = b""
    time: bytes = b"00000000000"
    checksum: bytes = b" " * 8  # for which it counts as spaces
    kind: bytes = tarfile.REGTYPE
    link: bytes = b""
    magic: bytes = tarfile.POSIX_MAGIC
    owner_name: bytes = b""
    group_name: bytes = b""
    major: bytes = b""
    minor: bytes = b""
    prefix: bytes = b""


def file_blocks(name: str, content: bytes) -> list[bytes]:
    """Return a file in an archive, in parts: no owner, time 0; a quarter of the time of ``TarInfo.tobuf``."""
    header = _Header(name.encode(), size=b"%011o" % len(content))
    checksum = b"%06o\0 " % sum(HEADER.pack(*header))
    header = header._replace(checksum=checksum)
    return [HEADER.pack(*header), content, bytes(-len(content) % tarfile.BLOCKSIZE)]


def parse_sample(data: bytes) -> Sample:
    """Return a sample with all its files, given its bytes in an archive.

    Raises:
        Exception: the bytes are not those of one sample.
    """
    sample = _parse_plain_sample(data)
    if sample is not None:
        return sample
    samples = list(scan(io.BytesIO(data + bytes(tarfile.BLOCKSIZE))))
    if len(samples) != 1:
        raise UserError(f"expected the files of one image, found those of {len(samples)}")
    return samples[0]


def _parse_plain_sample(data: bytes) -> Sample | None:
    """Return a sample as most programs write it, in a third of the time of ``tarfile``; None for any other."""
    key, place = "", 0
    members: dict[str, bytes] = {}
    while place < len(data):
        block = data[place : place + tarfile.BLOCKSIZE]
        if len(block) < tarfile.BLOCKSIZE:
            return None
        header = _Header._make(HEADER.unpack(block))
        size, checksum = header.size[:11], header.checksum.rstrip(b" \0")
        is_plain = header.kind == tarfile.REGTYPE and header.magic[:5] == b"ustar" and header.prefix[:1] == b"\0"
        if not is_plain or not size.isdigit() or not checksum.isdigit():
            return None
        if sum(block) - sum(header.checksum) + 8 * ord(" ") != int(checksum, 8):
            return None
        name = NAME.fullmatch(header.name.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
        if name is None or META_NAME.match(name[0]) or (members and name[1] != key):
            return None
        key, extension = name[1], name[2].lower()
        start = place + tarfile.BLOCKSIZE
        end = start + int(size, 8)
        if extension in members or end > len(data):
            return None
        members[extension] = data[start:end]
        place = start + -(-(end - start) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if not members or place != len(data):
        return None
    return Sample(key, 0, len(data), members)


def check_input(members: Mapping[str, bytes], max_image_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Decode the picture or else the array of a sample; raise :class:`UserError` if readers cannot use it."""
    if FEATURES in members and members.keys().isdisjoint(INPUTS["images"]):
        decode_features(members[FEATURES])
    else:
        inspect_image(input_of(members), max_image_pixels=max_image_pixels)


def decode(members: Mapping[str, bytes], inputs: str = "images", max_image_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """Return the RGB image of a sample, or with ``"features"`` its array (N, W).

    Raises:
        UserError: there is no picture or array, or :func:`~vl_plugins.data.picture_formats.open_image` raises it.
        Exception: of PIL, for damaged pixels.
    """
    data = input_of(members, inputs)
    if inputs == "features":
        return decode_features(data)
    with open_image(data, max_image_pixels) as image:
        if orientation_of(image) == UPRIGHT:
            return image.convert("RGB")
        return ImageOps.exif_transpose(image).convert("RGB")


def input_of(members: Mapping[str, bytes], inputs: str = "images") -> bytes:
    """Return the content of a sample's picture, or of its array file; raise :class:`UserError` if there is none."""
    for extension in INPUTS[one_of("inputs", inputs, INPUTS)]:
        if extension in members:
            return members[extension]
    raise UserError(f"it has no {inputs}, expected {' or '.join(INPUTS[inputs])}; it has {', '.join(sorted(members))}")


def decode_features(data: bytes) -> np.ndarray:
    """Return the features of an image, (N, W) float32: a row for each region, or each cell of a grid.

    A row of zeros is a region that is not there: batches are padded with such rows. A grid ``(W, rows, columns)`` is
    stored as ``grid.reshape(len(grid), -1).T``.

    Args:
        data: content of an array file (``.npy``) of floats.

    Raises:
        UserError: the content is damaged, pickled or something else; the array is not two-dimensional or of another
            type, or all zeros; a value is not finite, or too large for 32 bits.
    """
    with user_errors("the array cannot be read", Exception):
        array = np.load(io.BytesIO(data), allow_pickle=False)
        if array.ndim != 2 or array.dtype.kind != "f":
            raise UserError(f"the array must be (N, W) of floats, it is {array.shape} of {array.dtype}")
        with np.errstate(over="ignore"):
            features = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(features).all() or not features.any():
        raise UserError(f"the array {features.shape} has values that are not finite in 32 bits, or only zeros")
    return features
