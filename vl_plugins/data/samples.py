"""The files of one image: found in an archive, taken out of its bytes, checked and decoded."""

import io
import json
import re
import struct
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vl_plugins.data.captions import is_blank
from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.errors import UserError, one_of, user_errors

# Far above any image, array of features or text; more would fill the memory of a process that reads it.
MAX_FILE_BYTES = 1 << 30

TEXTS = ("json", "txt")
FEATURES = "npy"
# What a model takes of an image -> extensions of its file. Where a sample has several, the first counts.
INPUTS = {"images": ("jpg", "png", "webp", "jpeg"), "features": (FEATURES,)}
# As webdataset splits names, which would import torch; and files of its own.
NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
META_NAME = re.compile(r"__[^/]*__($|/)")
# PIL's name of a format -> extension.
IMAGE_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}

UPRIGHT, ON_ITS_SIDE = 1, (5, 6, 7, 8)  # orientations of EXIF

# PIL's modes that `convert("RGB")`, which readers of shards call, turns into what a viewer shows. Of 16 bits it keeps
# values up to 255 and makes all others white.
READABLE_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


class Record(msgspec.Struct, omit_defaults=True, gc=False):  # without cycles; tracking millions takes long
    """The names and captions of one image.

    Args:
        key: names its files in the archive, ``<key>.jpg``, ``<key>.json``, ``<key>.txt``.
        captions: at least one, in source order.
        image_id: the key where the shard has none.
        caption_ids: ``<image id>#<number>`` where the shard has none.
        dataset, split, group: as of :class:`~vl_plugins.data.captions.CaptionedImage`, where the shard has them.
    """

    key: str
    captions: tuple[str, ...]
    image_id: int | str
    caption_ids: tuple[int | str, ...]
    dataset: str | None = None
    split: str | None = None
    group: int | str | None = None


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
        rest = stream.read(tarfile.RECORDSIZE)
        if len(rest) < tarfile.BLOCKSIZE or any(rest):
            raise ValueError("it is cut off, or something follows its end; write the shard again")
    if sample is not None:
        yield sample


# The header of a file in an archive, of the fields that are read here. Others are owners, times and links.
HEADER = struct.Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s 12x")


class _Header(NamedTuple):
    name: bytes
    size: bytes
    checksum: bytes
    kind: bytes
    magic: bytes
    prefix: bytes


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


def parse_record(key: str, members: Mapping[str, bytes], has_lines: bool = False) -> Record:
    """Return the names and captions of a sample: the captions of ``json``, or else those of ``txt``.

    Args:
        key: of the sample.
        members: its files by extension.
        has_lines: each line of ``txt`` is a caption; otherwise the text is one.

    Raises:
        UserError: there are no captions, or something else in place of other fields.
    """
    with user_errors("its json or txt is not valid", TypeError, AttributeError):
        metadata = json.loads(members.get("json", b"{}").decode("utf-8-sig"))
        captions = texts_of(metadata)
        if not captions:  # of another program
            metadata, text = {}, members.get("txt", b"").decode("utf-8-sig")
            captions = lines_of(text) if has_lines else [text]
        if all(map(is_blank, captions)):
            raise UserError(
                "it has no captions; expected a list of strings 'captions' in json, or txt; it has "
                f"{', '.join(sorted(members))}"
            )
        image_id, ids = metadata.get("image_id", key), metadata.get("caption_ids")
        if not isinstance(ids, list) or len(ids) != len(captions):
            ids = [f"{image_id}#{number}" for number in range(len(captions))]
        fields = {"key": key, "captions": captions, "image_id": image_id, "caption_ids": ids}
        for name in ("dataset", "split", "group"):
            fields[name] = metadata.get(name)
        record = msgspec.convert(fields, Record)
        msgspec.json.encode(record)  # which finds half a character, as JSON can have it
    return record


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank."""
    return [line.strip() for line in text.splitlines() if not is_blank(line)]


def has_several_lines(members: Mapping[str, bytes]) -> bool:
    """Return whether the ``txt`` of a sample has several lines that are not blank."""
    return len(lines_of(members.get("txt", b"").decode("utf-8-sig", "replace"))) > 1


def texts_of(metadata: Any) -> list[str]:
    """Return the captions in the ``json`` of a sample; none if it has something else than a list of texts."""
    captions = metadata.get("captions") if isinstance(metadata, dict) else None
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        return []
    return captions


def check_input(members: Mapping[str, bytes], max_image_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Decode the picture or else the array of a sample; raise :class:`UserError` if readers cannot use it."""
    if FEATURES in members and members.keys().isdisjoint(INPUTS["images"]):
        decode_features(members[FEATURES])
    else:
        inspect_image(input_of(members), max_image_pixels=max_image_pixels)


def decode(members: Mapping[str, bytes], inputs: str = "images", max_image_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """Return the RGB image of a sample, or with ``"features"`` its array (N, W).

    Raises:
        UserError: there is no picture or array, or :func:`open_image` raises it.
        Exception: of PIL, for damaged pixels.
    """
    data = input_of(members, inputs)
    if inputs == "features":
        return decode_features(data)
    with open_image(data, max_image_pixels) as image:
        if orientation_of(image) == UPRIGHT:
            return image.convert("RGB")
        return ImageOps.exif_transpose(image).convert("RGB")


def orientation_of(image: ImageFile) -> int:
    """Return how a viewer turns a picture, 1 to 8, which cameras write into it; :data:`UPRIGHT` if it does not."""
    return image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)


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


def open_image(data: bytes, max_image_pixels: int = MAX_IMAGE_PIXELS) -> ImageFile:
    """Read the header of an image; its pixels are decoded by ``load`` or ``convert``.

    This is not ``PIL.Image.open``, which tries every format that PIL knows, whatever the name of the file: it starts
    Ghostscript for EPS. Its limit on pixels is a variable of the process, and no argument. For WebP, Pillow 13 has that
    limit here, too.

    Args:
        data: content of a file in JPEG, PNG or WebP format.
        max_image_pixels: largest width times height; 0 for no limit.

    Raises:
        UserError: the content is of another format, or has more pixels.
        Exception: of PIL, for a damaged header.
    """
    image_class = _image_class(data)
    try:
        image = image_class(io.BytesIO(data))
    except Image.DecompressionBombError as error:  # of WebP since Pillow 13
        raise UserError(f"the image is too large for PIL: {error}") from error
    if 0 < max_image_pixels < image.width * image.height:
        image.close()
        raise UserError(
            f"the image has {image.width:,} x {image.height:,} pixels, more than max_image_pixels {max_image_pixels:,}"
        )
    return image


def _image_class(data: bytes) -> type[ImageFile]:
    """Return PIL's class of a file, by the first bytes as PIL itself tells formats apart."""
    if data.startswith(b"\xff\xd8\xff"):  # also MPO of cameras, whose further pictures readers ignore
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImageFile
    raise UserError("the file is not an image in JPEG, PNG or WebP format")


def inspect_image(
    data: bytes, *, decode: bool = True, max_image_pixels: int = MAX_IMAGE_PIXELS
) -> tuple[str, int, int]:
    """Find out whether readers of shards can use an image; return ``"jpg"``, ``"png"`` or ``"webp"``, width, height.

    Width and height are those that a viewer shows.

    Args:
        data: content of an image file.
        decode: False takes a JPEG with a readable header and its end mark to be whole, which is many times faster and
            misses damage in between.
        max_image_pixels: largest width times height; 0 for no limit.

    Raises:
        UserError: the content is not an image, of another format, damaged, of more than 8 bits per channel, or of too
            many pixels, which are not decoded then.
    """
    try:
        with open_image(data, max_image_pixels) as image:
            extension = IMAGE_EXTENSIONS[str(image.format)]
            if decode or extension != "jpg" or not data.endswith(b"\xff\xd9"):
                image.load()
            width, height = image.size
            if orientation_of(image) in ON_ITS_SIDE:
                width, height = height, width
    except UserError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise UserError(f"the image is damaged: {error}") from error
    if image.mode not in READABLE_MODES:
        raise UserError(f"its pixels have more than 8 bits per channel ({image.mode}); convert them")
    return extension, width, height
