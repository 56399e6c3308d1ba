"""``vl-plugins shards verify``: whether shards are still what was written."""

import argparse
import json

from vl_plugins.data.parallel import usable_cores

__all__ = ["register", "run"]

MOST_PROBLEMS_PRINTED = 100

DESCRIPTION = """\
Read every shard of manifest.json again and print whatever is wrong: a shard that is missing, cut
off or changed, an image that cannot be decoded, captions or ids that do not fit, wrong counts.
Nothing is changed. The exit status is 0 when everything is right and 1 when something is not."""

EPILOG = """\
example:
  vl-plugins shards verify shards --split coco-train coco-val"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``verify`` subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="check shards against their manifest.json, sample by sample",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="folder of the shards, or a URL of fsspec such as s3://...")
    parser.add_argument(
        "--split", nargs="+", metavar="NAME", help="only these, such as train or coco-train (default: all)"
    )
    parser.add_argument(
        "--workers", type=int, default=usable_cores(), metavar="N", help="processes (default: the cores, %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print counts and all problems as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print; the progress bar goes to standard error. Return 1 when there are problems."""
    from vl_plugins.data.verification import verify_shards

    result = verify_shards(arguments.folder, splits=arguments.split, workers=arguments.workers)
    numbers = ((result.shards, "shard"), (result.samples, "sample"), (result.captions, "caption"))
    counts = ", ".join(_counted(number, name) for number, name in numbers)
    if arguments.json:
        print(json.dumps(vars(result), indent=2))
    elif not result.problems:
        print(f"{counts}: everything is as manifest.json says")
    else:
        print("\n".join(result.problems[:MOST_PROBLEMS_PRINTED]))
        if len(result.problems) > MOST_PROBLEMS_PRINTED:
            print(f"... and {len(result.problems) - MOST_PROBLEMS_PRINTED:,} more; --json lists all")
        print(f"{counts}: {_counted(len(result.problems), 'problem')}")
    return 1 if result.problems else 0


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
