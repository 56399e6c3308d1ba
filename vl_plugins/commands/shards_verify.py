"""``vl-plugins shards verify``: whether shards are still what was written."""

import argparse
import json

from vl_plugins.data.parallel import usable_cores

__all__ = ["register", "run"]

MOST_PROBLEMS_PRINTED = 100


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``verify`` subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="check shards against their manifest.json",
        examples=["vl-plugins shards verify shards --split coco-train coco-val"],
        description="Check shards against their manifest.json, and decode every image. The exit status is 1 if "
        "anything is wrong.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of shards, or an fsspec URL such as s3://...")
    parser.add_argument("--split", nargs="+", metavar="NAME", help="check only these splits, such as coco-train")
    parser.add_argument(
        "--workers", type=int, default=usable_cores(), metavar="N", help="worker processes (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print; the progress bar goes to standard error. Return 1 when there are problems."""
    from vl_plugins.data.verification import verify_shards

    result = verify_shards(arguments.folder, splits=arguments.split, workers=arguments.workers)
    if arguments.json:
        print(json.dumps(vars(result), indent=2))
        return 1 if result.problems else 0
    for problem in result.problems[:MOST_PROBLEMS_PRINTED]:
        print(problem)
    if len(result.problems) > MOST_PROBLEMS_PRINTED:
        print(f"... and {len(result.problems) - MOST_PROBLEMS_PRINTED:,} more; --json lists all")
    found = f"{len(result.problems):,} problems" if result.problems else "everything is as manifest.json says"
    print(f"{result.shards:,} shards, {result.samples:,} samples, {result.captions:,} captions: {found}")
    return 1 if result.problems else 0
