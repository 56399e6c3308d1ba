"""``vl-plugins losses``: which losses there are, their options, equations and papers."""

import argparse
import inspect
import json
import shutil
import textwrap
from typing import Any

from vl_plugins.options import REQUIRED, constructor_options, format_options, own_and_forwarded_options
from vl_plugins.registry import list_losses, load_loss
from vl_plugins.utils.errors import UserError

__all__ = ["describe_loss", "register", "run"]

LABEL_WIDTH = len("equation") + 2


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``losses`` command."""
    parser = subparsers.add_parser(
        "losses",
        help="list the losses with their options, equations and papers",
        description="List every loss, also those of other installed packages, with its options and their defaults.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the losses."""
    descriptions = [describe_loss(name) for name in list_losses()]
    if arguments.json:
        print(json.dumps(descriptions, indent=2, default=repr))
    else:
        print(format_descriptions(descriptions, width=min(shutil.get_terminal_size().columns, 120)))
    return 0


def describe_loss(name: str) -> dict[str, Any]:
    """Return what there is to know of a loss.

    ``options`` are those with a default, ``without_default`` the names of the others. ``forwarded`` are the names of
    those that there are because other options have their defaults, as those of the loss that the option ``base`` names.
    ``equation`` and ``paper`` are None if the loss does not name them. A loss that cannot be used has only ``name`` and
    ``error``.
    """
    try:
        loss = load_loss(name)
        own, forwarded = own_and_forwarded_options(loss)
    except UserError as error:
        return {"name": name, "error": str(error)}
    options = own | forwarded
    return {
        "name": name,
        "summary": (inspect.getdoc(loss) or "").partition("\n")[0],
        "options": {option: default for option, default in options.items() if default is not REQUIRED},
        "without_default": [option for option, default in options.items() if default is REQUIRED],
        "forwarded": list(forwarded),
        "equation": getattr(loss, "equation", None),
        "paper": getattr(loss, "paper", None),
    }


def format_descriptions(descriptions: list[dict[str, Any]], width: int) -> str:
    """Return a paragraph for each loss, and one for the options that all losses of pytorch-metric-learning share."""
    # Here, because every command imports this module and most need no torch.
    from pytorch_metric_learning.losses import BaseMetricLossFunction

    shared = constructor_options(BaseMetricLossFunction)
    paragraphs = [_paragraph(description, shared, width) for description in descriptions]
    footer = f"Options of every pytorch-metric-learning loss: {format_options(shared)} (None: the loss's own default)."
    return "\n\n".join([*paragraphs, textwrap.fill(footer, width)])


def _options(description: dict[str, Any], shared: dict[str, Any]) -> str:
    options = dict.fromkeys(description["without_default"], REQUIRED)
    options |= {name: default for name, default in description["options"].items() if name not in shared}
    own = {name: default for name, default in options.items() if name not in description["forwarded"]}
    forwarded = {name: default for name, default in options.items() if name in description["forwarded"]}
    return format_options(own) + (f"; with these defaults also {format_options(forwarded)}" if forwarded else "")


def _paragraph(description: dict[str, Any], shared: dict[str, Any], width: int) -> str:
    if "error" in description:
        rows = {"error": description["error"]}
    else:
        rows = {
            "": description["summary"],
            "options": _options(description, shared),
            "equation": description["equation"],
            "paper": description["paper"],
        }
    lines = [description["name"]]
    for label, text in rows.items():
        if text:
            indent = "  " if not label else f"  {label:{LABEL_WIDTH}}"
            lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    return "\n".join(lines)
