"""``vl-plugins shards``: captioned images as WebDataset shards."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vl_plugins.commands import shards_hugging_face, shards_info, shards_verify
from vl_plugins.commands.shards_common import (
    DEFAULT_QUALITY,
    add_common_options,
    add_leave_restval,
    add_source,
    describe_files,
    images_of_splits,
)
from vl_plugins.data.annotations import CaptionedImage, RejectedImage, read_karpathy
from vl_plugins.data.caption_table import read_caption_table
from vl_plugins.data.coco_captions import read_coco_captions, with_annotation_ids
from vl_plugins.data.manifest import REJECTED_FILE
from vl_plugins.data.shards import write_shards
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.tables import align_columns

__all__ = ["brace_pattern", "register", "run"]

EXAMPLES = {
    "coco": """example:
  vl-plugins shards coco --annotations dataset_coco.json --images coco --out shards

with coco/train2014 and coco/val2014 as image folders. Then, for open_clip:
  --train-data 'shards/coco-train-{000000..000113}.tar'

Evaluation with ECCV Caption and CxC needs the caption ids of the official files as well:
  --coco-annotations captions_train2014.json captions_val2014.json""",
    "flickr30k": """example:
  vl-plugins shards flickr30k --annotations dataset_flickr30k.json --images flickr30k-images --out shards

Then, for open_clip:
  --train-data 'shards/flickr30k-train-{000000..000028}.tar'""",
    "coco-captions": """example:
  vl-plugins shards coco-captions --annotations captions_train2017.json captions_val2017.json \\
      --images coco --out shards

with coco/train2017 and coco/val2017 as image folders. Then, for open_clip:
  --train-data 'shards/coco-train2017-{000000..000118}.tar'""",
    "table": """example:
  vl-plugins shards table --annotations birds.csv --images pictures --out shards

with a file birds.csv such as
  filepath,title,split
  owls/1.jpg,"an owl, seen from below",train
  owls/1.jpg,a white owl in the snow,train
  gulls/7.jpg,two gulls on a mast,val

where owls/1.jpg has two captions. Then, for open_clip:
  --train-data 'shards/birds-train-000000.tar'""",
}


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``shards`` subcommand with one subcommand for each source, and those that look at shards."""
    parser = subparsers.add_parser(
        "shards", help="write captioned images as WebDataset shards, check and describe shards", allow_abbrev=False
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    _register_coco(actions)
    _register_flickr30k(actions)
    _register_coco_captions(actions)
    _register_table(actions)
    shards_hugging_face.register(actions, run)
    shards_verify.register(actions)
    shards_info.register(actions)


def run(arguments: argparse.Namespace) -> int:
    """Write the shards, or with ``--dry-run`` only check everything, and print what they contain."""
    if arguments.features is not None and arguments.resize is not None:
        raise UserError("--resize is for images; array files of --features are written as they are")
    if arguments.quality is not None and arguments.resize is None:
        raise UserError("--quality needs --resize; without it the image files stay as they are")
    rejected: list[RejectedImage] = []
    images, files, source = arguments.read(arguments, rejected if arguments.on_error == "skip" else None)
    _check_splits_left(images, rejected, arguments.split)
    if arguments.group_key is not None:
        if all(image.group is None for image in images):
            raise UserError(f"--group-key {arguments.group_key}: no image has a group there")
        source["group_key"] = arguments.group_key
    entries = write_shards(
        images,
        files,
        arguments.out,
        features=arguments.features,
        samples_per_shard=arguments.samples_per_shard,
        shard_size_mb=arguments.shard_size_mb,
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


def _register_coco(actions: argparse._SubParsersAction) -> None:
    parser = add_source(
        actions, "coco", "COCO with Karpathy's splits, or any set in that format", EXAMPLES["coco"], run
    )
    reading = _add_files(parser, "the annotation file (JSON)", "'dataset' of the annotation file")
    reading.add_argument(
        "--coco-annotations",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="COCO's official caption files; captions then have COCO's annotation ids, which ECCV Caption and CxC use, "
        "instead of Karpathy's",
    )
    add_leave_restval(reading)
    parser.set_defaults(read=partial(_read_karpathy, "coco"))


def _register_flickr30k(actions: argparse._SubParsersAction) -> None:
    parser = add_source(
        actions, "flickr30k", "Flickr30K with Karpathy's splits, or any set in that format", EXAMPLES["flickr30k"], run
    )
    reading = _add_files(parser, "the annotation file (JSON)", "'dataset' of the annotation file")
    add_leave_restval(reading)
    parser.set_defaults(read=partial(_read_karpathy, "flickr30k"), coco_annotations=None)


def _register_coco_captions(actions: argparse._SubParsersAction) -> None:
    parser = add_source(
        actions,
        "coco-captions",
        "COCO's official caption files, or others in that format",
        EXAMPLES["coco-captions"],
        run,
    )
    reading = _add_files(
        parser,
        "the annotation files (JSON); each is a split with its name, captions_val2017.json is val2017",
        "coco",
        several_files=True,
    )
    reading.add_argument("--split-name", metavar="NAME", help="name of the split instead, for a single file")
    parser.set_defaults(read=_read_coco_captions)


def _register_table(actions: argparse._SubParsersAction) -> None:
    parser = add_source(
        actions, "table", "a table of image paths and captions in CSV, TSV or JSON Lines", EXAMPLES["table"], run
    )
    reading = _add_files(
        parser,
        "the table: .csv or .tsv with column names in the first line, or .jsonl with an object in each",
        "that of the file",
    )
    reading.add_argument(
        "--image-column",
        metavar="COLUMN",
        help="image paths (default: image, filepath, file_name, filename, path or image_path); rows with the same path "
        "are one image",
    )
    reading.add_argument(
        "--caption-column",
        nargs="+",
        metavar="COLUMN",
        help="captions (default: all of caption, captions, title, text, caption1, caption_2, ...)",
    )
    reading.add_argument("--split-column", metavar="COLUMN", help="splits (default: split, if present)")
    reading.add_argument("--id-column", metavar="COLUMN", help="image ids (default: image_id or id, if present)")
    reading.add_argument(
        "--delimiter",
        metavar="CHARACTER",
        help=r"what separates fields; \t is a tab (default: comma in .csv, tab in .tsv)",
    )
    reading.add_argument(
        "--split-name",
        default="train",
        metavar="NAME",
        help="split of all rows, if there is no split column (default: %(default)s)",
    )
    parser.set_defaults(read=_read_table)


def _add_files(
    parser: argparse.ArgumentParser, annotations: str, dataset_name: str, several_files: bool = False
) -> argparse._ArgumentGroup:
    """Add the options of sources that are files; return the group for those of one source.

    Args:
        parser: of the source.
        annotations: help of ``--annotations``.
        dataset_name: what ``--dataset-name`` is by default.
        several_files: whether ``--annotations`` takes more than one.
    """
    reading = parser.add_argument_group("what to read")
    reading.add_argument(
        "--annotations",
        type=Path,
        nargs="+" if several_files else None,
        required=True,
        metavar="FILE",
        help=annotations,
    )
    files = reading.add_mutually_exclusive_group(required=True)
    files.add_argument("--images", type=Path, metavar="DIR", help="folder that image paths start from")
    files.add_argument(
        "--features",
        type=Path,
        metavar="DIR",
        help="folder of array files in place of images: <image id>.npy, or else <name of the image file>.npy, with N "
        "features of W values as (N, W)",
    )
    add_common_options(parser, reading, dataset_name)
    return reading


def _read_karpathy(
    dataset: str, arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], Path | None, dict[str, Any]]:
    images = read_karpathy(
        arguments.annotations,
        dataset,
        dataset_name=arguments.dataset_name,
        join_restval=not arguments.leave_restval,
        group_key=arguments.group_key,
        rejected=rejected,
    )
    # Before the official files, which need not cover splits that are not written.
    images = images_of_splits(images, rejected, arguments.split)
    source = {
        "format": f"karpathy-{dataset}",
        "annotations": describe_files([arguments.annotations]),
        "restval": "kept" if arguments.leave_restval else "joined to train",
        "caption_ids": "karpathy-sentence",
    }
    if arguments.coco_annotations:
        images = with_annotation_ids(images, arguments.coco_annotations, rejected=rejected)
        source["caption_ids"] = "coco-annotation"
        source["coco_annotations"] = describe_files(arguments.coco_annotations)
    return images, arguments.images, source


def _read_coco_captions(
    arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], Path | None, dict[str, Any]]:
    images = read_coco_captions(
        arguments.annotations,
        image_root=arguments.images,
        dataset_name="coco" if arguments.dataset_name is None else arguments.dataset_name,
        split_name=arguments.split_name,
        group_key=arguments.group_key,
        rejected=rejected,
    )
    return (
        images_of_splits(images, rejected, arguments.split),
        arguments.images,
        {
            "format": "coco-captions",
            "annotations": describe_files(arguments.annotations),
            "caption_ids": "coco-annotation",
        },
    )


def _read_table(
    arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], Path | None, dict[str, Any]]:
    images = read_caption_table(
        arguments.annotations,
        image_column=arguments.image_column,
        caption_columns=arguments.caption_column,
        split_column=arguments.split_column,
        id_column=arguments.id_column,
        group_column=arguments.group_key,
        # Shells make it hard to give a tab itself.
        delimiter="\t" if arguments.delimiter == r"\t" else arguments.delimiter,
        dataset_name=arguments.dataset_name,
        split_name=arguments.split_name,
        rejected=rejected,
    )
    return (
        images_of_splits(images, rejected, arguments.split),
        arguments.images,
        {
            "format": "table",
            "annotations": describe_files([arguments.annotations]),
            "caption_ids": "running-number",
        },
    )


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
    rows = [("shards", "images", "captions", "rejected", "size")]
    for entry in entries.values():
        shards = sorted(entry["shards"])
        size = sum(facts["bytes"] for facts in entry["shards"].values())
        numbers = (f"{entry[key]:,}" for key in ("images", "captions", "rejected"))
        rows.append((brace_pattern(shards), *numbers, f"{size / 1e6:,.1f} MB"))
    return "\n".join("  ".join(row) for row in align_columns(rows))
