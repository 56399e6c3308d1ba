"""``vl-plugins toy``: the toy data set of colored shapes."""

import argparse
from pathlib import Path

from vl_plugins.errors import require

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``toy`` subcommand."""
    parser = subparsers.add_parser(
        "toy",
        help="draw a small data set of captioned scenes",
        examples=["vl-plugins toy --out toy"],
        description="Draw scenes of two or three colored shapes, each with five captions, and write their annotations "
        "in the format of Karpathy's COCO splits.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures and dataset_toy.json")
    numbers = {
        "seed": (0, "random seed"),
        "image-size": (64, "width and height in pixels"),
        "train": (1600, "train images"),
        "val": (200, "val images"),
        "test": (200, "test images"),
    }
    for name, (default, meaning) in numbers.items():
        text = f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the scenes and print the next command."""
    require("PIL", extra="data")
    from vl_plugins.data.toy import write_toy_scenes

    names = ("out", "seed", "train", "val", "test", "image_size")
    annotation_file = write_toy_scenes(**{name: getattr(arguments, name) for name in names})
    print(f"wrote {arguments.train} train, {arguments.val} val and {arguments.test} test images: {annotation_file}")
    print(f"next: vl-plugins shards coco --annotations {annotation_file} --images {arguments.out} --out SHARDS")
    return 0
