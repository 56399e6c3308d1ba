"""``vl-plugins shards``: captioned images as WebDataset shards."""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vl_plugins.commands import shards_info
from vl_plugins.errors import one_of, require
from vl_plugins.integrations.command_lines import add_max_image_pixels

__all__ = ["brace_pattern", "register", "run"]

HUB = "hugging-face"
# What each source is, and examples.
SOURCES = {
    "coco": ("COCO with Karpathy's splits", "coco --annotations dataset_coco.json --images coco \\\n    --out shards"),
    "flickr30k": (
        "Flickr30K with Karpathy's splits",
        "flickr30k --annotations dataset_flickr30k.json \\\n    --images flickr30k-images --out shards",
    ),
    "coco-captions": (
        "COCO with its official splits",
        "coco-captions --images coco --out shards \\\n    --annotations captions_train2017.json captions_val2017.json",
    ),
    "table": (
        "images and captions of a table (CSV, TSV, JSON, Parquet with paths)",
        "table --annotations birds.csv --images pictures --out shards",
    ),
    HUB: (
        "a data set of the Hugging Face hub, a Parquet file or a local folder",
        "hugging-face nlphuji/flickr30k \\\n    --revision refs/convert/parquet --out shards",
        "hugging-face folder-of-parquet-files --out shards",
    ),
}
NAME_OR_PATH = "name on the hub, a Parquet file, or a local folder, such as one of pictures with a .txt each"
# Options that are arguments of the reader.
OPTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(SOURCES, ("dataset_name",))
OPTIONS["table"] = ("dataset_name", "split_name", "val_fraction", "test_fraction")
OPTIONS[HUB] = ("dataset_name", "config", "revision", "image_root")


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``shards`` subcommand with one subcommand for each source, and those that look at shards."""
    parser = subparsers.add_parser(
        "shards",
        help="write and check WebDataset shards of captioned images",
        examples=[f"vl-plugins shards {SOURCES['table'][1]}", "vl-plugins shards info shards"],
        description="Write and check WebDataset shards of captioned images.",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for source, (content, *examples) in SOURCES.items():
        source_parser = actions.add_parser(
            source,
            help=f"write {content}",
            usage=f"%(prog)s{' NAME_OR_PATH' if source == HUB else ''} [options]",
            examples=[f"vl-plugins shards {example}" for example in examples],
            description=f"Write {content} as WebDataset shards, which open_clip reads too. Run an interrupted command "
            "again to resume it.",
        )
        source_parser.set_defaults(run=run, images=None, features=None)
        _add_reading_options(source_parser.add_argument_group("what to read"), source)
        _add_writing_options(source_parser)
    shards_info.register(actions)


def _add_reading_options(group: argparse._ArgumentGroup, source: str) -> None:
    add = group.add_argument
    if source == HUB:
        add("name", metavar="NAME_OR_PATH", help=NAME_OR_PATH)
        add("--config", metavar="NAME", help="configuration (subset) of the data set")
        add("--revision", metavar="NAME", help="branch, tag or commit of the data set")
        files = "download only these files, such as test='data/test-*'"
        add("--data-files", type=_split_pattern, nargs="+", metavar="SPLIT=PATTERN", help=files)
        add("--images", dest="image_root", metavar="DIR", help="folder of the pictures that rows name by their paths")
    else:
        number: Any = "+" if source == "coco-captions" else 1
        annotations = "annotation file"
        if source == "table":
            annotations = "the table: text with a row of column names, .jsonl, .json, .parquet, or Flickr30K's .token"
        add("--annotations", type=Path, nargs=number, required=True, metavar="FILE", help=annotations)
        folders = group.add_mutually_exclusive_group(required=True)
        images = "folder of the images, or an fsspec URL such as s3://...; paths are relative to it"
        folders.add_argument("--images", type=_folder, metavar="DIR", help=images)
        features = "folder or URL of feature arrays (N, W) instead, one .npy per image id or image file name"
        folders.add_argument("--features", type=_folder, metavar="DIR", help=features)
    if source in ("table", HUB):
        images = "images, or their paths; rows with the same path are one image"
        add("--image-column", metavar="COLUMN", help=f"{images} (default: image, filepath, ...)")
        captions = "captions (default: the first of caption, captions, ..., and caption_0, caption_1, ...)"
        add("--caption-column", nargs="+", default=(), metavar="COLUMN", help=captions)
        add("--id-column", metavar="COLUMN", help="image ids (default: image_id, ...)")
        add("--split-column", metavar="COLUMN", help="splits (default: split, if present)")
        add("--group-column", metavar="COLUMN", help="groups of images, such as videos (default: none)")
    if source == "table":
        name = "split if there is no split column (default: %(default)s)"
        add("--split-name", default="train", metavar="NAME", help=name)
        share = "share of the images for val, if there is no split column; new rows move no image"
        add("--val-fraction", type=float, default=0.0, metavar="X", help=share)
        add("--test-fraction", type=float, default=0.0, metavar="X", help="the same for test")
    if source in ("coco", HUB):
        official = "official caption files, for the caption ids that ECCV Caption and CxC need"
        add("--coco-annotations", type=Path, nargs="+", metavar="FILE", help=official)
    add("--split", nargs="+", metavar="SPLIT", help="write only these splits")


def _add_writing_options(parser: argparse.ArgumentParser) -> None:
    writing = parser.add_argument_group("what to write")
    add = writing.add_argument
    add("--out", required=True, metavar="DIR", help="output folder, or an fsspec URL such as s3://...")
    add("--dataset-name", metavar="NAME", help="prefix of shard names (default: from the source)")
    add("--samples-per-shard", type=int, default=1000, metavar="N", help="images per shard (default: %(default)s)")
    add_max_image_pixels(writing)
    convert = "write GIF, BMP, TIFF and gray of 16 bits in this format (default: such pictures are unusable)"
    add("--convert", choices=("jpeg", "png"), help=convert)
    resize = "shrink pictures whose shorter side is longer to this one, and never enlarge any; PNG stays PNG, others "
    resize += "become JPEG, or all what --convert says (default: keep sizes)"
    add("--resize", type=int, metavar="SIDE", help=resize)
    add("--seed", type=int, metavar="N", help="shuffle training splits (default: keep the order)")
    group = parser.add_argument_group("how to run")
    shards_info.add_engine(group, "written")
    skip = "stop at an unusable image, or skip it and list it in the index (default: %(default)s)"
    group.add_argument("--on-error", choices=("raise", "skip"), default="raise", help=skip)
    group.add_argument("--overwrite", action="store_true", help="replace existing shards that differ")


def run(arguments: argparse.Namespace) -> int:
    """Write the shards, and print which they are and what was left out."""
    require(*("datasets", "hub") if arguments.action == HUB else ("msgspec", "data"))
    from vl_plugins.data import write_shards

    images, files = _read_source(arguments)
    names = ("samples_per_shard", "seed", "workers", "on_error", "overwrite", "max_image_pixels", "convert", "resize")
    options = {name: getattr(arguments, name) for name in names}
    options |= {
        "inputs": "images" if arguments.features is None else "features",
        "executor": arguments.engine,
    }
    written = write_shards(images, files, arguments.out, **options)
    for _, shards in itertools.groupby(sorted(written.shards), lambda shard: shard.rpartition("-")[0]):
        print(brace_pattern(list(shards)))
    print(f"{len(written.shards):,} shards, {written.images:,} images, {written.captions:,} captions")
    shards_info.print_rejected(written.rejected)
    return 0


def brace_pattern(shards: Sequence[str]) -> str:
    """Return the pattern of shards ``NAME-000000.tar``, ... in order, as open_clip's ``--train-data`` takes it."""
    prefix, _, first = shards[0].removesuffix(".tar").rpartition("-")
    last = shards[-1].removesuffix(".tar").rpartition("-")[2]
    return shards[0] if first == last else f"{prefix}-{{{first}..{last}}}.tar"


def _read_source(arguments: argparse.Namespace) -> tuple[Iterable[Any], Any]:
    """Return the images of the splits asked for, and what they or their features are read from."""
    from vl_plugins.data import Columns, read_coco_captions, read_karpathy, read_table, with_annotation_ids

    options, action, files = vars(arguments), arguments.action, arguments.images or arguments.features
    common: dict[str, Any] = {name: options[name] for name in OPTIONS[action]}
    if "group_column" in options:
        names = arguments.image_column, arguments.caption_column, arguments.split_column, arguments.id_column
        common["columns"] = Columns(*names, arguments.group_column)
    if action == HUB:
        images, files = _read_data_set(arguments, common)
    elif action == "table":
        images = read_table(*arguments.annotations, image_root=files, **common)
    elif action == "coco-captions":
        images = read_coco_captions(arguments.annotations, image_root=files, **common)
    else:
        images = read_karpathy(*arguments.annotations, action, **common)
    images = _of_splits(images, arguments.split)
    # Only now: the official files need not cover splits that are not written.
    if official := options.get("coco_annotations"):
        images = with_annotation_ids(images, official)
    return images, files


def _read_data_set(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[Iterable[Any], Any]:
    """Return the images of a data set of the hub or in a folder, and what they are read from."""
    from vl_plugins.data import read_hugging_face, read_table
    from vl_plugins.data.table_collection import is_picture_folder

    name = arguments.name
    if is_picture_folder(name):
        return read_table(name, options["columns"], dataset_name=options["dataset_name"]), name
    options["data_files"] = dict(arguments.data_files or ()) or None
    return read_hugging_face(name, **options)


def _of_splits(images: Iterable[Any], splits: Sequence[str] | None) -> Iterator[Any]:
    """Yield the images of some splits; raise an error at the end for a split without any."""
    seen = set()
    for image in images:
        seen.add(image.split)
        if splits is None or image.split in splits:
            yield image
    for split in splits or ():
        one_of("split", split, seen)


def _folder(text: str) -> str | Path:
    """Return a URL as it is, of which a path would drop a slash, or else a path."""
    return text if "://" in text else Path(text)


def _split_pattern(text: str) -> list[str]:
    split, pattern = text.split("=", 1)
    return [split, pattern]
