"""The triplet weights and pair weights of GOAL, as in Figures 2 and 3 of its paper."""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vl_plugins.functional.goal import (
    PAIR_WEIGHTS,
    TRIPLET_WEIGHTS,
    Objective,
    RelativeTerms,
    pair_weights,
    triplet_weight,
)
from vl_plugins.plots.figures import COLORS, new_figure, picture_file, style_curves, write_figure
from vl_plugins.plots.plane import draw_plane, similarity_grid

__all__ = ["PAPER", "pair_weight_curves", "plot_weights", "triplet_weight_diagrams"]

PAPER = Objective(offset=0.0)
"""The hyper-parameters of Figures 2 and 3 of the paper."""

RELATIVE = 0.1  # both relative similarities, m+ and m-, in Figure 3
POINTS = 401
STEP = {0.5: "$s_n = s_p - m$"}
CONTOURS = {level: f"{level}" for level in (0.1, 0.3, 0.5, 0.7, 0.9)}


def plot_weights(out: str | os.PathLike[str], objective: Objective = PAPER) -> None:
    """Draw all triplet weights over the plane of both similarities, and all pair weights over that of their pair.

    The defaults are Figures 2 and 3 of "Dissecting Deep Metric Learning Losses for Image-Text Retrieval".

    Args:
        out: the picture, by its suffix ``.png``, ``.pdf`` or ``.svg``; its folder is created.
        objective: the hyper-parameters of the weights; the kinds that it names do not matter.

    Raises:
        UserError: another suffix, or a picture that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    out = picture_file(out)
    write_figure(_draw_weights(objective), out)


def triplet_weight_diagrams(similarities: Tensor, objective: Objective = PAPER) -> dict[str, Tensor]:
    """Return T of each kind at all combinations of two similarities.

    Args:
        similarities: (P,), cosines, of the positive pair as of the negative pair.
        objective: the hyper-parameters.

    Returns:
        kind -> (P, P), negative x positive similarities.

    >>> triplet_weight_diagrams(torch.tensor([0.1, 0.9]))["con"]
    tensor([[1., 0.],
            [1., 1.]])
    """
    return {
        kind: triplet_weight(similarities[None, :], similarities[:, None], replace(objective, triplet_weight=kind))
        for kind in TRIPLET_WEIGHTS
    }


def pair_weight_curves(similarities: Tensor, objective: Objective = PAPER) -> dict[str, tuple[Tensor, Tensor]]:
    """Return P+ (P,) and P- (P,) of each kind for a pair of each similarity (P,), a cosine.

    >>> positive, negative = pair_weight_curves(torch.tensor([0.5]))["lin_ms"]
    >>> round(positive.item(), 3), round(negative.item(), 3)
    (0.45, 0.55)
    """
    relative = RelativeTerms(RELATIVE, RELATIVE)
    curves = {}
    for kind in PAIR_WEIGHTS:
        drawn = replace(objective, pair_weight=kind)
        curves[kind] = pair_weights(similarities, similarities, drawn, *([relative] if drawn.is_relative else []))
    return curves


def _draw_weights(objective: Objective) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    figure = new_figure(11, 7.6)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.5, 4.1))
    upper.suptitle("Triplet weight T")
    settings = {
        "con": f"m = {objective.margin:g}",
        "nca": f"τ = {objective.tau:g}",
        "cir": f"τ = {objective.tau:g}, offset = {objective.offset:g}",
    }
    diagrams = triplet_weight_diagrams(similarity_grid(POINTS), objective)
    row = upper.subplots(1, len(diagrams))
    for axes, (kind, diagram) in zip(row, diagrams.items(), strict=True):
        image = draw_plane(axes, diagram, largest=1, contours=STEP if kind == "con" else CONTOURS)
        axes.set_title(f"{kind}  ({settings[kind]})")
    row[0].legend(loc="lower right")
    upper.colorbar(image, ax=row, label="T")

    lower.suptitle(f"Pair weights P  (α = {objective.alpha:g}, β = {objective.beta:g}, λ = {objective.lam:g})")
    row = lower.subplots(1, 2)
    similarities = torch.linspace(-1, 1, POINTS)
    for (kind, sides), color in zip(pair_weight_curves(similarities, objective).items(), COLORS, strict=False):
        relative = kind.endswith("_ms")
        label = f"{kind}, $m_+ = m_- = {RELATIVE:g}$" if relative else kind
        for axes, weights in zip(row, sides, strict=True):
            axes.plot(similarities, weights, "--" if relative else "-", color=color, label=label)
    row[0].set(title="positive pair", xlabel="cosine of anchor and positive $s_p$", ylabel="$P_+$")
    row[1].set(title="negative pair", xlabel="cosine of anchor and negative $s_n$", ylabel="$P_-$")
    for axes in row:
        axes.set_xlim(-1, 1)
        style_curves(axes)
    row[0].legend()
    return figure
