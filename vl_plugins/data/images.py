"""Image files: what is in them, whether readers can use them, and smaller copies of them."""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["IMAGE_EXTENSIONS", "ImageInfo", "inspect_image", "resize_image", "scaled_picture"]

# PIL's name of a format -> extension. MPO is what cameras write: a JPEG with further pictures that readers ignore.
IMAGE_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}

# The mark of the end of a JPEG file.
JPEG_END = b"\xff\xd9"

# PIL's modes that `convert("RGB")`, which readers of shards call, turns into what a viewer shows. Of 16 bits it keeps
# values up to 255 and makes all others white.
READABLE_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


class ImageInfo(NamedTuple):
    """What :func:`inspect_image` finds.

    Args:
        extension: ``"jpg"``, ``"png"`` or ``"webp"``, by the content.
        width: in pixels.
        height: in pixels.
        mode: PIL's name of the pixel format, such as ``"RGB"``, ``"L"`` (gray) or ``"CMYK"``.
    """

    extension: str
    width: int
    height: int
    mode: str


def inspect_image(data: bytes, *, decode: bool = True) -> ImageInfo:
    """Find out whether readers of shards can use an image.

    Args:
        data: content of an image file.
        decode: whether to decode the pixels of every image. Without it, a JPEG whose header can be read and that ends
            with the mark of its end is taken to be whole, which is many times faster and misses damage in between.

    Raises:
        UserError: the content is empty, not an image, of another format, damaged, animated, of more than 8 bits per
            channel, or of more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    with _opened(data) as image:
        info = ImageInfo(IMAGE_EXTENSIONS[image.format], *image.size, image.mode)
        if decode or info.extension != "jpg" or not data.endswith(JPEG_END):
            image.load()
    return info


def resize_image(data: bytes, shorter_side: int, *, quality: int = 95) -> tuple[bytes, ImageInfo]:
    """Return an image whose shorter side has at most ``shorter_side`` pixels, and what is in it.

    A smaller image comes back as it is, byte for byte. Others are scaled with antialiased bicubic interpolation, as
    CLIP's preprocessing does, and stored in the format they had, without metadata. Colors are RGB, or gray, with
    transparency where there was some.

    Args:
        data: content of an image file.
        shorter_side: in pixels.
        quality: of JPEG and WebP, 1 to 100.

    Raises:
        UserError: as for :func:`inspect_image`, with all images decoded.
    """
    pillow = require("PIL.Image", extra="data")
    with _opened(data) as image:
        image.load()
        extension, scale = IMAGE_EXTENSIONS[image.format], shorter_side / min(image.size)
        if scale >= 1:
            return data, ImageInfo(extension, *image.size, image.mode)
        size = tuple(max(shorter_side, round(side * scale)) for side in image.size)
        transparent = extension != "jpg" and image.has_transparency_data
        mode = "RGBA" if transparent else "L" if image.mode in ("1", "L") else "RGB"
        stored = image.convert(mode).resize(size, pillow.Resampling.BICUBIC)
        # `save` would write the old profile and comments from here.
        stored.info = {}
        stream = io.BytesIO()
        options = {} if extension == "png" else {"quality": quality}
        stored.save(stream, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[extension], **options)
    return stream.getvalue(), ImageInfo(extension, *size, mode)


def scaled_picture(
    data: bytes,
    fit: Callable[[int, int], tuple[int, int]],
    background: str,
    *,
    formats: Sequence[str] | None = None,
) -> Any:
    """Decode a picture to be looked at.

    Args:
        data: of an image file.
        fit: from width and height in pixels to those that the picture is to have.
        background: color behind what is transparent.
        formats: PIL's names of those that are opened; any by default.

    Returns:
        An RGB ``PIL.Image`` of that size.

    Raises:
        UserError: the picture is damaged, or of another format.
    """
    pillow = require("PIL.Image", extra="data")
    try:
        with pillow.open(io.BytesIO(data), formats=formats) as image:
            size = fit(*image.size)
            # Decodes a large JPEG at a fraction of its size, if it is one.
            image.draft("RGB", tuple(2 * side for side in size))
            picture = image.convert("RGBA").resize(size, pillow.Resampling.LANCZOS)
    except pillow.UnidentifiedImageError:
        raise UserError("cannot be decoded: it is not an image") from None
    # Decoders of damaged files raise nearly anything.
    except Exception as error:
        raise UserError(f"cannot be decoded: {error}") from error
    opaque = pillow.new("RGBA", size, background)
    opaque.alpha_composite(picture)
    return opaque.convert("RGB")


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open an image that readers of shards can use, and turn what PIL raises until the end of the block into ours."""
    pillow = require("PIL.Image", extra="data")
    if not data:
        raise UserError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(io.BytesIO(data)) as image:
                _check_readable(image)
                yield image
    except UserError:
        raise
    except pillow.UnidentifiedImageError:
        raise UserError("the file is not an image") from None
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError):
        raise UserError(f"the image has more than {pillow.MAX_IMAGE_PIXELS:,} pixels") from None
    # Decoders of damaged files raise nearly anything: OSError, SyntaxError, ValueError, struct.error, zlib.error.
    except Exception as error:
        raise UserError(f"the image is damaged: {error}") from error


def _check_readable(image: Any) -> None:
    if image.format not in IMAGE_EXTENSIONS:
        raise UserError(f"the format {image.format} is not supported; supported are JPEG, PNG and WebP")
    if image.mode not in READABLE_MODES:
        raise UserError(
            f"its pixels are of PIL's mode {image.mode}, more than 8 bits per channel; convert it to 8 bits"
        )
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise UserError(f"the image is animated, with {image.n_frames} frames; readers would see the first one only")
