"""``vl-plugins shards``: captioned images as WebDataset shards."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vl_plugins.commands import shards_info, shards_verify
from vl_plugins.data.annotations import CaptionedImage, RejectedImage, read_karpathy
from vl_plugins.data.caption_table import read_caption_table
from vl_plugins.data.captions import TXT
from vl_plugins.data.coco_captions import read_coco_captions, with_annotation_ids
from vl_plugins.data.manifest import REJECTED_FILE
from vl_plugins.data.parallel import usable_cores
from vl_plugins.data.shards import write_shards
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError, unknown_name
from vl_plugins.utils.tables import align_columns

__all__ = ["brace_pattern", "register", "run"]

DEFAULT_QUALITY = 95

DESCRIPTION = """\
Write {what}, as shards: tar files
with the image file (as it is, unless --resize is given), the first caption (.txt, see --txt) and all
captions with their ids (.json) of each image. Stock open_clip reads them too. A run that is repeated writes
the same bytes, and one that was stopped goes on where it was; shards of the same data set and split
with other contents are an error unless --overwrite is given. With --features an array file (.npy) of
region or grid features stands in place of each image file, for models that take these."""

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
    shards_verify.register(actions)
    shards_info.register(actions)


def run(arguments: argparse.Namespace) -> int:
    """Write the shards, or with ``--dry-run`` only check everything, and print what they contain."""
    if arguments.features is not None and arguments.resize is not None:
        raise UserError("--resize is for images; array files of --features are written as they are")
    if arguments.quality is not None and arguments.resize is None:
        raise UserError("--quality needs --resize; without it the image files stay as they are")
    rejected: list[RejectedImage] = []
    images, source = arguments.read(arguments, rejected if arguments.on_error == "skip" else None)
    _check_splits_left(images, rejected, arguments.split)
    if arguments.group_key is not None:
        if all(image.group is None for image in images):
            raise UserError(f"--group-key {arguments.group_key}: no image has a group there")
        source["group_key"] = arguments.group_key
    entries = write_shards(
        images,
        arguments.images,
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
    parser = _add_source(actions, "coco", "COCO with Karpathy's splits, or any set in that format")
    reading = _add_common_options(parser, "the annotation file (JSON)", "'dataset' of the annotation file")
    reading.add_argument(
        "--coco-annotations",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="COCO's official caption files; captions then have COCO's annotation ids, which ECCV Caption and CxC use, "
        "instead of Karpathy's",
    )
    _add_leave_restval(reading)
    parser.set_defaults(read=partial(_read_karpathy, "coco"))


def _register_flickr30k(actions: argparse._SubParsersAction) -> None:
    parser = _add_source(actions, "flickr30k", "Flickr30K with Karpathy's splits, or any set in that format")
    reading = _add_common_options(parser, "the annotation file (JSON)", "'dataset' of the annotation file")
    _add_leave_restval(reading)
    parser.set_defaults(read=partial(_read_karpathy, "flickr30k"), coco_annotations=None)


def _register_coco_captions(actions: argparse._SubParsersAction) -> None:
    parser = _add_source(actions, "coco-captions", "COCO's official caption files, or others in that format")
    reading = _add_common_options(
        parser,
        "the annotation files (JSON); each is a split with its name, captions_val2017.json is val2017",
        "coco",
        several_files=True,
    )
    reading.add_argument("--split-name", metavar="NAME", help="name of the split instead, for a single file")
    parser.set_defaults(read=_read_coco_captions)


def _register_table(actions: argparse._SubParsersAction) -> None:
    parser = _add_source(actions, "table", "a table of image paths and captions in CSV, TSV or JSON Lines")
    reading = _add_common_options(
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


def _add_source(actions: argparse._SubParsersAction, source: str, what: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        source,
        help=f"write {what}",
        description=DESCRIPTION.format(what=what),
        epilog=EXAMPLES[source],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_common_options(
    parser: argparse.ArgumentParser, annotations: str, dataset_name: str, several_files: bool = False
) -> argparse._ArgumentGroup:
    """Add the options of all sources; return the group for those of one source.

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
    return reading


def _add_leave_restval(reading: argparse._ArgumentGroup) -> None:
    reading.add_argument(
        "--leave-restval", action="store_true", help="keep restval as a split of its own instead of a part of train"
    )


def _read_karpathy(
    dataset: str, arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], dict[str, Any]]:
    images = read_karpathy(
        arguments.annotations,
        dataset,
        dataset_name=arguments.dataset_name,
        join_restval=not arguments.leave_restval,
        group_key=arguments.group_key,
        rejected=rejected,
    )
    # Before the official files, which need not cover splits that are not written.
    images = _of_splits(images, rejected, arguments.split)
    source = {
        "format": f"karpathy-{dataset}",
        "annotations": _describe_files([arguments.annotations]),
        "restval": "kept" if arguments.leave_restval else "joined to train",
        "caption_ids": "karpathy-sentence",
    }
    if arguments.coco_annotations:
        images = with_annotation_ids(images, arguments.coco_annotations, rejected=rejected)
        source["caption_ids"] = "coco-annotation"
        source["coco_annotations"] = _describe_files(arguments.coco_annotations)
    return images, source


def _read_coco_captions(
    arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], dict[str, Any]]:
    images = read_coco_captions(
        arguments.annotations,
        image_root=arguments.images,
        dataset_name="coco" if arguments.dataset_name is None else arguments.dataset_name,
        split_name=arguments.split_name,
        group_key=arguments.group_key,
        rejected=rejected,
    )
    return _of_splits(images, rejected, arguments.split), {
        "format": "coco-captions",
        "annotations": _describe_files(arguments.annotations),
        "caption_ids": "coco-annotation",
    }


def _read_table(
    arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], dict[str, Any]]:
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
    return _of_splits(images, rejected, arguments.split), {
        "format": "table",
        "annotations": _describe_files([arguments.annotations]),
        "caption_ids": "running-number",
    }


def _describe_files(files: Sequence[Path]) -> list[dict[str, str]]:
    """Return name, without the folder, and SHA-256 of each file."""
    return [{"file": file.name, "sha256": Folder(file.parent).sha256(file.name)} for file in files]


def _of_splits(
    images: list[CaptionedImage], rejected: Sequence[RejectedImage] | None, splits: Sequence[str] | None
) -> list[CaptionedImage]:
    present = {image.split for image in (*images, *(rejected or ()))}
    for split in splits or ():
        if split not in present:
            raise unknown_name("split", split, present)
    return [image for image in images if splits is None or image.split in splits]


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
