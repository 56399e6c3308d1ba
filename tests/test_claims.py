"""The claims of the papers: their files, their verdicts, their page, and results at the size of the papers."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks import at_scale, claims
from benchmarks.at_scale import add_at_scale
from benchmarks.claim import Claim, Comparison, Scale, find_claim, read_claims
from benchmarks.claims import claim_section, findings_of, overview, results_of, summary
from benchmarks.findings import (
    CONTRADICTED,
    NOT_RESOLVED,
    NOT_RUN,
    REPRODUCED,
    Finding,
    claim_verdict,
    finding,
    findings,
    verdict_of,
)
from benchmarks.grid import Study
from benchmarks.outcomes import Outcome
from vl_plugins.cli import build_parser
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.pytorch_metric_learning import command_line
from vl_plugins.integrations.pytorch_metric_learning.config import read_config
from vl_plugins.retrieval import ImageValues, compare
from vl_plugins.retrieval.comparison import BlockedQueries

ROOT = Path(__file__).parent.parent
CLAIMS = read_claims()
SCALES = [(claim.name, scale) for claim in CLAIMS for scale in claim.at_scale]


def test_every_paper_has_claims():
    assert {claim.name[:3] for claim in CLAIMS} >= {"001", "002", "003", "004", "our", "sig"}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_runs_of_a_claim_belong_to_its_study(claim):
    """Those of a regime that the study does not have are not run."""
    for comparison in claim.comparisons:
        study = Study.read(Path("benchmarks/studies") / f"{comparison.study}.yaml")
        for regime, method in zip(comparison.regimes, (comparison.method, comparison.baseline), strict=True):
            if regime in study.regimes:
                assert method in {name for cell in study.cells if cell.regime == regime for name in cell.all_methods}
            else:
                assert regime in {"joint", "frozen-crops"}


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_the_commands_at_scale_can_be_parsed(name, scale):
    *training, evaluation = find_claim(name).at_scale[scale].commands()
    for command in training:
        _, _, module, *words = shlex.split(command)
        if module.endswith("open_clip"):
            parse_args(words)
        else:
            arguments = command_line.build_parser().parse_args(words)
            read_config(arguments.config, command_line.overrides(arguments))
    _, *words = shlex.split(evaluation)
    arguments = build_parser().parse_args(words)
    assert arguments.baseline in {name.partition("=")[0] for name in arguments.checkpoint}
    assert arguments.protocol == [find_claim(name).at_scale[scale].protocol]


@pytest.mark.parametrize(
    ("expected", "low", "high", "verdict"),
    [
        ("above", 0.1, 2, REPRODUCED),
        ("above", -0.1, 2, NOT_RESOLVED),
        ("above", -2, -0.1, CONTRADICTED),
        ("below", -2, -0.1, REPRODUCED),
        ("below", -2, 0.1, NOT_RESOLVED),
        ("below", 0.1, 2, CONTRADICTED),
        ("equal", -2, 2, REPRODUCED),
        ("equal", -2, 6, NOT_RESOLVED),
        ("equal", 5.5, 7, CONTRADICTED),
        ("equal", -7, -5.5, CONTRADICTED),
    ],
)
def test_verdict_of_an_interval(expected, low, high, verdict):
    assert verdict_of(Comparison("regime", "method", "baseline", expected, within=5), low, high) == verdict


@pytest.mark.parametrize(
    ("verdicts", "of_claim"),
    [
        ([REPRODUCED, REPRODUCED], REPRODUCED),
        ([REPRODUCED, NOT_RESOLVED], NOT_RESOLVED),
        ([REPRODUCED, CONTRADICTED, NOT_RESOLVED], CONTRADICTED),
        ([CONTRADICTED, NOT_RUN], CONTRADICTED),
        ([REPRODUCED, NOT_RUN], NOT_RUN),
    ],
)
def test_verdict_of_a_claim(verdicts, of_claim):
    assert claim_verdict([Finding(Comparison("", "", ""), verdict) for verdict in verdicts]) == of_claim


class FakeResults:
    """Outcomes by method, of any regime but "another"."""

    def __init__(self, outcomes):
        self.outcomes = outcomes

    def seed_outcomes(self, regime, method):
        return self.outcomes.get(f"{method} of another" if regime == "another" else method, [])


def outcomes(level, seeds, variance=0.5, images=100):
    """Outcomes with RSUM around a level."""
    made = []
    for seed in range(seeds):
        draws = torch.Generator().manual_seed(1000 * int(level) + seed)
        values = level + 10 * torch.randn(3, images, generator=draws, dtype=torch.float64)
        entry = BlockedQueries(torch.tensor([0]), torch.tensor([1]), torch.zeros(1, dtype=torch.float64))
        names = ("rsum", "image_to_text_R@1", "text_to_image_R@1")
        image_values = ImageValues(names, values, torch.ones(3, dtype=torch.float64), (entry,) * 3)
        test = {"rsum": values[0].mean().item(), "image_circular_variance": variance + 0.01 * seed}
        made.append(Outcome("train", "commit 0", 10.0 * level, 1.0, {}, test, image_values))
    return made


def test_a_finding_has_the_interval_of_the_comparison():
    """That of `compare`, wider by Bonferroni's correction for the comparisons of the claim, with power and time."""
    runs = {"method": outcomes(20, 3), "baseline": outcomes(10, 4)}  # of which three are compared
    found = finding(Comparison("regime", "method", "baseline"), FakeResults(runs), comparisons=3)
    values = {name: [outcome.image_values for outcome in of_name[:3]] for name, of_name in runs.items()}
    expected = compare(values, "baseline", comparisons=3)["method"]["rsum"]
    assert (found.mean, found.low, found.high) == (expected.mean, expected.low, expected.high)
    assert (found.smallest, found.time, found.seeds) == (expected.smallest(0.8), 2.0, 3)
    assert found.verdict == REPRODUCED
    alone = finding(Comparison("regime", "method", "baseline"), FakeResults(runs), comparisons=1)
    assert alone.low > found.low
    assert finding(Comparison("regime", "method", "absent"), FakeResults(runs), comparisons=1).verdict == NOT_RUN


def test_equal_trainings_are_equal():
    """The interval of `compare` covers other seeds on both sides, where these would be equal again."""
    runs = {"method": outcomes(20, 3), "baseline": outcomes(20, 3), "other": outcomes(20, 2) + outcomes(21, 1)}
    comparison = Comparison("regime", "method", "baseline", "equal", within=0.1)
    found = finding(comparison, FakeResults(runs), comparisons=1)
    assert (found.mean, found.low, found.high, found.verdict) == (0, 0, 0, REPRODUCED)
    comparison = Comparison("regime", "method", "other", "equal", within=0.1)
    found = finding(comparison, FakeResults(runs), comparisons=1)
    assert found.verdict == NOT_RESOLVED
    assert found.low < found.mean < found.high


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        (["method"], r"reproduced: RSUM \+10"),
        (["method", "baseline"], "not resolved: 1 of 2 comparisons"),
        (["method", "absent"], "not run: 1 of 2 comparisons"),
        (["absent"], "not run$"),
        ([], "$"),
    ],
)
def test_the_summary_of_a_claim(methods, text):
    runs = FakeResults({"method": outcomes(20, 3), "baseline": outcomes(10, 3)})
    found = [finding(Comparison("regime", method, "baseline"), runs, len(methods)) for method in methods]
    assert re.match(text, summary(found))


def test_a_baseline_of_another_regime():
    runs = {"method": outcomes(20, 3), "baseline": outcomes(30, 3), "baseline of another": outcomes(10, 3)}
    comparison = Comparison("regime", "method", "baseline", baseline_regime="another")
    found = finding(comparison, FakeResults(runs), comparisons=1)
    assert (found.verdict, round(found.mean)) == (REPRODUCED, 10)
    assert comparison.text == "`method` > `baseline` of another"


def test_a_number_of_each_run_is_compared_over_the_seeds():
    """Welch's interval, as SciPy has it."""
    from scipy.stats import ttest_ind

    runs = {"method": outcomes(20, 5, variance=0.3), "baseline": outcomes(10, 3, variance=0.6)}
    comparison = Comparison("regime", "method", "baseline", "below", "image_circular_variance")
    found = finding(comparison, FakeResults(runs), comparisons=1)
    sides = [[outcome.test["image_circular_variance"] for outcome in of_name[:3]] for of_name in runs.values()]
    interval = ttest_ind(*sides, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(interval))
    assert found.verdict == REPRODUCED


CLAIM = Claim(
    name="001-test",
    title="A title",
    says="Somebody says so.",
    source="a paper, Table 1",
    comparisons=[Comparison("frozen", "method", "baseline"), Comparison("frozen", "method", "absent")],
    at_scale={
        "coco": Scale("coco-5k", "test.tar", "latest.pt", {"clip": "python clip", "unified": "python unified"}, "clip")
    },
)


def test_the_section_of_a_claim():
    runs = {"method": outcomes(20, 3), "baseline": outcomes(10, 3)}
    section = claim_section(CLAIM, {"claims": findings(CLAIM.comparisons, FakeResults(runs))})
    assert "| drawn scenes | comparison | metric |" in section
    assert "Somebody says so. (a paper, Table 1; `001-test`)" in section
    assert "| frozen | `method` > `baseline` | RSUM | +1" in section
    assert "| 2.00 | 3 | reproduced |" in section
    assert "| frozen | `method` > `absent` | RSUM | | | | | not run |" in section
    assert "--work studies/claims --results studies/own --regimes frozen --methods method baseline absent`" in section
    assert "At the size of the paper: `python -m benchmarks.claims --claim 001-test` with `--scale coco`." in section
    assert "Verdict on drawn scenes: **not run**. Rule: all comparisons must be reproduced." in section


def test_a_claim_has_a_verdict_for_each_kind_of_data():
    """Each with the intervals of its own comparisons."""
    found = findings_of([find_claim("ours-clip")])
    assert list(found["ours-clip"]) == ["claims", "clipart", "stamps"]
    section = claim_section(find_claim("ours-clip"), found["ours-clip"])
    assert "Verdict on drawn scenes: **reproduced**." in section
    assert "Verdict on stamps: **not resolved**." in section
    heading, *_ = overview([find_claim("ours-clip")], found).partition("| this package")[0].splitlines()[-2:]
    assert heading == "| of | claim | drawn scenes | clip art | stamps |"


def evaluation(**changes):
    """What `vl-plugins evaluate --json` prints, as far as it is read."""
    difference = {"value": 443.5, "baseline": 439.5, "difference": 4.0, "low": 1.0, "high": 7.0}
    content = {
        "results": [],
        "baseline": "clip",
        "differences": {"coco-5k": {"unified": {"rsum": difference | changes.pop("difference", {})}}},
    }
    return json.dumps(content | changes)


def test_results_at_scale_are_kept_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(at_scale, "AT_SCALE", tmp_path / "at_scale")
    (tmp_path / "own.json").write_text(evaluation())
    assert json.loads(add_at_scale(CLAIM, "coco", tmp_path / "own.json").read_text())["claim"] == "001-test"
    assert "- `unified` against `clip`, RSUM: +4.0 [+1.0, +7.0]" in claim_section(CLAIM, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not what `vl-plugins evaluate --json` prints"),
        (json.dumps({"results": [], "baseline": "clip"}), "no differences"),
        (evaluation(baseline="unified"), "the baseline is 'unified', but the claim compares with 'clip'"),
        (evaluation(differences={"plain": {}}), "no differences of the protocol coco-5k"),
        (evaluation(differences={"coco-5k": {"vlc": {}}}), "compares vlc, but the claim is about unified"),
        (evaluation(differences={"coco-5k": {"unified": {}}}), "unified, rsum: expected the numbers"),
        (evaluation(differences={"coco-5k": []}), "not those of protocols and models"),
        (evaluation(difference={"low": 5.0}), "not inside its interval"),
        (evaluation(difference={"value": float("nan")}), "expected the numbers"),
        (evaluation(difference={"difference": 3.0}), "not that of its two values"),
    ],
)
def test_other_results_at_scale_are_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(at_scale, "AT_SCALE", tmp_path / "at_scale")
    (tmp_path / "own.json").write_text(content)
    with pytest.raises(UserError, match=message):
        add_at_scale(CLAIM, "coco", tmp_path / "own.json")
    assert not (tmp_path / "at_scale").exists()


def test_the_commands_of_a_scale_are_printed(capsys):
    assert claims.main(["--scale", "coco", "--claim", "ours-learned-scale"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 3 + 1
    assert lines[-1].startswith("vl-plugins evaluate --checkpoint fixed=runs/fixed-0/run fixed=runs/fixed-1/run ")
    assert claims.main(["--scale", "laion", "--claim", "ours-learned-scale"]) == 2
    assert claims.main(["--scale", "coco", "--claim", "nothing"]) == 2
    assert claims.main(["--scale", "coco", "--add", "file.json"]) == 2
    assert "--add needs --claim and --scale" in capsys.readouterr().err


# README quotes these, and so does the page of measurements: method, baseline and regime.
IN_README = [
    ("unified-learned", "clip", "fine-tuned"),
    ("unified-learned-5-captions", "clip", "fine-tuned"),
    ("clip-1.5x", "clip", "fine-tuned"),
    ("unified-learned-5-captions", "unified-learned", "fine-tuned"),
    ("vlc-learned", "clip", "equal-captions"),
    ("unified-learned", "clip", "clipart"),
    ("vlc-learned", "clip", "clipart"),
    ("unified-learned", "clip", "clipart-scratch"),
    ("unified-learned-1.5x", "clip-1.5x", "fine-tuned"),
    ("unified-learned", "vlc-learned", "exact-captions"),
    ("unified-learned", "clip", "stamps"),
    ("unified-learned", "clip", "swapped"),
    ("unified-learned", "clip", "far"),
    ("unified-learned", "clip", "scratch"),
    ("unified-learned", "clip", "equal-captions"),
    ("unified-without-ids", "clip", "equal-captions"),
    ("unified-learned-5-captions", "clip", "clipart"),
    ("clip-1.5x", "clip", "clipart"),
    ("clip-1.5x", "clip", "clipart-scratch"),
    ("unified-learned-1.5x", "clip-1.5x", "clipart"),
    ("unified-learned-1.5x", "clip-1.5x", "clipart-scratch"),
    ("sets-4-1.5x", "sets-1-1.5x", "clipart"),
    ("sets-4", "sets-1", "fine-tuned"),
    ("unified-learned-5-captions", "unified-learned", "clipart"),
]
# On pages, outside the tables that are generated; with the regime of the baseline where it is another one.
QUOTED = {
    "README.md": IN_README,
    "docs/claims.md": [("triplet-hn", "clip", "equal-captions")],
    "docs/guides/comparison.md": [("clip-1.5x", "clip", "fine-tuned")],
    "docs/measured.md": [
        *IN_README,
        ("unified-learned", "clip-1.5x", "fine-tuned"),
        ("unified-learned-5-captions", "clip-1.5x", "fine-tuned"),
        ("unified", "vlc", "frozen"),
        ("unified", "triplet-hn", "frozen-long"),
        ("sets-4", "unified-learned", "fine-tuned"),
        ("unified-learned", "unified", "fine-tuned"),
        ("unified-learned", "vlc-learned", "fine-tuned"),
        ("goal", "clip", "fine-tuned"),
        ("goal-warmup", "goal", "fine-tuned"),
        ("unified", "clip", "fine-tuned"),
        ("vlc-learned", "clip", "fine-tuned"),
        ("sets-4", "clip", "fine-tuned"),
        ("sets-1", "clip", "fine-tuned"),
        ("goal-warmup", "clip", "fine-tuned"),
        ("unified-learned-5-captions-0.2x", "unified-learned", "fine-tuned"),
        ("unified", "clip", "swapped"),
        ("vlc", "clip", "swapped"),
        ("unified", "vlc", "swapped"),
        ("unified-learned", "unified", "swapped"),
        ("sets-1", "sets-4", "sets"),
        ("vector", "sets-4", "sets"),
        ("chamfer", "sets-4", "sets"),
        ("mil", "sets-4", "sets"),
        ("match-probability", "sets-4", "sets"),
        ("unified-learned-5-captions", "unified-learned-1.5x", "fine-tuned"),
        ("triplet-sh", "triplet-hn", "frozen-long"),
        ("goal-default", "triplet-hn", "frozen-long"),
        ("goal-cir-sig-ms", "triplet-hn", "frozen-long"),
        ("goal-con-sig-ms", "triplet-hn", "frozen-long"),
        ("unified", "goal-default", "frozen-long"),
        ("goal-nca-con", "triplet-hn", "frozen-long"),
        ("goal-con-sig-ms", "clip", "fine-tuned"),
        ("goal-con-sig-ms", "goal-default", "frozen-long"),
        ("siglip", "clip", "scratch"),
        ("goal", "clip", "far"),
        ("goal-warmup", "clip", "far"),
        ("goal-warmup", "goal", "far"),
        ("unified-learned", "vlc-learned", "clipart"),
        ("vlc-learned", "clip", "stamps"),
        ("unified-learned", "vlc-learned", "equal-captions"),
        ("vlc-learned", "clip", "clipart-scratch"),
        ("unified-learned", "vlc-learned", "clipart-scratch"),
        ("unified-learned", "clip", "exact-captions"),
        ("triplet-hn", "clip", "equal-captions"),
        ("unified-learned", "clip-1.5x", "clipart"),
        ("clip-2.25x", "clip-1.5x", "clipart"),
        *[
            (method, "clip-1.5x", regime)
            for method in ("sets-4-1.5x", "sets-1-1.5x", "triplet-hn-1.5x")
            for regime in ("clipart", "clipart-scratch")
        ],
        ("unified-learned-5-captions-1.5x", "clip-1.5x", "clipart-scratch"),
        ("sets-4-1.5x", "unified-learned-1.5x", "clipart"),
        ("sets-4-1.5x", "unified-learned-1.5x", "clipart-scratch"),
        ("sets-4-1.5x", "sets-1-1.5x", "clipart-scratch"),
        ("unified-learned-5-captions-1.5x", "unified-learned-1.5x", "clipart-scratch"),
        ("clip", "clip", "clipart", "clipart-scratch"),
        ("clip-1.5x", "clip-1.5x", "clipart", "clipart-scratch"),
        ("unified-learned-1.5x", "unified-learned", "clipart"),
        *[
            (f"unified-learned-margin-{margin}", "vlc-learned", regime)
            for margin in ("0.05", "0.1", "0.4")
            for regime in ("equal-captions", "exact-captions", "clipart")
        ],
        ("unified-learned-margin-0.05", "unified-learned", "equal-captions"),
        ("unified-learned-margin-0.05", "unified-learned", "clipart"),
        ("unified-learned-margin-0.1", "unified-learned", "equal-captions"),
        ("unified-learned-margin-0.4", "unified-learned", "equal-captions"),
        ("unified-learned-margin-0.4", "unified-learned", "clipart"),
    ],
}
STUDIES = ("claims", "clipart", "stamps")


def results_with(regime):
    """Results of the study that has a regime."""
    (found,) = [study for study in STUDIES if regime in results_of(study).study.regimes]
    return results_of(found)


@pytest.mark.parametrize("page", QUOTED)
def test_quoted_intervals_are_those_of_the_study(page):
    """Each of one difference by itself, with its time in a table."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("−", "-")
    for method, baseline, regime, *baseline_regime in QUOTED[page]:
        comparison = Comparison(regime, method, baseline, baseline_regime=" ".join(baseline_regime))
        found = finding(comparison, results_with(regime), comparisons=1)
        interval = f"[{found.low:.1f}, {found.high:.1f}]"
        assert interval in text, (comparison, interval)
        for line in text.splitlines():
            if interval in line and line.startswith("|"):
                assert f"{found.mean:.1f} {interval}" in line
                if re.search(r"\| \d\.\d\d \|", line):
                    assert f"| {found.time:.2f} |" in line, (comparison, found.time)


# The table of first rates in docs/measured.md: the beginning of a row, its regime, and the methods in its cells.
FIRST_RATES = [
    ("a CLIP of other scenes | 512 scenes |", "fine-tuned", ("clip", "unified-learned", "vlc-learned")),
    ("the same, scale fixed at 50", "fine-tuned", ("", "unified", "vlc")),
    ("the same | 512 scenes, a fifth", "swapped", ("clip", "unified-learned", "")),
    ("a CLIP of photographic negatives", "far", ("clip", "unified-learned", "")),
    ("a CLIP of scenes | 3,578", "clipart", ("clip", "unified-learned", "vlc-learned")),
    ("a CLIP of scenes | 575", "stamps", ("clip", "unified-learned", "vlc-learned")),
    ("none | 2,048", "scratch", ("clip", "unified-learned", "")),
    ("none | 3,578", "clipart-scratch", ("clip", "unified-learned", "vlc-learned")),
    ("a CLIP of other scenes | 512 scenes with exact", "exact-captions", ("clip", "unified-learned", "vlc-learned")),
]


@pytest.mark.parametrize(("start", "regime", "methods"), FIRST_RATES)
def test_first_rates_are_those_of_the_studies(start, regime, methods):
    text = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    cells = [cell.strip() for cell in row.split("|")[4:7]]
    results = results_with(regime)
    for cell, method in zip(cells, methods, strict=True):
        rate = results.rate(regime, method) if method else ""
        if method and results.is_at_edge(regime, method):
            rate += " or less"
        assert cell == rate, method
