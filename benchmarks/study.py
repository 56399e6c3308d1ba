"""Train many losses in several regimes, each at its own best learning rate, and compare them with intervals.

    python -m benchmarks.study benchmarks/studies/claims.yaml --work studies/claims

The file lists commands, regimes, methods and seeds; `benchmarks/studies/claims.yaml` explains each key. Whatever is
missing is trained, by the commands that a user would type, several runs at a time with one thread each. A study that
was stopped continues when it is started again, and one whose file got more methods or seeds trains only these.

The learning rate of a method is the one with the best RSUM on validation, by one rule for all: three rates are tried,
and while the best of them is the lowest or the highest, one more beyond it.

Results are small and meant to be kept: for each run a compressed file with what each test image contributes to RSUM,
from which anybody can compare the methods again without training. Beside them are a table (study.csv, one row for
each run), the comparisons (study.md) and a picture (study.svg). Data, checkpoints and logs are in --work, and may be
deleted.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.grid import Results, Run, Study
from benchmarks.study_tables import write_tables
from benchmarks.training import Training
from vl_plugins.errors import UserError, exit_status, one_of

RESULTS = Path("docs/studies")


def missing_runs(results: Results, regimes: Sequence[str], methods: Sequence[str]) -> list[Run]:
    """Return the runs that are missing, of some regimes and methods; of all where none are named."""
    missing = []
    for cell in results.study.cells:
        if regimes and cell.regime not in regimes:
            continue
        for method in cell.all_methods:
            if not methods or method in methods:
                missing += results.missing(cell, method)
    return list(dict.fromkeys(missing))


def repeat_sample(kept: Results, own: Results, name: str, training: Training) -> str:
    """Train a sample of the runs again; return a table that compares them with the results that are kept."""
    sample = [Run(regime, method, kept.rate(regime, method), seed) for regime, method, seed in kept.study.samples[name]]
    training.train(lambda: [run for run in sample if not own.has(run)], hours=float("inf"))
    rows = ["| run | RSUM | repeated | images whose values differ |", "|---|---:|---:|---:|"]
    for run in sample:
        before, after = kept.outcome(run), own.outcome(run)
        differing = (before.image_values.values != after.image_values.values).any(dim=0).sum().item()
        rows.append(f"| {run.path} | {before.test['rsum']:.2f} | {after.test['rsum']:.2f} | {differing} |")
    makers = dict.fromkeys([kept.outcome(sample[0]).made_by, own.outcome(sample[0]).made_by])
    return "\n".join([*rows, "", f"made by {' and by '.join(makers)}"])


def run_study(arguments: argparse.Namespace) -> None:
    study = Study.read(arguments.file)
    kept = Results(study, RESULTS / arguments.file.stem)
    results = Results(study, arguments.results) if arguments.results else kept
    for regime in arguments.regimes:
        one_of("--regimes", regime, tuple(study.regimes))
    all_methods = sorted({method for cell in study.cells for method in cell.all_methods})
    for method in arguments.methods:
        one_of("--methods", method, tuple(all_methods))
    training = Training(results, arguments.work)
    if arguments.sample:
        if results is kept:
            raise UserError("--sample trains runs again: give another folder with --results")
        one_of("--sample", arguments.sample, tuple(study.samples))
        print(repeat_sample(kept, results, arguments.sample, training))
        return
    training.train(partial(missing_runs, results, arguments.regimes, arguments.methods), arguments.hours)
    print(write_tables(study, results))
    print(f"{results.hours():.1f} hours of processor time in {len(list(results.all_runs()))} runs")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path, help="the study, .yaml")
    add("--work", type=Path, required=True, help="folder of data, runs and logs, also of a study that was stopped")
    add("--results", type=Path, help="folder of results (default: docs/studies/NAME)")
    add("--regimes", nargs="+", default=[], metavar="NAME", help="train the runs of these only (default: all)")
    add("--methods", nargs="+", default=[], metavar="NAME", help="train the runs of these only (default: all)")
    add("--hours", type=float, default=float("inf"), help="start no run after this processor time of all runs")
    add("--sample", metavar="NAME", help="train some runs again, and compare them with the results that are kept")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the study was ended"))  # which ends its trainings, too
    return exit_status("benchmarks.study", lambda: run_study(arguments))


if __name__ == "__main__":
    sys.exit(main())
