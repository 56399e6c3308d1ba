"""What the papers claim, and what training says about it: print the claims with verdicts, and write docs/claims.md.

    python -m benchmarks.claims
    python -m benchmarks.claims --scale coco --claim 001-margin
    python -m benchmarks.claims --scale coco --claim 001-margin --add coco.json

Each file of `benchmarks/claims` is a claim: the sentence and its place, the comparisons that decide on it, and the
rule of its verdict. The comparisons are of runs that `python -m benchmarks.study` has trained and whose results lie in
`docs/studies`; nothing is trained here. A comparison is

- reproduced if the interval of the difference lies on the side that the claim says,
- contradicted if it lies on the other side,
- not resolved otherwise, and
- not run before all of its runs are there, which is no verdict.

A claim is reproduced if all of its comparisons are, contradicted if one of them is, and else not resolved.

`--scale` prints the commands that run a claim with the configurations of its paper. Their last one prints JSON, which
`--add` checks and keeps, so that the page shows it beside the small runs.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from scipy.special import stdtrit

from benchmarks.outcomes import Outcome
from benchmarks.study import RESULTS, Results, Study
from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, exit_status, one_of
from vl_plugins.retrieval import compare

CLAIMS = Path("benchmarks/claims")
STUDIES = Path("benchmarks/studies")
AT_SCALE = RESULTS / "at_scale"
PAGE = Path("docs/claims.md")

REPRODUCED, CONTRADICTED, NOT_RESOLVED, NOT_RUN = "reproduced", "contradicted", "not resolved", "not run"
EXPECTATIONS = ("above", "below", "equal")
CONFIDENCE, POWER = 0.95, 0.8

# How the page names metrics, with their units.
METRICS = {
    "rsum": "RSUM",
    "image_to_text_R@1": "R@1 i2t",
    "text_to_image_R@1": "R@1 t2i",
    "image_circular_variance": "circular variance of images' sets",
}


@dataclass(frozen=True)
class Comparison:
    """A method against a baseline in a regime of a study.

    Attributes:
        regime, method, baseline: names in the study.
        expected: ``above``, ``below`` or ``equal``, what the claim says about the method.
        metric: what is compared.
        within: for ``equal``, the difference that does not matter.
    """

    regime: str
    method: str
    baseline: str
    expected: str = "above"
    metric: str = "rsum"
    within: float = 0.0

    def __post_init__(self) -> None:
        one_of("expected", self.expected, EXPECTATIONS)
        one_of("metric", self.metric, tuple(METRICS))

    @property
    def text(self) -> str:
        relation = {"above": ">", "below": "<", "equal": "="}[self.expected]
        return f"`{self.method}` {relation} `{self.baseline}`"


@dataclass(frozen=True)
class Scale:
    """How to run a claim with the configurations of its paper.

    Attributes:
        protocol: of ``vl-plugins evaluate``.
        shards: the test split.
        checkpoint: the file in a run's folder that is evaluated.
        train: the training command of each method, with {seed} and the run's folder {run}.
        baseline: the method that the others are compared with.
        seeds: how many.
    """

    protocol: str
    shards: str
    checkpoint: str
    train: dict[str, str]
    baseline: str
    seeds: int = 3

    def commands(self) -> list[str]:
        """Return all commands, the evaluation last."""
        commands, checkpoints = [], []
        for method, command in self.train.items():
            for seed in range(self.seeds):
                run = f"runs/{method}-{seed}"
                commands.append(command.format(seed=seed, run=run))
                checkpoints.append(f"{method}={run}/{self.checkpoint}")
        commands.append(
            f"vl-plugins evaluate --checkpoint {' '.join(checkpoints)} --shards '{self.shards}' "
            f"--protocol {self.protocol} --baseline {self.baseline} --json"
        )
        return commands


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and how it is checked.

    Attributes:
        name: that of its file.
        title: in a few words.
        says: the claim, in our words.
        source: the paper, and the place in it.
        study: the study that trains the runs.
        comparisons: what has to hold.
        rule: of the verdict, in words.
        note: what a reader should know about the result.
        at_scale: by the name of the data set, how to run it with the configurations of the paper.
    """

    name: str
    title: str
    says: str
    source: str
    comparisons: list[Comparison]
    rule: str = "all comparisons"
    study: str = "claims"
    note: str = ""
    at_scale: dict[str, Scale] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Claim":
        """Read a YAML file."""
        content = yaml.safe_load(file.read_text())
        content["comparisons"] = [Comparison(**comparison) for comparison in content["comparisons"]]
        content["at_scale"] = {name: Scale(**scale) for name, scale in content.get("at_scale", {}).items()}
        return cls(name=file.stem, **content)


@dataclass(frozen=True)
class Finding:
    """What the runs say about a comparison.

    Attributes:
        comparison: which one.
        verdict: ``reproduced``, ``contradicted``, ``not resolved`` or ``not run``.
        mean, low, high: the difference and its interval.
        smallest: the true difference that would be resolved in 4 of 5 cases.
        time: processor time of the method's trainings, as a multiple of the baseline's.
        seeds: of the method and of the baseline.
    """

    comparison: Comparison
    verdict: str = NOT_RUN
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    smallest: float = math.nan
    time: float = math.nan
    seeds: tuple[int, int] = (0, 0)


def read_claims() -> list[Claim]:
    return [Claim.read(file) for file in sorted(CLAIMS.glob("*.yaml"))]


def find_claim(name: str) -> Claim:
    claims = {claim.name: claim for claim in read_claims()}
    return claims[one_of("--claim", name, tuple(claims))]


def findings(claim: Claim, results: Results) -> list[Finding]:
    """Return what the runs say about each comparison of a claim.

    The intervals of all comparisons that decide on a claim hold together (Bonferroni).
    """
    return [finding(comparison, results, len(claim.comparisons)) for comparison in claim.comparisons]


def finding(comparison: Comparison, results: Results, comparisons: int) -> Finding:
    """Return what the runs say about one of several comparisons."""
    method = results.seed_outcomes(comparison.regime, comparison.method)
    baseline = results.seed_outcomes(comparison.regime, comparison.baseline)
    if not method or not baseline:
        return Finding(comparison)
    if comparison.metric.endswith("_variance"):
        mean, low, high, smallest = number_difference(method, baseline, comparison.metric, comparisons)
    else:
        values = {"method": [outcome.image_values for outcome in method]}
        values["baseline"] = [outcome.image_values for outcome in baseline]
        difference = compare(values, "baseline", comparisons=comparisons)["method"][comparison.metric]
        mean, low, high, smallest = difference.mean, difference.low, difference.high, difference.smallest(POWER)
    time = mean_seconds(method) / mean_seconds(baseline)
    verdict = verdict_of(comparison, low, high)
    return Finding(comparison, verdict, mean, low, high, smallest, time, (len(method), len(baseline)))


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
    """Return the verdict on a claim."""
    verdicts = {finding.verdict for finding in found}
    for verdict in (NOT_RUN, CONTRADICTED, NOT_RESOLVED):
        if verdict in verdicts:
            return verdict
    return REPRODUCED
