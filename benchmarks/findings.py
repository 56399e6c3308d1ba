"""What trained runs say about the comparisons of a claim."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from scipy.special import stdtrit

from benchmarks.claim import Comparison
from benchmarks.grid import Results
from benchmarks.outcomes import Outcome
from vl_plugins.retrieval import compare
from vl_plugins.retrieval.comparison import CONFIDENCE, POWER

__all__ = [
    "CONTRADICTED",
    "NOT_RESOLVED",
    "NOT_RUN",
    "REPRODUCED",
    "Finding",
    "claim_verdict",
    "finding",
    "findings",
    "verdict_of",
]

REPRODUCED, CONTRADICTED, NOT_RESOLVED, NOT_RUN = "reproduced", "contradicted", "not resolved", "not run"


@dataclass(frozen=True)
class Finding:
    """What the runs say about a comparison.

    Attributes:
        comparison: which one.
        verdict: ``reproduced``, ``contradicted``, ``not resolved`` or ``not run``.
        mean, low, high: the difference and its interval.
        smallest: the true difference that would be resolved in 4 of 5 cases.
        time: processor time of the method's trainings, as a multiple of the baseline's.
        seeds: of each of the two.
    """

    comparison: Comparison
    verdict: str = NOT_RUN
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    smallest: float = math.nan
    time: float = math.nan
    seeds: int = 0


def findings(comparisons: Sequence[Comparison], results: Results) -> list[Finding]:
    """Return what the runs say about comparisons that decide on a claim; all intervals hold together (Bonferroni)."""
    return [finding(comparison, results, len(comparisons)) for comparison in comparisons]


def finding(comparison: Comparison, results: Results, comparisons: int) -> Finding:
    """Return what the runs say about one of several comparisons."""
    regime, baseline_regime = comparison.regimes
    method = results.seed_outcomes(regime, comparison.method)
    baseline = results.seed_outcomes(baseline_regime, comparison.baseline)
    if not method or not baseline:
        return Finding(comparison)
    seeds = min(len(method), len(baseline))  # the same on both sides
    method, baseline = method[:seeds], baseline[:seeds]
    if are_equal(method, baseline):
        mean = low = high = smallest = 0.0
    elif comparison.is_of_runs:
        mean, low, high, smallest = number_difference(method, baseline, comparison.metric, comparisons)
    else:
        values = {"method": [outcome.image_values for outcome in method]}
        values["baseline"] = [outcome.image_values for outcome in baseline]
        difference = compare(values, "baseline", comparisons=comparisons)["method"][comparison.metric]
        mean, low, high, smallest = difference.mean, difference.low, difference.high, difference.smallest(POWER)
    time = mean_seconds(method) / mean_seconds(baseline)
    verdict = verdict_of(comparison, low, high)
    return Finding(comparison, verdict, mean, low, high, smallest, time, seeds)


def are_equal(method: Sequence[Outcome], baseline: Sequence[Outcome]) -> bool:
    """Return whether two methods trained the same models: with each seed, all values of all test images are equal."""
    pairs = zip(method, baseline, strict=True)
    return all(torch.equal(ours.image_values.values, theirs.image_values.values) for ours, theirs in pairs)


def verdict_of(comparison: Comparison, low: float, high: float) -> str:
    """Return the verdict that an interval gives."""
    if comparison.expected == "equal":
        if -comparison.within <= low and high <= comparison.within:
            return REPRODUCED
        return CONTRADICTED if low > comparison.within or high < -comparison.within else NOT_RESOLVED
    if comparison.expected == "below":
        low, high = -high, -low
    if low > 0:
        return REPRODUCED
    return CONTRADICTED if high < 0 else NOT_RESOLVED


def number_difference(
    method: Sequence[Outcome], baseline: Sequence[Outcome], metric: str, comparisons: int
) -> tuple[float, float, float, float]:
    """Return the difference of a number of each run, its interval over seeds (Welch), and what it can resolve."""
    sides = [[outcome.test[metric] for outcome in side] for side in (method, baseline)]
    variances = [stdev(side) ** 2 / len(side) for side in sides]
    error = math.sqrt(sum(variances))
    if error == 0:
        return 0.0, 0.0, 0.0, 0.0
    freedom = sum(variances) ** 2 / sum(v**2 / (len(s) - 1) for v, s in zip(variances, sides, strict=True))
    mean = fmean(sides[0]) - fmean(sides[1])
    half_width = float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / 2 / comparisons)) * error
    return mean, mean - half_width, mean + half_width, half_width + float(stdtrit(freedom, POWER)) * error


def mean_seconds(outcomes: Sequence[Outcome]) -> float:
    return fmean(outcome.training_seconds for outcome in outcomes)


def claim_verdict(found: Sequence[Finding]) -> str:
    """Return the verdict on a claim on one kind of data, which is contradicted as soon as one of its comparisons is."""
    verdicts = {finding.verdict for finding in found}
    for verdict in (CONTRADICTED, NOT_RUN, NOT_RESOLVED):
        if verdict in verdicts:
            return verdict
    return REPRODUCED
