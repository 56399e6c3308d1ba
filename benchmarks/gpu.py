"""The tests marked ``gpu``, then time and memory of the losses on one GPU, in Markdown for docs/measured.md.

    make gpu                                                   # in any checkout
    python -m benchmarks.gpu                                   # where the package is installed
    python -m benchmarks.gpu --batch-sizes 1024 65536x768      # 768 dimensions for the second batch
    python -m benchmarks.gpu --device cpu --batch-sizes 8 16   # a rehearsal without a GPU

It needs torch, pytorch-metric-learning and open_clip, and for the tests pytest. siglip-kernel and inf-cl are measured
where they are installed. Without a package index, their wheels of pure Python may lie in a folder::

    pip install --no-deps --target build/peers siglip-kernel inf-cl   # elsewhere
    PYTHONPATH=build/peers make gpu

Standard output is the Markdown, with what was left out and why; progress and the tests' own output go to standard
error. The exit status is 1 if a test failed, and 2 without a GPU.

Time is wall time between two synchronizations of forward and backward pass: the median over the rounds, and the median
of the ratios to ClipLoss, eager and compiled, in the same round. Memory is the peak that torch allocated, gradients
included. All losses run as in open_clip's ``--precision amp_bf16``: features in bfloat16, under autocast.
"""

import argparse
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu_losses import LossBenchmark, Size, markdown_table, missing_lines
from benchmarks.gpu_rows import SET_SIZE, open_clip_rows, own_rows, peer_rows
from benchmarks.gpu_tests import ROOT, TestReport, run_gpu_tests
from vl_plugins.errors import UserError, exit_status

SHARE_OF_TESTS = 0.4  # of the time, at most
SECONDS_TO_END = 20  # for the last step that was begun
BATCH_SIZES = ("256", "1024", "4096", "16384", "32768", "65536x768")
PACKAGES = ("triton", "open_clip_torch", "pytorch-metric-learning", "siglip-kernel", "inf-cl", "vl_plugins")


def describe_device(device: str) -> str:
    """Return the name of the device, the versions of the packages, and the commit."""
    name = "CPU, a rehearsal"
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    packages = [f"torch {torch.__version__}"]
    for package in PACKAGES:
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    commit = commit_of(ROOT)
    if commit:
        packages.append(f"commit {commit}")
    return f"{name}; {', '.join(packages)}."


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, such as ``e6a99af-dirty``; empty if there is none."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True).stdout.strip()


def sizes_of(batch_sizes: Sequence[str], dimension: int) -> list[Size]:
    """Return the sizes that ``B`` or ``BxD`` say, the smallest first."""
    sizes = []
    for text in batch_sizes:
        batch, _, own_dimension = text.partition("x")
        try:
            sizes.append(Size(int(batch), int(own_dimension or dimension)))
        except ValueError:
            raise UserError(f"--batch-sizes: {text!r} is neither a number, as 1024, nor B x D, as 65536x768") from None
    return sorted(sizes)


def print_list(title: str, lines: Sequence[str]) -> None:
    """Print a list in Markdown, if it has any lines."""
    if lines:
        print(f"\n{title}:\n")
        for line in lines:
            print(f"- {line}")


def print_tests(report: TestReport) -> None:
    """Print the outcome of the tests in Markdown."""
    print("## Tests on a GPU\n")
    print(f"{report.passed} passed, {len(report.failed)} failed.")
    print_list("Failed", report.failed)
    print_list("Skipped", report.skipped)


def print_losses(benchmark: LossBenchmark, sizes: Sequence[Size]) -> None:
    """Print the tables in Markdown, those of each dimension together."""
    sizes_by_dimension: dict[int, list[Size]] = {}
    for size in sizes:
        sizes_by_dimension.setdefault(size.dimension, []).append(size)
    for dimension, columns in sizes_by_dimension.items():
        print(f"\n### D = {dimension:,}")
        for quantity in ("time", "memory"):
            lines = ["", *markdown_table(benchmark.results, benchmark.rows, columns, quantity)]
            print("\n".join(lines))
        print_list("Not measured", missing_lines(benchmark.results, columns))


def run(arguments: argparse.Namespace) -> int:
    """Run tests and measurements, and print them; return 1 if a test failed."""
    deadline = time.monotonic() + 60 * arguments.minutes - SECONDS_TO_END
    sizes = sizes_of(arguments.batch_sizes, arguments.dimension)
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no CUDA device, so that tests and tables would be empty; install a torch "
            "with CUDA, or rehearse with --device cpu"
        )
    print(textwrap.fill(describe_device(arguments.device), 120), end="\n\n")
    report = run_gpu_tests(arguments.tests, SHARE_OF_TESTS * 60 * arguments.minutes)
    print_tests(report)

    peers, reasons = peer_rows(arguments.device)
    rows = [*open_clip_rows(arguments.compiler), *peers, *own_rows()]
    benchmark = LossBenchmark(rows, arguments.device, arguments.rounds)
    benchmark.measure(sizes, deadline)
    print("\n## Time and memory of the losses on a GPU\n")
    explanation = (
        "Forward and backward pass of B pairs, features of D dimensions in bfloat16 under autocast; medians of up to "
        f"{arguments.rounds} rounds. Compiled: open_clip's losses by `torch.compile`, one graph for each B; of ours, "
        f"the element-wise part of each block of similarities. Sets of {SET_SIZE}: so many vectors for each image and "
        "text."
    )
    print(textwrap.fill(explanation, 120))
    if reasons:
        peers_without_rows = [f"{package} ({reason})" for package, reason in reasons.items()]
        print(f"\nNot measured: {', '.join(peers_without_rows)}.")
    print_losses(benchmark, sizes)
    return 1 if report.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it; what does not fit is left out")
    parser.add_argument("--batch-sizes", nargs="+", metavar="B", default=BATCH_SIZES, help="or BxD with an own D")
    parser.add_argument("--dimension", type=int, default=512, help="D, where a batch size has no own")
    parser.add_argument("--rounds", type=int, default=30, help="at most; fewer where time is short")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the tests")
    arguments = parser.parse_args(argv)
    return exit_status("benchmarks.gpu", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
