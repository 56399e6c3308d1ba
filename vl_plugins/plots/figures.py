"""What all pictures share: colors, figures without a display, and files that appear complete or not at all."""

import io
import os
from pathlib import Path
from typing import Any

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, require

__all__ = ["COLORS", "new_figure", "picture_file", "style_curves", "write_figure"]

# Okabe and Ito's palette, which people with any common color vision deficiency can tell apart, without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

SUFFIXES = (".png", ".pdf", ".svg")
DPI = 120


def picture_file(out: str | os.PathLike[str]) -> Path:
    """Return the path of a picture that can be drawn. To be called before the work that the picture needs.

    Raises:
        UserError: a suffix other than ``.png``, ``.pdf`` or ``.svg``.
        MissingExtraError: matplotlib is not installed.
    """
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise UserError(f"the picture must end in .png, .pdf or .svg, got {out}")
    require("matplotlib.figure", extra="eval")
    return out


def new_figure(width: float, height: float) -> Any:
    """Return an empty ``matplotlib.figure.Figure`` whose layout follows what is drawn.

    Args:
        width, height: inches; 120 pixels each.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    # Unlike one of pyplot, it neither needs a display nor changes the caller's current figure.
    return require("matplotlib.figure", extra="eval").Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def style_curves(axes: Any) -> None:
    """Give axes with curves a grid in place of a frame."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(figure: Any, out: Path) -> None:
    """Write a figure as the picture that :func:`picture_file` has checked; its folder is created.

    Raises:
        UserError: it cannot be written; a picture that was there before stays.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:])
    write_file(out, picture.getbuffer())
