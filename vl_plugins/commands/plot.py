"""``vl-plugins plot``: pictures for papers and for watching a training run."""

import argparse
from pathlib import Path

from vl_plugins.errors import UserError

__all__ = ["register"]


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add ``plot`` and its kinds of picture."""
    parser = subparsers.add_parser("plot", help="draw curves of training runs", allow_abbrev=False)
    pictures = parser.add_subparsers(title="pictures", dest="picture", metavar="PICTURE", required=True)
    _register_training(pictures)


def _register_training(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "training",
        help="RSUM and similarities of positives and hardest negatives over epochs",
        description="Draw RSUM, and the mean similarity of positives and of hardest negatives, over the epochs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run folder of open_clip (LOGS/NAME) or a results.jsonl; NAME=PATH names it in the picture",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("training_curves.png"), help="the .png, .pdf or .svg (default: %(default)s)"
    )
    parser.set_defaults(run=_run_training)


def _run_training(arguments: argparse.Namespace) -> None:
    # Here, because every command imports this module and most need no torch.
    from vl_plugins.retrieval import plot_training_curves, read_results

    runs = {}
    for argument in arguments.runs:
        name, path = _name_and_path(argument)
        if name in runs:
            raise UserError(f"two runs are called {name!r}; name them: NAME=PATH OTHER=PATH")
        runs[name] = read_results(path)
    plot_training_curves(runs, arguments.out)
    print(f"wrote {arguments.out}")


def _name_and_path(argument: str) -> tuple[str, Path]:
    """Split ``NAME=PATH``; a path alone, which may hold ``=`` itself, is named after its run folder."""
    name, separator, path = argument.partition("=")
    if separator and not Path(argument).exists():
        if not name or not path:
            raise UserError(f"a run is NAME=PATH or a path, got {argument!r}")
        return name, Path(path)
    from vl_plugins.retrieval.plots import find_results

    folder = find_results(argument).resolve().parent
    return (folder.parent if folder.name == "checkpoints" else folder).name, Path(argument)
