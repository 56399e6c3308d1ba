"""``vl-plugins shards verify`` and ``info``: whether shards are what was written, and what is in them."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from vl_plugins.errors import UserError, require, unknown_name
from vl_plugins.tables import printable

__all__ = ["register"]

MOST_SAMPLES = 60
WIDTH = 100  # characters
REPEATS = """\
A repeat in a batch is a false negative: two images that show or say the same, which a contrastive loss pushes apart. \
The sampler of vl-plugins keeps equal captions of different images apart. It does not compare pictures: leave repeated \
ones out when you write the shards, or give them a common group (--group-key)."""


def register(actions: argparse._SubParsersAction) -> None:
    """Add the subcommands ``verify``, ``info`` and ``index``."""
    parsers = {}
    for name, (run, what, description, *examples) in ACTIONS.items():
        parsers[name] = parser = actions.add_parser(
            name,
            help=what,
            examples=[f"vl-plugins shards {name} {example}" for example in examples],
            description=description,
        )
        add = parser.add_argument
        shards = "folder of shards, or shards such as coco-train-{000000..000113}.tar; a path, or an fsspec URL"
        add("shards", nargs="+", metavar="SHARDS", help=shards)
        add("--split", nargs="+", metavar="NAME", help="read only these splits, such as coco-train")
        add("--workers", type=int, metavar="N", help="shards read at a time (default: one per core)")
        engine = "threads here, or a Ray or Dask cluster (default: %(default)s)"
        add("--engine", choices=("threads", "ray", "dask"), default="threads", help=engine)
        add("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=run)
    add = parsers["info"].add_argument
    add("--contact-sheet", metavar="FILE", help="draw samples to this .png file")
    samples = f"samples on the sheet, up to {MOST_SAMPLES} (default: %(default)s)"
    add("--samples", type=int, default=12, metavar="N", help=samples)


def _find_shards(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the shards, and the folders that are read as a whole."""
    from vl_plugins.data.collection import expand_shards
    from vl_plugins.data.files import join, names
    from vl_plugins.data.inspection import split_of

    shards: list[str] = []
    folders = [place.rstrip("/") for place in arguments.shards if not place.endswith(".tar")]
    for folder in folders:
        found = [join(folder, name) for name in names(folder, "[!.]*.tar")]
        if not found:
            raise UserError(f"{folder} holds no shards; expected .tar files")
        shards += found
    for pattern in arguments.shards:
        shards += expand_shards(pattern) if pattern.endswith(".tar") else []
    shards = list(dict.fromkeys(shards))
    if arguments.split is None:
        return shards, folders
    splits = {split_of(shard) for shard in shards}
    wanted = [{name for name in splits if name == split or name.endswith(f"-{split}")} for split in arguments.split]
    if not all(wanted):
        raise unknown_name("split", arguments.split[wanted.index(set())], splits)
    return [shard for shard in shards if split_of(shard) in set.union(*wanted)], []


def _index(arguments: argparse.Namespace) -> int:
    from vl_plugins.data.engines import executor, run_jobs
    from vl_plugins.data.files import exists
    from vl_plugins.data.index import index_file, index_shard

    shards = [shard for shard in _find_shards(arguments)[0] if not exists(index_file(shard))]
    with executor(arguments.engine, arguments.workers) as pool:
        images = sum(run_jobs(index_shard, shards, arguments.workers, pool))
    result = {"shards": len(shards), "images": images}
    print(json.dumps(result) if arguments.json else f"indexed {len(shards):,} shards, {images:,} images")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from vl_plugins.data.engines import executor
    from vl_plugins.data.verification import verify_shards

    shards, folders = _find_shards(arguments)
    with executor(arguments.engine, arguments.workers) as pool:
        result = verify_shards(shards, folders=folders, workers=arguments.workers, executor=pool)
    if arguments.json:
        print(json.dumps(result._asdict(), indent=2))
    else:
        for problem in result.problems:
            print(problem)
        counts = f"{result.shards:,} shards, {result.samples:,} samples, {result.captions:,} captions"
        print(f"{counts}: {f'{len(result.problems):,}' if result.problems else 'no'} problems")
    return 1 if result.problems else 0


def _info(arguments: argparse.Namespace) -> int:
    from vl_plugins.data.engines import executor
    from vl_plugins.data.inspection import draw_contact_sheet, inspect_shards

    sheet = arguments.contact_sheet
    if sheet is not None:  # before the shards are read, which may take minutes
        require("matplotlib", extra="eval")
        if not sheet.lower().endswith(".png") or not 1 <= arguments.samples <= MOST_SAMPLES:
            raise UserError(
                f"a contact sheet is a .png file of 1 to {MOST_SAMPLES} samples, got {sheet} and {arguments.samples}"
            )
    shards, _ = _find_shards(arguments)
    with executor(arguments.engine, arguments.workers) as pool:
        statistics = inspect_shards(shards, workers=arguments.workers, executor=pool)
    if arguments.json:
        print(json.dumps({"splits": statistics}, indent=2))
    else:
        for name, split in statistics.items():
            print(printable(name))
            for label, value in _rows(split):
                print(f"  {label:<18}  {printable(value)}")
            print()
        print(textwrap.fill(REPEATS, WIDTH))
    if sheet is not None:
        draw_contact_sheet(shards, sheet, arguments.samples, ", ".join(statistics))
    return 0


def _rows(split: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and values."""
    yield "shards", f"{split['shards']:,}, {split['bytes'] / 1e6:,.1f} MB"
    source = [f"{key} {value}" for key, value in (split["source"] or {}).items() if isinstance(value, str)]
    yield from [("source", ", ".join(source))] if source else []
    for name in ("images", "captions", "groups", "rejected"):
        yield from [(name, f"{split[name]:,}")] if split[name] or name in ("images", "captions") else []
    if split["unusable"]:
        yield "unusable", f"{split['unusable']:,} samples without a picture, or features, or a caption, not counted"
    labels = {"captions_per_image": "captions per image", "feature_dims": "values per feature"}
    labels |= {"words": "words per caption", "widths": "width", "heights": "height", "features": "features per image"}
    for name, label in labels.items():
        if (numbers := split[name]) and "median" in numbers:
            yield label, "min {minimum:,}, median {median:,.10g}, max {maximum:,}".format(**numbers)
        elif numbers:
            total = sum(numbers.values())
            yield label, ", ".join(f"{key:,}: {images:,} ({images / total:.1%})" for key, images in numbers.items())
    for unit, what in (("pictures", "the picture of"), ("captions", "the text")):
        repeats = split[f"repeated_{unit}"]
        numbers = f"{repeats['number']:,} ({repeats['share']:.2%}), {repeats['different']:,} different"
        example = textwrap.shorten(str(repeats["example"]), 50, placeholder=" ...")
        most = f"most frequent: {what} {example!r}, {repeats['example_images']:,} images"
        yield f"repeated {unit}", f"{numbers}; {most}" if repeats["number"] else "none"


# Function, help, description and examples of each subcommand.
ACTIONS: dict[str, tuple[Any, ...]] = {
    "verify": (
        _verify,
        "check shards against their indexes",
        "Check shards against their indexes, and decode every image. The exit status is 1 if anything is wrong.",
        "shards --split coco-train coco-val",
    ),
    "info": (
        _info,
        "print statistics of shards, or draw a contact sheet",
        "Print counts, lengths of captions, sizes of images, and repeated images and captions. Shards of img2dataset "
        "and other programs work too.",
        "shards",
        "shards --contact-sheet sheet.png",
    ),
    "index": (
        _index,
        "write the indexes of shards that other programs wrote",
        "Write an index beside each shard that has none, so that readers need not scan it. Shards of `vl-plugins "
        "shards` have one already; those of version 0.2 and of other programs have none.",
        "'laion/{00000..00099}.tar'",
    ),
}
