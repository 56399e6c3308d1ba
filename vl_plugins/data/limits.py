"""The limit on the pixels of an image, which files and command lines share."""

from vl_plugins.errors import UserError

__all__ = ["MAX_IMAGE_PIXELS", "check_max_image_pixels"]

# A little below the number from which PIL warns of decompression bombs. As RGB they fill 267 MB.
MAX_IMAGE_PIXELS = 89_000_000


def check_max_image_pixels(limit: int) -> int:
    """Return a limit on width times height of an image; raise :class:`UserError` for a negative one."""
    if limit < 0:
        raise UserError(f"max_image_pixels must be at least 0, which sets no limit; got {limit:,}")
    return limit
