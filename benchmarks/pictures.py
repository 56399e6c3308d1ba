"""Random JPEG files with captions, for the benchmarks of the writer and the reader."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vl_plugins.data.sources import CaptionedImage

__all__ = ["make_pictures"]

DIFFERENT_PICTURES = 50


def make_pictures(
    root: Path, number: int, size: tuple[int, int], *, repeat_captions: bool = False
) -> list[CaptionedImage]:
    """Write JPEG files and return them with five captions each.

    Args:
        root: folder to create.
        number: of files; their contents repeat.
        size: width and height in pixels. Files of (640, 480) have about 100 KB, as COCO's larger ones.
        repeat_captions: every caption occurs twice, with different images.
    """
    root.mkdir(parents=True)
    generator = np.random.default_rng(0)
    width, height = size
    contents = []
    for _ in range(min(number, DIFFERENT_PICTURES)):
        smooth = Image.fromarray(generator.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8))
        noisy = np.asarray(smooth.resize(size)) + generator.normal(0, 12, (height, width, 3))
        stream = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
        contents.append(stream.getvalue())
    images = []
    for index in range(number):
        name = f"COCO_train2014_{index:012d}.jpg"
        (root / name).write_bytes(contents[index % len(contents)])
        subject = index // 2 if repeat_captions else index
        captions = tuple(f"Caption {place} of the picture with the number {subject}." for place in range(5))
        caption_ids = tuple(5 * index + place for place in range(5))
        images.append(CaptionedImage(index, name, captions, caption_ids, "train", "bench", name))
    return images
