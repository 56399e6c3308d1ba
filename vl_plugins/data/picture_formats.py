"""Pictures: which ones readers of shards take, and what the writer makes of others."""

import contextlib
import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.errors import UserError

# PIL's name of a format -> extension.
IMAGE_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
# First bytes of formats that are converted -> PIL's class. Others are not tried; PIL would start Ghostscript for EPS.
CONVERTIBLE: dict[bytes, type[ImageFile]] = {
    b"GIF87a": GifImageFile,
    b"GIF89a": GifImageFile,
    b"BM": BmpImageFile,
    b"II*\0": TiffImageFile,
    b"MM\0*": TiffImageFile,
    b"II+\0": TiffImageFile,
    b"MM\0+": TiffImageFile,
}
CONVERT = ("jpeg", "png")  # what they are converted to
HINT = "--convert (convert= of write_shards) makes it JPEG or PNG"
QUALITY = 95  # of JPEG

UPRIGHT, ON_ITS_SIDE = 1, (5, 6, 7, 8)  # orientations of EXIF

# PIL's modes that `convert("RGB")`, which readers of shards call, turns into what a viewer shows. Of 16 bits it keeps
# values up to 255 and makes all others white.
READABLE_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
DEEP_MODES = ("I;16", "I;16B")  # gray of up to 16 bits


class Picture(NamedTuple):
    """A picture for a shard.

    Args:
        extension: ``"jpg"``, ``"png"`` or ``"webp"``.
        data: content of its file.
        width, height: as a viewer shows it.
    """

    extension: str
    data: bytes
    width: int
    height: int


def prepare_picture(
    data: bytes, *, convert: str | None = None, resize: int | None = None, max_image_pixels: int = MAX_IMAGE_PIXELS
) -> Picture:
    """Return a picture as it is written into a shard; without options its content stays.

    Args:
        data: content of an image file.
        convert: ``"jpeg"`` or ``"png"``: what becomes of a picture that readers do not take, a GIF, BMP or TIFF (the
            first, if it has several) or gray of 16 bits, whose upper 8 bits are kept.
        resize: longest shorter side. A picture with a longer one is resized to it, by bicubic interpolation with
            antialiasing, as torchvision resizes; others stay.
        max_image_pixels: largest width times height; 0 for no limit.

    A picture that has to change is turned as viewers show it, and then written without orientation and other metadata:
    in the format ``convert``, or else as PNG if it is one, or as JPEG of quality 95. PNG keeps transparency. In JPEG a
    transparent pixel has the color that it hides, as PIL's ``convert("RGB")`` gives it to readers anyway.

    Raises:
        UserError: see :func:`inspect_image`; or its pixels have more than 16 bits, or a side is too long for JPEG.
    """
    written = None
    if convert is not None or resize is not None:
        with _errors_as("the image is damaged"), open_image(data, max_image_pixels, convert is not None) as image:
            written = _format_to_write(image, convert, resize)
            if written is not None:
                shown = _as_shown(image)
    if written is None:
        extension, width, height = inspect_image(data, decode=False, max_image_pixels=max_image_pixels)
        return Picture(extension, data, width, height)
    with _errors_as(f"the image cannot be written as {written}"):
        image = _as_written(shown, written, resize)
        stream = io.BytesIO()
        image.save(stream, written, quality=QUALITY)
    return Picture(IMAGE_EXTENSIONS[written], stream.getvalue(), image.width, image.height)


def _format_to_write(image: ImageFile, convert: str | None, resize: int | None) -> str | None:
    """Return PIL's name of the format that a picture is written in; None if its file stays as it is."""
    can_read = image.format in IMAGE_EXTENSIONS and image.mode in READABLE_MODES
    is_large = resize is not None and min(image.size) > resize
    if can_read and not is_large:
        return None
    if convert is not None:
        return convert.upper()
    if not can_read:  # which is an error
        return None
    return "PNG" if image.format == "PNG" else "JPEG"


def _as_shown(image: ImageFile) -> Image.Image:
    """Return the decoded picture, turned as viewers show it, in a mode of 8 bits."""
    ImageOps.exif_transpose(image, in_place=True)
    # Before version 11 PIL has gray PNG of 16 bits in mode "I".
    if image.mode in DEEP_MODES or (image.mode == "I" and image.format == "PNG"):
        return _upper_bits(image)
    if image.mode == "La":  # which PIL converts to nothing else
        return image.convert("LA")
    if image.mode not in READABLE_MODES:
        raise UserError(f"its pixels are in the mode {image.mode} of PIL, which is not converted; write RGB of 8 bits")
    return image


def _upper_bits(image: ImageFile) -> Image.Image:
    """Return the upper 8 bits of the pixels of a gray picture, as PIL reads 16 bits of color."""
    bits, white_is_zero = 16, False
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2[BITSPERSAMPLE][0]
        white_is_zero = image.tag_v2[PHOTOMETRIC_INTERPRETATION] == 0  # which PIL leaves as it is
    levels = np.asarray(image).astype(np.int32)
    if white_is_zero:
        levels = 2**bits - 1 - levels
    return Image.fromarray((levels >> (bits - 8)).astype(np.uint8))


def _as_written(image: Image.Image, written: str, resize: int | None) -> Image.Image:
    """Return a picture in a mode that the format has, resized and without metadata."""
    mode = "L" if image.mode in ("1", "L") else "RGB"
    if written == "PNG" and image.has_transparency_data:
        mode = "RGBA"
    image = image.convert(mode)
    image.info = {}
    shorter = min(image.size)
    if resize is None or shorter <= resize:
        return image
    width, height = resize * image.width // shorter, resize * image.height // shorter
    # By channel, or PIL would make transparent pixels black, which readers show.
    channels = [channel.resize((width, height), Image.Resampling.BICUBIC) for channel in image.split()]
    return Image.merge(mode, channels)


def open_image(data: bytes, max_image_pixels: int = MAX_IMAGE_PIXELS, any_format: bool = False) -> ImageFile:
    """Read the header of an image; its pixels are decoded by ``load`` or ``convert``.

    This is not ``PIL.Image.open``, which tries every format that PIL knows, whatever the name of the file: it starts
    Ghostscript for EPS. Its limit on pixels is a variable of the process, and no argument. For WebP, Pillow 13 has that
    limit here, too.

    Args:
        data: content of a file in JPEG, PNG or WebP format.
        max_image_pixels: largest width times height; 0 for no limit.
        any_format: the file may also be in one of the formats that are converted.

    Raises:
        UserError: the content is of another format, or has more pixels.
        Exception: of PIL, for a damaged header.
    """
    image_class = _image_class(data, any_format)
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


def _image_class(data: bytes, any_format: bool) -> type[ImageFile]:
    """Return PIL's class of a file, by the first bytes as PIL itself tells formats apart."""
    if data.startswith(b"\xff\xd8\xff"):  # also MPO of cameras, whose further pictures readers ignore
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImageFile
    for start, image_class in CONVERTIBLE.items():
        if data.startswith(start) and any_format:
            return image_class
        if data.startswith(start):
            probably = f"probably {image_class.format}; {HINT}"
            raise UserError(f"the file is not an image in JPEG, PNG or WebP format, but {probably}")
    known = "JPEG, PNG, WebP, GIF, BMP or TIFF" if any_format else "JPEG, PNG or WebP"
    raise UserError(f"the file is not an image in {known} format")


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
    with _errors_as("the image is damaged"), open_image(data, max_image_pixels) as image:
        extension = IMAGE_EXTENSIONS[str(image.format)]
        if decode or extension != "jpg" or not data.endswith(b"\xff\xd9"):
            image.load()
        width, height = image.size
        if orientation_of(image) in ON_ITS_SIDE:
            width, height = height, width
    if image.mode not in READABLE_MODES:
        raise UserError(f"its pixels have more than 8 bits per channel ({image.mode}); {HINT}")
    return extension, width, height


def orientation_of(image: ImageFile) -> int:
    """Return how a viewer turns a picture, 1 to 8, which cameras write into it; :data:`UPRIGHT` if it does not."""
    return image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)


@contextlib.contextmanager
def _errors_as(what: str) -> Iterator[None]:
    """Raise what PIL raises, which for damaged files is nearly anything, as a :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        raise UserError(f"the image is too large for PIL: {error}") from error
    except Exception as error:
        raise UserError(f"{what}: {error}") from error
