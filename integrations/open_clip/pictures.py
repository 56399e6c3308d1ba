"""Pictures in open_clip's own readers, which open whatever PIL can."""

from collections.abc import Callable
from typing import Any

from open_clip_train import data as host_data
from PIL import Image

__all__ = ["image_opener"]

# open_clip 4.x has `--max-image-pixels` itself, for shards.
HOST_CHECKS_PIXELS = hasattr(host_data, "decode_pil_rgb")
# PIL starts Ghostscript for these.
PROGRAMS = ("EPS",)


def image_opener(max_image_pixels: int) -> Callable[..., Image.Image]:
    """Return a function to replace ``PIL.Image.open``, which starts no program, whatever a file holds.

    It serves the readers of open_clip, webdataset and torchvision, which call ``Image.open`` without its ``formats``,
    in this process and in those that it forks.

    Args:
        max_image_pixels: the function raises a ValueError for an image with more pixels; 0 for no limit. It is left to
            open_clip where that has the flag.
    """
    host_open = Image.open
    Image.init()  # or PIL knows only some formats
    safe_formats = [name for name in Image.ID if name not in PROGRAMS]
    limit = 0 if HOST_CHECKS_PIXELS else max_image_pixels

    def open_image(fp: Any, mode: Any = "r", formats: Any = safe_formats) -> Image.Image:
        image = host_open(fp, mode, formats)
        if 0 < limit < image.width * image.height:
            size = f"{image.width:,} x {image.height:,} pixels"
            raise ValueError(f"the image has {size}, more than --max-image-pixels {limit:,}")
        return image

    return open_image
