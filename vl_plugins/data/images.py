"""Image files: what is in them, and whether readers can use them."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image, UnidentifiedImageError

from vl_plugins.data.files import read_bytes
from vl_plugins.errors import UserError

# PIL's name of a format -> extension. Cameras write MPO, a JPEG with further pictures that readers ignore.
IMAGE_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}

# PIL's modes that `convert("RGB")`, which readers of shards call, turns into what a viewer shows. Of 16 bits it keeps
# values up to 255 and makes all others white.
READABLE_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


class FileFolder:
    """The image or array files of a data set, here those in a folder. It is pickled for worker processes."""

    def __init__(self, root: str | os.PathLike):
        self.root = os.fspath(root)

    def read(self, file: str) -> bytes:
        """Return the content of ``CaptionedImage.file``; raise :class:`UserError` if that cannot be read."""
        return read_bytes(os.path.join(self.root, file))

    def state(self, file: str) -> Any:
        """Return a JSON value that changes with the content; None if the file cannot be read."""
        try:
            status = os.stat(os.path.join(self.root, file))
        except (OSError, ValueError):
            return None
        return status.st_size, status.st_mtime_ns


def inspect_image(data: bytes, *, decode: bool = True) -> tuple[str, int, int]:
    """Find out whether readers of shards can use an image; return ``"jpg"``, ``"png"`` or ``"webp"``, width, height.

    Args:
        data: content of an image file.
        decode: False takes a JPEG with a readable header and its end mark to be whole, which is many times faster and
            misses damage in between.

    Raises:
        UserError: the content is not an image, of another format, damaged, of more than 8 bits per channel, or of more
            than twice ``PIL.Image.MAX_IMAGE_PIXELS`` pixels.
    """
    with _opened(data) as image:
        extension = IMAGE_EXTENSIONS[image.format]
        if decode or extension != "jpg" or not data.endswith(b"\xff\xd9"):
            image.load()
        return extension, *image.size


def scaled_picture(data: bytes, longest_side: int) -> Image.Image:
    """Return an RGB picture of at most ``longest_side`` pixels, with white behind what is transparent.

    Errors are those of :func:`inspect_image`.
    """
    with _opened(data) as image:
        # Decodes a large JPEG at a fraction of its size, if it is one.
        image.draft("RGB", (2 * longest_side, 2 * longest_side))
        picture = image.convert("RGBA")
    picture.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    opaque = Image.new("RGBA", picture.size, "white")
    opaque.alpha_composite(picture)
    return opaque.convert("RGB")


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open an image that readers of shards can use; whatever PIL raises until the end of the block is a UserError."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.mode not in READABLE_MODES:
                raise UserError(f"its pixels have more than 8 bits per channel ({image.mode}); convert them")
            yield image
    except UserError:
        raise
    except UnidentifiedImageError:  # whose text has an address in memory
        raise UserError("the file is no JPEG, PNG or WebP image") from None
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise UserError(f"the image is damaged: {error}") from error
