"""Curves of retrieval quality over training, from the ``results.jsonl`` of a run."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vl_plugins.errors import MALFORMED_CONTENT, UserError, require, user_errors
from vl_plugins.plots.figures import COLORS, new_figure, style_curves, write_figure

__all__ = ["plot_training_curves", "read_results"]

# open_clip's own validation writes recalls, but neither RSUM nor similarities.
RECALLS = tuple(f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10))
SIMILARITIES = ("positive_similarity", "hardest_negative_similarity")
MARKERS = ("o", "s", "^", "D", "v")


def read_results(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the validation results of a run, one row per epoch in the order of epochs.

    Rows without an ``epoch`` are left out. Where an epoch occurs twice, as after resuming a run, the later row counts.

    Args:
        run: a ``results.jsonl``, or a run folder that holds one, open_clip's ``<logs>/<name>`` or one of the trainer
            for pytorch-metric-learning.

    Returns:
        At least one row, each with ``epoch`` and ``rsum``, [0, 600]; where vl_plugins validated, with
        ``positive_similarity`` and ``hardest_negative_similarity``; all else as in the file.

    Raises:
        UserError: there is no such file, or a line is not JSON or lacks these.
    """
    file = next(
        (f for f in (Path(run), Path(run, "checkpoints/results.jsonl"), Path(run, "results.jsonl")) if f.is_file()),
        None,
    )
    if file is None:
        raise UserError(f"{run} is no results.jsonl, nor a run folder with one; runs write it after a first validation")
    rows = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        with user_errors(f"{file}, line {number} is no validation result", *MALFORMED_CONTENT):
            row = json.loads(line) if line.strip() else {}
            if "epoch" in row:
                if "rsum" not in row:  # of open_clip, or of version 0.2
                    row["rsum"] = 100 * sum(row[name] for name in RECALLS) if RECALLS[0] in row else row["rsum_percent"]
                numbers = {"rsum": float(row["rsum"])}
                if SIMILARITIES[0] in row:
                    numbers |= {name: float(row[name]) for name in SIMILARITIES}
                rows[int(row["epoch"])] = row | numbers
    if not rows:
        raise UserError(f"{file} holds no validation results")
    return [rows[epoch] for epoch in sorted(rows)]


def plot_training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], out: str | os.PathLike[str]) -> None:
    """Draw RSUM and, where runs have them, the similarities of positives and hardest negatives over epochs.

    As Figures 3 and 4 of "Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval".

    Args:
        runs: name -> rows as :func:`read_results` returns them.
        out: ``.png`` (1200 x 504 pixels), ``.pdf`` or ``.svg``; its folder is created.
    """
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
        rsum_axes.plot([row["epoch"] for row in rows], [row["rsum"] for row in rows], label=name, **style)
        compared = [row for row in rows if "positive_similarity" in row]
        epochs = [row["epoch"] for row in compared]
        for axes in others if compared else ():
            axes.plot(epochs, [row["positive_similarity"] for row in compared], "-", **style)
            hardest = [row["hardest_negative_similarity"] for row in compared]
            axes.plot(epochs, hardest, "--", markerfacecolor="white", **style)
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
    write_figure(figure, out)
