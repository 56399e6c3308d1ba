"""Differences between models as tables and sentences, for terminals and reports."""

from collections.abc import Mapping
from math import inf

from vl_plugins.retrieval.comparison import PRECISION, R_PRECISION, RSUM, Difference
from vl_plugins.retrieval.metrics import DIRECTIONS, RECALL_AT
from vl_plugins.tables import align_columns

__all__ = ["comparison_notes", "comparison_tables", "format_comparison"]

Differences = Mapping[str, Mapping[str, Difference]]
"""By name of the model and metric, as :func:`~vl_plugins.retrieval.compare` returns them."""

LABELS = {RSUM: "RSUM", PRECISION: "mAP@R", R_PRECISION: "R-P"}


def deciding_metric(judged: bool) -> str:
    """Return the metric that has a verdict: RSUM, or mAP@R where ECCV Caption judges the answers."""
    return PRECISION if judged else RSUM


def verdict(difference: Difference) -> str:
    """Return what the interval says: better, worse or not resolved, and whether it is about the checkpoints only."""
    if not difference.resolved:
        return "not resolved"
    text = "better" if difference.mean > 0 else "worse"
    return text if difference.seed_error is not None else f"{text} (checkpoints)"


def comparison_tables(differences: Differences, baseline: str, judged: bool = False) -> list[list[list[str]]]:
    """Return two tables with a heading and a row for each model: the verdicts, and the other metrics.

    Args:
        differences: from the baseline, by model and metric.
        baseline: its name.
        judged: whether ECCV Caption judges the answers, so that mAP@R decides.
    """
    decides = deciding_metric(judged)
    verdicts = [["", "seeds", LABELS[decides], f"− {baseline}", "95 % interval", "verdict"]]
    for name, by_metric in differences.items():
        difference = by_metric[decides]
        verdicts.append(
            [
                name,
                f"{difference.seeds[0]} vs {difference.seeds[1]}",
                f"{difference.value:.1f}",
                f"{difference.mean:+.1f}",
                f"[{difference.low:+.1f}, {difference.high:+.1f}]",
                verdict(difference),
            ]
        )
    columns = [f"R@{k}" for k in RECALL_AT]
    if judged:
        columns = [PRECISION, R_PRECISION, "R@1"]
    heading = [""]
    metrics = []
    for direction, label in DIRECTIONS.items():
        for column in columns:
            heading.append(f"{label} {LABELS.get(column, column)}")
            metrics.append(f"{direction}_{column}")
    details = [heading]
    for name, by_metric in differences.items():
        row = [name]
        for metric in metrics:
            row.append(f"{by_metric[metric].mean:+.1f} ± {by_metric[metric].half_width:.1f}")
        details.append(row)
    return [verdicts, details]


def comparison_notes(differences: Differences, judged: bool = False) -> list[str]:
    """Return sentences that say what the intervals mean, and what these images and seeds can resolve."""
    decides = deciding_metric(judged)
    label = LABELS[decides]
    rows = {name: by_metric[decides] for name, by_metric in differences.items()}
    checkpoints_only = [name for name, row in rows.items() if row.seed_error is None]
    sample = "another test set of this kind"
    if any(row.fixed_gallery for row in rows.values()):
        sample = "other queries to the same candidates"
    if not checkpoints_only:
        sample += " and other seeds"
    held = "the interval holds the true difference"
    if len(rows) > 1:
        held = "the intervals hold the true differences of all rows"
    notes = [f"The verdict is about {label}. In 95 of 100 repetitions with {sample}, {held}."]
    if checkpoints_only:
        few = "With fewer than three seeds on a side"
        if len(checkpoints_only) < len(rows):
            few = f"{', '.join(checkpoints_only)}: with fewer than three seeds on a side"
        notes.append(
            f"{few}, it is about these checkpoints and not about the methods: another training may differ by more."
        )
    least_certain = max(rows.values(), key=lambda row: row.smallest())
    notes.append(_resolution(least_certain, label))
    return notes


def _resolution(difference: Difference, label: str) -> str:
    """Return what difference the images and seeds resolve, and what one half as large would take."""
    smallest = difference.smallest()
    images = difference.images_needed(smallest / 2)
    seeds = "" if difference.seed_error is None else " and these seeds"
    resolved = f"A true difference of {smallest:.1f} in {label} would be resolved by these {difference.images:,} images"
    resolved += f"{seeds} in 4 of 5 cases"
    if images == inf or images > 100 * difference.images:
        return f"{resolved}. One half as large takes more seeds."
    return f"{resolved}. One half as large takes about {_rounded(images):,} images."


def _rounded(number: float) -> int:
    """Return a number with two digits that are not 0."""
    return int(float(f"{number:.1e}"))


def format_comparison(differences: Differences, baseline: str, judged: bool = False) -> str:
    """Return the tables and the notes as text."""
    lines = []
    for table in comparison_tables(differences, baseline, judged):
        for row in align_columns(table):
            lines.append("  ".join(row).rstrip())
    return "\n".join(lines + comparison_notes(differences, judged))
