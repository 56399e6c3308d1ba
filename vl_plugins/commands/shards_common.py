"""What the sources of ``vl-plugins shards`` have in common."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.captions import TXT
from vl_plugins.data.manifest import REJECTED_FILE
from vl_plugins.data.parallel import usable_cores
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import unknown_name

__all__ = [
    "DEFAULT_QUALITY",
    "add_common_options",
    "add_leave_restval",
    "add_source",
    "describe_files",
    "images_of_splits",
]

DEFAULT_QUALITY = 95

DESCRIPTION = """\
Write {what}, as shards: tar files
with the image file (as it is, unless --resize is given), the first caption (.txt, see --txt) and all
captions with their ids (.json) of each image. Stock open_clip reads them too. A run that is repeated writes
the same bytes, and one that was stopped goes on where it was; shards of the same data set and split
with other contents are an error unless --overwrite is given."""


def add_source(
    actions: argparse._SubParsersAction,
    source: str,
    what: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add the subcommand of a source; ``what`` says in messages what it writes."""
    parser = actions.add_parser(
        source,
        help=f"write {what}",
        description=DESCRIPTION.format(what=what),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_common_options(parser: argparse.ArgumentParser, reading: argparse._ArgumentGroup, dataset_name: str) -> None:
    """Add the options of all sources.

    Args:
        parser: of the source.
        reading: its group for what is read.
        dataset_name: what ``--dataset-name`` is by default.
    """
    reading.add_argument("--split", nargs="+", metavar="SPLIT", help="only these splits (default: all there are)")
    reading.add_argument(
        "--group-key",
        metavar="KEY",
        help="field of each image, or column, that says which images belong together, such as pictures of one object "
        "or frames of a video: --same-group of a training keeps them apart or takes them for positives",
    )

    writing = parser.add_argument_group("what to write")
    writing.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the shards, or a URL of fsspec such as s3://..."
    )
    writing.add_argument("--dataset-name", metavar="NAME", help=f"name for the shards (default: {dataset_name})")
    size = writing.add_mutually_exclusive_group()
    size.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="images in a shard (default: %(default)s)"
    )
    size.add_argument(
        "--shard-size-mb",
        type=float,
        metavar="MB",
        help="instead of a number of images, the megabytes that a shard has at most",
    )
    writing.add_argument(
        "--txt",
        choices=TXT,
        default="first",
        help="what .txt has: the first caption, as open_clip trains on it, or each caption in a line, as "
        "CLIP_benchmark reads it (default: %(default)s); the readers of vl-plugins take all captions from .json",
    )
    writing.add_argument(
        "--resize", type=int, metavar="PIXELS", help="reduce larger images to this shorter side (default: leave all)"
    )
    writing.add_argument(
        "--quality",
        type=int,
        metavar="Q",
        help=f"JPEG and WebP quality of images that --resize reduces, 1 to 100 (default: {DEFAULT_QUALITY})",
    )
    writing.add_argument(
        "--seed", type=int, metavar="N", help="shuffle the training splits (default: the order of the annotations)"
    )

    running = parser.add_argument_group("how to run")
    running.add_argument(
        "--workers", type=int, default=usable_cores(), metavar="N", help="processes (default: the cores, %(default)s)"
    )
    running.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help=f"stop at an image that cannot be used, or leave it out and list it in {REJECTED_FILE} "
        "(default: %(default)s)",
    )
    running.add_argument("--overwrite", action="store_true", help="replace shards that have other contents")
    running.add_argument(
        "--dry-run", action="store_true", help="read and check everything and print the numbers, but write nothing"
    )


def add_leave_restval(reading: argparse._ArgumentGroup) -> None:
    """Add ``--leave-restval``."""
    reading.add_argument(
        "--leave-restval", action="store_true", help="keep restval as a split of its own instead of a part of train"
    )


def describe_files(files: Sequence[Path]) -> list[dict[str, str]]:
    """Return name, without the folder, and SHA-256 of each file."""
    return [{"file": file.name, "sha256": Folder(file.parent).sha256(file.name)} for file in files]


def images_of_splits(
    images: list[CaptionedImage], rejected: Sequence[RejectedImage] | None, splits: Sequence[str] | None
) -> list[CaptionedImage]:
    """Return the images of some splits, of all with None; raise :class:`UserError` for a split that there is not."""
    present = {image.split for image in (*images, *(rejected or ()))}
    for split in splits or ():
        if split not in present:
            raise unknown_name("split", split, present)
    return [image for image in images if splits is None or image.split in splits]
