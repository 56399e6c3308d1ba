"""Curves of retrieval quality: over training, from the ``results.jsonl`` of a run, and between two models."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vl_plugins.errors import MALFORMED_CONTENT, UserError, require, user_errors
from vl_plugins.plots.figures import COLORS, new_figure, style_curves, write_figure

__all__ = ["plot_merging_curve", "plot_training_curves", "read_results"]

# open_clip's own validation writes recalls, but neither RSUM nor similarities.
RECALLS = tuple(f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10))
SIMILARITIES = ("positive_similarity", "hardest_negative_similarity")
# Of a line in open_clip's out.log: the epoch, from 0, and the mean loss of its steps until then.
LOGGED_LOSS = re.compile(r"Train Epoch: (\d+) .* Loss: \S+ \((\S+)\)")
MARKERS = ("o", "s", "^", "D", "v")


def read_results(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the validation results of a run, one row per epoch in the order of epochs.

    Rows without an ``epoch`` are left out. Where an epoch occurs twice, as after resuming a run, the later row counts.

    Args:
        run: a ``results.jsonl``, or a run folder that holds one, open_clip's ``<logs>/<name>`` or one of the trainer
            for pytorch-metric-learning.

    Returns:
        At least one row, each with ``epoch`` and ``rsum``, [0, 600]; where vl_plugins validated, with
        ``positive_similarity`` and ``hardest_negative_similarity``; with ``train_loss``, the mean in the epoch, where
        the file or open_clip's ``out.log`` has it; all else as in the file.

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
    for epoch, loss in _logged_losses(file.parent.parent / "out.log").items():
        if epoch in rows:
            rows[epoch]["train_loss"] = loss
    return [rows[epoch] for epoch in sorted(rows)]


def _logged_losses(log: Path) -> dict[int, float]:
    """Return the mean losses of epochs in open_clip's log; {} if there is none. The later line of an epoch counts."""
    losses = {}
    if log.is_file():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            match = LOGGED_LOSS.search(line)
            if match:
                losses[int(match[1]) + 1] = float(match[2])
    return losses


def plot_training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], out: str | os.PathLike[str]) -> None:
    """Draw RSUM and, where runs have them, training losses and similarities of positives and hardest negatives.

    As Figures 3 and 4 of "Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval".

    Args:
        runs: name -> rows as :func:`read_results` returns them.
        out: ``.png`` (1200 x 504 pixels), ``.pdf`` or ``.svg``; its folder is created.
    """
    figure = new_figure(10, 4.2)
    figure.get_layout_engine().set(wspace=0.06)
    ticker = require("matplotlib.ticker", extra="eval")
    names = ["rsum"]
    for name in ("train_loss", "positive_similarity"):
        if any(name in row for rows in runs.values() for row in rows):
            names.append(name)
    axes_of = dict(zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True))
    for index, (name, rows) in enumerate(runs.items()):
        style = {
            "color": COLORS[index % len(COLORS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 4,
            "markevery": 1 + len(rows) // 12,  # more would hide which lines are dashed
        }
        for value, axes in axes_of.items():
            having = [row for row in rows if value in row]
            if not having:
                continue
            epochs = [row["epoch"] for row in having]
            axes.plot(epochs, [row[value] for row in having], label=name, **style)
            if value == "positive_similarity":
                hardest = [row["hardest_negative_similarity"] for row in having]
                axes.plot(epochs, hardest, "--", markerfacecolor="white", **style)
    of_pairs = "" if "positive_similarity" in axes_of else " of pairs"  # which open_clip ranks
    axes_of["rsum"].set(title="Retrieval quality", ylabel=f"RSUM{of_pairs} (percent, at most 600)")
    axes_of["rsum"].legend()
    if "train_loss" in axes_of:
        axes_of["train_loss"].set(title="Training", ylabel="mean loss")
    if "positive_similarity" in axes_of:
        axes = axes_of["positive_similarity"]
        axes.set(title="Similarity of pairs", ylabel="mean cosine similarity")
        handles = []
        for label, line_style, face in (("positives", "-", "0.3"), ("hardest negatives", "--", "white")):
            handles += axes.plot(
                [], [], line_style, marker="o", color="0.3", markerfacecolor=face, markersize=4, label=label
            )
        axes.legend(handles=handles)
    for axes in axes_of.values():
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        style_curves(axes)
    write_figure(figure, out)


def plot_merging_curve(
    weights: Sequence[float],
    rsums: Sequence[float],
    retained: Sequence[float],
    names: Sequence[str],
    out: str | os.PathLike[str],
) -> None:
    """Draw RSUM over the weight of the second model, as Figure 1 of "Robust fine-tuning of zero-shot models".

    A star marks the best weight, the first of equal ones.

    Args:
        weights: (N,) in ascending order, from 0 to 1.
        rsums: (N,) on the shards to choose by.
        retained: (N,) on the shards of what should not be forgotten, or empty.
        names: of both models.
        out: ``.png`` (720 x 504 pixels), ``.pdf`` or ``.svg``; its folder is created.
    """
    figure = new_figure(6, 4.2)
    axes = figure.subplots()
    axes.plot(weights, rsums, "o-", color=COLORS[0], label="to choose by")
    if retained:
        axes.plot(weights, retained, "s-", color=COLORS[1], label="to retain")
    best = rsums.index(max(rsums))
    axes.plot(weights[best], rsums[best], "*", markersize=14, color=COLORS[0], label="the best")
    axes.set(xlabel=f"weight of {names[1]}, from {names[0]}", ylabel="RSUM (percent, at most 600)")
    axes.legend()
    style_curves(axes)
    write_figure(figure, out)
