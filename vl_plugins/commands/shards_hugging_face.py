"""``vl-plugins shards hugging-face``: shards of data sets of the Hugging Face hub, Parquet files and image folders."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vl_plugins.commands.shards_common import (
    add_common_options,
    add_leave_restval,
    add_source,
    describe_files,
    images_of_splits,
)
from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.coco_captions import with_annotation_ids
from vl_plugins.data.hugging_face import HuggingFaceFiles, read_hugging_face

__all__ = ["register"]

EPILOG = """\
examples:
  vl-plugins shards hugging-face nlphuji/flickr30k --revision refs/convert/parquet --out shards
  vl-plugins shards hugging-face jxie/coco_captions --data-files test='data/test-*' --dataset-name coco --out shards
  vl-plugins shards hugging-face clip-benchmark/wds_flickr30k --caption-lines --out shards
  vl-plugins shards hugging-face folder-of-parquet-files --out shards

The library datasets downloads (with the login of `hf auth login`), goes on with a download that was stopped, and
keeps the data set in its cache: set HF_HOME to choose where. `vl-plugins shards` reads the images from there."""


def register(actions: argparse._SubParsersAction, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the ``hugging-face`` subcommand, which ``run`` runs."""
    what = "an image-caption data set of the Hugging Face hub, or a folder of Parquet files, images or tars"
    parser = add_source(actions, "hugging-face", what, EPILOG, run)
    parser.add_argument("name", metavar="NAME_OR_FOLDER", help="name on the hub, or a local folder")
    reading = parser.add_argument_group("what to read")
    reading.add_argument("--config", metavar="NAME", help="configuration (subset) of a data set that has several")
    reading.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit on the hub; refs/convert/parquet has Parquet files of data sets that are a script",
    )
    reading.add_argument(
        "--data-files",
        type=_split_pattern,
        nargs="+",
        metavar="SPLIT=PATTERN",
        help="only these files, such as test='data/test-*', and no others are downloaded (default: all splits)",
    )
    reading.add_argument("--image-column", metavar="COLUMN", help="images (default: the column of that type)")
    reading.add_argument(
        "--caption-column",
        nargs="+",
        metavar="COLUMN",
        help="captions, as texts, lists of texts or Karpathy's sentences (default: the first of caption, captions, "
        "sentences, sentence, text, texts, title, txt, or else caption_0, caption_1, ...)",
    )
    reading.add_argument(
        "--caption-lines", action="store_true", help="each line of a text is a caption, as in CLIP_benchmark's tars"
    )
    reading.add_argument(
        "--id-column",
        metavar="COLUMN",
        help="image ids; rows with the same one are one image (default: the first of image_id, cocoid, img_id, imgid, "
        "filename, file_name, id, __key__)",
    )
    reading.add_argument(
        "--split-column", metavar="COLUMN", help="splits (default: split, if present, or else those of the data set)"
    )
    reading.add_argument(
        "--coco-annotations",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="COCO's official caption files; captions then have COCO's annotation ids, which ECCV Caption and CxC use",
    )
    add_leave_restval(reading)
    add_common_options(parser, reading, "last part of the name")
    parser.set_defaults(read=_read, features=None)


def _split_pattern(text: str) -> tuple[str, str]:
    split, _, pattern = text.partition("=")
    if not split or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not SPLIT=PATTERN, such as test='data/test-*'")
    return split, pattern


def _read(
    arguments: argparse.Namespace, rejected: list[RejectedImage] | None
) -> tuple[list[CaptionedImage], HuggingFaceFiles, dict[str, Any]]:
    images, files = read_hugging_face(
        arguments.name,
        config=arguments.config,
        revision=arguments.revision,
        data_files=None if arguments.data_files is None else dict(arguments.data_files),
        image_column=arguments.image_column,
        caption_columns=arguments.caption_column,
        caption_lines=arguments.caption_lines,
        id_column=arguments.id_column,
        split_column=arguments.split_column,
        group_column=arguments.group_key,
        join_restval=not arguments.leave_restval,
        dataset_name=arguments.dataset_name,
        rejected=rejected,
    )
    images = images_of_splits(images, rejected, arguments.split)
    source = {
        "format": "hugging-face",
        "name": Path(arguments.name).name if Path(arguments.name).is_dir() else arguments.name,
        "config": arguments.config,
        "revision": arguments.revision,
        "restval": "kept" if arguments.leave_restval else "joined to train",
        "caption_ids": "running-number",
    }
    if arguments.coco_annotations:
        images = with_annotation_ids(images, arguments.coco_annotations, rejected=rejected)
        source["caption_ids"] = "coco-annotation"
        source["coco_annotations"] = describe_files(arguments.coco_annotations)
    return images, files, source
