"""Time and memory of losses at several batch sizes: tables in Markdown.

A loss that does not fit into memory or gets no time is left out, and the reason is kept.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from benchmarks.gpu_rows import BASELINE, COMPILED_BASELINE, Row
from benchmarks.losses import random_sides
from benchmarks.measurement import clock, extra_bytes, time_rounds

FEWEST_ROUNDS = 3
CALLS_BEFORE_ROUNDS = 2  # one compiles and allocates what stays allocated, one measures memory
SECONDS_TO_COMPILE = 20  # a guess: with less time, nothing is compiled any more
LONGEST_REASON = 160  # characters
NO_TIME = "no time left"


class Size(NamedTuple):
    """How large a batch is.

    Attributes:
        batch: number of images, and of texts.
        dimension: of the embeddings.
    """

    batch: int
    dimension: int


class Call(NamedTuple):
    """A loss that was called, and is ready to be timed.

    Attributes:
        run: the forward and the backward pass.
        seconds: what a call took.
        bytes: peak of allocated memory, gradients included.
    """

    run: Callable[[], None]
    seconds: float
    bytes: int


class Measurement(NamedTuple):
    """Forward and backward pass of a loss at one batch size.

    Attributes:
        seconds: median over the rounds.
        ratio: median over the rounds of the ratio to :data:`BASELINE` in the same round; None without a baseline.
        ratio_to_compiled: the same for :data:`COMPILED_BASELINE`.
        bytes: peak of allocated memory, gradients included.
    """

    seconds: float
    ratio: float | None
    ratio_to_compiled: float | None
    bytes: int


@dataclass
class Results:
    """Measurements by label and size, and the sizes that are missing by label and reason."""

    measurements: dict[tuple[str, Size], Measurement] = field(default_factory=dict)
    missing: dict[tuple[str, str], list[Size]] = field(default_factory=dict)

    def skip(self, label: str, size: Size, reason: str) -> None:
        self.missing.setdefault((label, reason), []).append(size)

    def expected_seconds(self, label: str, size: Size) -> float:
        """Return what a call should take if time grows with the matrix of similarities; 0 if nothing is known."""
        expected = 0.0
        for (measured_label, measured_size), measurement in self.measurements.items():
            if measured_label == label:  # the last one is the largest
                growth = (size.batch / measured_size.batch) ** 2 * size.dimension / measured_size.dimension
                expected = growth * measurement.seconds
        return expected


@dataclass
class LossBenchmark:
    """All losses at several batch sizes.

    Attributes:
        rows: the losses.
        device: name of torch's device.
        rounds: at most; fewer where time is short.
        results: what was measured so far.
    """

    rows: Sequence[Row]
    device: str
    rounds: int
    results: Results = field(default_factory=Results)

    @property
    def fewest_rounds(self) -> int:
        return min(self.rounds, FEWEST_ROUNDS)

    def measure(self, sizes: Sequence[Size], deadline: float) -> None:
        """Measure all sizes, the smallest first, until ``deadline``, a time of ``time.monotonic``.

        Each has its share of the time.
        """
        for number, size in enumerate(sizes):
            print(f"losses: B = {size.batch:,}, D = {size.dimension:,}", file=sys.stderr, flush=True)
            now = time.monotonic()
            self.measure_size(size, now + (deadline - now) / (len(sizes) - number))
            release_memory(self.device)
            torch.compiler.reset()  # it stops compiling after some shapes

    def measure_size(self, size: Size, deadline: float) -> None:
        """Measure all losses at one size."""
        calls = self.call_all(size, deadline)
        if not calls:
            return
        runs = {}
        seconds_of_round = 0.0
        for label, call in calls.items():
            runs[label] = call.run
            seconds_of_round += call.seconds
        affordable_rounds = int((deadline - time.monotonic()) / max(seconds_of_round, 1e-9)) - 1  # one warms up
        rounds = max(self.fewest_rounds, min(self.rounds, affordable_rounds))
        seconds = time_rounds(runs, rounds, clock(self.device))
        for label, times in seconds.items():
            self.results.measurements[label, size] = Measurement(
                seconds=statistics.median(times),
                ratio=median_ratio(times, seconds.get(BASELINE)),
                ratio_to_compiled=median_ratio(times, seconds.get(COMPILED_BASELINE)),
                bytes=calls[label].bytes,
            )

    def call_all(self, size: Size, deadline: float) -> dict[str, Call]:
        """Call each loss, and return those that work and have time for some rounds, by label."""
        inputs = {}
        calls: dict[str, Call] = {}
        seconds_of_round = 0.0
        # Compilation may take all the time that is left, and sets take many times that of single vectors.
        for row in sorted(self.rows, key=attrgetter("set_size", "is_compiled")):
            expected = self.results.expected_seconds(row.label, size)
            seconds_before = CALLS_BEFORE_ROUNDS * expected + SECONDS_TO_COMPILE * row.is_compiled
            if not self.has_time(seconds_of_round + expected, deadline - seconds_before):
                self.results.skip(row.label, size, NO_TIME)
                continue
            if row.set_size not in inputs:
                inputs[row.set_size] = random_inputs(size, row.set_size, self.device)
            call = self.call(row.label, size, partial(row.run, *inputs[row.set_size]))
            if call is None:
                release_memory(self.device)
            elif self.has_time(seconds_of_round + call.seconds, deadline):
                seconds_of_round += call.seconds
                calls[row.label] = call
            else:
                self.results.skip(row.label, size, NO_TIME)
        return calls

    def has_time(self, seconds_of_round: float, deadline: float) -> bool:
        """Tell whether the fewest rounds end before the deadline."""
        rounds = self.fewest_rounds + 1  # one warms up
        return time.monotonic() + rounds * seconds_of_round < deadline

    def call(self, label: str, size: Size, run: Callable[[], None]) -> Call | None:
        """Call a loss twice; None if it fails, for a reason that is kept."""
        read_clock = clock(self.device)
        try:
            run()
            started = read_clock()
            peak = extra_bytes(run, self.device)
            return Call(run, read_clock() - started, peak)
        except Exception as error:  # of memory, of a compiler, or of a peer
            self.results.skip(label, size, short_reason(error))
            return None


def random_inputs(size: Size, set_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images and texts in bfloat16, and their labels, all different."""
    shape = (size.batch, size.dimension)
    if set_size:
        shape = (size.batch, set_size, size.dimension)
    images, texts = random_sides(shape, torch.bfloat16, device)
    return images, texts, torch.arange(size.batch, device=device)


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


def short_reason(error: Exception) -> str:
    """Return the first line of an error, shortened."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    reason = f"{type(error).__name__}: {lines[0]}"
    if len(reason) > LONGEST_REASON:
        reason = reason[:LONGEST_REASON] + " ..."
    return reason


def markdown_table(results: Results, rows: Sequence[Row], sizes: Sequence[Size], column: str) -> list[str]:
    """Return the lines of a table with a row for each loss and a column for each size.

    Args:
        column: ``"time"`` for ms and the ratios to the baselines, or ``"memory"`` for MB.
    """
    headings = ["ms (ratio to `ClipLoss` / to `ClipLoss` compiled)" if column == "time" else "MB"]
    for size in sizes:
        headings.append(f"B = {size.batch:,}")
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
    ratio = format_ratio(measurement.ratio)
    ratio_to_compiled = format_ratio(measurement.ratio_to_compiled)
    return f"{1e3 * measurement.seconds:,.2f} ({ratio} / {ratio_to_compiled})"


def format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.2f}"


def missing_lines(results: Results, sizes: Sequence[Size]) -> list[str]:
    """Return a line for each reason why something was not measured at one of the sizes."""
    labels_by_reason: dict[tuple[str, str], list[str]] = {}
    for (label, reason), missing_sizes in results.missing.items():
        batches = []
        for size in missing_sizes:
            if size in sizes:
                batches.append(f"{size.batch:,}")
        if batches:
            labels_by_reason.setdefault((", ".join(batches), reason), []).append(label)
    lines = []
    for (batches_in_words, reason), labels in labels_by_reason.items():
        lines.append(f"{'; '.join(labels)}; B = {batches_in_words}: {reason}")
    return lines
