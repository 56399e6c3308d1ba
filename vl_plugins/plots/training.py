"""Curves of retrieval quality over training, from the ``results.jsonl`` of a run."""

import json
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError, require
from vl_plugins.plots.figures import COLORS, new_figure, picture_file, style_curves, write_figure

__all__ = ["find_results", "plot_training_curves", "read_results"]

CURVE_KEYS = ("epoch", "rsum_percent", "positive_similarity", "hardest_negative_similarity")
# What open_clip's own validation writes, as fractions.
HOST_RECALLS = tuple(f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10))
MARKERS = ("o", "s", "^", "D", "v")


def find_results(run: str | os.PathLike[str]) -> Path:
    """Return the ``results.jsonl`` of a run folder (open_clip's ``<logs>/<name>``), or ``run`` if it is a file.

    Raises:
        UserError: there is none.
    """
    run = Path(run)
    for file in (run, run / "checkpoints" / "results.jsonl", run / "results.jsonl"):
        if file.is_file():
            return file
    if run.is_dir():
        raise UserError(
            f"no results.jsonl in {run} nor in its checkpoints folder; "
            "a run writes it after its first validation (--val-data)"
        )
    raise UserError(f"no such results file or run folder: {run}")


def read_results(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the validation results of a run, one row per epoch in the order of epochs.

    Rows without an ``epoch`` are left out. Where an epoch occurs twice, as after resuming a run, the later row counts.
    Of open_clip's own validation, which writes no similarities, RSUM is that of its recalls.

    Args:
        run: a ``results.jsonl``, or a run folder that holds one.

    Returns:
        At least one row, each with at least ``epoch`` and ``rsum_percent``, [0, 600]; where vl_plugins validated, with
        ``positive_similarity`` and ``hardest_negative_similarity`` too; all else as it stands in the file.

    Raises:
        UserError: no such file, a line that is not a JSON object, or a row that lacks one of these numbers.
    """
    path = find_results(run)
    rows = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is not a JSON object: {line.decode()}")
        if "epoch" not in row:
            continue
        needed = CURVE_KEYS
        if all(isinstance(row.get(name), Real) for name in HOST_RECALLS):
            needed = ("epoch",)
            row["rsum_percent"] = 100 * sum(row[name] for name in HOST_RECALLS)
        missing = [key for key in needed if not isinstance(row.get(key), Real)]
        if missing:
            raise UserError(f"{path}, line {number} has no number for {', '.join(missing)}, which validation writes")
        rows[row["epoch"]] = row
    if not rows:
        raise UserError(f"{path} holds no validation results")
    return [rows[epoch] for epoch in sorted(rows)]


def plot_training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], out: str | os.PathLike[str]) -> None:
    """Draw RSUM and, where runs have them, the similarities of positives and hardest negatives over epochs.

    As Figures 3 and 4 of "Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval".

    Args:
        runs: name -> rows as :func:`read_results` returns them, ordered by epoch.
        out: the picture, by its suffix ``.png`` (1200 x 504 pixels), ``.pdf`` or ``.svg``; its folder is created.

    Raises:
        UserError: no run, another suffix, or a picture that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if not runs:
        raise UserError("runs must hold at least one named run, got none")
    out = picture_file(out)
    write_figure(_draw_training_curves(runs), out)


def _draw_training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    figure = new_figure(10, 4.2)
    figure.get_layout_engine().set(wspace=0.06)
    ticker = require("matplotlib.ticker", extra="eval")
    has_similarities = any("positive_similarity" in row for rows in runs.values() for row in rows)
    rsum_axes, *others = figure.subplots(1, 2 if has_similarities else 1, squeeze=False)[0]

    for index, (name, rows) in enumerate(runs.items()):
        style = {
            "color": COLORS[index % len(COLORS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 4,
            "markevery": 1 + len(rows) // 12,  # more would hide which lines are dashed
        }
        epochs = [row["epoch"] for row in rows]
        rsum_axes.plot(epochs, [row["rsum_percent"] for row in rows], label=name, **style)
        compared = [row for row in rows if "positive_similarity" in row]
        epochs = [row["epoch"] for row in compared]
        for axes in others if compared else ():
            axes.plot(epochs, [row["positive_similarity"] for row in compared], "-", **style)
            hardest_negatives = [row["hardest_negative_similarity"] for row in compared]
            axes.plot(epochs, hardest_negatives, "--", markerfacecolor="white", **style)

    rsum_axes.set(title="Retrieval quality", ylabel="RSUM (percent, at most 600)")
    rsum_axes.legend()
    for axes in others:
        axes.set(title="Similarity of pairs", ylabel="mean cosine similarity")
        for label, line_style, face in (("positives", "-", "0.3"), ("hardest negatives", "--", "white")):
            axes.plot([], [], line_style, marker="o", color="0.3", markerfacecolor=face, markersize=4, label=label)
        axes.legend()
    for axes in (rsum_axes, *others):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        style_curves(axes)
    return figure
