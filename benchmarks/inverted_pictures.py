"""Write a data set of another domain: the photographic negatives of another one's pictures.

    python -m benchmarks.inverted_pictures toy negatives

A model that was trained on negatives of toy scenes knows shapes, places and words, but has colors and backgrounds to
learn anew. So it stands to the scenes as CLIP stands to the pictures that somebody fine-tunes it on.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps


def write_inverted(source: Path, out: Path) -> int:
    """Write the negatives of all ``.png`` pictures below a folder, and copies of its ``.json`` files.

    Returns:
        The number of pictures.
    """
    pictures = sorted(source.rglob("*.png"))
    for path in pictures:
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            ImageOps.invert(picture.convert("RGB")).save(target)
    for path in source.glob("*.json"):
        shutil.copy(path, out)
    return len(pictures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of `vl-plugins toy`")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    print(f"wrote {write_inverted(arguments.source, arguments.out):,} pictures to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
