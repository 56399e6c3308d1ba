"""What the losses do to recall: train each of them with several seeds, and compare with intervals.

    python -m benchmarks.study benchmarks/studies/toy.yaml --out studies/toy

The file lists commands, settings, losses and seeds; `benchmarks/studies/toy.yaml` explains each key. Whatever is
missing is trained, one run after another, by the commands that a user would type. A study that was stopped continues
when it is started again, and one whose file got more losses, seeds or learning rates trains only these. The first
table of a setting has all losses at the learning rate that is best for the baseline on validation, the second one each
loss at its own best.

Writes to --out: study.md with the tables, study.csv with a row for each run, and runs/ with what they are made from:
for each run a compressed file with what each image contributes to each metric, from which anybody can compare the
losses again. Recalls are in percent. The checkpoint of a run is deleted once it is evaluated. The intervals are those
of `vl_plugins.retrieval.compare`.
"""

import argparse
import csv
import io
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, exit_status
from vl_plugins.retrieval import Difference, ImageValues, compare
from vl_plugins.retrieval.comparison import BlockedQueries
from vl_plugins.retrieval.features import load_features
from vl_plugins.retrieval.protocols import evaluate

# Names of metrics in tables, by those of `retrieval_metrics`.
RECALLS = {
    f"{direction}_R@{k}": f"{label} R@{k}"
    for direction, label in (("image_to_text", "i2t"), ("text_to_image", "t2i"))
    for k in (1, 5, 10)
}


class Run(NamedTuple):
    """One training of a study."""

    setting: str
    loss: str
    lr: str
    seed: int


class Outcome(NamedTuple):
    """What is kept of a run."""

    command: str
    seconds: float  # wall time of the whole training command
    val: ImageValues
    test: ImageValues

    def save(self, file: Path) -> None:
        """Write to a compressed ``.npz`` file, complete or not at all."""
        arrays: dict[str, Any] = {"command": self.command, "seconds": self.seconds}
        for split, values in (("val", self.val), ("test", self.test)):
            for name, array in image_value_arrays(values).items():
                arrays[f"{split}_{name}"] = array
        stream = io.BytesIO()
        np.savez_compressed(stream, **arrays)
        write_file(file, stream.getbuffer())

    @classmethod
    def load(cls, file: Path) -> "Outcome":
        """Read what :meth:`save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            if "test_values" not in arrays:
                raise UserError(f"{file} was written by version 0.3: delete it to train the run again")
            splits = []
            for split in ("val", "test"):
                own = {name.removeprefix(f"{split}_"): arrays[name] for name in arrays if name.startswith(f"{split}_")}
                splits.append(image_values_of_arrays(own))
            return cls(str(arrays["command"]), float(arrays["seconds"]), splits[0], splits[1])


def image_value_arrays(values: ImageValues) -> dict[str, np.ndarray]:
    """Return image values as arrays; the entries of all blocked matrices are put after each other."""
    metric_of_entry, entries = [], []
    for metric, blocked in zip(values.metrics, values.blocked, strict=True):
        if blocked is not None:
            entries.append(blocked)
            metric_of_entry.extend([metric] * len(blocked.gain))
    return {
        "metrics": np.array(values.metrics),
        "values": values.values.numpy(),
        "steps": values.steps.numpy(),
        "has_blocked": np.array([blocked is not None for blocked in values.blocked]),
        "blocked_metric": np.array(metric_of_entry, dtype=str),
        "blocked_image": torch.cat([blocked.image for blocked in entries]).numpy(),
        "blocked_by": torch.cat([blocked.blocked_by for blocked in entries]).numpy(),
        "blocked_gain": torch.cat([blocked.gain for blocked in entries]).numpy(),
    }


def image_values_of_arrays(arrays: dict[str, np.ndarray]) -> ImageValues:
    """Return the image values of :func:`image_value_arrays`."""
    blocked: list[BlockedQueries | None] = []
    for metric, has_blocked in zip(arrays["metrics"], arrays["has_blocked"], strict=True):
        own = arrays["blocked_metric"] == metric
        columns = (torch.from_numpy(arrays[name][own]) for name in ("blocked_image", "blocked_by", "blocked_gain"))
        blocked.append(BlockedQueries(*columns) if has_blocked else None)
    values, steps = torch.from_numpy(arrays["values"]), torch.from_numpy(arrays["steps"])
    return ImageValues(tuple(arrays["metrics"].tolist()), values, steps, tuple(blocked))


def means(values: ImageValues) -> dict[str, float]:
    """Return the metrics of a run in percent, by name."""
    return dict(zip(values.metrics, values.values.mean(dim=1).tolist(), strict=True))


class Study:
    """The runs of a study; what is asked for and missing is trained.

    Args:
        content: of the file.
        out: the folder, which may hold a part of the runs.
    """

    def __init__(self, content: dict[str, Any], out: Path):
        self.content, self.out = content, out
        self.outcomes: dict[Run, Outcome] = {}

    def outcome(self, run: Run) -> Outcome:
        """Return the outcome of a run: that of its file, or else of training it now.

        Raises:
            UserError: the file was made by another command, or the command fails.
        """
        if run not in self.outcomes:
            file = self.folder(run).with_suffix(".npz")
            if not file.is_file():
                print(f"{len(self.outcomes)} runs done, next: {run}", flush=True)
                self.train(run, file)
            self.outcomes[run] = Outcome.load(file)
            if self.outcomes[run].command != self.command(run):
                raise UserError(f"{file} was made by another command: {self.outcomes[run].command}")
        return self.outcomes[run]

    def folder(self, run: Run) -> Path:
        return self.out / "runs" / run.setting / f"{run.loss}-lr{run.lr}-seed{run.seed}"

    def command(self, run: Run) -> str:
        """Return the training command of a run."""
        options = self.content["settings"][run.setting]
        words = [self.content["train"], options["flags"], self.content["losses"][run.loss]]
        return " ".join(words).format(**options | run._asdict(), out=self.out, folder=self.folder(run))

    def train(self, run: Run, file: Path) -> None:
        """Train and encode one run, and write its outcome."""
        folder, command, values = self.folder(run), self.command(run), {}
        started = time.perf_counter()
        once(command, folder)
        seconds = time.perf_counter() - started
        for split in ("val", "test"):
            features = folder / f"{split}.safetensors"
            encode = self.content["encode"].format(out=self.out, folder=folder, split=split, features=features)
            execute(encode, folder / "log")
            evaluation = evaluate([load_features(features)], for_comparison=True)
            values[split] = evaluation.image_values()["plain"]
        Outcome(command, seconds, values["val"], values["test"]).save(file)
        shutil.rmtree(folder)

    def best_lr(self, setting: str, loss: str) -> str:
        """Return the learning rate with the highest RSUM on validation."""

        def rsum(lr: str) -> float:
            runs = [Run(setting, loss, lr, seed) for seed in self.content["tuning_seeds"]]
            return fmean(means(self.outcome(run).val)["rsum"] for run in runs)

        return max(self.content["settings"][setting]["lr"], key=rsum)

    def table(self, setting: str, rates: dict[str, str]) -> str:
        """Return a table in Markdown of all losses, each at the learning rate given."""
        baseline, seeds = self.content["baseline"], self.content["seeds"]
        rows = [f"| loss | lr | RSUM | − {baseline}, 95 % interval | {' | '.join(RECALLS.values())} |"]
        rows.append("|---|---|---|---|" + "---:|" * len(RECALLS))
        runs = {}
        for loss, lr in rates.items():
            runs[loss] = [self.outcome(Run(setting, loss, lr, seed)).test for seed in seeds]
        differences = compare(runs, baseline) if len(runs) > 1 else {}
        for loss, lr in rates.items():
            metrics = [means(values) for values in runs[loss]]
            rsums = [of_seed["rsum"] for of_seed in metrics]
            spread = f" ± {stdev(rsums):.1f}" if len(rsums) > 1 else ""
            recalls = [f"{fmean(of_seed[name] for of_seed in metrics):.1f}" for name in RECALLS]
            versus = "" if loss == baseline else versus_baseline(differences[loss]["rsum"])
            cells = [loss, lr, f"{fmean(rsums):.1f}{spread}", versus, *recalls]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(rows)

    def write_runs(self) -> None:
        """Write ``study.csv``."""
        with (self.out / "study.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Run._fields, "val RSUM", "RSUM", *RECALLS.values(), "seconds"])
            for run, outcome in sorted(self.outcomes.items()):
                test = means(outcome.test)
                numbers = [means(outcome.val)["rsum"], test["rsum"], *(test[name] for name in RECALLS), outcome.seconds]
                writer.writerow([*run, *(f"{number:.3f}" for number in numbers)])


def versus_baseline(difference: Difference) -> str:
    """Return a difference with its interval, and whether it is resolved."""
    interval = f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]"
    return interval if difference.resolved else f"{interval}, not resolved"


def once(command: str, folder: Path) -> None:
    """Run a command that writes to a folder, unless it has; what another or an interrupted one left is deleted."""
    done = folder / "done"
    if not done.exists() or done.read_text() != command:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        execute(command, folder / "log")
        done.write_text(command)


def execute(command: str, log: Path) -> None:
    """Run ``vl-plugins ...`` or ``python -m ...``, with its output appended to ``log``."""
    program, *words = shlex.split(command)
    words = [sys.executable, *(words if program == "python" else ["-m", "vl_plugins.cli", *words])]
    with log.open("ab") as file:
        status = subprocess.run(words, stdout=file, stderr=file, check=False).returncode
    if status:
        raise UserError(f"exit code {status} of: {command}\n{log} ends with:\n{log.read_text()[-1500:]}")


def run_study(content: dict[str, Any], out: Path) -> None:
    """Train what is missing, and write the tables, all those at the baseline's learning rate first."""
    study, baseline = Study(content, out), content["baseline"]
    prepare = [command.format(out=out, seed=seed) for command in content["prepare"] for seed in content["seeds"]]
    for command in dict.fromkeys(prepare):  # those with a seed once for each
        once(command, out / "prepared" / f"{zlib.crc32(command.encode()):08x}")
    titles = {baseline: f"all at the best learning rate of {baseline}", None: "each loss at its own best learning rate"}
    tables = []
    for tuned, title in titles.items():
        for setting in content["settings"]:
            rates = {loss: study.best_lr(setting, tuned or loss) for loss in content["losses"]}
            tables.append(f"## {setting}, {title}\n\n{study.table(setting, rates)}\n")
            (out / "study.md").write_text("\n".join(tables))
            study.write_runs()
    print((out / "study.md").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the study, .yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study, also of one that was stopped")
    arguments = parser.parse_args(argv)
    return exit_status("benchmarks.study", lambda: run_study(yaml.safe_load(arguments.file.read_text()), arguments.out))


if __name__ == "__main__":
    sys.exit(main())
