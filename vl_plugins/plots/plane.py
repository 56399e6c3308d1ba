"""The triplet diagram: a quantity over the plane of a triplet's two similarities.

As in Xuan et al. 2020, Hard Negative Examples are Hard, but Useful. Triplets in the right order are below the diagonal.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vl_plugins.plots.figures import COLORS

__all__ = ["draw_plane", "similarity_grid"]

COLOR_MAP = "cividis"  # the same order of lightness for every kind of color vision, and in gray


def similarity_grid(points: int) -> Tensor:
    """Return the centers of equal intervals that cover the cosine's range [-1, 1], (points,), float32.

    >>> similarity_grid(4)
    tensor([-0.7500, -0.2500,  0.2500,  0.7500])
    """
    return (2 * torch.arange(points) + 1) / points - 1


def draw_plane(
    axes: Any, values: Tensor, *, largest: float | None = None, contours: Mapping[float, str] | None = None
) -> Any:
    """Draw values over the plane, with the diagonal on which both similarities are equal.

    Args:
        axes: of matplotlib.
        values: (N, P), >= 0, for negative x positive similarities, each a :func:`similarity_grid`.
        largest: the value of the last color; by default the largest finite one of the values.
        contours: levels of lines of equal value, with their labels; those that no value reaches are left out.

    Returns:
        The ``matplotlib.image.AxesImage``, for a color bar.
    """
    if largest is None:
        finite = values[values.isfinite() & (values > 0)]
        largest = finite.max().item() if len(finite) else 1.0
    extent = (-1, 1, -1, 1)
    image = axes.imshow(values.numpy(), cmap=COLOR_MAP, vmin=0, vmax=largest, origin="lower", extent=extent)
    axes.plot([-1, 1], [-1, 1], "--", color=COLORS[1], linewidth=1.2, label="$s_p = s_n$")
    levels = sorted(level for level in contours or () if values.min() < level < values.max())
    if levels:
        middle = image.get_clim()[1] / 2
        colors = ["white" if level < middle else "black" for level in levels]
        positive_similarities, negative_similarities = (similarity_grid(points) for points in reversed(values.shape))
        lines = axes.contour(positive_similarities, negative_similarities, values, levels, colors=colors, linewidths=1)
        for label in axes.clabel(lines, fmt=contours, fontsize=8, colors="black", inline_spacing=1):
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8})
    ticks = (-1, -0.5, 0, 0.5, 1)
    axes.set(xlabel="cosine of anchor and positive $s_p$", ylabel="cosine of anchor and negative $s_n$")
    axes.set(xlim=(-1, 1), ylim=(-1, 1), xticks=ticks, yticks=ticks)
    return image
