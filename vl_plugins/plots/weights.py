"""The triplet weights and pair weights of GOAL, as in Figures 2 and 3 of its paper."""

import os
from collections.abc import Iterable, Mapping, Sequence
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
from vl_plugins.plots.figures import COLOURS, new_figure, picture_file, write_figure
from vl_plugins.plots.plane import draw_plane, similarity_grid
from vl_plugins.utils.checks import finite, non_negative
from vl_plugins.utils.errors import UserError

__all__ = ["PAPER", "pair_weight_curves", "plot_weights", "triplet_weight_diagrams"]

PAPER = Objective(offset=0.0)
"""The hyper-parameters of Figures 2 and 3 of the paper."""

POINTS = 401
STEP = {0.5: "$s_n = s_p - m$"}
CONTOURS = {level: f"{level}" for level in (0.1, 0.3, 0.5, 0.7, 0.9)}
DASHES = ((0, (5, 2)), (0, (1, 1)), (0, (7, 2, 1, 2)), (0, (2, 2)))

Curve = tuple[Tensor, Tensor]


def plot_weights(
    out: str | os.PathLike[str],
    triplet_kinds: Sequence[str] = TRIPLET_WEIGHTS,
    pair_kinds: Sequence[str] = PAIR_WEIGHTS,
    objective: Objective = PAPER,
    *,
    relative: Sequence[float] = (0.1,),
) -> None:
    """Draw triplet weights over the plane of both similarities, and pair weights over the similarity of their pair.

    The defaults are Figures 2 and 3 of "Dissecting Deep Metric Learning Losses for Image-Text Retrieval".

    Args:
        out: the picture, by its suffix ``.png``, ``.pdf`` or ``.svg``; its folder is created.
        triplet_kinds: of con, nca and cir; none leaves the triplet weights out.
        pair_kinds: of con, lin, sig, sig_ms and lin_ms; none leaves the pair weights out.
        objective: the hyper-parameters of the weights; the kinds that it names do not matter.
        relative: values of both relative similarities, m+ and m-; sig_ms and lin_ms have a curve for each.

    Raises:
        UserError: nothing to draw, an unknown kind, another suffix, or a picture that cannot be written.
        ValueError: a relative similarity out of its range.
        MissingExtraError: matplotlib is not installed.
    """
    if not triplet_kinds and not pair_kinds:
        raise UserError("there is no weight to draw: name at least one triplet weight or pair weight")
    out = picture_file(out)
    grid = similarity_grid(POINTS)
    diagrams = triplet_weight_diagrams(triplet_kinds, grid, objective)
    similarities = torch.linspace(-1, 1, POINTS)
    curves = pair_weight_curves(pair_kinds, similarities, objective, relative=relative)
    settings = {
        "con": f"m = {objective.margin:g}",
        "nca": f"τ = {objective.tau:g}",
        "cir": f"τ = {objective.tau:g}, offset = {objective.offset:g}",
        "P": f"α = {objective.alpha:g}, β = {objective.beta:g}, λ = {objective.lam:g}",
    }
    write_figure(_draw_weights(diagrams, similarities, curves, settings), out)


def triplet_weight_diagrams(
    kinds: Iterable[str], similarities: Tensor, objective: Objective = PAPER
) -> dict[str, Tensor]:
    """Return T of each kind at all combinations of two similarities.

    Args:
        kinds: of con, nca and cir.
        similarities: (P,), cosines, of the positive pair as of the negative pair.
        objective: the hyper-parameters.

    Returns:
        kind -> (P, P), negative x positive similarities.

    Raises:
        UserError: an unknown kind.

    >>> triplet_weight_diagrams(["con"], torch.tensor([0.1, 0.9]))["con"]
    tensor([[1., 0.],
            [1., 1.]])
    """
    return {
        kind: triplet_weight(similarities[None, :], similarities[:, None], replace(objective, triplet_weight=kind))
        for kind in kinds
    }


def pair_weight_curves(
    kinds: Iterable[str],
    similarities: Tensor,
    objective: Objective = PAPER,
    *,
    relative: Sequence[float] = (0.1,),
) -> dict[tuple[str, float | None], Curve]:
    """Return P+ and P- of each kind for a pair of each similarity.

    Args:
        kinds: of con, lin, sig, sig_ms and lin_ms.
        similarities: (P,), cosines.
        objective: the hyper-parameters.
        relative: values of both relative similarities, m+ and m-, >= 0 for sig_ms.

    Returns:
        (kind, relative similarity or None for a kind without) -> P+ (P,) and P- (P,).

    Raises:
        UserError: an unknown kind.
        ValueError: a relative similarity out of its range, or none.

    >>> curves = pair_weight_curves(["lin", "lin_ms"], torch.tensor([0.5]), relative=[0.1, 0.2])
    >>> {key: (round(positive.item(), 3), round(negative.item(), 3)) for key, (positive, negative) in curves.items()}
    {('lin', None): (0.5, 0.5), ('lin_ms', 0.1): (0.45, 0.55), ('lin_ms', 0.2): (0.4, 0.6)}
    """
    curves: dict[tuple[str, float | None], Curve] = {}
    for kind in kinds:
        drawn = replace(objective, pair_weight=kind)
        if not drawn.is_relative:
            curves[kind, None] = pair_weights(similarities, similarities, drawn)
            continue
        if not relative:
            raise ValueError(f"relative must hold at least one number for pair weight {kind}, got none")
        for value in relative:
            value = (non_negative if kind == "sig_ms" else finite)("relative", value)
            curves[kind, value] = pair_weights(similarities, similarities, drawn, RelativeTerms(value, value))
    return curves


def _draw_weights(
    diagrams: Mapping[str, Tensor],
    similarities: Tensor,
    curves: Mapping[tuple[str, float | None], Curve],
    settings: Mapping[str, str],
) -> Any:
    """Return the ``matplotlib.figure.Figure``.

    Args:
        diagrams: kind -> T over a :func:`similarity_grid`.
        similarities: (P,), of the curves.
        curves: as :func:`pair_weight_curves` returns them.
        settings: kind of a diagram, or ``"P"`` for the curves -> the hyper-parameters in its title.
    """
    heights = [height for height, shown in ((3.5, diagrams), (4.1, curves)) if shown]
    # Diagrams are squares: beside curves one of them takes a third of the width.
    columns = 3 if curves else len(diagrams)
    figure = new_figure(11 if curves else 0.8 + 3.4 * columns, sum(heights))
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if diagrams:
        part = next(parts)
        part.suptitle("Triplet weight T")
        _draw_diagrams(part, diagrams, settings, columns)
    if curves:
        part = next(parts)
        part.suptitle(f"Pair weights P  ({settings['P']})")
        _draw_curves(part, similarities, curves)
    return figure


def _draw_diagrams(figure: Any, diagrams: Mapping[str, Tensor], settings: Mapping[str, str], columns: int) -> None:
    grid = figure.add_gridspec(1, columns)
    row = [figure.add_subplot(grid[index]) for index in range(len(diagrams))]
    for axes, (kind, diagram) in zip(row, diagrams.items(), strict=True):
        image = draw_plane(axes, diagram, largest=1, contours=STEP if kind == "con" else CONTOURS)
        axes.set_title(f"{kind}  ({settings[kind]})")
    row[0].legend(loc="lower right")
    figure.colorbar(image, ax=row, label="T")


def _draw_curves(figure: Any, similarities: Tensor, curves: Mapping[tuple[str, float | None], Curve]) -> None:
    row = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(kind for kind, _ in curves))
    relatives = list(dict.fromkeys(relative for _, relative in curves if relative is not None))
    for (kind, relative), sides in curves.items():
        style = {
            "color": COLOURS[kinds.index(kind)],
            "linestyle": "-" if relative is None else DASHES[relatives.index(relative) % len(DASHES)],
            "label": kind if relative is None else f"{kind}, $m_+ = m_- = {relative:g}$",
        }
        for axes, weights in zip(row, sides, strict=True):
            axes.plot(similarities, weights, **style)
    row[0].set(title="positive pair", xlabel="cosine of anchor and positive $s_p$", ylabel="$P_+$")
    row[1].set(title="negative pair", xlabel="cosine of anchor and negative $s_n$", ylabel="$P_-$")
    for axes in row:
        axes.set_xlim(-1, 1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    row[0].legend()
