"""Training the runs of a study, several at a time."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

from benchmarks.grid import Results, Run
from benchmarks.jobs import Jobs, processor_seconds, run_command, run_once
from benchmarks.outcomes import Outcome, made_by, metric_means, selected_metrics
from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval.features import Features, load_features
from vl_plugins.retrieval.protocols import evaluate

__all__ = ["Training"]

RUNS_AT_ONCE = 2
SPLITS = ("val", "test")


class Training:
    """Trains runs of a study whose results are missing.

    Args:
        results: of the study, to which outcomes are added.
        work: folder of data, runs and logs.
    """

    def __init__(self, results: Results, work: Path):
        self.results, self.study, self.work = results, results.study, work
        self.jobs = Jobs(RUNS_AT_ONCE)

    def train(self, wanted: Callable[[], Sequence[Run]], hours: float) -> None:
        """Prepare, and train until no more is wanted or the processor time of all runs is used up.

        Args:
            wanted: returns the runs that are missing, the most urgent first; asked again after each run.
            hours: most processor time of all runs of the results.
        """
        try:
            self.prepare()
            running: set[Run] = set()
            while True:
                if self.results.hours() < hours:
                    for run in wanted():
                        if run not in running and not self.jobs.is_full:
                            self.start(run)
                            running.add(run)
                if not running:
                    return
                run = self.jobs.wait()
                running.remove(run)
                print(self.line_about(run), flush=True)
        finally:
            self.jobs.stop()

    def prepare(self) -> None:
        """Write data and the checkpoints to start from, one command after another."""
        for command in self.study.prepare:
            command = command.format(work=self.work)
            done = self.work / "prepared" / f"{crc32(command.encode()):08x}"
            self.jobs.start(command, self.work / "prepare.log", run_once, command, done)
            self.jobs.wait()

    def start(self, run: Run) -> None:
        commands = self.study.train_command(run, self.work), self.results.kept_command(run)
        encode = {split: self.study.encode_command(run, self.work, split) for split in SPLITS}
        folder, log = self.work / run.path, self.work / f"{run.path}.log"
        self.jobs.start(run, log, train_run, commands, encode, folder, self.results.file(run))

    def line_about(self, run: Run) -> str:
        outcome = self.results.outcome(run)
        rsums = f"RSUM {outcome.val['rsum']:.1f} on validation, {outcome.test['rsum']:.1f} on test"
        return f"{self.results.hours():.2f} h: {run.path}, {outcome.training_seconds:.0f} s, {rsums}"


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
