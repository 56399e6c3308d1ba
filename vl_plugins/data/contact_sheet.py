"""One picture with many samples of shards, to see at a glance what is in them."""

import io
import logging
import math
import os
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vl_plugins.data.images import scaled_picture
from vl_plugins.data.statistics import ShardSample
from vl_plugins.data.storage import write_file
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["MOST_SAMPLES", "draw_contact_sheet"]

MOST_SAMPLES = 60
MOST_COLUMNS = 6
# Of a caption, and characters in a line; half as many of East Asian scripts or capitals.
MOST_LINES = 10
LINE_LENGTH = 40
# Characters of a key; its end tells it from others.
LONGEST_KEY = 36

# Pixels; the picture has 100 to the inch.
DPI = 100
FRAME = (300, 225)
MARGIN = 32
COLUMN_GAP = 28
LINE = 20
HEADING = 60
# A smaller picture is enlarged by at most so much.
ENLARGED = 4

BACKGROUND, FRAME_COLOR, TEXT, FAINT = "#ffffff", "#eef0f2", "#1c1f23", "#6b7280"

# For what DejaVu Sans, which matplotlib brings, has no letters for; those that are installed are used.
FALLBACK_FONTS = (
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Bengali",
    "Noto Sans Tamil",
    "Noto Sans Thai",
    "Noto Emoji",
    "Droid Sans Fallback",
    "WenQuanYi Micro Hei",
    "Unifont",
    "Arial Unicode MS",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Nirmala UI",
    "Segoe UI Symbol",
)


def draw_contact_sheet(samples: Sequence[ShardSample], file: str | os.PathLike, *, title: str = "") -> None:
    """Draw pictures with their keys, first captions and numbers of captions, and write it as a PNG file.

    A sample whose picture is missing or damaged becomes an empty frame that says so. Letters that no installed font has
    are drawn as boxes.

    Args:
        samples: 1 to 60, drawn in rows from left to right.
        file: ends in ``.png``; it appears complete or not at all, and its folder is made when missing.
        title: stands at the top; by default there is none.

    Raises:
        UserError: there are no or too many samples, or the file has another ending or cannot be written.
        MissingExtraError: matplotlib or pillow is not installed.
    """
    if not 1 <= len(samples) <= MOST_SAMPLES:
        raise UserError(f"a contact sheet shows 1 to {MOST_SAMPLES} samples, got {len(samples)}")
    file = Path(file)
    if file.suffix.lower() != ".png":
        raise UserError(f"a contact sheet is a .png file, got {file}")
    picture = io.BytesIO()
    # The caller's settings could change sizes and colors.
    with _without_font_warnings(), require("matplotlib.style", extra="eval").context("default"):
        # Unlike `savefig`, of the size and resolution that the figure has.
        _draw(samples, title).canvas.print_png(picture)
    write_file(file, picture.getbuffer())


def _draw(samples: Sequence[ShardSample], title: str) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    agg = require("matplotlib.backends.backend_agg", extra="eval")
    figure_module = require("matplotlib.figure", extra="eval")
    manager = require("matplotlib.font_manager", extra="eval")
    installed = set(manager.get_font_names())
    family = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
    # Captions hold dollar signs, which are no formulas.
    small, normal = ({"family": family, "size": size, "parse_math": False} for size in (8, 10))

    captions = [_wrap(sample.captions[0] if sample.captions else "") for sample in samples]
    columns = _columns(len(samples))
    rows = [captions[start : start + columns] for start in range(0, len(captions), columns)]
    heights = [FRAME[1] + LINE * (2 + max(map(len, row))) for row in rows]
    width = 2 * MARGIN + columns * FRAME[0] + (columns - 1) * COLUMN_GAP
    height = 2 * MARGIN + HEADING + sum(heights)
    # A Figure of its own, not pyplot's, neither needs a display nor changes the caller's current figure. The next
    # larger number: 1020 / 100 * 100 is less than 1020, which older versions of matplotlib cut to 1019.
    size = tuple(math.nextafter(pixels / DPI, math.inf) for pixels in (width, height))
    figure = figure_module.Figure(size, dpi=DPI, facecolor=BACKGROUND, layout="constrained")
    agg.FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=COLUMN_GAP / 2 / DPI)
    heading = "\n".join(_wrap(title, LINE_LENGTH * columns)[:2])
    figure.suptitle(heading, family=family, size=13, weight="bold", parse_math=False)
    grid = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes in list(grid.flat)[len(samples) :]:
        axes.set_axis_off()
    for axes, sample, lines in zip(grid.flat, samples, captions, strict=False):
        axes.set(xticks=[], yticks=[], facecolor=FRAME_COLOR)
        axes.spines[:].set_visible(False)
        axes.set_anchor("N")
        key = _printable(sample.key)
        key = key if len(key) <= LONGEST_KEY else f"…{key[-LONGEST_KEY:]}"
        number = f"{len(sample.captions):,} caption{'' if len(sample.captions) == 1 else 's'}"
        axes.set_title(f"{key}   {number}", color=FAINT, **small)
        axes.set_xlabel("\n".join(lines), color=TEXT, loc="left", **normal)
        try:
            axes.imshow(_thumbnail(sample.picture))
            axes.set_adjustable("datalim")  # the frame keeps its shape
        except UserError as error:
            note = "\n".join(_wrap(str(error)))
            axes.text(0.5, 0.5, note, color=FAINT, transform=axes.transAxes, ha="center", va="center", **small)
    return figure


def _columns(number: int) -> int:
    """Return the number of columns that makes the sheet a little wider than high."""
    return number if number <= 3 else min(MOST_COLUMNS, round((1.4 * number) ** 0.5))


def _thumbnail(data: bytes | None) -> Any:
    """Return a picture scaled to the frame, as an array of RGB values (height, width, 3).

    Raises:
        UserError: it is missing or damaged.
    """
    if data is None:
        raise UserError("no picture")
    return require("numpy", extra="eval").asarray(scaled_picture(data, _fit, FRAME_COLOR))


def _fit(width: int, height: int) -> tuple[int, int]:
    scale = min(FRAME[0] / width, FRAME[1] / height, ENLARGED)
    return tuple(min(max(1, round(side * scale)), most) for side, most in zip((width, height), FRAME, strict=True))


def _wrap(text: str, length: int = LINE_LENGTH) -> list[str]:
    """Return at most ten lines of a text."""
    text = _printable(text)
    wide = sum(character.isupper() or unicodedata.east_asian_width(character) in "WF" for character in text)
    return textwrap.wrap(text, length // 2 if 2 * wide > len(text) else length, max_lines=MOST_LINES, placeholder=" …")


def _printable(text: str) -> str:
    """Return a text so that fonts can be asked for it: one line, without control characters."""
    words = " ".join(text[: LINE_LENGTH * MOST_LINES * MOST_COLUMNS].split())
    return "".join(character if character.isprintable() else "\ufffd" for character in words)


@contextmanager
def _without_font_warnings() -> Iterator[None]:
    """Keep silent about each letter that no font has."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
