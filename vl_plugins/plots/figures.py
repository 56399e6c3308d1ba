"""What all pictures share: colors, figures without a display, and files that appear complete or not at all."""

import io
import os
from pathlib import Path
from typing import Any

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, require

__all__ = ["COLORS", "check_picture", "new_figure", "style_curves", "write_figure"]

# Okabe and Ito's palette, which people with any common color vision deficiency can tell apart, without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SUFFIXES = (".png", ".pdf", ".svg")


def check_picture(out: str | os.PathLike[str]) -> None:
    """Raise ``UserError`` if a picture of this name cannot be drawn, before the work that it needs."""
    if Path(out).suffix not in SUFFIXES:
        raise UserError(f"the picture must end in .png, .pdf or .svg, got {out}")
    require("matplotlib.figure", extra="eval")


def new_figure(width: float, height: float) -> Any:
    """Return an empty ``matplotlib.figure.Figure`` of so many inches, 120 pixels each."""
    # Unlike one of pyplot, it neither needs a display nor changes the caller's current figure.
    return require("matplotlib.figure", extra="eval").Figure(figsize=(width, height), dpi=120, layout="constrained")


def style_curves(axes: Any) -> None:
    """Give axes with curves a grid in place of a frame."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(figure: Any, out: str | os.PathLike[str]) -> None:
    """Write a figure by the suffix of ``out``; its folder is created."""
    check_picture(out)
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(out).suffix[1:])
    write_file(out, picture.getbuffer())
