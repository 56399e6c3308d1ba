"""Time and memory over the batch size."""

import os
from typing import Any

from vl_plugins.benchmarks.measurement import Measurement, Result
from vl_plugins.plots.figures import COLOURS, new_figure, picture_file, write_figure
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["plot_result"]

MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_result(result: Result, out: str | os.PathLike[str]) -> None:
    """Draw milliseconds and megabytes over B, both axes logarithmic, with a line for each contestant.

    Ours are solid, the others dashed; the legend has the slowest first.

    Args:
        result: with a measurement.
        out: the picture, by its suffix ``.png`` (1440 x 540 pixels), ``.pdf`` or ``.svg``; its folder is created.

    Raises:
        UserError: nothing was measured, another suffix, or a picture that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if not result.measurements:
        raise UserError("there is nothing to draw")
    out = picture_file(out)
    write_figure(_draw(result), out)


def _draw(result: Result) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    figure = new_figure(12, 4.5)
    ticker = require("matplotlib.ticker", extra="eval")
    panels = figure.subplots(1, 2)
    lines = _lines(result)
    sizes = sorted({measurement.setting.batch_size for measurement in result.measurements})
    styles = _styles(lines)
    for axes, name, value in zip(
        panels,
        ("time (ms)", "memory (MB)"),
        (lambda each: 1e3 * each.median, lambda each: each.peak_bytes / 1e6),
        strict=True,
    ):
        for label, points in lines.items():
            batch_sizes = [each.setting.batch_size for each in points]
            axes.loglog(batch_sizes, [value(each) for each in points], label=label, **styles[label])
        axes.set(title=name.partition(" (")[0], xlabel="batch size B", ylabel=name)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda number, _: f"{number:,g}"))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(f"Forward and backward: {result.machine}", fontsize=10)
    return figure


def _lines(result: Result) -> dict[str, list[Measurement]]:
    """Return the measurements of each contestant over B, the slowest first."""
    several = len({_rest(measurement) for measurement in result.measurements}) > 1
    lines: dict[str, list[Measurement]] = {}
    for measurement in result.measurements:
        label = f"{measurement.name}, {_rest(measurement)}" if several else measurement.name
        lines.setdefault(label, []).append(measurement)
    largest = {label: max(points, key=_batch_size) for label, points in lines.items()}
    # One that was left out where it would take too much would have been slow there too.
    order = sorted(lines, key=lambda label: (_batch_size(largest[label]), -largest[label].median))
    return {label: sorted(lines[label], key=_batch_size) for label in order}


def _batch_size(measurement: Measurement) -> int:
    return measurement.setting.batch_size


def _rest(measurement: Measurement) -> str:
    """Say what may differ between settings of one batch size."""
    setting = measurement.setting
    sets = "" if setting.elements is None else f"K {setting.elements}, "
    return f"{sets}D {setting.dimension}, {setting.dtype}"


def _styles(lines: dict[str, list[Measurement]]) -> dict[str, dict[str, Any]]:
    """Give ours solid lines with full markers and the others dashed ones; colours and markers in turn within each."""
    styles, counts = {}, {True: 0, False: 0}
    for label, (first, *_) in lines.items():
        index = counts[first.ours]
        counts[first.ours] += 1
        # The others begin at the other end, so that few of both share no colour.
        colours = COLOURS if first.ours else COLOURS[::-1]
        # The shift pairs a repeated colour with another marker.
        marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
        styles[label] = {
            "color": colours[index % len(colours)],
            "marker": marker,
            "markersize": 5,
            "linestyle": "-" if first.ours else "--",
        }
        if not first.ours:
            styles[label]["markerfacecolor"] = "white"
    return styles
