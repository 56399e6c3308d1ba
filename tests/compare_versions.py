"""Compare two installations of this package: run the same cases in both and print the largest differences."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

CASES = Path(__file__).resolve().parent / "compare"
AREAS = ("losses", "shards", "retrieval", "open_clip", "pml")
WITH_BATCHES = ("open_clip", "pml")
TOLERANCES = {"losses": 1e-12, "retrieval": 1e-12, "open_clip": 1e-12, "pml": 1e-12}
SHOWN = 5  # differences of a group


class Difference(NamedTuple):
    """How two arrays of one name differ.

    Attributes:
        absolute: largest difference of two entries.
        relative: the same divided by the largest entry, or by 1 if all are smaller.
        problem: why they cannot be compared as numbers; empty if they can.
    """

    absolute: float
    relative: float
    problem: str = ""


def difference(old: np.ndarray | None, new: np.ndarray | None) -> Difference:
    """Compare two arrays; None for one that is missing."""
    if old is None or new is None:
        present = new if old is None else old
        where = "new" if old is None else "old"
        return Difference(0, 0, f"only in the {where} version{_text(present)}")
    if old.dtype == new.dtype == np.uint8:
        return Difference(0, 0, "" if old.tobytes() == new.tobytes() else f"old{_text(old)}, new{_text(new)}")
    if old.dtype != new.dtype or old.shape != new.shape:
        return Difference(0, 0, f"old {old.dtype} {old.shape}, new {new.dtype} {new.shape}")
    if old.size == 0:
        return Difference(0, 0)
    old, new = (array.astype(np.float64) for array in (old, new))
    same = (old == new) | (np.isnan(old) & np.isnan(new))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0, np.abs(old - new))
    absolute = float(np.where(np.isnan(distance), np.inf, distance).max())
    largest = np.abs(old[np.isfinite(old)]).max(initial=1)
    return Difference(absolute, absolute / float(largest))


def compare(area: str, old: dict[str, np.ndarray], new: dict[str, np.ndarray], tolerance: float) -> list[str]:
    """Print a row for each group of cases; return the first differences of each above the tolerance, as lines."""
    groups: dict[str, dict[str, dict[str, Difference]]] = defaultdict(lambda: defaultdict(dict))
    for key in old | new:
        case, quantity = key.rsplit("/", 1)
        groups[case.split("/")[0]][case][quantity] = difference(old.get(key), new.get(key))
    lines = []
    for group, cases in groups.items():
        if group.startswith("gone"):
            dropped = [case for case, found in cases.items() if all("only in" in d.problem for d in found.values())]
            for case in dropped:
                del cases[case]
            group += f" ({len(dropped)} in one version only)" if dropped else ""
        worst, worst_size = "", 0.0
        largest = {"value": Difference(0, 0), "gradient": Difference(0, 0)}
        different, found_lines = set(), []
        for case, found in cases.items():
            for quantity, d in found.items():
                kind = "gradient" if quantity.startswith("grad") else "value"
                largest[kind] = Difference(*map(max, largest[kind][:2], d[:2]))
                size = np.inf if d.problem else d.relative
                if size > worst_size:
                    worst, worst_size = case, size
                if size > tolerance:
                    different.add(case)
                    text = d.problem or f"{d.absolute:.1e}, relative {d.relative:.1e}"
                    found_lines.append(f"{area} {case} {quantity}: {text}")
        numbers = "  ".join(f"{x:9.1e}" for kind in ("value", "gradient") for x in largest[kind][:2])
        counts = f"{len(cases):5}  {len(different):6}"
        print(f"{area:9}  {group:38}  {counts}  {numbers}  {worst.partition('/')[2] or worst}", flush=True)
        hidden = len(found_lines) - SHOWN
        lines += found_lines[:SHOWN] + ([f"{area} {group}: {hidden} more differences"] if hidden > 0 else [])
    return lines


def run_cases(python: str, area: str, out: Path, options: list[str]) -> dict[str, np.ndarray]:
    """Run the cases of an area in one environment and return their arrays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _run(python, [str(CASES / f"{area}.py"), str(out), *options], f"{area} with {python}")
    with np.load(out, allow_pickle=False) as arrays:
        return dict(arrays)


def installed(python: str) -> str:
    """Return the file of the package that an environment imports."""
    code = "import vl_plugins; print(vl_plugins.__version__, vl_plugins.__file__)"
    return _run(python, ["-c", code], python).strip()


def _run(python: str, command: list[str], name: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    real_data = environment.get("VL_PLUGINS_REAL_DATA", CASES.parents[2] / "shared" / "data" / "stamps")
    environment["VL_PLUGINS_REAL_DATA"] = str(Path(real_data).resolve())
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([python, *command], cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{name} failed:\n{result.stderr[-4000:]}")
    for line in result.stderr.splitlines():
        if line.startswith("compare: "):
            print(line)
    return result.stdout


def _text(array: np.ndarray) -> str:
    if array.dtype != np.uint8:
        return ""
    text = array.tobytes().decode(errors="replace")
    return f" {text if len(text) <= 60 else text[:60] + '...'!r}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The tolerance is relative to the largest entry of an array, or to 1 if all its entries are smaller. "
        "The exit status is 1 if any case differs by more.",
    )
    parser.add_argument("old_python", help="Python of the environment with the old version")
    parser.add_argument("new_python", help="Python of the environment with the new version")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"{', '.join(AREAS)} (default: all)")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest equal difference (default: 0 or 1e-12, by area)",
    )
    parser.add_argument("--batches", help="file of real batches, for open_clip and pml")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the arrays of both versions in this folder")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.areas) - set(AREAS))
    if unknown:
        parser.error(f"unknown area {unknown[0]}; areas: {', '.join(AREAS)}")
    # Not resolved: a link leads out of its environment.
    pythons = {"old": os.path.abspath(arguments.old_python), "new": os.path.abspath(arguments.new_python)}
    files = {version: installed(python) for version, python in pythons.items()}
    for version, file in files.items():
        print(f"{version}: {file}")
    if files["old"] == files["new"]:
        parser.error("both environments import the same package")
    print(f"{'area':9}  {'group':38}  cases  differ  {'value':>9}   relative   gradient   relative  worst case")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        root = (arguments.keep or Path(folder)).resolve()
        for area in arguments.areas or [area for area in AREAS if (CASES / f"{area}.py").is_file()]:
            batches = arguments.batches is not None and area in WITH_BATCHES
            options = ["--batches", str(Path(arguments.batches).resolve())] if batches else []
            found = [run_cases(pythons[v], area, root / v / f"{area}.npz", options) for v in ("old", "new")]
            tolerance = TOLERANCES.get(area, 0) if arguments.tolerance is None else arguments.tolerance
            lines += compare(area, *found, tolerance)
    print("\n".join(["", *lines]) if lines else "\nno differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
