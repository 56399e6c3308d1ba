"""Write annotations in which some training images have each other's captions: wrong pairs, as noisy data have them.

python -m benchmarks.swapped_captions toy/dataset_toy.json toy/swapped.json --share 0.2
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def swap_captions(images: list[dict[str, Any]], share: float, seed: int = 0) -> int:
    """Give a share of the training images, drawn at random, all captions of the next one of them.

    Returns:
        The number of images whose captions are wrong.
    """
    rng = random.Random(seed)
    train = [image for image in images if image["split"] == "train"]
    chosen = rng.sample(train, round(share * len(train)))
    captions = [image["sentences"] for image in chosen]
    for image, of_another in zip(chosen, captions[1:] + captions[:1], strict=True):
        image["sentences"] = of_another
    return len(chosen)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("annotations", type=Path, help="in Karpathy's format")
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.2, help="of the training images (default: %(default)s)")
    arguments = parser.parse_args(argv)
    content = json.loads(arguments.annotations.read_text())
    number = swap_captions(content["images"], arguments.share)
    arguments.out.write_text(json.dumps(content))
    print(f"{number:,} training images have the captions of another one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
