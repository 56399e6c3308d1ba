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

__all__ = ["describe_class", "describe_losses", "register", "run"]

SHARED_OPTIONS = {
    "embedding_regularizer": None,
    "embedding_reg_weight": 1,
    "reducer": None,
    "distance": None,
    "collect_stats": None,
}
"""Those of every loss of pytorch-metric-learning."""

LABEL_WIDTH = len("equation") + 2
REQUIRED = inspect.Parameter.empty
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
    """Print the losses."""
    descriptions = describe_losses()
    if arguments.json:
        print(json.dumps(descriptions, indent=2, default=repr))
    else:
        print(format_descriptions(descriptions, width=min(shutil.get_terminal_size().columns, 120)))
    return 0


def describe_losses() -> list[dict[str, Any]]:
    """Return :func:`describe_class` of every loss, which imports torch; of one that cannot be loaded, its ``error``."""
    descriptions = []
    for name in list_losses():
        try:
            descriptions.append(describe_class(name, find("loss", name)))
        except UserError as error:
            descriptions.append({"name": name, "error": str(error)})
    return descriptions


def describe_class(name: str, loss: Callable) -> dict[str, Any]:
    """Return the ``name``, ``summary``, ``options``, ``equation`` and ``paper`` of a loss.

    ``options`` are those with a default, ``without_default`` the names of the others; ``equation`` and ``paper`` are
    None if the loss does not name them.
    """
    options = options_of(loss)
    return {
        "name": name,
        "summary": (inspect.getdoc(loss) or "").partition("\n")[0],
        "options": {option: default for option, default in options.items() if default is not REQUIRED},
        "without_default": [option for option, default in options.items() if default is REQUIRED],
        "equation": getattr(loss, "equation", None),
        "paper": getattr(loss, "paper", None),
    }


def format_descriptions(descriptions: list[dict[str, Any]], width: int) -> str:
    """Return a paragraph for each loss, and lines about the options and losses of pytorch-metric-learning."""
    shared = f"Options of every loss: {format_options(SHARED_OPTIONS)} (None: the loss's own default)."
    footers = [textwrap.fill(footer, width) for footer in (shared, OTHERS)]
    return "\n\n".join([*(_paragraph(description, width) for description in descriptions), *footers])


def _paragraph(description: dict[str, Any], width: int) -> str:
    if "error" in description:
        rows = {"error": description["error"]}
    else:
        options = dict.fromkeys(description["without_default"], REQUIRED)
        options |= {name: default for name, default in description["options"].items() if name not in SHARED_OPTIONS}
        rows = {"": description["summary"], "options": format_options(options)}
        rows |= {label: description[label] for label in ("equation", "paper")}
    lines = [description["name"]]
    for label, text in rows.items():
        if text:
            indent = "  " if not label else f"  {label:{LABEL_WIDTH}}"
            lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    return "\n".join(lines)
