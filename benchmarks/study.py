"""What the losses do to recall: train each of them with several seeds, and compare with intervals.

    python -m benchmarks.study benchmarks/studies/toy.yaml --out studies/toy

The file lists commands, settings, losses and seeds; `benchmarks/studies/toy.yaml` explains each key. Whatever is
missing is trained, one run after another, by the commands that a user would type. A study that was stopped goes on when
it is started again, and one whose file got more losses, seeds or learning rates trains only these. The first table has
all losses at the learning rate that is best for the baseline on validation, the second one each loss at its own best.

Writes to --out: study.md with the tables, study.csv with a row for each run, and runs/ with what they are made from.
Recalls are in percent. Checkpoints are deleted once they are evaluated, except those that other runs start from.
"""

import argparse
import csv
import io
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, exit_status
from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.features import Features, load_features

RECALLS = [f"{direction} R@{k}" for direction in ("i2t", "t2i") for k in (1, 5, 10)]
RESAMPLES = 2000


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
    val: np.ndarray  # (6, I), see image_recalls
    test: np.ndarray


def sum_recalls(recalls: np.ndarray) -> float:
    """Return the RSUM of :func:`image_recalls`."""
    return recalls.mean(axis=1).sum()


def image_recalls(features: Features) -> np.ndarray:
    """Return (6, I): what each image adds to RECALLS, with its captions, in percent; their means are the recalls."""
    ranks = similarity_ranks(features.similarities(), features.image_of_caption)
    found = [torch.stack([direction.rank <= k for k in (1, 5, 10)]).double() for direction in ranks]
    images, captions = len(features.images), len(features.captions)
    by_image = torch.zeros_like(found[0]).index_add_(1, features.image_of_caption, found[1]) * images / captions
    return 100 * torch.cat([found[0], by_image]).numpy()


def difference(ours: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean difference in RSUM and its 95 % interval, given :func:`image_recalls` (6, I) of each seed.

    The interval is the percentile bootstrap over seeds and test images together: an image is drawn with its captions,
    and a seed with both of its runs. With few seeds it is too narrow rather than too wide.
    """
    rsum = np.stack([(x - y).sum(axis=0) for x, y in zip(ours, baseline, strict=True)])  # (S, I)
    seed_weights, image_weights = map(_resamples, rsum.shape)
    low, high = np.quantile((seed_weights @ rsum * image_weights).sum(axis=1), [0.025, 0.975])
    return rsum.mean(), low, high


@lru_cache
def _resamples(number: int) -> np.ndarray:
    """Return (RESAMPLES, number): the weights of seeds or images in samples with replacement."""
    return np.random.default_rng(number).multinomial(number, np.full(number, 1 / number), size=RESAMPLES) / number


class Study:
    """A study with its folder.

    Args:
        content: of the file.
        out: the folder, which may hold a part of the runs.

    Raises:
        UserError: a run there was made by another command.
    """

    def __init__(self, content: dict[str, Any], out: Path):
        self.content, self.out = content, out
        self.outcomes: dict[Run, Outcome] = {}
        self.failed: set[Run] = set()
        for setting, options in content["settings"].items():
            for run in (Run(setting, *each) for each in product(content["losses"], options["lr"], content["seeds"])):
                if (file := self.folder(run).with_suffix(".npz")).is_file():
                    with np.load(file) as arrays:
                        self.outcomes[run] = Outcome(**arrays)
                    if str(self.outcomes[run].command) != self.command(run):
                        raise UserError(f"{file} was made by another command: {self.outcomes[run].command}")

    def folder(self, run: Run) -> Path:
        return self.out / "runs" / run.setting / f"{run.loss}-lr{run.lr}-seed{run.seed}"

    def start_folder(self, run: Run) -> Path:
        return self.out / "runs" / run.setting / f"start-seed{run.seed}"

    def plan(self) -> Iterator[Run]:
        """Yield the runs of all first tables, then those of the second, as far as learning rates are known."""
        losses, seeds, tuning_seeds = (self.content[key] for key in ("losses", "seeds", "tuning_seeds"))
        for setting, options in self.content["settings"].items():
            baseline = self.content["baseline"]
            yield from (Run(setting, baseline, lr, seed) for lr in options["lr"] for seed in tuning_seeds)
            if lr := self.best_lr(setting, baseline):
                yield from (Run(setting, loss, lr, seed) for seed in seeds for loss in losses)
        for setting, options in self.content["settings"].items():
            for loss in losses:
                yield from (Run(setting, loss, lr, seed) for lr in options["lr"] for seed in tuning_seeds)
                if lr := self.best_lr(setting, loss):
                    yield from (Run(setting, loss, lr, seed) for seed in seeds)

    def pending(self) -> list[Run]:
        """Return the runs of :meth:`plan` that are missing."""
        return [run for run in dict.fromkeys(self.plan()) if run not in self.outcomes and run not in self.failed]

    def best_lr(self, setting: str, loss: str) -> str | None:
        """Return the learning rate with the highest RSUM on validation; None while runs are missing."""
        rsums = {}
        for lr in self.content["settings"][setting]["lr"]:
            runs = [Run(setting, loss, lr, seed) for seed in self.content["tuning_seeds"]]
            if not all(run in self.outcomes for run in runs):
                return None
            rsums[lr] = fmean(sum_recalls(self.outcomes[run].val) for run in runs)
        return max(rsums, key=rsums.__getitem__)

    def command(self, run: Run, start: bool = False) -> str:
        """Return the training command of a run, or of what it starts from."""
        options, start_folder = self.content["settings"][run.setting], self.start_folder(run)
        flags = [options["start"]] if start else [options["flags"], self.content["losses"][run.loss]]
        values = options | run._asdict() | {"out": self.out, "folder": start_folder if start else self.folder(run)}
        values["start"] = self.content["checkpoint"].format(folder=start_folder)
        return " ".join([self.content["train"], *flags]).format(**values)

    def train(self, run: Run) -> None:
        """Train and encode one run, after the one that it starts from."""
        if "start" in self.content["settings"][run.setting]:
            once(self.command(run, start=True), self.start_folder(run))
        folder, command = self.folder(run), self.command(run)
        shutil.rmtree(folder, ignore_errors=True)  # of a study that was stopped
        started = time.perf_counter()
        once(command, folder)
        seconds, recalls = time.perf_counter() - started, {}
        for split in ("val", "test"):
            checkpoint, features = self.content["checkpoint"].format(folder=folder), folder / f"{split}.safetensors"
            values = {"out": self.out, "checkpoint": checkpoint, "split": split, "features": features}
            execute(self.content["encode"].format(**values), folder / "log")
            recalls[split] = image_recalls(load_features(features))
        self.outcomes[run] = Outcome(command, seconds, **recalls)
        stream = io.BytesIO()
        np.savez_compressed(stream, **self.outcomes[run]._asdict())
        write_file(folder.with_suffix(".npz"), stream.getbuffer())
        shutil.rmtree(folder)

    def tables(self, setting: str) -> Iterator[str]:
        """Yield the lines of the two tables of a setting in Markdown."""
        losses, baseline = self.content["losses"], self.content["baseline"]
        if lr := self.best_lr(setting, baseline):
            yield f"## {setting}, all at the best learning rate of {baseline}, {lr}\n"
            yield from self._table(setting, dict.fromkeys(losses, lr))
            best = {loss: self.best_lr(setting, loss) for loss in losses}
            if all(best.values()) and {*best.values()} != {lr}:
                yield f"## {setting}, each loss at its own best learning rate\n"
                yield from self._table(setting, best)

    def _table(self, setting: str, rates: dict[str, Any]) -> Iterator[str]:
        baseline, seeds = self.content["baseline"], self.content["seeds"]
        yield f"| loss | lr | RSUM | − {baseline}, 95 % interval | {' | '.join(RECALLS)} | s/step |"
        yield "|---|---|---|---|" + "---:|" * (len(RECALLS) + 1)
        for loss, lr in rates.items():
            both = [[Run(setting, name, rates[name], seed) for name in (loss, baseline)] for seed in seeds]
            pairs = [[self.outcomes[run] for run in pair] for pair in both if self.outcomes.keys() >= {*pair}]
            if len(pairs) < 2:
                continue
            ours, peers = zip(*pairs, strict=True)
            versus = ""
            if loss != baseline:
                mean, low, high = difference([x.test for x in ours], [x.test for x in peers])
                versus = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" + ("" if low > 0 or high < 0 else ", not resolved")
            rsums = [sum_recalls(outcome.test) for outcome in ours]
            some = "" if len(ours) == len(seeds) else f" ({len(ours)} of {len(seeds)} seeds)"
            recalls = [f"{recall:.1f}" for recall in np.mean([outcome.test for outcome in ours], axis=(0, 2))]
            step = fmean(outcome.seconds for outcome in ours) / self.content["settings"][setting]["steps"]
            cells = [loss + some, lr, f"{fmean(rsums):.1f} ± {stdev(rsums):.1f}", versus, *recalls, f"{step:.3f}"]
            yield f"| {' | '.join(cells)} |"
        yield ""

    def write(self) -> None:
        """Write ``study.md`` and ``study.csv``."""
        lines = (line for setting in self.content["settings"] for line in self.tables(setting))
        (self.out / "study.md").write_text("\n".join(lines))
        with (self.out / "study.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Run._fields, "val RSUM", "RSUM", *RECALLS, "seconds"])
            for run, (_, seconds, val, test) in sorted(self.outcomes.items()):
                numbers = [sum_recalls(val), sum_recalls(test), *test.mean(axis=1), seconds]
                writer.writerow([*run, *(f"{number:.3f}" for number in numbers)])


def once(command: str, folder: Path) -> None:
    """Run a command that writes to a folder, unless it has; what it left when it was stopped is deleted."""
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        execute(command, folder / "log")
        (folder / "done").touch()


def execute(command: str, log: Path) -> None:
    """Run ``vl-plugins ...`` or ``python -m ...``, with its output appended to ``log``."""
    program, *words = shlex.split(command)
    words = [sys.executable, *(words if program == "python" else ["-m", "vl_plugins.cli", *words])]
    with log.open("ab") as file:
        status = subprocess.run(words, stdout=file, stderr=file, check=False).returncode
    if status:
        raise UserError(f"exit code {status} of: {command}\n{log} ends with:\n{log.read_text()[-1500:]}")


def run_study(content: dict[str, Any], out: Path) -> int:
    """Train what is missing; return 1 if a run failed."""
    study = Study(content, out)
    for number, command in enumerate(content["prepare"]):
        once(command.format(out=out), out / f"prepared-{number}")
    study.write()
    while pending := study.pending():
        print(f"{len(study.outcomes)} runs done, at least {len(pending)} to go: {pending[0]}", flush=True)
        try:
            study.train(pending[0])
        except UserError as error:
            study.failed.add(pending[0])
            print(f"failed: {error}", flush=True)
        study.write()
    print((out / "study.md").read_text())
    return int(bool(study.failed))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the study, .yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study, also of one that was stopped")
    arguments = parser.parse_args(argv)
    study = yaml.safe_load(arguments.file.read_text())
    return exit_status("benchmarks.study", lambda: run_study(study, arguments.out))


if __name__ == "__main__":
    sys.exit(main())
