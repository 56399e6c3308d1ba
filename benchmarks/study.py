"""What the losses do to recall: train each of them with several seeds, and compare with intervals.

    python -m benchmarks.study benchmarks/studies/toy.yaml --out studies/toy

The file lists commands, settings, losses and seeds; `benchmarks/studies/toy.yaml` explains each key. Whatever is
missing is trained, one run after another, by the commands that a user would type. A study that was stopped continues
when it is started again, and one whose file got more losses, seeds or learning rates trains only these. The first
table of a setting has all losses at the learning rate that is best for the baseline on validation, the second one each
loss at its own best.

Writes to --out: study.md with the tables, study.csv with a row for each run, and runs/ with what they are made from.
Recalls are in percent. The checkpoint of a run is deleted once it is evaluated.
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


def _resamples(number: int) -> np.ndarray:
    """Return (RESAMPLES, number): the weights of seeds or images in samples with replacement."""
    return np.random.default_rng(number).multinomial(number, np.full(number, 1 / number), size=RESAMPLES) / number


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
            with np.load(file) as arrays:
                self.outcomes[run] = Outcome(**arrays)
            if str(self.outcomes[run].command) != self.command(run):
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
        folder, command, recalls = self.folder(run), self.command(run), {}
        started = time.perf_counter()
        once(command, folder)
        seconds = time.perf_counter() - started
        for split in ("val", "test"):
            features = folder / f"{split}.safetensors"
            encode = self.content["encode"].format(out=self.out, folder=folder, split=split, features=features)
            execute(encode, folder / "log")
            recalls[split] = image_recalls(load_features(features))
        stream = io.BytesIO()
        np.savez_compressed(stream, **Outcome(command, seconds, **recalls)._asdict())
        write_file(file, stream.getbuffer())
        shutil.rmtree(folder)

    def best_lr(self, setting: str, loss: str) -> str:
        """Return the learning rate with the highest RSUM on validation."""

        def rsum(lr: str) -> float:
            runs = [Run(setting, loss, lr, seed) for seed in self.content["tuning_seeds"]]
            return fmean(sum_recalls(self.outcome(run).val) for run in runs)

        return max(self.content["settings"][setting]["lr"], key=rsum)

    def table(self, setting: str, rates: dict[str, str]) -> str:
        """Return a table in Markdown of all losses, each at the learning rate given."""
        baseline, seeds = self.content["baseline"], self.content["seeds"]
        rows = [f"| loss | lr | RSUM | − {baseline}, 95 % interval | {' | '.join(RECALLS)} |"]
        rows.append("|---|---|---|---|" + "---:|" * len(RECALLS))
        for loss, lr in rates.items():
            ours, peers = (
                [self.outcome(Run(setting, name, rates[name], seed)).test for seed in seeds]
                for name in (loss, baseline)
            )
            versus = ""
            if loss != baseline:
                mean, low, high = difference(ours, peers)
                versus = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" + ("" if low > 0 or high < 0 else ", not resolved")
            rsums = [sum_recalls(recalls) for recalls in ours]
            recalls = [f"{recall:.1f}" for recall in np.mean(ours, axis=(0, 2))]
            cells = [loss, lr, f"{fmean(rsums):.1f} ± {stdev(rsums):.1f}", versus, *recalls]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(rows)

    def write_runs(self) -> None:
        """Write ``study.csv``."""
        with (self.out / "study.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Run._fields, "val RSUM", "RSUM", *RECALLS, "seconds"])
            for run, (_, seconds, val, test) in sorted(self.outcomes.items()):
                numbers = [sum_recalls(val), sum_recalls(test), *test.mean(axis=1), seconds]
                writer.writerow([*run, *(f"{number:.3f}" for number in numbers)])


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
