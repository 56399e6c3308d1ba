"""``vl-plugins shards``: captioned images as WebDataset shards."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vl_plugins.commands import shards_info, shards_verify
from vl_plugins.commands.shards_sources import OPTIONS, SOURCES, Source, read_source
from vl_plugins.data.manifest import REJECTED_FILE
from vl_plugins.data.parallel import usable_cores
from vl_plugins.data.shards import TXT, write_shards
from vl_plugins.data.sources import CaptionedImage, RejectedImage
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError
from vl_plugins.tables import align_columns

__all__ = ["brace_pattern", "register", "run"]

DEFAULT_QUALITY = 95


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``shards`` subcommand with one subcommand for each source, and those that look at shards."""
    parser = subparsers.add_parser(
        "shards",
        help="write and check WebDataset shards of captioned images",
        examples=[
            "vl-plugins shards table --annotations birds.csv --images pictures --out shards",
            "vl-plugins shards info shards",
        ],
        description="Write and check WebDataset shards of captioned images.",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for name, source in SOURCES.items():
        _register_source(actions, name, source)
    shards_verify.register(actions)
    shards_info.register(actions)


def run(arguments: argparse.Namespace) -> int:
    """Write the shards, or with ``--dry-run`` only check everything, and print what they contain."""
    if arguments.quality is not None and arguments.resize is None:
        raise UserError("--quality needs --resize; without it the image files stay as they are")
    rejected: list[RejectedImage] = []
    images, files, source = read_source(arguments, rejected if arguments.on_error == "skip" else None)
    _check_splits_left(images, rejected, arguments.split)
    entries = write_shards(
        images,
        files,
        arguments.out,
        inputs="images" if arguments.features is None else "features",
        samples_per_shard=arguments.samples_per_shard,
        txt=arguments.txt,
        resize=arguments.resize,
        quality=DEFAULT_QUALITY if arguments.quality is None else arguments.quality,
        workers=arguments.workers,
        seed=arguments.seed,
        on_error=arguments.on_error,
        overwrite=arguments.overwrite,
        dry_run=arguments.dry_run,
        rejected=rejected,
        source=source,
    )
    print(_format_summary(entries))
    left_out = sum(entry["rejected"] for entry in entries.values())
    if arguments.dry_run:
        print("dry run: nothing was written")
    elif left_out:
        print(f"left out: {left_out:,}; the reasons are in {Folder(arguments.out) / REJECTED_FILE}")
    return 0


def brace_pattern(shards: list[str]) -> str:
    """Return the pattern of shards ``NAME-000000.tar``, ... in order, as open_clip's ``--train-data`` takes it."""
    prefix, _, first = shards[0].removesuffix(".tar").rpartition("-")
    last = shards[-1].removesuffix(".tar").rpartition("-")[2]
    return shards[0] if first == last else f"{prefix}-{{{first}..{last}}}.tar"


def _register_source(actions: argparse._SubParsersAction, name: str, source: Source) -> None:
    parser = actions.add_parser(
        name,
        help=f"write {source.what}",
        usage="%(prog)s [options]" if "--annotations" in source.options else "%(prog)s NAME_OR_FOLDER [options]",
        examples=source.examples,
        description=f"Write {source.what} as WebDataset shards, which open_clip reads too. Run an interrupted command "
        "again to resume it.",
    )
    parser.set_defaults(run=run, features=None)
    reading = parser.add_argument_group("what to read")
    for option in source.options.split():
        reading.add_argument(option, **{**OPTIONS[option], **source.differences.get(option, {})})
    if "--annotations" in source.options:
        files = reading.add_mutually_exclusive_group(required=True)
        files.add_argument(
            "--images",
            type=Path,
            metavar="DIR",
            help="folder of the images; paths in the annotations are relative to it",
        )
        files.add_argument(
            "--features",
            type=Path,
            metavar="DIR",
            help="folder of feature arrays (N, W) instead, one .npy per image id or image file name",
        )

    writing = parser.add_argument_group("what to write")
    writing.add_argument("--out", required=True, metavar="DIR", help="output folder, or an fsspec URL such as s3://...")
    writing.add_argument("--dataset-name", metavar="NAME", help="prefix of shard names (default: from the source)")
    writing.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="images per shard (default: %(default)s)"
    )
    writing.add_argument(
        "--txt",
        choices=TXT,
        default="first",
        help="captions in .txt: the first, for open_clip, or all, one per line, for CLIP_benchmark "
        "(default: %(default)s)",
    )
    writing.add_argument("--resize", type=int, metavar="PIXELS", help="shrink larger images to this shorter side")
    writing.add_argument(
        "--quality",
        type=int,
        metavar="Q",
        help=f"JPEG and WebP quality of resized images, 1 to 100 (default: {DEFAULT_QUALITY})",
    )
    writing.add_argument("--seed", type=int, metavar="N", help="shuffle training splits (default: keep the order)")

    running = parser.add_argument_group("how to run")
    running.add_argument(
        "--workers", type=int, default=usable_cores(), metavar="N", help="worker processes (default: %(default)s)"
    )
    running.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help=f"stop at an unusable image, or skip it and list it in {REJECTED_FILE} (default: %(default)s)",
    )
    running.add_argument("--overwrite", action="store_true", help="replace existing shards that differ")
    running.add_argument("--dry-run", action="store_true", help="check everything and print counts, but write nothing")


def _check_splits_left(
    images: Sequence[CaptionedImage], rejected: Sequence[RejectedImage], splits: Sequence[str] | None
) -> None:
    """Raise where all images of a split were rejected; without shards they would not even be counted."""
    left = {image.split for image in images}
    for item in rejected:
        if item.split not in left and (splits is None or item.split in splits):
            raise UserError(f"none of the images of {item.split} can be used; {item.image}: {item.reason}")


def _format_summary(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with one line for each entry of the manifest."""
    rows = [["shards", "images", "captions", "rejected", "size"]]
    for entry in entries.values():
        shards = sorted(entry["shards"])
        size = sum(facts["bytes"] for facts in entry["shards"].values())
        numbers = (f"{entry[key]:,}" for key in ("images", "captions", "rejected"))
        rows.append([brace_pattern(shards), *numbers, f"{size / 1e6:,.1f} MB"])
    return "\n".join("  ".join(row) for row in align_columns(rows))
