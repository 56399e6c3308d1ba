"""``vl-plugins toy``: the toy data set of colored shapes."""

import argparse
from pathlib import Path

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
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--train", type=int, default=1600, help="number of training images (default: %(default)s)")
    parser.add_argument("--val", type=int, default=200, help="number of validation images (default: %(default)s)")
    parser.add_argument("--test", type=int, default=200, help="number of test images (default: %(default)s)")
    parser.add_argument(
        "--image-size", type=int, default=64, help="width and height in pixels, at least 16 (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the scenes and say how to go on."""
    from vl_plugins.data.toy import write_toy_scenes

    annotation_file = write_toy_scenes(
        arguments.out,
        seed=arguments.seed,
        train=arguments.train,
        val=arguments.val,
        test=arguments.test,
        image_size=arguments.image_size,
    )
    print(f"wrote {arguments.train} train, {arguments.val} val and {arguments.test} test images: {annotation_file}")
    print(f"next: vl-plugins shards coco --annotations {annotation_file} --images {arguments.out} --out SHARDS")
    return 0
