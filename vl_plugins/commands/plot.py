"""``vl-plugins plot``: pictures for papers and for watching a training run."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vl_plugins.integrations.key_values import parse_key_values
from vl_plugins.registry import create_loss, format_options, list_losses
from vl_plugins.utils.errors import UserError, check_name

__all__ = ["register"]

# With the defaults of plots.weights.PAPER, which --help does not import.
TRIPLET_OPTIONS = {
    "margin": "margin of con (default: 0.2)",
    "tau": "inverse temperature of nca and cir (default: 10)",
    "offset": "added in the exponent of cir; 1 is Circle loss (default: 0)",
}
PAIR_OPTIONS = {
    "alpha": "steepness of sig and sig_ms for positive pairs (default: 2)",
    "beta": "steepness of sig and sig_ms for negative pairs (default: 10)",
    "lam": "similarity at which sig is 1/2 (default: 0.5)",
}

WEIGHTS_DESCRIPTION = """\
Draw how a loss weighs a triplet, before any training.

Without --loss: the triplet weights and pair weights that make up the loss `goal`, as Figures 2
and 3 of "Dissecting Deep Metric Learning Losses for Image-Text Retrieval" show them.

With --loss: the size of a loss's gradient at the positive and at the negative pair of a triplet,
over both cosines, by automatic differentiation; of any loss of `vl-plugins losses`. The triplet
is alone in its batch: there are no other pairs, which sig_ms and lin_ms of `goal` would look at."""

WEIGHTS_EPILOG = """\
examples:
  vl-plugins plot weights
  vl-plugins plot weights --triplet-weight cir --offset 1 --out circle.pdf
  vl-plugins plot weights --pair-weight sig sig_ms --relative 0.1 0.5 1
  vl-plugins plot weights --loss unified --loss-kwargs margin=0.1 scale=30 --loss triplet_hn"""

ATTENTION_DESCRIPTION = """\
Draw where the slots of a model with a set head look in images, as Figures 4 and A2 of "Improving
Cross-Modal Retrieval with Set of Diverse Embeddings" do. A row is an image: the picture that the
model sees, and one panel for each slot with its attention over the picture. Slots compete: at every
place their attention sums to 1, unless the head was made with attention=inputs. Below it stands the
caption nearest to the element that the slot became, of all captions in the shards: after a check
mark if it is one of this image, otherwise after a cross."""

ATTENTION_EPILOG = """\
examples:
  vl-plugins plot attention --checkpoint logs/dive/checkpoints/epoch_50.pt \\
      --shards 'shards/coco-test-{000000..000004}.tar' --images 5
  vl-plugins plot attention --checkpoint logs/dive/checkpoints/epoch_50.pt \\
      --shards 'shards/coco-test-{000000..000004}.tar' --iteration 1 \\
      --keys coco-test-00000042 COCO_val2014_000000391895.jpg --out first_iteration.pdf"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add ``plot`` and its kinds of picture."""
    parser = subparsers.add_parser(
        "plot",
        help="draw training runs, the attention of slots, or how losses weigh a triplet",
        description="Draw a picture for a paper, or to watch a training run.",
        allow_abbrev=False,
    )
    pictures = parser.add_subparsers(title="pictures", dest="picture", metavar="PICTURE", required=True)
    _register_attention(pictures)
    _register_training(pictures)
    _register_weights(pictures)


def _register_attention(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "attention",
        help="where the slots of a set head look in images, with the nearest captions",
        description=ATTENTION_DESCRIPTION,
        epilog=ATTENTION_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", required=True, help="of a training run with `--head set`"
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE_OR_FOLDER",
        help="model configurations that open_clip does not know, as .json (default: what the run was trained with)",
    )
    parser.add_argument(
        "--shards",
        metavar="PATTERN",
        required=True,
        help="shards of `vl-plugins shards`, with {000000..000004} for many; their captions are compared",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--images", type=int, metavar="N", default=3, help="the first N images of the shards (default: %(default)s)"
    )
    chosen.add_argument(
        "--keys", nargs="+", metavar="KEY", default=(), help="these images, by key in the shards or by file name"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="T", help="of which the attention is drawn, from 1 (default: the last)"
    )
    parser.add_argument(
        "--max-captions", type=int, metavar="N", help="compare the first N captions of an image (default: all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("attention.png"),
        help="the .png, .pdf or .svg (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        default=64,
        help="images whose captions are encoded at once (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.set_defaults(run=_run_attention)


def _run_attention(arguments: argparse.Namespace) -> None:
    if arguments.images < 1:
        raise UserError(f"--images must be at least 1, got {arguments.images}")
    if not arguments.checkpoint.is_file():
        raise UserError(f"--checkpoint {arguments.checkpoint}: no such file")
    from vl_plugins.data.shard_files import expand_shards

    shards = expand_shards(arguments.shards)  # before torch is imported
    from vl_plugins.integrations.checkpoints import load_model
    from vl_plugins.integrations.torch_files import check_device
    from vl_plugins.plots.attention import attended_images, plot_attention
    from vl_plugins.plots.figures import picture_file

    picture_file(arguments.out)
    device = check_device("--device", arguments.device)
    try:
        model, preprocess, tokenizer = load_model(
            arguments.checkpoint, model_config=arguments.model_config, device=device
        )
    except UserError as error:
        raise UserError(f"--checkpoint {arguments.checkpoint}: there is no model with a set head: {error}") from error
    items = attended_images(
        model,
        preprocess,
        tokenizer,
        shards,
        images=arguments.images,
        keys=arguments.keys,
        iteration=arguments.iteration,
        max_captions=arguments.max_captions,
        batch_size=arguments.batch_size,
        device=device,
    )
    plot_attention(items, arguments.out)
    print(f"wrote {arguments.out}")


def _register_training(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "training",
        help="RSUM and similarities of positives and hardest negatives over epochs",
        description="Draw RSUM, and the mean similarity of positives and of hardest negatives, over the epochs; of "
        "open_clip's own validation, which writes no similarities, RSUM alone.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run folder of either trainer (LOGS/NAME of open_clip's) or its results.jsonl; NAME=PATH names it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("training_curves.png"),
        help="the .png, .pdf or .svg (default: %(default)s)",
    )
    parser.set_defaults(run=_run_training)


def _run_training(arguments: argparse.Namespace) -> None:
    from vl_plugins.plots.training import plot_training_curves, read_results

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
    from vl_plugins.plots.training import find_results

    folder = find_results(argument).resolve().parent
    return (folder.parent if folder.name == "checkpoints" else folder).name, Path(argument)


def _register_weights(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "weights",
        help="weights that the loss `goal` is made of, or gradients of any loss",
        description=WEIGHTS_DESCRIPTION,
        epilog=WEIGHTS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("weights.png"),
        help="the .png, .pdf or .svg (default: %(default)s)",
    )

    weights = parser.add_argument_group(
        "weights", "Every kind of both is drawn, unless kinds are named: then those alone."
    )
    weights.add_argument("--triplet-weight", nargs="+", metavar="KIND", help="con, nca, cir")
    weights.add_argument("--pair-weight", nargs="+", metavar="KIND", help="con, lin, sig, sig_ms, lin_ms")
    for name, meaning in (TRIPLET_OPTIONS | PAIR_OPTIONS).items():
        weights.add_argument(f"--{name}", type=float, metavar="X", help=meaning)
    weights.add_argument(
        "--relative",
        type=float,
        nargs="+",
        metavar="M",
        help="relative similarities m+ = m- of sig_ms and lin_ms; a curve for each (default: 0.1)",
    )

    gradients = parser.add_argument_group("gradients")
    gradients.add_argument(
        "--loss",
        action="append",
        dest="losses",
        metavar="NAME",
        help="a loss of `vl-plugins losses`; repeat it to compare several, or one with different options",
    )
    gradients.add_argument(
        "--loss-kwargs",
        action="append",
        dest="losses",
        nargs="+",
        metavar="KEY=VALUE",
        help="options of the --loss before it, such as margin=0.2 scale=50",
    )
    parser.set_defaults(run=_run_weights)


def _run_weights(arguments: argparse.Namespace) -> None:
    options = {
        name: value
        for name in (*TRIPLET_OPTIONS, *PAIR_OPTIONS, "relative")
        if (value := getattr(arguments, name)) is not None
    }
    try:
        if arguments.losses:
            _plot_losses(arguments, options)
        else:
            _plot_weights(arguments, options)
    except UserError:
        raise
    except ValueError as error:  # of a hyper-parameter out of its range
        raise UserError(str(error)) from error
    print(f"wrote {arguments.out}")


def _plot_weights(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    kinds = {"triplet_kinds": arguments.triplet_weight or (), "pair_kinds": arguments.pair_weight or ()}
    if not any(kinds.values()):
        kinds = {}
    for name in options if kinds else ():
        sort = "triplet" if name in TRIPLET_OPTIONS else "pair"
        if not kinds[f"{sort}_kinds"]:
            raise UserError(f"--{name} is of {sort} weights, and none is drawn: name one with --{sort}-weight")

    from vl_plugins.plots.weights import PAPER, plot_weights

    relative = {"relative": options.pop("relative")} if "relative" in options else {}
    plot_weights(arguments.out, **kinds, objective=replace(PAPER, **options), **relative)


def _plot_losses(arguments: argparse.Namespace, options: Mapping[str, Any]) -> None:
    for name in ("triplet_weight", "pair_weight", *options):
        if getattr(arguments, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} and --loss are of different pictures; options of a loss are "
                "--loss-kwargs KEY=VALUE"
            )
    asked = _losses_with_options(arguments.losses)
    for name, _ in asked:
        check_name("loss", name, list_losses())
    from vl_plugins.plots.gradients import plot_gradient_sizes

    losses = {}
    for name, kwargs in asked:
        try:
            loss = create_loss(name, **kwargs)
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"--loss {name}: {error}") from error
        losses[f"{name}({format_options(kwargs)})" if kwargs else name] = loss
    plot_gradient_sizes(losses, arguments.out)


def _losses_with_options(tokens: Sequence[str | list[str]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the losses with their options from ``NAME``s, each before the lists of its ``KEY=VALUE``s."""
    losses: list[tuple[str, dict[str, Any]]] = []
    for token in tokens:
        if isinstance(token, str):
            losses.append((token, {}))
        elif losses:
            losses[-1][1].update(parse_key_values(token, "--loss-kwargs"))
        else:
            raise UserError(f"--loss-kwargs {' '.join(token)}: give it after the --loss that it is for")
    return losses
