"""The sources of ``vl-plugins shards``: what each can be asked for, and how it is read."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vl_plugins.data.hugging_face import read_hugging_face
from vl_plugins.data.images import FileFolder
from vl_plugins.data.sources import (
    CaptionedImage,
    Columns,
    RejectedImage,
    read_coco_captions,
    read_karpathy,
    read_table,
    with_annotation_ids,
)
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError, one_of

__all__ = ["OPTIONS", "SOURCES", "Source", "read_source"]

Rejected = list[RejectedImage] | None
# The images, what they or their features are read from, and facts for the manifest.
Read = tuple[list[CaptionedImage], Path | FileFolder, dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A subcommand that writes shards.

    Args:
        what: what it writes, for its help.
        examples: for its help.
        read: reads the source, given the command line and the options that all readers have.
        options: names of :data:`OPTIONS` that it has.
        differences: what differs from these, by option.
    """

    what: str
    examples: Sequence[str]
    read: Callable[[argparse.Namespace, dict[str, Any]], Read]
    options: str
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_source(arguments: argparse.Namespace, rejected: Rejected) -> Read:
    """Read the source of a command line, only the splits asked for.

    Raises:
        UserError: the source is wrong; there is no such split, or no image has a group.
    """
    common = {"dataset_name": arguments.dataset_name, "rejected": rejected}
    images, files, facts = SOURCES[arguments.action].read(arguments, common)
    splits = {image.split for image in (*images, *(rejected or ()))}
    for split in arguments.split or ():
        one_of("split", split, splits)
    images = [image for image in images if arguments.split is None or image.split in arguments.split]
    options = vars(arguments)
    if "leave_restval" in options:
        facts["restval"] = "kept" if arguments.leave_restval else "joined to train"
    # Only now: the official files need not cover splits that are not written.
    if options.get("coco_annotations"):
        images = with_annotation_ids(images, arguments.coco_annotations, rejected=rejected)
        facts |= {"caption_ids": "coco-annotation", "coco_annotations": _describe(arguments.coco_annotations)}
    if arguments.group_key is not None:
        if all(image.group is None for image in images):
            raise UserError(f"--group-key {arguments.group_key}: no image has a group there")
        facts["group_key"] = arguments.group_key
    return images, files, facts


def _describe(files: Sequence[Path]) -> list[dict[str, str]]:
    """Return name, without the folder, and SHA-256 of each file."""
    return [{"file": file.name, "sha256": Folder(file.parent).sha256(file.name)} for file in files]


def _columns(arguments: argparse.Namespace) -> Columns:
    captions = arguments.caption_column or ()
    return Columns(arguments.image_column, captions, arguments.split_column, arguments.id_column, arguments.group_key)


def _read_karpathy(arguments: argparse.Namespace, common: dict[str, Any]) -> Read:
    facts = {"format": f"karpathy-{arguments.action}", "annotations": _describe([arguments.annotations])}
    common |= {"join_restval": not arguments.leave_restval, "group_key": arguments.group_key}
    images = read_karpathy(arguments.annotations, arguments.action, **common)
    return images, arguments.images or arguments.features, {**facts, "caption_ids": "karpathy-sentence"}


def _read_coco_captions(arguments: argparse.Namespace, common: dict[str, Any]) -> Read:
    common |= {
        "dataset_name": "coco" if arguments.dataset_name is None else arguments.dataset_name,
        "group_key": arguments.group_key,
    }
    images = read_coco_captions(arguments.annotations, image_root=arguments.images, **common)
    facts = {"format": "coco-captions", "annotations": _describe(arguments.annotations)}
    return images, arguments.images or arguments.features, {**facts, "caption_ids": "coco-annotation"}


def _read_table(arguments: argparse.Namespace, common: dict[str, Any]) -> Read:
    # Shells make it hard to give a tab itself.
    common["delimiter"] = "\t" if arguments.delimiter == r"\t" else arguments.delimiter
    common |= {key: getattr(arguments, key) for key in ("split_name", "val_fraction", "test_fraction")}
    root = arguments.images or arguments.features
    images = list(read_table(arguments.annotations, _columns(arguments), image_root=root, **common))
    facts: dict[str, Any] = {"format": "table", "annotations": _describe([arguments.annotations])}
    facts |= {key: value for key in ("val_fraction", "test_fraction") if (value := common[key])}
    return images, root, {**facts, "caption_ids": "running-number"}


def _read_hugging_face(arguments: argparse.Namespace, common: dict[str, Any]) -> Read:
    common |= {"caption_lines": arguments.caption_lines, "join_restval": not arguments.leave_restval}
    common |= {"data_files": None if arguments.data_files is None else dict(arguments.data_files)}
    place = {"config": arguments.config, "revision": arguments.revision}
    images, files = read_hugging_face(arguments.name, _columns(arguments), **place, **common)
    name = Path(arguments.name).name if Path(arguments.name).is_dir() else arguments.name
    return images, files, {"format": "hugging-face", "name": name, **place, "caption_ids": "running-number"}


def _split_pattern(text: str) -> tuple[str, str]:
    split, _, pattern = text.partition("=")
    if not split or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not SPLIT=PATTERN, such as test='data/test-*'")
    return split, pattern


OPTIONS: dict[str, dict[str, Any]] = {
    "name": {"metavar": "NAME_OR_FOLDER", "help": "name on the hub, or a local folder"},
    "--annotations": {
        "type": Path,
        "required": True,
        "metavar": "FILE",
        "help": "annotation file in Karpathy's JSON format",
    },
    "--coco-annotations": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE",
        "help": "official caption files, for the caption ids that ECCV Caption and CxC need",
    },
    "--leave-restval": {"action": "store_true", "help": "keep restval separate from train"},
    "--config": {"metavar": "NAME", "help": "configuration (subset) of the data set"},
    "--revision": {"metavar": "NAME", "help": "branch, tag or commit of the data set"},
    "--data-files": {
        "type": _split_pattern,
        "nargs": "+",
        "metavar": "SPLIT=PATTERN",
        "help": "download only these files, such as test='data/test-*'",
    },
    "--image-column": {"metavar": "COLUMN", "help": "images (default: the column that has images)"},
    "--caption-column": {
        "nargs": "+",
        "metavar": "COLUMN",
        "help": "captions (default: the first of caption, captions, ..., and caption_0, caption_1, ...)",
    },
    "--caption-lines": {"action": "store_true", "help": "each line of a text is a caption, as in CLIP_benchmark"},
    "--id-column": {
        "metavar": "COLUMN",
        "help": "image ids; rows with the same id are one image (default: image_id, cocoid, ...)",
    },
    "--split-column": {"metavar": "COLUMN", "help": "splits (default: split, if present)"},
    "--delimiter": {
        "metavar": "TEXT",
        "help": r"such as \t for a tab (default: the first of tab, comma, '| ' and semicolon in the first line)",
    },
    "--val-fraction": {
        "type": float,
        "default": 0.0,
        "metavar": "X",
        "help": "share of the images for val, if there is no split column; new rows move no image",
    },
    "--test-fraction": {"type": float, "default": 0.0, "metavar": "X", "help": "the same for test"},
    "--split-name": {
        "metavar": "NAME",
        "default": "train",
        "help": "split if there is no split column (default: %(default)s)",
    },
    "--split": {"nargs": "+", "metavar": "SPLIT", "help": "write only these splits"},
    "--group-key": {"metavar": "KEY", "help": "field or column that names an image's group, such as its video"},
}

SOURCES = {
    "coco": Source(
        "COCO with Karpathy's splits",
        ["vl-plugins shards coco --annotations dataset_coco.json --images coco \\\n    --out shards"],
        _read_karpathy,
        "--annotations --coco-annotations --leave-restval --split --group-key",
    ),
    "flickr30k": Source(
        "Flickr30K with Karpathy's splits",
        [
            "vl-plugins shards flickr30k --annotations dataset_flickr30k.json \\\n"
            "    --images flickr30k-images --out shards"
        ],
        _read_karpathy,
        "--annotations --leave-restval --split --group-key",
    ),
    "coco-captions": Source(
        "COCO with its official splits",
        [
            "vl-plugins shards coco-captions --images coco --out shards \\\n"
            "    --annotations captions_train2017.json captions_val2017.json"
        ],
        _read_coco_captions,
        "--annotations --split --group-key",
        {"--annotations": {"nargs": "+", "help": "caption files in COCO's format, one per split"}},
    ),
    "table": Source(
        "images and captions of a table (CSV, TSV, JSON Lines)",
        ["vl-plugins shards table --annotations birds.csv --images pictures --out shards"],
        _read_table,
        "--annotations --image-column --caption-column --split-column --id-column --delimiter --split-name "
        "--val-fraction --test-fraction --split --group-key",
        {
            "--annotations": {"help": "the table: text with a row of column names, or .jsonl"},
            "--image-column": {
                "help": "image paths; rows with the same path are one image (default: image, filepath, ...)"
            },
            "--id-column": {"help": "image ids (default: image_id or id, if present)"},
        },
    ),
    "hugging-face": Source(
        "a data set of the Hugging Face hub or a local folder",
        [
            "vl-plugins shards hugging-face nlphuji/flickr30k \\\n    --revision refs/convert/parquet --out shards",
            "vl-plugins shards hugging-face folder-of-parquet-files --out shards",
        ],
        _read_hugging_face,
        "name --config --revision --data-files --image-column --caption-column --caption-lines --id-column "
        "--split-column --coco-annotations --leave-restval --split --group-key",
    ),
}
