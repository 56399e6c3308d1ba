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

from benchmarks.grid import Results, Study
from benchmarks.outcomes import Outcome
from benchmarks.study import RESULTS
from benchmarks.study_tables import format_interval
from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, exit_status, one_of
from vl_plugins.retrieval import compare
from vl_plugins.retrieval.comparison import CONFIDENCE, POWER

CLAIMS = Path("benchmarks/claims")
STUDIES = Path("benchmarks/studies")
AT_SCALE = RESULTS / "at_scale"
PAGE = Path("docs/claims.md")
PAGE_START, PAGE_END = CLAIMS / "introduction.md", CLAIMS / "run_it_yourself.md"

REPRODUCED, CONTRADICTED, NOT_RESOLVED, NOT_RUN = "reproduced", "contradicted", "not resolved", "not run"
EXPECTATIONS = ("above", "below", "equal")

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


def at_scale_file(claim: str, scale: str) -> Path:
    return AT_SCALE / scale / f"{claim}.json"


def add_at_scale(claim: Claim, scale_name: str, file: Path) -> Path:
    """Check what ``vl-plugins evaluate --json`` printed for a claim, and keep it; return where.

    Raises:
        UserError: the file is no such JSON, or of other methods, another baseline, another protocol or other metrics.
    """
    scale = scale_of(claim, scale_name)
    content = read_evaluation(file)
    protocol = scale.protocol
    if content["baseline"] != scale.baseline:
        raise UserError(
            f"{file}: the baseline is {content['baseline']!r}, but the claim compares with {scale.baseline!r}"
        )
    if protocol not in content["differences"]:
        raise UserError(f"{file} has no differences of the protocol {protocol}: evaluate with --protocol {protocol}")
    differences = content["differences"][protocol]
    expected = set(scale.train) - {scale.baseline}
    if set(differences) != expected:
        raise UserError(
            f"{file} compares {', '.join(sorted(differences))}, but the claim is about {', '.join(sorted(expected))}"
        )
    for method, of_method in differences.items():
        for metric in sorted({comparison.metric for comparison in claim.comparisons}):
            check_difference(f"{file}: {method}, {metric}", of_method.get(metric))
    target = at_scale_file(claim.name, scale_name)
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = {"claim": claim.name, "scale": scale_name, "protocol": protocol, "commands": scale.commands()} | content
    write_file(target, f"{json.dumps(kept, indent=1)}\n".encode())
    return target


def read_evaluation(file: Path) -> dict[str, Any]:
    """Read what ``vl-plugins evaluate --json`` printed for several models."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    types = {"results": list, "baseline": str, "differences": dict}
    for key, kind in types.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise UserError(f"{file} is not what `vl-plugins evaluate --json` prints for several models: no {key}")
    for protocol in content["differences"].values():
        if not isinstance(protocol, dict) or not all(isinstance(of_method, dict) for of_method in protocol.values()):
            raise UserError(f"{file}: differences are not those of protocols and models")
    return content


def check_difference(place: str, difference: Any) -> None:
    """Check an interval that somebody sent."""
    keys = ("value", "baseline", "low", "high", "difference")
    if not isinstance(difference, dict) or not all(is_finite(difference.get(key)) for key in keys):
        raise UserError(f"{place}: expected the numbers {', '.join(keys)}")
    mean = difference["value"] - difference["baseline"]
    if not difference["low"] <= mean <= difference["high"] or abs(mean - difference["difference"]) > 1e-6:
        raise UserError(f"{place}: the difference is not inside its interval, or not that of its two values")


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def scale_of(claim: Claim, name: str) -> Scale:
    if not claim.at_scale:
        raise UserError(f"the claim {claim.name} has no configurations of its paper")
    return claim.at_scale[one_of("--scale", name, tuple(claim.at_scale))]


def results_of(claim: Claim) -> Results:
    return Results(Study.read(STUDIES / f"{claim.study}.yaml"), RESULTS / claim.study)


def overview(claims: Sequence[Claim], found: dict[str, list[Finding]]) -> str:
    """Return the table of all claims in Markdown."""
    rows = ["| claim | verdict |", "|---|---|"]
    for claim in claims:
        number = f"{claim.name[:3]}: " if claim.name[:3].isdigit() else ""  # of the paper
        rows.append(f"| [{number}{claim.title}](#{claim.name}) | {claim_verdict(found[claim.name])} |")
    return "\n".join(rows)


def claim_section(claim: Claim, found: Sequence[Finding]) -> str:
    """Return what the page says about a claim."""
    parts = [f"({claim.name})=\n### {claim.title}", f"{claim.says} ({claim.source})"]
    rows = [
        "| regime | comparison | metric | difference, interval | power | time | seeds | verdict |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    rows += [finding_row(finding) for finding in found]
    parts.append("\n".join(rows))
    verdict = claim_verdict(found)
    parts.append(f"**{verdict[0].upper()}{verdict[1:]}** by the rule: {claim.rule}.")
    if claim.note:
        parts.append(claim.note)
    parts += [others for name in claim.at_scale if (others := results_at_scale(claim, name))]
    return "\n\n".join(parts)


def finding_row(finding: Finding) -> str:
    comparison = finding.comparison
    start = f"| {comparison.regime} | {comparison.text} | {METRICS[comparison.metric]} |"
    if finding.verdict == NOT_RUN:
        return f"{start} | | | | not run |"
    digits = 3 if comparison.metric.endswith("_variance") else 1
    interval = format_interval(finding.mean, finding.low, finding.high, digits)
    seeds = f"{finding.seeds[0]}, {finding.seeds[1]}"
    return f"{start} {interval} | {finding.smallest:.{digits}f} | {finding.time:.2f} | {seeds} | {finding.verdict} |"


def results_at_scale(claim: Claim, scale_name: str) -> str:
    """Return what somebody measured at the size of the paper; empty if nobody has."""
    file = at_scale_file(claim.name, scale_name)
    if not file.is_file():
        return ""
    content = json.loads(file.read_text())
    lines = [f"At the size of {scale_name} ([JSON](studies/at_scale/{scale_name}/{claim.name}.json)):", ""]
    for method, of_method in content["differences"][content["protocol"]].items():
        for metric in sorted({comparison.metric for comparison in claim.comparisons}):
            difference = of_method[metric]
            interval = format_interval(difference["difference"], difference["low"], difference["high"])
            lines.append(f"- `{method}` against `{content['baseline']}`, {METRICS[metric]}: {interval}")
    return "\n".join(lines)


def made_by_all(results: Results) -> str:
    """Return the commits and versions that trained the runs of a study."""
    return "; ".join(sorted({results.outcome(run).made_by for run in results.all_runs()}))


def write_page(claims: Sequence[Claim]) -> str:
    """Write ``docs/claims.md``; return the table of all claims."""
    found, makers = {}, {}
    for claim in claims:
        results = results_of(claim)
        found[claim.name] = findings(claim, results)
        makers[claim.study] = made_by_all(results)
    table = overview(claims, found)
    parts = [PAGE_START.read_text().rstrip(), table, "## Each claim"]
    parts += [claim_section(claim, found[claim.name]) for claim in claims]
    parts.append("## How the runs were made")
    for study, maker in makers.items():
        parts.append(
            f"`python -m benchmarks.study benchmarks/studies/{study}.yaml --work studies/{study}` trained the runs, "
            f"at {maker}. [All runs](studies/{study}/study.csv) and [all comparisons](studies/{study}/study.md) lie in "
            f"`docs/studies/{study}`, with what each test image contributes."
        )
    parts.append(PAGE_END.read_text().rstrip())
    PAGE.write_text("\n\n".join(parts) + "\n")
    return table


def run(arguments: argparse.Namespace) -> None:
    claims = [find_claim(arguments.claim)] if arguments.claim else read_claims()
    if arguments.add:
        if not arguments.claim or not arguments.scale:
            raise UserError("--add needs --claim and --scale, which say what was run")
        print(f"kept as {add_at_scale(claims[0], arguments.scale, arguments.add)}")
    elif arguments.scale:
        for claim in claims:
            if arguments.claim or arguments.scale in claim.at_scale:
                print(f"# {claim.name}: {claim.title}")
                print("\n".join(scale_of(claim, arguments.scale).commands()))
    else:
        print(write_page(read_claims()))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", metavar="NAME", help="a file of benchmarks/claims (default: all)")
    parser.add_argument("--scale", metavar="NAME", help="print the commands with the paper's data set: coco, flickr30k")
    parser.add_argument("--add", type=Path, metavar="FILE.json", help="results at this scale, of evaluate --json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return exit_status("benchmarks.claims", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
