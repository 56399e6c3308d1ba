"""The picture of a study: for each cell, the differences of RSUM from the baseline with their intervals."""

import io
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from vl_plugins.data.files import write_file
from vl_plugins.plots.figures import COLORS, new_figure
from vl_plugins.retrieval import Difference

__all__ = ["draw_differences"]

ROW_HEIGHT = 0.22  # inches
RESOLVED, NOT_RESOLVED = COLORS[0], "0.6"


def draw_differences(panels: dict[str, dict[str, Difference]], file: Path) -> None:
    """Draw the differences of methods, by title of the panel and by name of the method, as SVG."""
    heights = [len(differences) + 2.5 for differences in panels.values()]
    figure = new_figure(7, ROW_HEIGHT * sum(heights))
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (title, differences) in zip(axes, panels.items(), strict=True):
        _draw_panel(axis, title, differences)
    picture = io.BytesIO()
    # The same picture is the same file: no date, and no random names.
    with rc_context({"svg.hashsalt": "study"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    write_file(file, picture.getbuffer())


def _draw_panel(axis: Any, title: str, differences: dict[str, Difference]) -> None:
    """Draw a row for each method, in gray where the interval has 0 in it."""
    axis.set_title(title, fontsize=9, loc="left")
    axis.axvline(0, color="black", linewidth=0.8)
    style = {"fmt": "o", "markersize": 4, "capsize": 2, "linewidth": 1.2}
    for row, difference in enumerate(differences.values()):
        color = RESOLVED if difference.resolved else NOT_RESOLVED
        axis.errorbar(difference.mean, row, xerr=difference.half_width, color=color, **style)
    axis.set_yticks(range(len(differences)), list(differences), fontsize=8)
    axis.set_ylim(len(differences) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
