"""Compare an old version of this package with this one: run the same cases in both, and list what differs.

    make compare                                             # 0.3, which it checks out in .v0_3, with this checkout
    python -m benchmarks.compare .v0_3 --cases 'unified*'    # some cases, named as in the output

Both versions run in this Python environment, each in a process of its own with its checkout on ``PYTHONPATH``.
``losses`` are values and gradients of losses, miners, reducers, distances and sets, in one process and in two; ``data``
the bytes of shards and what is read from them; ``hosts`` the weights and metrics of short trainings.

By default results have to be equal to the last bit. The tolerance is relative to the largest entry of a tensor, or to 1
if all entries are smaller. The exit status is 1 if anything differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.differences import Group, compare
from benchmarks.metadata import write_metadata
from vl_plugins.errors import UserError, exit_status
from vl_plugins.tables import align_columns

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
AREAS = ("losses", "data", "hosts")
MOST_LINES = 10  # of one group


def run_cases(
    area: str, tree: Path, folder: Path, cases: str = "*", batches: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Run the cases of an area with the package of a checkout, in a new process.

    Args:
        area: one of :data:`AREAS`.
        tree: the checkout.
        folder: for the files of the cases, the same for both versions: an index of shards depends on the absolute path
            of its source.
        cases: pattern of the names of cases.
        batches: file of training batches, which is written if it does not exist and else used instead of new ones.
    """
    tree = tree.resolve()
    work = folder / "work"
    work.mkdir()
    # Version and losses by name are those of the checkout, and not those that are installed.
    metadata = folder / "metadata"
    write_metadata(metadata, tree)
    results = folder / "results.pt"
    command = [sys.executable, str(HERE / f"{area}_cases.py"), str(results), "--tree", str(tree), "--cases", cases]
    if batches is not None:
        command += ["--batches", str(batches)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(metadata), str(tree)])
    try:
        process = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(metadata)
    if process.returncode:
        raise RuntimeError(f"the cases of {area} failed with {tree}:\n{process.stdout}\n{process.stderr}")
    return torch.load(results, weights_only=True)


def print_groups(area: str, groups: dict[str, Group]) -> None:
    """Print a row for each group, then the differences."""
    rows = [[area, "cases", "errors", "differ", "largest difference"]]
    for name, group in groups.items():
        numbers = [str(group.cases), str(group.errors), str(len(group.differences)), f"{group.largest:.1e}"]
        rows.append([name, *numbers])
    for row in align_columns(rows):
        print("  ".join(row))
    for name, group in groups.items():
        for line in group.differences[:MOST_LINES]:
            print(f"- {line}")
        if len(group.differences) > MOST_LINES:
            print(f"- {name}: {len(group.differences) - MOST_LINES} more")
    print(flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Compare all areas; return 1 if anything differs."""
    if not (arguments.old / "vl_plugins").is_dir():
        raise UserError(f"{arguments.old} is no checkout of vl_plugins; `make compare` makes one")
    is_different = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = folder / "batches.pt" if arguments.same_batches else None
        for area in arguments.areas:
            old = run_cases(area, arguments.old, folder, arguments.cases, batches)
            new = run_cases(area, arguments.new, folder, arguments.cases, batches)
            groups = compare(old, new, arguments.tolerance)
            print_groups(area, groups)
            for group in groups.values():
                is_different |= bool(group.differences)
    print("differences" if is_different else f"no differences (tolerance {arguments.tolerance:g})")
    return 1 if is_different else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, help="checkout of the old version")
    parser.add_argument("--new", type=Path, default=ROOT, help="checkout of the new version (default: this one)")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=AREAS)
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="names of cases, with * and ?")
    parser.add_argument("--tolerance", type=float, default=0.0)
    batches = "train both versions on the batches that the old one reads, where the order of an epoch has changed"
    parser.add_argument("--same-batches", action="store_true", help=batches)
    arguments = parser.parse_args(argv)
    return exit_status("benchmarks.compare", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
