"""One picture with many samples of shards, to see at a glance what is in them."""

import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vl_plugins.data.images import scaled_picture
from vl_plugins.data.statistics import ShardSample
from vl_plugins.data.storage import write_file
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["MOST_SAMPLES", "draw_contact_sheet"]

MOST_SAMPLES = 60
MOST_COLUMNS = 6
MOST_LINES = 10  # of a caption, or of the title
# Characters; more than these lines can hold.
LONGEST_TEXT = 1500

# Pixels; the picture has 100 to the inch, so that a font size of 72 points is 100 pixels.
DPI = 100
FRAME = (300, 225)
MARGIN = 32
COLUMN_GAP = 28
ROW_GAP = 30
LINE = 20
SMALL_LINE = 22
HEADING_LINE = 28
HEADING_GAP = 22
# A smaller picture is enlarged by at most so much.
ENLARGED = 4

BACKGROUND, FRAME_COLOUR, TEXT, FAINT = "#ffffff", "#eef0f2", "#1c1f23", "#6b7280"

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
    # The caller's settings could change sizes and colours.
    with _without_font_warnings(), require("matplotlib.style", extra="eval").context("default"):
        # Unlike `savefig`, of the size and resolution that the figure has.
        _draw(samples, title).canvas.print_png(picture)
    write_file(file, picture.getbuffer())


class _Cell(NamedTuple):
    """What is drawn of a sample, fitted to the width of a frame.

    Args:
        picture: pixels (height, width, 3), or None.
        note: what stands in the frame without a picture.
        key: on one line.
        number: of captions, beside the key, on the same line.
        lines: of the caption.
    """

    picture: Any | None
    note: list[str]
    key: str
    number: str
    lines: list[str]


def _draw(samples: Sequence[ShardSample], title: str) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    figure_module = require("matplotlib.figure", extra="eval")
    agg = require("matplotlib.backends.backend_agg", extra="eval")
    patches = require("matplotlib.patches", extra="eval")
    # A Figure of its own, not pyplot's, neither needs a display nor changes the caller's current figure.
    figure = figure_module.Figure(figsize=(1, 1), dpi=DPI, facecolor=BACKGROUND)
    fonts = _Fonts(agg.FigureCanvasAgg(figure).get_renderer())

    cells = [_cell(sample, fonts) for sample in samples]
    columns = _columns(len(cells))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    width = 2 * MARGIN + columns * FRAME[0] + (columns - 1) * COLUMN_GAP
    heights = [FRAME[1] + SMALL_LINE + LINE * max(len(cell.lines) for cell in row) for row in rows]
    heading = fonts.wrap(_printable(title), fonts.title, width - 2 * MARGIN)
    top = MARGIN + (HEADING_GAP + HEADING_LINE * len(heading) if heading else 0)
    height = top + sum(heights) + ROW_GAP * (len(rows) - 1) + MARGIN
    # The next larger number: 1020 / 100 * 100 is less than 1020, which older versions of matplotlib cut to 1019.
    figure.set_size_inches(*(math.nextafter(pixels / DPI, math.inf) for pixels in (width, height)))

    def write(x: float, y: float, text: str, font: Any, colour: str = TEXT, align: str = "left") -> None:
        """Write a line whose letters stand on ``y``, in pixels from the top."""
        # Captions hold dollar signs, which are no formulas.
        style = {"parse_math": False, "usetex": False, "ha": align, "va": "baseline", "color": colour}
        figure.text(x / width, 1 - y / height, text, fontproperties=font, **style)

    for index, line in enumerate(heading):
        write(MARGIN, MARGIN + 18 + HEADING_LINE * index, line, fonts.title)
    for row, row_height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            left = MARGIN + column * (FRAME[0] + COLUMN_GAP)
            frame = patches.Rectangle(
                (left / width, 1 - (top + FRAME[1]) / height),
                FRAME[0] / width,
                FRAME[1] / height,
                transform=figure.transFigure,
                facecolor=FRAME_COLOUR,
                edgecolor="none",
                zorder=-1,  # behind the picture
            )
            figure.add_artist(frame)
            if cell.picture is None:
                first = top + (FRAME[1] - LINE * (len(cell.note) - 1)) / 2 + 5
                for index, line in enumerate(cell.note):
                    write(left + FRAME[0] / 2, first + LINE * index, line, fonts.small, FAINT, "center")
            else:
                picture_height, picture_width = cell.picture.shape[:2]
                x = left + (FRAME[0] - picture_width) // 2
                y = height - top - FRAME[1] + (FRAME[1] - picture_height) // 2
                # Pixel by pixel; axes would scale it again.
                figure.figimage(cell.picture, x, y, origin="upper")
            below = top + FRAME[1] + SMALL_LINE - 5
            write(left, below, cell.key, fonts.small, FAINT)
            write(left + FRAME[0], below, cell.number, fonts.small, FAINT, "right")
            for index, line in enumerate(cell.lines, start=1):
                write(left, below + LINE * index, line, fonts.text)
        top += row_height + ROW_GAP
    return figure


def _columns(number: int) -> int:
    """Return the number of columns that makes the sheet a little wider than high."""
    return number if number <= 3 else min(MOST_COLUMNS, round((1.4 * number) ** 0.5))


def _cell(sample: ShardSample, fonts: "_Fonts") -> _Cell:
    number = f"{len(sample.captions):,} caption{'' if len(sample.captions) == 1 else 's'}"
    space = FRAME[0] - fonts.width(number, fonts.small) - 12
    try:
        picture, note = _thumbnail(sample.picture), []
    except UserError as error:
        picture, note = None, fonts.wrap(_printable(str(error)), fonts.small, FRAME[0] - 40)[:MOST_LINES]
    caption = _printable(sample.captions[0]) if sample.captions else ""
    # The end of a key tells it from others.
    key = fonts.shorten(_printable(sample.key), fonts.small, space, keep_end=True)
    return _Cell(picture, note, key, number, fonts.wrap(caption, fonts.text, FRAME[0]))


def _thumbnail(data: bytes | None) -> Any:
    """Return a picture scaled to the frame, as an array of RGB values (height, width, 3).

    Raises:
        UserError: it is missing or damaged.
    """
    if data is None:
        raise UserError("no picture")
    return require("numpy", extra="eval").asarray(scaled_picture(data, _fit, FRAME_COLOUR))


def _fit(width: int, height: int) -> tuple[int, int]:
    scale = min(FRAME[0] / width, FRAME[1] / height, ENLARGED)
    return tuple(min(max(1, round(side * scale)), most) for side, most in zip((width, height), FRAME, strict=True))


class _Fonts:
    """The fonts of a sheet, and how long texts are in them.

    Args:
        renderer: of matplotlib's canvas.
    """

    def __init__(self, renderer: Any):
        manager = require("matplotlib.font_manager", extra="eval")
        installed = set(manager.get_font_names())
        family = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
        self._renderer = renderer
        self.title = manager.FontProperties(family, size=13, weight="bold")
        self.text = manager.FontProperties(family, size=10)
        self.small = manager.FontProperties(family, size=8)

    def width(self, text: str, font: Any) -> float:
        """Return the width of a line in pixels."""
        return self._renderer.get_text_width_height_descent(text, font, ismath=False)[0]

    def wrap(self, text: str, font: Any, width: float) -> list[str]:
        """Return the lines of a text, at most ten of them; a word that is too long is broken."""
        lines: list[str] = []
        parts = (part for word in text.split() for part in self._broken(word, font, width))
        for part in parts:
            longer = f"{lines[-1]} {part}" if lines else part
            if lines and self.width(longer, font) <= width:
                lines[-1] = longer
            elif len(lines) < MOST_LINES:
                lines.append(part)
            else:
                lines[-1] = self.shorten(longer, font, width)
                break
        return lines

    def shorten(self, text: str, font: Any, width: float, *, keep_end: bool = False) -> str:
        """Return a text that fits into a line, with … instead of its end or beginning."""
        if self.width(text, font) <= width:
            return text
        if keep_end:
            number = _most(len(text), lambda number: self.width(f"…{text[-number:]}", font) <= width)
            return f"…{text[-number:]}"
        number = _most(len(text), lambda number: self.width(f"{text[:number]}…", font) <= width)
        return f"{text[:number]}…"

    def _broken(self, word: str, font: Any, width: float) -> Iterator[str]:
        """Yield the parts of a word, each but the last as long as a line can be."""
        # To measure a long text takes time, and no letter is narrower than a pixel.
        while len(word) > width or self.width(word, font) > width:
            number = _most(min(len(word), int(width)), lambda number: self.width(word[:number], font) <= width)  # noqa: B023
            yield word[:number]
            word = word[number:]
        if word:
            yield word


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``limit`` that fits, at least 1."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _printable(text: str) -> str:
    """Return the beginning of a text so that fonts can be asked for it: one line, without control characters."""
    words = " ".join(text[:LONGEST_TEXT].split())
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
