"""Measuring contestants side by side: time, memory, and that those of one formula compute the same."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.benchmarks.contestants import (
    FORMULAS,
    Contestant,
    Inputs,
    Setting,
    Skipped,
    make_contestants,
    make_inputs,
    three_products,
)
from vl_plugins.benchmarks.machine import describe_machine
from vl_plugins.benchmarks.memory import free_bytes, peak_bytes
from vl_plugins.utils.errors import UserError, first_line

__all__ = [
    "Measurement",
    "Ratio",
    "Result",
    "check_against_formula",
    "check_agreement",
    "clock_name",
    "copy_rate",
    "describe_setting",
    "least_bytes",
    "measure",
    "product_share",
    "ratio",
    "run_benchmark",
    "seconds",
    "time_rounds",
]

# Items on which contestants are compared with their formula in float64.
CHECKED = 256

NO_REASON = "no reason given"

# Relative. Fast products of GPUs (TF32), which some take for float32 too, have the mantissa of float16.
TOLERANCE = {"cpu": {torch.float32: 1e-4}, "cuda": {torch.float32: 5e-3}}
HALF_TOLERANCE = 3e-2
HALF_GRADIENT_TOLERANCE = 0.1
ABSOLUTE_TOLERANCE = 1e-5

# Larger than caches, small beside the memory.
COPIED_BYTES = 2**27
COPIES = 5

DEFAULT_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True)
class Measurement:
    """A contestant at a setting.

    Attributes:
        setting: where.
        name: of the contestant.
        ours: it is a loss of this package.
        seconds: of forward and backward, in each round.
        peak_bytes: the most that was allocated beyond what was there before; the gradients are in it.
        product_share: fraction of the measured rate of matrix products, see :func:`product_share`; None without one.
        copy_share: fraction of the measured rate of copying; None for what computes no loss.
    """

    setting: Setting
    name: str
    ours: bool
    seconds: tuple[float, ...]
    peak_bytes: int
    product_share: float | None
    copy_share: float | None

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


class Ratio(NamedTuple):
    """Ours divided by another's: of the seconds in the same round median, least and most; of the peaks of memory."""

    median: float
    least: float
    most: float
    memory: float


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Attributes:
        machine: what it ran on.
        clock: what the seconds are of.
        rounds: how many were measured.
        peers: names of those that ours are compared with.
        measurements: of all settings, in the order in which they were measured.
        skipped: by setting.
    """

    machine: str
    clock: str
    rounds: int
    peers: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    skipped: tuple[tuple[Setting, Skipped], ...]

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings with a measurement, in order."""
        return tuple(dict.fromkeys(measurement.setting for measurement in self.measurements))

    def at(self, setting: Setting) -> list[Measurement]:
        """Return the measurements of a setting."""
        return [measurement for measurement in self.measurements if measurement.setting == setting]

    def pairs(self, setting: Setting) -> list[tuple[Measurement, Measurement]]:
        """Return each of ours with each peer."""
        at = self.at(setting)
        others = [measurement for measurement in at if not measurement.ours and measurement.name in self.peers]
        return [(ours, other) for ours in at if ours.ours for other in others]


def run_benchmark(
    losses: Sequence[str],
    peers: Sequence[str],
    backends: Sequence[str],
    settings: Sequence[Setting],
    *,
    rounds: int = 5,
    seed: int = 0,
    memory_limit: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Compare losses with peers at each setting, with the threads that torch has.

    In each round every contestant runs once, forward and backward; in one round in one order, in the next in the
    opposite one. What computes the same formula must give the same value.

    Args:
        losses, peers, backends: see :func:`~vl_plugins.benchmarks.contestants.make_contestants`.
        settings: all on one device.
        rounds: to measure, after one to warm up.
        seed: of the embeddings.
        memory_limit: in bytes; what is estimated to need more is skipped. Half of what is free, if left out.
        progress: called with a line before each setting.

    Raises:
        UserError: contestants disagree, or there is nothing to measure.
    """
    device, threads = settings[0].device, torch.get_num_threads()
    rate = copy_rate(device)
    measurements, skipped = [], []
    for setting in settings:
        limit = DEFAULT_SHARE_OF_MEMORY * free_bytes(device) if memory_limit is None else memory_limit
        contestants, skipped_here = make_contestants(losses, backends, peers, setting)
        if all(contestant.peer != "three-products" for contestant in contestants):
            contestants.append(three_products(setting))
        contestants, too_large = _within(limit, contestants, setting)
        progress(f"{describe_setting(setting)}: {len(contestants)} contestants, {rounds} rounds")
        if contestants:
            found, failed = measure(contestants, make_inputs(setting, seed), setting, rounds, rate)
            measurements += found
            skipped_here += failed
        skipped += [(setting, each) for each in [*skipped_here, *too_large]]
    if not any(measurement.name != "three-products" for measurement in measurements):
        reasons = "; ".join(f"{each.name}: {each.reason}" for _, each in skipped)
        raise UserError(f"nothing to measure ({reasons})")
    return Result(
        describe_machine(device, threads),
        clock_name(device, threads),
        rounds,
        tuple(peers),
        tuple(measurements),
        tuple(skipped),
    )


def measure(
    contestants: Sequence[Contestant], inputs: Inputs, setting: Setting, rounds: int, rate: float
) -> tuple[list[Measurement], list[Skipped]]:
    """Check contestants and measure them; also return which failed.

    Args:
        contestants: names are unique.
        inputs: of the setting.
        setting: for the results.
        rounds: at least 1.
        rate: of :func:`copy_rate`.

    Raises:
        UserError: contestants disagree.
    """
    running, values, skipped = [], {}, []
    for contestant in contestants:
        try:
            check_against_formula(contestant, inputs)
            values[contestant.name] = _forward_backward(contestant, inputs.fresh())
            running.append(contestant)
        except _Disagreement:
            raise
        except ValueError as error:  # how a backend says that it cannot run here
            skipped.append(Skipped(contestant.name, first_line(error, NO_REASON)))
        except Exception as error:  # whatever others raise where they cannot
            if contestant.ours:
                raise
            skipped.append(Skipped(contestant.name, f"{type(error).__name__}: {first_line(error, NO_REASON)}"))
    check_agreement(running, values)
    del values

    def prepare(contestant: Contestant) -> Callable[[], object]:
        return partial(_forward_backward, contestant, inputs.fresh())

    device = setting.device
    taken = time_rounds({contestant.name: partial(prepare, contestant) for contestant in running}, rounds, device)
    peaks = {contestant.name: peak_bytes(prepare(contestant), device) for contestant in running}
    of_products = statistics.median(taken["three-products"]) if "three-products" in taken else None
    measurements = []
    for contestant in running:
        times = taken[contestant.name]
        products = 3 if contestant.formula is None else FORMULAS[contestant.formula].products
        middle = statistics.median(times)
        measurements.append(
            Measurement(
                setting,
                contestant.name,
                contestant.ours,
                times,
                peaks[contestant.name],
                None if of_products is None else product_share(products, of_products, middle),
                None if contestant.formula is None else least_bytes(inputs) / rate / middle,
            )
        )
    return measurements, skipped


def _within(
    limit: float, contestants: Sequence[Contestant], setting: Setting
) -> tuple[list[Contestant], list[Skipped]]:
    """Return the contestants that need no more memory than the limit, and the others."""
    fitting, skipped = [], []
    for contestant in contestants:
        needed = contestant.peak(setting)
        if needed <= limit:
            fitting.append(contestant)
        else:
            reason = f"needs about {needed / 1e9:.3g} GB, more than the limit of {limit / 1e9:.3g} GB"
            skipped.append(Skipped(contestant.name, reason))
    return fitting, skipped


class _Disagreement(UserError):
    """Contestants of one formula compute different things."""


def describe_setting(setting: Setting) -> str:
    """Return one line.

    >>> describe_setting(Setting(1024, 512, "float32", torch.device("cpu")))
    'B 1,024, D 512, float32'
    """
    sets = "" if setting.elements is None else f", K {setting.elements}"
    return f"B {setting.batch_size:,}{sets}, D {setting.dimension:,}, {setting.dtype}"


def ratio(ours: Measurement, other: Measurement) -> Ratio:
    """Return how ours compares with another at the same setting.

    >>> setting = Setting(2, 2, "float32", torch.device("cpu"))
    >>> ours = Measurement(setting, "ours", True, (1.0, 2.0, 1.0), 10, None, None)
    >>> ratio(ours, Measurement(setting, "other", False, (2.0, 2.0, 4.0), 40, None, None))
    Ratio(median=0.5, least=0.25, most=1.0, memory=0.25)
    """
    of_rounds = [taken / by_other for taken, by_other in zip(ours.seconds, other.seconds, strict=True)]
    return Ratio(statistics.median(of_rounds), min(of_rounds), max(of_rounds), ours.peak_bytes / other.peak_bytes)


def product_share(products: int, seconds_of_three: float, taken: float) -> float:
    """Return which fraction of a time so many matrix products alone would take.

    Args:
        products: how many the loss needs at least: 3 of a contrastive one, 3 B^2 D multiply-adds.
        seconds_of_three: what three of them take on these inputs.
        taken: seconds of the loss.

    >>> product_share(1, seconds_of_three=3.0, taken=4.0)
    0.25
    """
    return products * seconds_of_three / 3 / taken


def least_bytes(inputs: Inputs) -> int:
    """Return what has to be read and written once: embeddings and gradients, with sets also similarities and theirs."""
    return 4 * inputs.x.nbytes + (0 if inputs.upstream is None else 2 * inputs.upstream.nbytes)


def clock_name(device: torch.device, threads: int) -> str:
    """Return what :func:`seconds` measures.

    Of one thread the time of the processor, which other programs on the machine disturb less than wall time.
    """
    if device.type == "cuda":
        return "GPU time"
    return "processor time" if threads == 1 else "wall time"


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that ``function()`` takes, by the clock of :func:`clock_name`."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    function()
    return clock() - started


def time_rounds(
    functions: Mapping[str, Callable[[], Callable[[], object]]], rounds: int, device: torch.device
) -> dict[str, tuple[float, ...]]:
    """Time functions in turn: all of them in each round, forwards in one round, backwards in the next.

    Args:
        functions: name -> function that prepares a run, untimed, and returns what is timed. It should have run before.
        rounds: at least 1.
        device: where they run.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds):
        for name in list(functions)[:: -1 if number % 2 else 1]:
            run = functions[name]()
            taken[name].append(seconds(run, device))
    return {name: tuple(times) for name, times in taken.items()}


def copy_rate(device: torch.device) -> float:
    """Return bytes read and written per second when memory is copied."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()  # touches every page
    return 2 * COPIED_BYTES / statistics.median(seconds(copy, device) for _ in range(COPIES))


def check_against_formula(contestant: Contestant, inputs: Inputs) -> None:
    """Compare value and gradients on the first items with the plain formula in float64.

    Raises:
        UserError: they differ by more than rounding.
    """
    if contestant.formula is None:
        return
    formula = FORMULAS[contestant.formula]
    few = inputs.first(CHECKED)
    value = _forward_backward(contestant, few)
    x, y = (side.detach().double().requires_grad_() for side in few[:2])
    expected = contestant.factor * formula.value(x, y)
    expected.backward(None if few.upstream is None else few.upstream.double())
    tolerance, of_gradients = _tolerances(inputs.x, products=formula.products)
    _check_near(f"{contestant.name} is not {contestant.factor:g} x {contestant.formula}", value, expected, tolerance)
    if of_gradients is None:
        return
    for given, plain in ((few.x, x), (few.y, y)):
        # Some normalise what they get, and have no gradient along the vector.
        across = [
            leaf.grad.double() - (leaf.grad.double() * plain).sum(-1, keepdim=True) * plain for leaf in (given, plain)
        ]
        what = f"the gradient of {contestant.name} is not that of {contestant.factor:g} x {contestant.formula}"
        _check_near(what, *across, of_gradients)


def check_agreement(contestants: Sequence[Contestant], values: Mapping[str, Tensor]) -> None:
    """Compare the values of contestants of the same formula, on all of the inputs.

    Args:
        contestants: any.
        values: by name; what each of them returned.

    Raises:
        UserError: they differ by more than rounding.
    """
    first: dict[str, Contestant] = {}
    for contestant in contestants:
        if contestant.formula is None:
            continue
        other = first.setdefault(contestant.formula, contestant)
        value, expected = values[contestant.name], values[other.name]
        # Of the type that rounds more.
        tolerance, _ = _tolerances(min(value, expected, key=lambda given: given.dtype.itemsize), products=3)
        what = f"{contestant.name} and {other.name} disagree"
        _check_near(what, value.double() / contestant.factor, expected.double() / other.factor, tolerance)


def _tolerances(tensor: Tensor, *, products: int) -> tuple[float, float | None]:
    """Return how far values and gradients may be off; None where a gradient depends on how similarities are rounded."""
    exact = TOLERANCE[tensor.device.type].get(tensor.dtype)
    if exact is not None:
        return exact, exact
    # Hardest negatives: which one it is.
    return HALF_TOLERANCE, HALF_GRADIENT_TOLERANCE if products == 3 else None


def _check_near(what: str, value: Tensor, expected: Tensor, tolerance: float) -> None:
    value, expected = value.detach().double(), expected.detach().double()
    size = torch.linalg.vector_norm(expected)
    difference = torch.linalg.vector_norm(value - expected)
    if not difference <= tolerance * size + ABSOLUTE_TOLERANCE:  # NaN is not
        numbers = "" if value.ndim else f": {value:.6g} and {expected:.6g}"
        raise _Disagreement(f"{what}{numbers} (relative difference {difference / size:.1e}, rounding: {tolerance:.0e})")


def _forward_backward(contestant: Contestant, inputs: Inputs) -> Tensor | None:
    """Return the value, if it computes one."""
    value = contestant.run(inputs)
    if contestant.formula is None:
        return None
    value.backward(inputs.upstream)
    return value.detach()
