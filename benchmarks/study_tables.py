"""The tables and the picture of a study."""

import csv
from statistics import fmean, stdev

from benchmarks.grid import Cell, Results, Run, Study
from benchmarks.study_picture import draw_differences
from vl_plugins.retrieval import Difference, compare
from vl_plugins.retrieval.metrics import DIRECTIONS, RECALL_AT

__all__ = ["COLUMNS", "comparison_table", "format_interval", "rsum_differences", "write_tables"]

TITLE = """\
---
orphan: true
---

# All comparisons of the study

Written by `python -m benchmarks.study`. Rates are chosen on validation. Time is the processor time of training, as a
multiple of the baseline's. The 95 % intervals of a table hold together, and are bold where they exclude 0. "(edge)"
marks a rate that is the lowest or the highest of all that may be tried: a better one may lie beyond it.

![Differences of RSUM from the baseline with their intervals, blue where they exclude 0](study.svg)
"""

# Columns of the table, by the metric's name.
COLUMNS = {"rsum": "RSUM"} | {
    f"{direction}_R@{k}": f"{label} R@{k}" for direction, label in DIRECTIONS.items() for k in RECALL_AT
}


def format_interval(mean: float, low: float, high: float, digits: int = 1) -> str:
    """Return a difference with its interval, as all tables of a study have it."""
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def rsum_cell(difference: Difference) -> str:
    """Return the interval of a difference, bold where it excludes 0."""
    interval = format_interval(difference.mean, difference.low, difference.high)
    return f"**{interval}**" if difference.resolved else interval


def rsum_differences(cell: Cell, results: Results) -> dict[str, Difference]:
    """Return the differences of RSUM from the baseline, of the methods of a cell that are complete."""
    methods = [method for method in cell.all_methods if results.is_complete(cell, method)]
    if cell.baseline not in methods or len(methods) < 2:
        return {}
    values = {}
    for method in methods:
        values[method] = [outcome.image_values for outcome in results.outcomes(cell, method)]
    return {method: of_method["rsum"] for method, of_method in compare(values, cell.baseline).items()}


def comparison_table(cell: Cell, results: Results, differences: dict[str, Difference]) -> str:
    """Return a table in Markdown of the baseline of a cell and the methods of :func:`rsum_differences`."""
    methods = [cell.baseline, *differences]
    outcomes = {method: results.outcomes(cell, method) for method in methods}
    base_seconds = fmean(outcome.training_seconds for outcome in outcomes[cell.baseline])
    rows = [
        f"| method | rate | epochs | time | RSUM | − {cell.baseline} | R@1 i2t | R@1 t2i |",
        "|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for method in methods:
        rsums = [outcome.test["rsum"] for outcome in outcomes[method]]
        seconds = fmean(outcome.training_seconds for outcome in outcomes[method])
        recalls = [fmean(outcome.test[f"{direction}_R@1"] for outcome in outcomes[method]) for direction in DIRECTIONS]
        edge = " (edge)" if results.is_at_edge(cell.regime, method) else ""
        cells = [
            f"`{method}`",
            results.rate(cell.regime, method) + edge,
            str(results.study.epochs(cell.regime, method)),
            f"{seconds / base_seconds:.2f}",
            f"{fmean(rsums):.1f} ± {stdev(rsums):.1f}" if len(rsums) > 1 else f"{rsums[0]:.1f}",
            "" if method == cell.baseline else rsum_cell(differences[method]),
            *(f"{recall:.1f}" for recall in recalls),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    smallest = max(difference.smallest() for difference in differences.values())
    note = f"\nA true difference of {smallest:.1f} in RSUM would be resolved in 4 of 5 cases."
    return "\n".join([*rows, note])


def write_tables(study: Study, results: Results) -> str:
    """Write ``study.csv``, ``study.md`` and ``study.svg``; return the comparisons."""
    results.folder.mkdir(parents=True, exist_ok=True)
    with (results.folder / "study.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Run._fields, "epochs", "seconds", "val RSUM", *COLUMNS.values()])
        for run in sorted(results.all_runs()):
            outcome = results.outcome(run)
            numbers = [outcome.val["rsum"], *(outcome.test[metric] for metric in COLUMNS)]
            epochs = study.epochs(run.regime, run.method)
            writer.writerow([*run, epochs, f"{outcome.training_seconds:.1f}", *(f"{number:.3f}" for number in numbers)])
    parts = []
    panels: dict[str, dict[str, Difference]] = {}
    for cell in study.cells:
        if differences := rsum_differences(cell, results):
            table = comparison_table(cell, results, differences)
            parts.append(f"## {cell.regime}, {cell.seeds} seeds, against `{cell.baseline}`\n\n{table}\n")
            title = f"{cell.regime}: RSUM against {cell.baseline}"
            # Of all cells with this baseline; the first of them has the most seeds.
            panel = panels.setdefault(title, {})
            for method, difference in differences.items():
                panel.setdefault(method, difference)
    if panels:
        draw_differences(panels, results.folder / "study.svg")
    text = "\n".join([TITLE, *parts])
    (results.folder / "study.md").write_text(text)
    return text
