"""``vl-plugins losses``: which losses there are, their options, equations and papers."""

import argparse
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

from vl_plugins.errors import UserError
from vl_plugins.registry import find, format_options, list_losses, options_of

__all__ = ["describe_loss", "register", "run"]

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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the losses; one that cannot be loaded has an ``error``."""
    losses = []
    for name in list_losses():
        try:
            losses.append(describe_loss(name, find("loss", name)))
        except UserError as error:
            losses.append({"name": name, "error": str(error)})
    if arguments.json:
        print(json.dumps(losses, indent=2, default=repr))
        return 0
    width = min(shutil.get_terminal_size().columns, 120)
    shared = f"Options of every loss: {format_options(SHARED_OPTIONS)} (None: the loss's own default)."
    footers = [textwrap.fill(footer, width) for footer in (shared, OTHERS)]
    print("\n\n".join([*(_paragraph(loss, width) for loss in losses), *footers]))
    return 0


def describe_loss(name: str, loss: Callable) -> dict[str, Any]:
    """Return the ``name``, ``summary``, ``options``, ``equation`` and ``paper`` of a loss.

    ``options`` are those with a default, ``without_default`` the names of the others; ``equation`` and ``paper`` are
    None if the loss does not name them.
    """
    options, required = options_of(loss), inspect.Parameter.empty
    return {
        "name": name,
        "summary": (inspect.getdoc(loss) or "").partition("\n")[0],
        "options": {option: default for option, default in options.items() if default is not required},
        "without_default": [option for option, default in options.items() if default is required],
        "equation": getattr(loss, "equation", None),
        "paper": getattr(loss, "paper", None),
    }


def _paragraph(loss: dict[str, Any], width: int) -> str:
    options = dict.fromkeys(loss.get("without_default", ()), inspect.Parameter.empty)
    options |= {name: default for name, default in loss.get("options", {}).items() if name not in SHARED_OPTIONS}
    rows = {"": loss.get("summary"), "options": format_options(options)}
    rows |= {label: loss.get(label) for label in ("equation", "paper", "error")}
    lines = [loss["name"]]
    for label, text in rows.items():
        indent = f"  {label:10}" if label else "  "
        lines += textwrap.wrap(text or "", width, initial_indent=indent, subsequent_indent=" " * len(indent))
    return "\n".join(lines)
