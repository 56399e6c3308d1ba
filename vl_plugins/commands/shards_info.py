"""``vl-plugins shards verify``, ``info`` and ``index``: whether shards are what was written, and what is in them."""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import add_caption_rule, add_max_image_pixels
from vl_plugins.tables import printable

__all__ = ["add_engine", "print_rejected", "register"]


def register(actions: argparse._SubParsersAction) -> None:
    """Add the subcommands ``verify``, ``info`` and ``index``."""
    for name, (run, summary, description) in ACTIONS.items():
        examples = [f"vl-plugins shards {name} shards/coco-val-*.tar"]
        parser = actions.add_parser(name, help=summary, examples=examples, description=description)
        shards = "folder of shards, or shards such as coco-train-{000000..000113}.tar; a path, or an fsspec URL"
        parser.add_argument("shards", nargs="+", metavar="SHARDS", help=shards)
        if run is _info:
            longer = "also count the captions that are longer than the context of this open_clip model, which cuts them"
            parser.add_argument("--model", metavar="NAME", help=longer)
        else:
            add_engine(parser, "read")
        add_caption_rule(parser)
        if run is _index:
            skip = "stop at a sample without captions, or leave it out (default: %(default)s)"
            parser.add_argument("--on-error", choices=("raise", "skip"), default="raise", help=skip)
        if run is _verify:
            add_max_image_pixels(parser)
        parser.set_defaults(run=run)


def add_engine(parser: Any, what: str) -> None:
    """Add the flags that say where jobs run."""
    parser.add_argument("--workers", type=int, metavar="N", help=f"shards {what} at a time (default: one per core)")
    engine = "threads here, or a Ray or Dask cluster (default: %(default)s)"
    parser.add_argument("--engine", choices=("threads", "ray", "dask"), default="threads", help=engine)


def _find_shards(arguments: argparse.Namespace) -> list[str]:
    """Return the shards asked for: of a folder all that are there or have an index."""
    from vl_plugins.data.files import join, names
    from vl_plugins.data.index import INDEX_FOLDER
    from vl_plugins.data.shard_names import SHARDS, expand_shards

    shards: list[str] = []
    for place in arguments.shards:
        if place.endswith(".tar") or "*" in place or "?" in place:
            shards += expand_shards(place, of_one_split=False)
        else:
            in_folder = set(names(place, SHARDS))
            for index in names(join(place, INDEX_FOLDER), "*.tar.jsonl"):
                in_folder.add(index.removesuffix(".jsonl"))
            if not in_folder:
                raise UserError(f"{place} holds no shards; expected .tar files")
            for name in sorted(in_folder):
                shards.append(join(place, name))
    return list(dict.fromkeys(shards))


def _rule(arguments: argparse.Namespace) -> Any:
    from vl_plugins.data.records import as_rule

    return as_rule(arguments.caption_lines, arguments.caption_fields)


def _index(arguments: argparse.Namespace) -> int:
    from vl_plugins.data.engines import run_jobs
    from vl_plugins.data.reading import rules_of_splits

    shards = _find_shards(arguments)
    counts = dict.fromkeys(("new", "rewritten", "unchanged"), 0)
    images, rejected = 0, []
    rules = rules_of_splits(shards, _rule(arguments))
    index = partial(_index_shard, on_error=arguments.on_error, rules=rules)
    for indexed in run_jobs(index, shards, arguments.workers, arguments.engine):
        counts[indexed.state] += 1
        images += indexed.images
        rejected += indexed.rejected
    states = ", ".join(f"{count:,} {state}" for state, count in counts.items())
    print(f"{len(shards):,} shards, {images:,} images; indexes: {states}")
    print_rejected(rejected)
    return 0


def _index_shard(shard: str, on_error: str, rules: dict[str, Any]) -> Any:
    from vl_plugins.data.index import index_shard

    return index_shard(shard, on_error, rules[shard])


def print_rejected(rejected: Sequence[Any]) -> None:
    """Print how many images were left out, and the first of them."""
    if rejected:
        print(f"left out: {len(rejected):,}; the indexes list all, and these are the first:")
    for item in rejected[:20]:
        print(f"  {printable(item.image)}: {printable(item.reason)}")


def _verify(arguments: argparse.Namespace) -> int:
    from vl_plugins.data import verify_shards

    shards = _find_shards(arguments)
    samples, captions, problems = verify_shards(
        shards,
        workers=arguments.workers,
        executor=arguments.engine,
        max_image_pixels=arguments.max_image_pixels,
        caption_lines=_rule(arguments),
    )
    for problem in problems:
        print(problem)
    counts = f"{len(shards):,} shards, {samples:,} samples, {captions:,} captions"
    print(f"{counts}: {f'{len(problems):,}' if problems else 'no'} problems")
    return 1 if problems else 0


def _info(arguments: argparse.Namespace) -> int:
    from vl_plugins.data import inspect_shards

    shards = _find_shards(arguments)
    statistics = inspect_shards(shards, _rule(arguments))
    if arguments.model is not None:
        for split, counts in _cut_captions(shards, arguments).items():
            statistics[split]["longer_than_context"] = counts
    print(json.dumps(statistics, indent=2))
    return 0


def _cut_captions(shards: Sequence[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return by split how many captions the tokenizer of a model cuts."""
    from vl_plugins.data import read_collection
    from vl_plugins.data.shard_names import split_of
    from vl_plugins.errors import require

    open_clip = require("open_clip", extra="open-clip")
    from vl_plugins.integrations.open_clip.models import check_model
    from vl_plugins.integrations.open_clip.tokens import cut_captions

    check_model(arguments.model)
    tokenizer = open_clip.get_tokenizer(arguments.model)
    length = tokenizer([""]).shape[1]
    shards_of_split: dict[str, list[str]] = {}
    for shard in shards:
        shards_of_split.setdefault(split_of(shard), []).append(shard)
    counts = {}
    for split, of_split in shards_of_split.items():
        captions = read_collection(of_split, caption_lines=_rule(arguments)).captions
        number = cut_captions(tokenizer, captions, length)
        counts[split] = {"context_length": length, "number": number, "share": number / len(captions)}
    return counts


# Function, help and description of each subcommand.
ACTIONS: dict[str, tuple[Any, ...]] = {
    "verify": (
        _verify,
        "check shards against their indexes",
        "Check shards against their indexes, and decode every image. The exit status is 1 if anything is wrong.",
    ),
    "info": (
        _info,
        "print statistics of shards as JSON",
        "Print counts, and repeated captions, which are no negatives of each other in a batch. "
        "Shards of img2dataset and other programs work too.",
    ),
    "index": (
        _index,
        "write the indexes of shards that have none, or one that is not right",
        "Write an index beside each shard, so that readers need not scan it. Shards of `vl-plugins shards` have one "
        "already; those of version 0.2 and of other programs have none. An index that does not fit its shard, because "
        "one of them has changed or is damaged, is written again; one that fits stays as it is.",
    ),
}
