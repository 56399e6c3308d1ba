"""``vl-plugins shards``: captioned images as WebDataset shards."""

import argparse
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vl_plugins.data.annotations import CaptionedImage, RejectedImage, read_karpathy
from vl_plugins.data.shards import write_shards
from vl_plugins.errors import unknown_name
from vl_plugins.tables import align_columns

__all__ = ["brace_pattern", "register", "run"]

EXAMPLES = {
    "coco": """example:
  vl-plugins shards coco --annotations dataset_coco.json --images coco --out shards

with coco/train2014 and coco/val2014 as image folders. Then, for open_clip:
  --train-data 'shards/coco-train-{000000..000113}.tar'""",
    "flickr30k": """example:
  vl-plugins shards flickr30k --annotations dataset_flickr30k.json --images flickr30k-images --out shards

Then, for open_clip:
  --train-data 'shards/flickr30k-train-{000000..000028}.tar'""",
}


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``shards`` subcommand with one subcommand for each source."""
    parser = subparsers.add_parser("shards", help="write captioned images as WebDataset shards", allow_abbrev=False)
    sources = parser.add_subparsers(title="sources", dest="source", metavar="SOURCE", required=True)
    for source, title in (("coco", "COCO"), ("flickr30k", "Flickr30K")):
        _register_source(sources, source, title)


def _register_source(sources: argparse._SubParsersAction, source: str, title: str) -> None:
    parser = sources.add_parser(
        source,
        help=f"{title} with Karpathy's splits, or any set in that format",
        description=f"Write {title} with Karpathy's splits, or any set in that format, as shards: tar files with the\n"
        "unchanged image file, the first caption (.txt) and all captions with their ids (.json) of each\n"
        "image. Stock open_clip reads them too. A run that is repeated writes the same bytes; shards of\n"
        "the same data set and split with other contents are an error unless --overwrite is given.",
        epilog=EXAMPLES[source],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--annotations", type=Path, required=True, metavar="FILE", help="the annotation file (JSON)")
    parser.add_argument("--images", type=Path, required=True, metavar="DIR", help="folder that image paths start from")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the shards")
    parser.add_argument("--split", nargs="+", metavar="SPLIT", help="only these splits (default: all in the file)")
    parser.add_argument(
        "--dataset-name", metavar="NAME", help="name for the shards (default: 'dataset' of the annotation file)"
    )
    parser.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="images in a shard (default: %(default)s)"
    )
    parser.add_argument(
        "--leave-restval", action="store_true", help="keep restval as a split of its own instead of a part of train"
    )
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="stop at an image that cannot be used, or leave it out and list it in rejected.jsonl "
        "(default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace shards that have other contents")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the shards and print what was written."""
    rejected: list[RejectedImage] = []
    images = read_karpathy(
        arguments.annotations,
        arguments.source,
        dataset_name=arguments.dataset_name,
        join_restval=not arguments.leave_restval,
        rejected=rejected if arguments.on_error == "skip" else None,
    )
    entries = write_shards(
        _of_splits(images, arguments.split),
        arguments.images,
        arguments.out,
        samples_per_shard=arguments.samples_per_shard,
        on_error=arguments.on_error,
        overwrite=arguments.overwrite,
        rejected=rejected,
        source={
            "format": f"karpathy-{arguments.source}",
            "annotations": arguments.annotations.name,
            "annotations_sha256": hashlib.sha256(arguments.annotations.read_bytes()).hexdigest(),
            "restval": "kept" if arguments.leave_restval else "joined to train",
        },
    )
    print(_format_summary(entries))
    return 0


def _of_splits(images: list[CaptionedImage], splits: list[str] | None) -> list[CaptionedImage]:
    present = {image.split for image in images}
    for split in splits or ():
        if split not in present:
            raise unknown_name("split", split, present)
    return [image for image in images if splits is None or image.split in splits]


def _format_summary(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with one line for each entry of the manifest."""
    rows = [("shards", "images", "captions", "rejected", "size")]
    for entry in entries.values():
        shards = sorted(entry["shards"])
        size = sum(facts["bytes"] for facts in entry["shards"].values())
        numbers = (f"{entry[key]:,}" for key in ("images", "captions", "rejected"))
        rows.append((brace_pattern(shards), *numbers, f"{size / 1e6:,.1f} MB"))
    return "\n".join("  ".join(row) for row in align_columns(rows))


def brace_pattern(shards: list[str]) -> str:
    """Return the pattern of shards ``NAME-000000.tar``, ... in order, as open_clip's ``--train-data`` takes it."""
    prefix, _, first = shards[0].removesuffix(".tar").rpartition("-")
    last = shards[-1].removesuffix(".tar").rpartition("-")[2]
    return shards[0] if first == last else f"{prefix}-{{{first}..{last}}}.tar"
