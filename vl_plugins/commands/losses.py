"""``vl-plugins losses``: which losses there are, their options, equations and papers."""

import argparse
import inspect
import shutil
import textwrap

from vl_plugins.errors import UserError
from vl_plugins.registry import find, format_options, list_losses, options_of

__all__ = ["register", "run"]

# Those of every loss of pytorch-metric-learning.
SHARED_OPTIONS = {"embedding_regularizer": None, "embedding_reg_weight": 1}
SHARED_OPTIONS |= dict.fromkeys(("reducer", "distance", "collect_stats"))
OTHERS = "Losses of pytorch-metric-learning go by the names of their classes, such as NTXentLoss."


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``losses`` command."""
    parser = subparsers.add_parser(
        "losses",
        help="list the losses with their options, equations and papers",
        examples=["vl-plugins losses"],
        description="List all losses, also those of other installed packages, with options, equations and papers.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the losses; one that cannot be loaded has an ``error``."""
    width = min(shutil.get_terminal_size().columns, 120)
    shared = f"Options of every loss: {format_options(SHARED_OPTIONS)} (None: the loss's own default)."
    paragraphs = []
    for name in list_losses():
        paragraphs.append(_paragraph(name, width))
    for footer in (shared, OTHERS):
        paragraphs.append(textwrap.fill(footer, width))
    print("\n\n".join(paragraphs))
    return 0


def _paragraph(name: str, width: int) -> str:
    try:
        loss = find("loss", name)
        options = {option: value for option, value in options_of(loss).items() if option not in SHARED_OPTIONS}
        rows = {"": (inspect.getdoc(loss) or "").partition("\n")[0], "options": format_options(options)}
        rows |= {label: getattr(loss, label, "") for label in ("equation", "paper")}
    except UserError as error:
        rows = {"error": str(error)}
    lines = [name]
    for label, text in rows.items():
        indent = f"  {label:10}" if label else "  "
        lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    return "\n".join(lines)
