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
import csv
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple
from zlib import crc32

import yaml

from benchmarks.jobs import Jobs, processor_seconds, run_command, run_once
from benchmarks.outcomes import Outcome, made_by, metric_means, selected_metrics
from vl_plugins.errors import UserError, exit_status
from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval import Difference, compare
from vl_plugins.retrieval.features import Features, load_features
from vl_plugins.retrieval.protocols import evaluate

RESULTS = Path("docs/studies")
RUNS_AT_ONCE = 2
FIRST_RATES = 3

# Columns of the table, by the metric's name.
COLUMNS = {"rsum": "RSUM"} | {
    f"{direction}_R@{k}": f"{label} R@{k}"
    for direction, label in (("image_to_text", "i2t"), ("text_to_image", "t2i"))
    for k in (1, 5, 10)
}


class Run(NamedTuple):
    """One training of a study."""

    regime: str
    method: str
    rate: str
    seed: int

    @property
    def path(self) -> Path:
        return Path(self.regime) / self.method / f"lr{self.rate}-seed{self.seed}"


@dataclass(frozen=True)
class Cell:
    """Methods that are compared in a regime.

    Attributes:
        regime: its name.
        baseline: the method that the others are compared with.
        methods: the others.
        seeds: how many trainings of each method at its best rate.
    """

    regime: str
    baseline: str
    methods: list[str]
    seeds: int = 3

    @property
    def all_methods(self) -> list[str]:
        return [self.baseline, *self.methods]


@dataclass
class Trainer:
    """A training command with the flags of its methods."""

    train: str
    encode: str
    methods: dict[str, Any]


@dataclass
class Study:
    """What a study's file says.

    Attributes:
        prepare: commands that write data and the checkpoints to start from.
        rates: all learning rates that may be tried, from the lowest to the highest.
        trainers: by name.
        regimes: by name, with the keys that may stand in {} in commands; ``trainer``, ``epochs`` and ``first_rate``
            are needed.
        cells: what is compared, the most urgent first.
        tuning_seed: the seed whose RSUM on validation decides on the rate.
        samples: by name, runs that somebody may repeat to see whether the results hold elsewhere.
    """

    prepare: list[str]
    rates: list[str]
    trainers: dict[str, Trainer]
    regimes: dict[str, dict[str, Any]]
    cells: list[Cell]
    tuning_seed: int = 0
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Study":
        """Read a YAML file."""
        content = yaml.safe_load(file.read_text())
        content["trainers"] = {name: Trainer(**trainer) for name, trainer in content["trainers"].items()}
        content["cells"] = [Cell(**cell) for cell in content["cells"]]
        study = cls(**content)
        for cell in study.cells:
            for method in cell.all_methods:
                if method not in study.trainer_of(cell.regime).methods:
                    raise UserError(f"{file}: the method {method} of regime {cell.regime} has no flags")
        return study

    def trainer_of(self, regime: str) -> Trainer:
        return self.trainers[self.regimes[regime]["trainer"]]

    def epochs(self, regime: str, method: str) -> int:
        """Return how long a method is trained: the epochs of its regime times its own ``length``."""
        return round(self.regimes[regime]["epochs"] * self._options(regime, method).get("length", 1))

    def train_command(self, run: Run, work: Path) -> str:
        keys = self.regimes[run.regime] | run._asdict() | {"lr": run.rate, "work": work, "folder": work / run.path}
        keys["epochs"] = self.epochs(run.regime, run.method)
        # Twice, because flags of the regime and of the method have keys too.
        keys["method_flags"] = self._options(run.regime, run.method)["flags"].format(**keys)
        keys["flags"] = str(keys.get("flags", "")).format(**keys)
        return self.trainer_of(run.regime).train.format(**keys)

    def encode_command(self, run: Run, work: Path, split: str) -> str:
        folder = work / run.path
        keys = self.regimes[run.regime] | {"work": work, "folder": folder, "split": split}
        return self.trainer_of(run.regime).encode.format(**keys, features=folder / f"{split}.safetensors")

    def _options(self, regime: str, method: str) -> dict[str, Any]:
        flags = self.trainer_of(regime).methods[method]
        return flags if isinstance(flags, dict) else {"flags": flags}


class Results:
    """The outcomes of a study: those of the files in a folder."""

    def __init__(self, study: Study, folder: Path):
        self.study, self.folder = study, folder
        self._outcomes: dict[Run, Outcome] = {}

    def file(self, run: Run) -> Path:
        return self.folder / run.path.with_suffix(".npz")

    def has(self, run: Run) -> bool:
        return run in self._outcomes or self.file(run).is_file()

    def outcome(self, run: Run) -> Outcome:
        """Return what a run gave.

        Raises:
            UserError: its file was made by another command.
        """
        if run not in self._outcomes:
            file = self.file(run)
            outcome = Outcome.load(file)
            command = self.study.train_command(run, Path("WORK"))
            if outcome.command != command:
                raise UserError(
                    f"{file} was made by another command: delete it to train again, or restore it\n"
                    f"  the file: {outcome.command}\n  the study: {command}"
                )
            self._outcomes[run] = outcome
        return self._outcomes[run]

    def missing(self, cell: Cell, method: str) -> list[Run]:
        """Return the runs that a method needs next: at rates to choose from, or of the seeds at the best one."""
        tried = self._tried_rates(cell.regime, method)
        tuning = [Run(cell.regime, method, rate, self.study.tuning_seed) for rate in tried]
        missing = [run for run in tuning if not self.has(run)]
        if missing:
            return missing
        return [run for run in self.runs(cell, method) if not self.has(run)]

    def rate(self, regime: str, method: str) -> str:
        """Return the learning rate with the highest RSUM on validation."""
        tried = self._tried_rates(regime, method)
        return max(tried, key=lambda rate: self._validation_rsum(regime, method, rate))

    def is_at_edge(self, regime: str, method: str) -> bool:
        """Whether the best learning rate is the lowest or highest of all that may be tried."""
        return self.rate(regime, method) in (self.study.rates[0], self.study.rates[-1])

    def runs(self, cell: Cell, method: str) -> list[Run]:
        """Return the runs of a method at its best rate."""
        rate = self.rate(cell.regime, method)
        return [Run(cell.regime, method, rate, seed) for seed in range(cell.seeds)]

    def is_complete(self, cell: Cell, method: str) -> bool:
        return not self.missing(cell, method)

    def outcomes(self, cell: Cell, method: str) -> list[Outcome]:
        return [self.outcome(run) for run in self.runs(cell, method)]

    def seed_outcomes(self, regime: str, method: str) -> list[Outcome]:
        """Return the outcomes of all seeds of a method at its best rate; none before all of them are there."""
        for cell in self.study.cells:
            if cell.regime == regime and method in cell.all_methods:
                return self.outcomes(cell, method) if self.is_complete(cell, method) else []
        raise UserError(f"no cell of the study has the method {method} in the regime {regime}")

    def all_runs(self) -> Iterator[Run]:
        """Yield all runs that the study asks for and that are there."""
        seen = set()
        for cell in self.study.cells:
            for method in cell.all_methods:
                rates = self._tried_rates(cell.regime, method)
                runs = [Run(cell.regime, method, rate, self.study.tuning_seed) for rate in rates]
                if all(map(self.has, runs)):
                    runs += self.runs(cell, method)
                for run in runs:
                    if run not in seen and self.has(run):
                        seen.add(run)
                        yield run

    def _tried_rates(self, regime: str, method: str) -> list[str]:
        """Return the rates to try, from the lowest to the highest, as far as results say."""
        rates = self.study.rates
        first = rates.index(self.study.regimes[regime]["first_rate"])
        last = first + FIRST_RATES - 1
        while True:
            tried = rates[first : last + 1]
            runs = [Run(regime, method, rate, self.study.tuning_seed) for rate in tried]
            if not all(map(self.has, runs)):
                return tried
            best = max(tried, key=lambda rate: self._validation_rsum(regime, method, rate))
            if best == tried[0] and first > 0:
                first -= 1
            elif best == tried[-1] and last < len(rates) - 1:
                last += 1
            else:
                return tried

    def _validation_rsum(self, regime: str, method: str, rate: str) -> float:
        return self.outcome(Run(regime, method, rate, self.study.tuning_seed)).val["rsum"]


def train_missing(study: Study, results: Results, work: Path, hours: float, only: Sequence[str]) -> None:
    """Prepare, and train what is missing, until everything is there or the processor time is used up."""
    jobs = Jobs(RUNS_AT_ONCE)
    try:
        for command in study.prepare:
            command = command.format(work=work)
            jobs.start(
                command, work / "prepare.log", run_once, command, work / f"prepared/{crc32(command.encode()):08x}"
            )
            jobs.wait()
        running: set[Run] = set()
        while True:
            wanted = [run for run in _wanted(study, results, only) if run not in running]
            used = sum(results.outcome(run).all_seconds for run in results.all_runs())
            if used > hours * 3600:
                wanted = []
            while wanted and not jobs.is_full:
                run = wanted.pop(0)
                command = study.train_command(run, work), study.train_command(run, Path("WORK"))
                encode = {split: study.encode_command(run, work, split) for split in ("val", "test")}
                jobs.start(
                    run, work / f"{run.path}.log", train_run, command, encode, work / run.path, results.file(run)
                )
                running.add(run)
            if not running:
                return
            run = jobs.wait()
            running.remove(run)
            outcome = results.outcome(run)
            print(
                f"{used / 3600:.2f} h  {run.path}  {outcome.training_seconds:.0f} s  val RSUM {outcome.val['rsum']:.1f}"
                f"  test {outcome.test['rsum']:.1f}",
                flush=True,
            )
    finally:
        jobs.stop()


def _wanted(study: Study, results: Results, only: Sequence[str]) -> list[Run]:
    wanted = []
    for cell in study.cells:
        if only and cell.regime not in only:
            continue
        for method in cell.all_methods:
            wanted += results.missing(cell, method)
    return list(dict.fromkeys(wanted))


def train_run(commands: tuple[str, str], encode: dict[str, str], folder: Path, file: Path) -> None:
    """Train, encode and evaluate a run, and write its outcome; its checkpoint is deleted.

    Args:
        commands: the training command, and the one that is kept, without names of folders.
        encode: commands that write the features of both splits.
        folder: of the run.
        file: of the outcome.
    """
    shutil.rmtree(folder, ignore_errors=True)
    started = processor_seconds()
    run_command(commands[0])
    trained = processor_seconds()
    metrics, image_values = {}, None
    for split, command in encode.items():
        run_command(command)
        features = load_features(folder / f"{split}.safetensors")
        image_values = evaluate([features], for_comparison=True).image_values()["plain"]
        metrics[split] = metric_means(image_values) | set_variances(features)
    assert image_values is not None
    ended = processor_seconds()
    outcome = Outcome(
        command=commands[1],
        made_by=made_by(),
        training_seconds=trained - started,
        all_seconds=ended - started,
        val=metrics["val"],
        test=metrics["test"],
        image_values=selected_metrics(image_values),
    )
    outcome.save(file)
    shutil.rmtree(folder)


def set_variances(features: Features) -> dict[str, float]:
    """Return the mean circular variance of the sets of images and captions; of vectors nothing."""
    if features.images.ndim == 2:
        return {}
    return {
        "image_circular_variance": circular_variance(features.images).mean().item(),
        "caption_circular_variance": circular_variance(features.captions).mean().item(),
    }


def verdict(difference: Difference) -> str:
    """Return the interval of a difference, bold where it excludes 0."""
    interval = f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]"
    return f"**{interval}**" if difference.resolved else interval


def comparison_table(cell: Cell, results: Results) -> str | None:
    """Return a table in Markdown of the methods of a cell that are complete; None before two of them are."""
    methods = [method for method in cell.all_methods if results.is_complete(cell, method)]
    if cell.baseline not in methods or len(methods) < 2:
        return None
    outcomes = {method: results.outcomes(cell, method) for method in methods}
    values = {method: [outcome.image_values for outcome in of_method] for method, of_method in outcomes.items()}
    differences = compare(values, cell.baseline)
    base_seconds = fmean(outcome.training_seconds for outcome in outcomes[cell.baseline])
    rows = [
        f"| method | rate | epochs | time | RSUM | − {cell.baseline} | R@1 i2t | R@1 t2i |",
        "|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for method in methods:
        rsums = [outcome.test["rsum"] for outcome in outcomes[method]]
        seconds = fmean(outcome.training_seconds for outcome in outcomes[method])
        recalls = [fmean(outcome.test[f"{direction}_R@1"] for outcome in outcomes[method]) for direction in DIRECTIONS]
        edge = " (edge)" if results.is_at_edge(cell.regime, method) else ""
        cells = [
            f"`{method}`",
            results.rate(cell.regime, method) + edge,
            str(results.study.epochs(cell.regime, method)),
            f"{seconds / base_seconds:.2f}",
            f"{fmean(rsums):.1f} ± {stdev(rsums):.1f}" if len(rsums) > 1 else f"{rsums[0]:.1f}",
            "" if method == cell.baseline else verdict(differences[method]["rsum"]),
            *(f"{recall:.1f}" for recall in recalls),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    smallest = max(of_method["rsum"].smallest() for of_method in differences.values())
    note = f"\n{cell.seeds} seeds. A true difference of {smallest:.1f} in RSUM would be resolved in 4 of 5 cases."
    return "\n".join([*rows, note])


DIRECTIONS = ("image_to_text", "text_to_image")


def write_tables(study: Study, results: Results) -> str:
    """Write ``study.csv`` and ``study.md``; return the comparisons."""
    results.folder.mkdir(parents=True, exist_ok=True)
    with (results.folder / "study.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Run._fields, "epochs", "seconds", "val RSUM", *COLUMNS.values()])
        for run in sorted(results.all_runs()):
            outcome = results.outcome(run)
            numbers = [outcome.val["rsum"], *(outcome.test[metric] for metric in COLUMNS)]
            epochs = study.epochs(run.regime, run.method)
            writer.writerow([*run, epochs, f"{outcome.training_seconds:.1f}", *(f"{number:.3f}" for number in numbers)])
    parts = []
    for cell in study.cells:
        table = comparison_table(cell, results)
        if table is not None:
            parts.append(f"## {cell.regime}, against `{cell.baseline}`\n\n{table}\n")
    text = "\n".join(parts)
    (results.folder / "study.md").write_text(text)
    return text


def run_study(arguments: argparse.Namespace) -> None:
    study = Study.read(arguments.file)
    results = Results(study, arguments.results or RESULTS / arguments.file.stem)
    train_missing(study, results, arguments.work, arguments.hours, arguments.regimes)
    print(write_tables(study, results))
    used = sum(results.outcome(run).all_seconds for run in results.all_runs())
    print(f"{used / 3600:.1f} hours of processor time in {len(list(results.all_runs()))} runs")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the study, .yaml")
    parser.add_argument("--work", type=Path, required=True, help="folder of data and runs, also of a stopped study")
    parser.add_argument("--results", type=Path, help="folder of results (default: docs/studies/NAME)")
    parser.add_argument("--regimes", nargs="*", default=[], help="train these only (default: all)")
    parser.add_argument("--hours", type=float, default=float("inf"), help="most processor time of all runs")
    arguments = parser.parse_args(argv)
    return exit_status("benchmarks.study", lambda: run_study(arguments))


if __name__ == "__main__":
    sys.exit(main())
