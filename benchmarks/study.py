"""What the losses do to recall: train each of them with several seeds, and compare with intervals.

    python -m benchmarks.study benchmarks/studies/toy.yaml --out studies/toy

The file lists commands, settings, losses and seeds; `benchmarks/studies/toy.yaml` explains each key. Whatever is
missing is trained, one run after another. A study that was stopped goes on when it is started again, and one whose file
got more losses, seeds or learning rates trains only these. The first table has all losses at the learning rate
that is best for the baseline on validation, the second one each loss at its own best.

Writes to --out: study.md with the tables, study.csv with a row for each run, and runs/ with what they are made from.
Checkpoints are deleted once they are evaluated, except those that other runs start from.
"""

import argparse
import csv
import io
import itertools
import multiprocessing
import os
import runpy
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from tqdm import tqdm

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, exit_status
from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.features import Features, load_features
from vl_plugins.retrieval.metrics import RSUM_RECALLS

RECALLS = [f"{direction} R@{k}" for direction in ("i2t", "t2i") for k in RSUM_RECALLS]
RESAMPLES = 2000
# Imported once, by a server that forks each command: it takes as long as a small training.
multiprocessing.set_forkserver_preload(
    ["open_clip_train.main", "vl_plugins.integrations.open_clip.launcher", "vl_plugins.commands.evaluation"]
)


class Run(NamedTuple):
    """One training of a setting."""

    loss: str
    lr: str
    seed: int

    def __str__(self) -> str:
        return f"{self.loss}-lr{self.lr}-seed{self.seed}"


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
    found = [torch.stack([direction.rank <= k for k in RSUM_RECALLS]).double() for direction in ranks]
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


class Setting:
    """A setting of a study: from scratch, or from checkpoints that it trains itself."""

    def __init__(self, name: str, study: dict[str, Any], out: Path):
        self.name, self.study, self.out = name, study, out
        self.options = study["settings"][name]
        self.folder = out / "runs" / name
        self.outcomes: dict[Run, Outcome] = {}
        self.failed: set[Run] = set()
        for run in itertools.starmap(Run, itertools.product(study["losses"], self.options["lr"], study["seeds"])):
            if (file := self.folder / f"{run}.npz").is_file():
                with np.load(file) as arrays:
                    outcome = Outcome(*(arrays[name] for name in Outcome._fields))
                if str(outcome.command) != self.train_command(run):
                    raise UserError(f"{file} was made by another command: {outcome.command}")
                self.outcomes[run] = outcome

    def plan(self, own_best: bool = True) -> Iterator[Run]:
        """Yield the runs of the first table, then those of ``own_best``, as far as learning rates are known."""
        losses, seeds, baseline = (self.study[key] for key in ("losses", "seeds", "baseline"))
        tuning = [Run(*run) for run in itertools.product(losses, self.options["lr"], self.study["tuning_seeds"])]
        yield from (run for run in tuning if run.loss == baseline)
        if lr := self.best_lr(baseline):
            yield from (Run(loss, lr, seed) for seed in seeds for loss in losses)
        if own_best:
            yield from tuning
            yield from (Run(loss, lr, seed) for loss in losses if (lr := self.best_lr(loss)) for seed in seeds)

    def pending(self, own_best: bool = True) -> list[Run]:
        """Return the runs of :meth:`plan` that are missing."""
        planned = dict.fromkeys(self.plan(own_best))
        return [run for run in planned if run not in self.outcomes and run not in self.failed]

    def best_lr(self, loss: str) -> str | None:
        """Return the learning rate with the highest RSUM on validation; None while runs are missing."""
        rsums = {}
        for lr in self.options["lr"]:
            runs = [Run(loss, lr, seed) for seed in self.study["tuning_seeds"]]
            if not all(run in self.outcomes for run in runs):
                return None
            rsums[lr] = fmean(sum_recalls(self.outcomes[run].val) for run in runs)
        return max(rsums, key=rsums.__getitem__)

    def train_command(self, run: Run) -> str:
        flags = [self.options["flags"], self.study["losses"][run.loss]]
        start = self._checkpoint(self._start_folder(run.seed))
        return self._command(flags, self.folder / str(run), run.seed, lr=run.lr, start=start)

    def start_command(self, seed: int) -> str:
        return self._command([self.options["start"]], self._start_folder(seed), seed)

    def train(self, run: Run) -> None:
        """Train and evaluate one run, after the one that it starts from."""
        if "start" in self.options:
            self._train_once(self.start_command(run.seed), self._start_folder(run.seed))
        folder, command = self.folder / str(run), self.train_command(run)
        started = time.perf_counter()
        self._train_once(command, folder)
        seconds = time.perf_counter() - started
        recalls = []
        for split in ("val", "test"):
            file = folder / f"{split}.npz"
            evaluate = self.study["evaluate"].format(out=self.out, checkpoint=self._checkpoint(folder), split=split)
            execute(f"{evaluate} --save-features {file}", folder / "evaluate.log")
            recalls.append(image_recalls(load_features(file)))
        self.outcomes[run] = outcome = Outcome(command, seconds, *recalls)
        content = io.BytesIO()
        np.savez_compressed(content, **outcome._asdict())
        write_file(self.folder / f"{run}.npz", content.getbuffer())
        shutil.rmtree(folder)

    def _train_once(self, command: str, folder: Path) -> None:
        if not (folder / "trained").exists():
            resume = f" {self.study['resume']}" if folder.exists() else ""
            folder.mkdir(parents=True, exist_ok=True)
            execute(command + resume, folder / "train.log")
            (folder / "trained").touch()

    def _start_folder(self, seed: int) -> Path:
        return self.folder / f"start-seed{seed}"

    def _checkpoint(self, folder: Path) -> str:
        return self.study["checkpoint"].format(folder=folder)

    def _command(self, flags: Sequence[str], folder: Path, seed: int, **values: str) -> str:
        command = " ".join([self.study["train"], *flags])
        return command.format(**self.options | values, out=self.out, folder=folder, seed=seed)

    def tables(self) -> Iterator[str]:
        """Yield the lines of the two tables in Markdown."""
        baseline = self.study["baseline"]
        if lr := self.best_lr(baseline):
            yield f"## {self.name}, all at the best learning rate of {baseline}, {lr}\n"
            yield from self._table(dict.fromkeys(self.study["losses"], lr))
            best = {loss: self.best_lr(loss) for loss in self.study["losses"]}
            if all(best.values()) and best != dict.fromkeys(best, lr):
                yield f"## {self.name}, each loss at its own best learning rate\n"
                yield from self._table(best)

    def _table(self, rates: dict[str, str]) -> Iterator[str]:
        baseline, seeds = self.study["baseline"], self.study["seeds"]
        yield f"| loss | lr | RSUM | − {baseline}, 95 % interval | {' | '.join(RECALLS)} | s/step |"
        yield "|---|---|---|---|" + "---:|" * (len(RECALLS) + 1)
        for loss, lr in rates.items():
            both = [(Run(loss, lr, seed), Run(baseline, rates[baseline], seed)) for seed in seeds]
            pairs = [tuple(map(self.outcomes.get, pair)) for pair in both if self.outcomes.keys() >= set(pair)]
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
            step = fmean(outcome.seconds for outcome in ours) / self.options["steps"]
            cells = [loss + some, lr, f"{fmean(rsums):.1f} ± {stdev(rsums):.1f}", versus, *recalls, f"{step:.3f}"]
            yield f"| {' | '.join(cells)} |"
        yield ""


def execute(command: str, log: Path) -> None:
    """Run ``vl-plugins ...`` or ``python -m ...``, with its output appended to ``log``."""
    words = shlex.split(command)
    arguments = words[2:] if words[0] == "python" else ["vl_plugins.cli", *words[1:]]
    process = multiprocessing.get_context("forkserver").Process(target=_run_module, args=(arguments, str(log)))
    process.start()
    process.join()
    if process.exitcode:
        raise UserError(f"exit code {process.exitcode} of: {command}\n{log} ends with:\n{log.read_text()[-1500:]}")


def _run_module(arguments: list[str], log: str) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # for loaders
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def write_results(settings: Sequence[Setting], out: Path) -> None:
    """Write ``study.md`` and ``study.csv``."""
    (out / "study.md").write_text("\n".join(line for setting in settings for line in setting.tables()))
    with (out / "study.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "loss", "lr", "seed", "val RSUM", "RSUM", *RECALLS, "seconds"])
        for setting in settings:
            for run, (_, seconds, val, test) in sorted(setting.outcomes.items()):
                numbers = [sum_recalls(val), sum_recalls(test), *test.mean(axis=1), seconds]
                writer.writerow([setting.name, *run, *(f"{number:.3f}" for number in numbers)])


def run_study(study: dict[str, Any], out: Path) -> int:
    """Train what is missing; return 1 if a run failed."""
    out.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(study["prepare"]):
        if not (done := out / f"prepared-{number}").exists():
            execute(command.format(out=out), out / "prepare.log")
            done.touch()
    settings = [Setting(name, study, out) for name in study["settings"]]
    write_results(settings, out)
    with tqdm(desc=str(out)) as bar:
        for own_best, setting in itertools.product((False, True), settings):
            while pending := setting.pending(own_best):
                bar.total = bar.n + sum(len(other.pending()) for other in settings)
                bar.set_description(f"{setting.name}, {pending[0]}")
                try:
                    setting.train(pending[0])
                except UserError as error:
                    setting.failed.add(pending[0])
                    bar.write(f"{setting.name}, {pending[0]} failed: {error}")
                write_results(settings, out)
                bar.update()
    print((out / "study.md").read_text())
    return int(any(setting.failed for setting in settings))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the study, .yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study, also of one that was stopped")
    arguments = parser.parse_args(argv)
    study = yaml.safe_load(arguments.file.read_text())
    return exit_status("benchmarks.study", lambda: run_study(study, arguments.out))


if __name__ == "__main__":
    sys.exit(main())
