"""Time and memory of all losses at several batch sizes, open_clip's also compiled: tables in Markdown.

A loss that does not fit into memory or gets no time is left out, and the reason is kept.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.losses import PEERS, Loss, metric_loss, random_sides, step
from benchmarks.measurement import clock, extra_bytes, time_rounds
from vl_plugins import create_loss

BASELINE = "open_clip's `ClipLoss`"
LOSSES_OF_VECTORS = ("unified", "vlc", "triplet_hn", "triplet_sh", "goal")
SET_SIZE = 4
FEWEST_ROUNDS = 3
LONGEST_REASON = 160  # characters
NO_TIME = "no time left"


class Row(NamedTuple):
    """A loss in the tables.

    Attributes:
        label: first cell of the row, in Markdown.
        loss: called with images, texts and labels.
        set_size: number of vectors of an image or text; 0 for a loss of single vectors.
    """

    label: str
    loss: Loss
    set_size: int = 0


class Measurement(NamedTuple):
    """Forward and backward pass of a loss at one batch size.

    Attributes:
        seconds: median over the rounds.
        ratio: median over the rounds of the ratio to :data:`BASELINE` in the same round; None without a baseline.
        bytes: peak of allocated memory, gradients included.
    """

    seconds: float
    ratio: float | None
    bytes: int


@dataclass
class Results:
    """Measurements by label and batch size, and the batch sizes that are missing by label and reason."""

    measurements: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    missing: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def skip(self, label: str, size: int, reason: str) -> None:
        self.missing.setdefault((label, reason), []).append(size)


def loss_rows(compiler: str) -> Iterator[Row]:
    """Yield open_clip's losses, each as it is and compiled, then ours, which ``torch.compile`` runs as they are."""
    for row in (Row(BASELINE, PEERS["clip"]()), Row("open_clip's `SigLipLoss`", PEERS["siglip"]())):
        yield row
        # A graph for each shape, because this is as fast as it gets.
        compiled = torch.compile(row.loss, backend=compiler, fullgraph=True, dynamic=False)
        yield Row(f"{row.label}, compiled", compiled)
    for name in LOSSES_OF_VECTORS:
        yield Row(f"`{name}`", metric_loss(create_loss(name)))
    sets = metric_loss(create_loss("smooth_chamfer"))
    yield Row(f"`smooth_chamfer`, sets of {SET_SIZE}", sets, SET_SIZE)


@dataclass
class LossBenchmark:
    """All losses at several batch sizes.

    Attributes:
        rows: the losses.
        dimension: of the embeddings.
        device: name of torch's device.
        rounds: at most; fewer where time is short.
        results: what was measured so far.
    """

    rows: Sequence[Row]
    dimension: int
    device: str
    rounds: int
    results: Results = field(default_factory=Results)

    def measure(self, sizes: Sequence[int], deadline: float) -> None:
        """Measure all batch sizes until ``deadline``, a time of ``time.monotonic``; each has its share of the time."""
        for number, size in enumerate(sizes):
            print(f"losses: B = {size:,}", file=sys.stderr, flush=True)
            now = time.monotonic()
            self.measure_size(size, now + (deadline - now) / (len(sizes) - number))
            release_memory(self.device)
            torch.compiler.reset()  # it stops compiling after some shapes

    def measure_size(self, size: int, deadline: float) -> None:
        """Measure all losses at one batch size."""
        steps: dict[str, Callable[[], None]] = {}
        memory: dict[str, int] = {}
        seconds_of_round = 0.0
        for row, run in self.steps(size):
            if time.monotonic() >= deadline:
                self.results.skip(row.label, size, NO_TIME)
                continue
            try:
                run()  # compiles, and allocates what stays allocated
                started = time.monotonic()
                memory[row.label] = extra_bytes(run, self.device)
            except RuntimeError as error:  # also those of memory and of the compiler
                self.results.skip(row.label, size, short_reason(error))
                release_memory(self.device)
                continue
            seconds_of_round += time.monotonic() - started
            steps[row.label] = run
        affordable_rounds = int((deadline - time.monotonic()) / max(seconds_of_round, 1e-9)) - 1  # one warms up
        if affordable_rounds < min(self.rounds, FEWEST_ROUNDS):
            for label in steps:
                self.results.skip(label, size, NO_TIME)
            return
        seconds = time_rounds(steps, min(self.rounds, affordable_rounds), clock(self.device))
        for label, times in seconds.items():
            ratio = median_ratio(times, seconds.get(BASELINE))
            self.results.measurements[label, size] = Measurement(statistics.median(times), ratio, memory[label])

    def steps(self, size: int) -> Iterator[tuple[Row, Callable[[], None]]]:
        """Yield each loss with a function that runs its forward and backward pass."""
        inputs: dict[int, tuple[Tensor, Tensor]] = {}
        for set_size in (0, SET_SIZE):
            shape = (size, set_size, self.dimension) if set_size else (size, self.dimension)
            inputs[set_size] = random_sides(shape, torch.bfloat16, self.device)
        labels = torch.arange(size, device=self.device)
        for row in self.rows:
            images, texts = inputs[row.set_size]
            yield row, partial(step, row.loss, images, texts, labels, autocast=True)


def median_ratio(times: Sequence[float], of_baseline: Sequence[float] | None) -> float | None:
    """Return the median ratio of times of the same round; None without a baseline."""
    if of_baseline is None:
        return None
    ratios = [own / baseline for own, baseline in zip(times, of_baseline, strict=True)]
    return statistics.median(ratios)


def release_memory(device: str) -> None:
    """Give unused memory back to the device, so that a loss is not refused memory that another one held."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def short_reason(error: RuntimeError) -> str:
    """Return the first line of an error, shortened."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    reason = f"{type(error).__name__}: {lines[0]}"
    if len(reason) > LONGEST_REASON:
        reason = reason[:LONGEST_REASON] + " ..."
    return reason


def markdown_table(results: Results, rows: Sequence[Row], sizes: Sequence[int], column: str) -> list[str]:
    """Return the lines of a table with a row for each loss and a column for each batch size.

    Args:
        column: ``"time"`` for ms and the ratio to the baseline, or ``"memory"`` for MB.
    """
    unit = "ms (ratio to `ClipLoss`)" if column == "time" else "MB"
    headings = [unit, *(f"B = {size:,}" for size in sizes)]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * len(sizes)]
    for row in rows:
        cells = [row.label]
        for size in sizes:
            measurement = results.measurements.get((row.label, size))
            cells.append(format_cell(measurement, column))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_cell(measurement: Measurement | None, column: str) -> str:
    if measurement is None:
        return "–"
    if column == "memory":
        return f"{measurement.bytes / 1e6:,.1f}"
    milliseconds = f"{1e3 * measurement.seconds:,.2f}"
    if measurement.ratio is None:
        return milliseconds
    return f"{milliseconds} ({measurement.ratio:.2f})"


def missing_lines(results: Results) -> list[str]:
    """Return a line for each reason why something was not measured."""
    labels_by_reason: dict[tuple[str, str], list[str]] = {}
    for (label, reason), sizes in results.missing.items():
        batch_sizes = ", ".join(f"{size:,}" for size in sizes)
        labels_by_reason.setdefault((batch_sizes, reason), []).append(label)
    lines = []
    for (batch_sizes, reason), labels in labels_by_reason.items():
        lines.append(f"{'; '.join(labels)}; B = {batch_sizes}: {reason}")
    return lines
