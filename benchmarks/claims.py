"""What the papers claim, and what training says about it: print the claims with verdicts, and write docs/claims.md.

    python -m benchmarks.claims
    python -m benchmarks.claims --results studies/own
    python -m benchmarks.claims --scale coco --claim ours-clip
    python -m benchmarks.claims --scale coco --claim ours-clip --add coco.json

Each file of `benchmarks/claims` is a claim: the sentence and its place, the comparisons that decide on it, and the
rule of its verdict. The comparisons are of runs that `python -m benchmarks.study` has trained and whose results lie in
`docs/studies`; nothing is trained here. A comparison is

- reproduced if the interval of the difference lies on the side that the claim says,
- contradicted if it lies on the other side,
- not resolved otherwise, and
- not run before all of its runs are there, which is no verdict.

A claim is contradicted if one of its comparisons is, reproduced if all of them are, and not run if one is missing. It
has a verdict for each kind of data that its comparisons are of.

`--results` prints the verdicts of runs of one's own, and writes nothing.

`--scale` prints the commands that run a claim with the configurations of its paper. Their last one prints JSON, which
`--add` checks and keeps, so that the page shows it beside the small runs.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.at_scale import add_at_scale, results_at_scale, scale_of
from benchmarks.claim import CLAIMS, METRICS, Claim, Comparison, find_claim, read_claims
from benchmarks.findings import CONTRADICTED, NOT_RESOLVED, NOT_RUN, REPRODUCED, Finding, claim_verdict, findings
from benchmarks.grid import Results, Study
from benchmarks.study import RESULTS
from benchmarks.study_tables import format_interval
from vl_plugins.errors import UserError, exit_status

STUDIES = Path("benchmarks/studies")
PAGE = Path("docs/claims.md")
# By how the name of a claim begins.
PAPERS = {"001": "Unified", "002": "GOAL", "003": "VSE++", "004": "DivE", "sig": "SigLIP", "our": "this package"}
# The parts of the page that are not generated.
INTRODUCTION = CLAIMS / "introduction.md"
HOW_TO_READ_IT = CLAIMS / "how_to_read_it.md"
RUN_IT_YOURSELF = CLAIMS / "run_it_yourself.md"


@cache
def results_of(study: str, folder: Path | None = None) -> Results:
    """Return the results of a study by its name, those of the repository by default; each file is read once."""
    return Results(Study.read(STUDIES / f"{study}.yaml"), folder or RESULTS / study)


def data_of(study: str) -> str:
    return results_of(study).study.data


def study_command(study: str) -> str:
    return f"python -m benchmarks.study {STUDIES / study}.yaml --work studies/{study}"


Found = dict[str, dict[str, list[Finding]]]  # by the names of claim and study


def overview(claims: Sequence[Claim], found: Found) -> str:
    """Return how many claims have which verdict on each kind of data, and the table of all claims in Markdown."""
    studies = list(dict.fromkeys(study for claim in claims for study in claim.studies))
    counts = []
    for study in studies:
        verdicts = Counter(claim_verdict(of_claim[study]) for of_claim in found.values() if study in of_claim)
        numbers = [f"{verdicts[verdict]} {verdict}" for verdict in (REPRODUCED, CONTRADICTED, NOT_RESOLVED, NOT_RUN)]
        counts.append(f"{verdicts.total()} claims on {data_of(study)}: {', '.join(numbers)}.")
    rows = [*counts, "", f"| of | claim | {' | '.join(map(data_of, studies))} |", f"|---|---|{'---|' * len(studies)}"]
    for claim in claims:
        link = f"[{claim.title}](#{heading_anchor(claim.title)})"
        cells = [PAPERS[claim.name[:3]], link]
        for study in studies:
            cells.append(summary(found[claim.name].get(study, [])))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def summary(found: Sequence[Finding]) -> str:
    """Return the verdict, with the difference of one comparison or how many of several are reproduced."""
    if not found:
        return ""
    verdict = claim_verdict(found)
    verdicts = [finding.verdict for finding in found]
    if NOT_RUN in verdicts:
        run = len(found) - verdicts.count(NOT_RUN)
        return f"{verdict}: {run} of {len(found)} comparisons" if run else verdict
    if len(found) == 1:
        return f"{verdict}: {METRICS[found[0].comparison.metric]} {interval_of(found[0])}"
    return f"{verdict}: {verdicts.count(REPRODUCED)} of {len(found)} comparisons"


def interval_of(finding: Finding) -> str:
    digits = digits_of(finding.comparison)
    return format_interval(finding.mean, finding.low, finding.high, digits)


def digits_of(comparison: Comparison) -> int:
    return 3 if comparison.is_of_runs else 1


def in_order(claims: Sequence[Claim], found: Found) -> list[Claim]:
    """Return the claims as the page has them: those that were run first, and of these, those of this package."""

    def place(claim: Claim) -> tuple[bool, bool]:
        verdicts = {claim_verdict(of_study) for of_study in found[claim.name].values()}
        return verdicts == {NOT_RUN}, not claim.name.startswith("ours")

    return sorted(claims, key=place)


def heading_anchor(title: str) -> str:
    """Return the anchor that GitHub and Sphinx give to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def claim_section(claim: Claim, found: dict[str, list[Finding]]) -> str:
    """Return what the page says about a claim."""
    parts = [f"### {claim.title}", f"{claim.says} ({claim.source}; `{claim.name}`)"]
    for study, of_study in found.items():
        rows = [
            f"| {data_of(study)} | comparison | metric | difference, interval | detectable | time | seeds | verdict |",
            "|---|---|---|---|---:|---:|---:|---|",
        ]
        rows += [finding_row(finding) for finding in of_study]
        parts.append("\n".join(rows))
        parts.append(f"Verdict on {data_of(study)}: **{claim_verdict(of_study)}**. Rule: {claim.rule}.")
        parts.append(training_command(claim.of_study(study), study))
    if claim.at_scale:
        scales = " or ".join(f"`--scale {name}`" for name in claim.at_scale)
        parts.append(f"At the size of the paper: `python -m benchmarks.claims --claim {claim.name}` with {scales}.")
    if claim.note:
        parts.append(claim.note)
    parts += [others for name in claim.at_scale if (others := results_at_scale(claim, name))]
    return "\n\n".join(parts)


def training_command(comparisons: Sequence[Comparison], study: str) -> str:
    """Return the command that trains the runs of comparisons again, or that the study has no such regime."""
    results = results_of(study)
    regimes = list(dict.fromkeys(regime for comparison in comparisons for regime in comparison.regimes))
    methods = list(dict.fromkeys(method for comparison in comparisons for method in comparison.methods))
    missing = [regime for regime in regimes if regime not in results.study.regimes]
    if missing:
        return f"The study has no regime {', '.join(missing)} yet."
    command = f"{study_command(study)} --results studies/own"
    command = f"`{command} --regimes {' '.join(regimes)} --methods {' '.join(methods)}`"
    hours = results.hours(regimes, methods)
    if hours == 0:
        return f"To train: {command}."
    time = f"{hours:.1f} hours" if hours > 0.1 else f"{60 * hours:.0f} minutes"
    return f"To train again, in {time} of processor time: {command}."


def finding_row(finding: Finding) -> str:
    comparison = finding.comparison
    start = f"| {comparison.regime} | {comparison.text} | {METRICS[comparison.metric]} |"
    if finding.verdict == NOT_RUN:
        return f"{start} | | | | not run |"
    digits, interval = digits_of(comparison), interval_of(finding)
    numbers = f"{finding.smallest:.{digits}f} | {finding.time:.2f} | {finding.seeds}"
    return f"{start} {interval} | {numbers} | {finding.verdict} |"


def origin(results: Results) -> str:
    """Return how many runs a study has, their processor time, and the commits and versions that trained them."""
    outcomes = [results.outcome(run) for run in results.all_runs()]
    makers = sorted({outcome.made_by for outcome in outcomes})
    return f"{len(outcomes)} runs in {results.hours():.1f} hours of processor time, at {'; '.join(makers)}"


def findings_of(claims: Sequence[Claim], folder: Path | None = None) -> Found:
    """Return what the runs say about each claim on each kind of data; those of a folder, or else of the repository."""
    found: Found = {}
    for claim in claims:
        found[claim.name] = {}
        for study in claim.studies:
            found[claim.name][study] = findings(claim.of_study(study), results_of(study, folder))
    return found


def write_page(claims: Sequence[Claim]) -> str:
    """Write ``docs/claims.md``; return the table of all claims."""
    found = findings_of(claims)
    claims = in_order(claims, found)
    table = overview(claims, found)
    parts = [INTRODUCTION.read_text().rstrip(), table, HOW_TO_READ_IT.read_text().rstrip(), "## Each claim"]
    parts += [claim_section(claim, found[claim.name]) for claim in claims]
    parts.append("## How the runs were made")
    for study in dict.fromkeys(study for claim in claims for study in claim.studies):
        parts.append(
            f"`{study_command(study)}` trained {origin(results_of(study))}. "
            f"[All runs](studies/{study}/study.csv) and [all comparisons](studies/{study}/study.md) lie in "
            f"`docs/studies/{study}`, with what each test image contributes."
        )
    parts.append(RUN_IT_YOURSELF.read_text().rstrip())
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
    elif arguments.results:
        print(overview(claims, findings_of(claims, arguments.results)))
    else:
        print(write_page(read_claims()))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", metavar="NAME", help="a file of benchmarks/claims (default: all)")
    parser.add_argument("--scale", metavar="NAME", help="print the commands with the paper's data set: coco, flickr30k")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="runs of one's own: print their verdicts only")
    parser.add_argument("--add", type=Path, metavar="FILE.json", help="results at this scale, of evaluate --json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return exit_status("benchmarks.claims", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
