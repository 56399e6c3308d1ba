"""The tests marked ``gpu``, then time and memory of the losses on one GPU, in Markdown for docs/measured.md.

    make gpu                                                   # in any checkout
    python -m benchmarks.gpu                                   # where the package is installed
    python -m benchmarks.gpu --device cpu --batch-sizes 8 16   # a rehearsal without a GPU

It needs torch, pytorch-metric-learning and open_clip, and for the tests pytest. Standard output is the Markdown, with
what was left out and why; progress and the tests' own output go to standard error. The exit status is 1 if a test
failed, and 2 without a GPU.

Time is wall time between two synchronizations of forward and backward pass: the median over the rounds, and the median
of the ratios to ClipLoss in the same round. Memory is the peak that torch allocated, gradients included. All losses run
as in open_clip's ``--precision amp_bf16``: features in bfloat16, under autocast.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.gpu_losses import SET_SIZE, LossBenchmark, loss_rows, markdown_table, missing_lines
from benchmarks.gpu_tests import ROOT, TestReport, run_gpu_tests
from vl_plugins.errors import UserError, exit_status

SHARE_OF_TESTS = 0.4  # of the time, at most
SECONDS_TO_END = 20  # for the last step that was begun


def describe_device(device: str) -> str:
    """Return the name of the device and the versions, for the heading."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU, a rehearsal"
    packages = []
    for package in ("open_clip_torch", "pytorch-metric-learning", "vl_plugins"):
        packages.append(f"{package} {version(package)}")
    return f"{name}; torch {torch.__version__}, {', '.join(packages)}"


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


def run(arguments: argparse.Namespace) -> int:
    """Run tests and measurements, and print them; return 1 if a test failed."""
    deadline = time.monotonic() + 60 * arguments.minutes - SECONDS_TO_END
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no CUDA device, so that tests and tables would be empty; install a torch "
            "with CUDA, or rehearse with --device cpu"
        )
    report = run_gpu_tests(arguments.tests, SHARE_OF_TESTS * 60 * arguments.minutes)
    print_tests(report)

    sizes = sorted(arguments.batch_sizes)
    rows = list(loss_rows(arguments.compiler))
    benchmark = LossBenchmark(rows, arguments.dimension, arguments.device, arguments.rounds)
    benchmark.measure(sizes, deadline)
    print("\n## Time and memory of the losses on a GPU\n")
    explanation = (
        f"{describe_device(arguments.device)}. Forward and backward pass of B pairs, features in bfloat16 under "
        f"autocast, D = {arguments.dimension:,}; medians of up to {arguments.rounds} rounds. Compiled: by "
        f"`torch.compile`, one graph for each B. Sets of {SET_SIZE}: so many vectors for each image and text."
    )
    print(textwrap.fill(explanation, 120), end="\n\n")
    for column in ("time", "memory"):
        print("\n".join(markdown_table(benchmark.results, rows, sizes, column)), end="\n\n")
    print_list("Not measured", missing_lines(benchmark.results))
    return 1 if report.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it; what does not fit is left out")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(256, 1024, 4096, 16384, 32768))
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30, help="at most; fewer where time is short")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the tests")
    arguments = parser.parse_args(argv)
    return exit_status("benchmarks.gpu", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
