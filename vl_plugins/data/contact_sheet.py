"""One picture with many samples of shards, to see at a glance what is in them."""

import io
import math
import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vl_plugins.data.images import scaled_picture
from vl_plugins.data.shard_files import ScannedSample, input_of, read_texts
from vl_plugins.data.storage import write_file
from vl_plugins.errors import UserError, require
from vl_plugins.tables import printable

__all__ = ["check_contact_sheet", "draw_contact_sheet"]

MOST_SAMPLES = 60
LINE_LENGTH = 40  # characters
MOST_LINES = 8
FAINT = "#6b7280"


def check_contact_sheet(file: str | os.PathLike, number: int) -> None:
    """Check the arguments of a contact sheet, and that matplotlib is there, before the samples are read."""
    if not 1 <= number <= MOST_SAMPLES:
        raise UserError(f"a contact sheet shows 1 to {MOST_SAMPLES} samples, got {number}")
    if Path(file).suffix.lower() != ".png":
        raise UserError(f"a contact sheet is a .png file, got {file}")
    require("matplotlib", extra="eval")


def draw_contact_sheet(samples: Sequence[ScannedSample], file: str | os.PathLike, *, title: str = "") -> None:
    """Draw pictures with their keys and first captions, and write it as a PNG file.

    A sample whose picture is missing or damaged becomes an empty frame with a note. Letters that the fonts of
    matplotlib's ``font.family`` lack are drawn as boxes.

    Args:
        samples: 1 to 60, read with their pictures and texts; drawn in rows from left to right.
        file: ends in ``.png``; it appears complete or not at all, and its folder is made when missing.
        title: stands at the top.
    """
    check_contact_sheet(file, len(samples))
    style = require("matplotlib.style", extra="eval")
    family = require("matplotlib", extra="eval").rcParams["font.family"]
    picture = io.BytesIO()
    # Captions hold dollar signs, which are no formulas; other settings of the caller could change sizes and colors.
    with warnings.catch_warnings(), style.context(["default", {"font.family": family, "text.parse_math": False}]):
        warnings.simplefilter("ignore")  # of letters that no font has
        _draw(samples, title).savefig(picture, format="png")
    write_file(Path(file), picture.getbuffer())


def _draw(samples: Sequence[ScannedSample], title: str) -> Any:
    columns = math.ceil(math.sqrt(len(samples)))
    rows = math.ceil(len(samples) / columns)
    # A Figure of its own, not pyplot's, neither needs a display nor changes the caller's current figure.
    figure_module = require("matplotlib.figure", extra="eval")
    figure = figure_module.Figure((3.4 * columns, 0.6 + 3.6 * rows), dpi=100, layout="constrained")
    figure.suptitle(_wrap(title, LINE_LENGTH * columns))
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes in grid[len(samples) :]:
        axes.set_axis_off()
    for axes, sample in zip(grid, samples, strict=False):
        axes.set(xticks=[], yticks=[], anchor="N")
        axes.set_title(printable(sample.key)[-LINE_LENGTH:], color=FAINT, fontsize=8)
        try:
            caption = read_texts(sample)[1][0]
        except ValueError as error:
            caption = f"({error})"
        axes.set_xlabel(_wrap(caption), fontsize=9)
        try:
            axes.imshow(scaled_picture(input_of(sample), 300))
        except UserError as error:
            axes.set_box_aspect(0.75)
            place = {"transform": axes.transAxes, "ha": "center", "va": "center"}
            axes.text(0.5, 0.5, _wrap(str(error)), color=FAINT, fontsize=8, **place)
    return figure


def _wrap(text: str, length: int = LINE_LENGTH) -> str:
    text = printable(" ".join(text[: 2 * MOST_LINES * length].split()))
    return "\n".join(textwrap.wrap(text, length, max_lines=MOST_LINES, placeholder=" …"))
