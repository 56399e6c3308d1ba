"""``vl-plugins plot``: pictures for papers and for watching a training run."""

import argparse
from pathlib import Path
from typing import Any

from vl_plugins.commands.run_names import run_names, split_name
from vl_plugins.errors import UserError, one_of, user_errors
from vl_plugins.integrations.key_values import parse_key_values
from vl_plugins.registry import create_loss, format_options, list_losses

__all__ = ["register"]


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add ``plot`` and its kinds of picture."""
    parser = subparsers.add_parser(
        "plot",
        help="plot training runs, slot attention, or gradients of a loss",
        examples=["vl-plugins plot training logs/unified", "vl-plugins plot gradients unified"],
        description="Plot training runs, slot attention, or how strongly a loss pulls at a triplet.",
    )
    pictures = parser.add_subparsers(title="pictures", dest="picture", metavar="PICTURE", required=True)
    _register_attention(pictures)
    _register_training(pictures)
    _register_gradients(pictures)


def _add_out(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=default, help=".png, .pdf or .svg file (default: %(default)s)"
    )


def _register_attention(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "attention",
        help="where the slots of a set head look in images",
        usage="%(prog)s [options]",
        examples=[
            "vl-plugins plot attention --checkpoint logs/dive/checkpoints/epoch_50.pt \\\n"
            "    --shards 'shards/coco-test-{000000..000004}.tar' --images 5"
        ],
        description="Draw where each slot of a set head looks in images, with the caption nearest to its embedding: "
        "after a check mark if it is a caption of the image, otherwise after a cross.",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", required=True, help="checkpoint of a run with `--head set`"
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE_OR_FOLDER",
        help="your own model configurations for open_clip (default: those of the run)",
    )
    parser.add_argument(
        "--shards", metavar="PATTERN", required=True, help="shards with the images, and the captions to choose from"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--images", type=int, metavar="N", default=3, help="draw the first N images (default: %(default)s)"
    )
    chosen.add_argument("--keys", nargs="+", metavar="KEY", default=(), help="draw these images, by key or image id")
    parser.add_argument(
        "--iteration", type=int, metavar="T", help="iteration of slot attention, from 1 (default: the last)"
    )
    _add_out(parser, "attention.png")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.set_defaults(run=_run_attention)


def _run_attention(arguments: argparse.Namespace) -> None:
    if arguments.images < 1:
        raise UserError(f"--images must be at least 1, got {arguments.images}")
    if not arguments.checkpoint.is_file():
        raise UserError(f"--checkpoint {arguments.checkpoint}: no such file")
    from vl_plugins.data.collection import expand_shards

    shards = expand_shards(arguments.shards)  # before torch is imported
    from vl_plugins.integrations.checkpoints import load_model
    from vl_plugins.integrations.torch_files import check_device
    from vl_plugins.plots.attention import attended_images, plot_attention
    from vl_plugins.plots.figures import picture_file

    picture_file(arguments.out)
    device = check_device("--device", arguments.device)
    try:
        loaded = load_model(arguments.checkpoint, model_config=arguments.model_config, device=device)
    except UserError as error:
        raise UserError(f"--checkpoint {arguments.checkpoint}: there is no model with a set head: {error}") from error
    items = attended_images(
        *loaded, shards, images=arguments.images, keys=arguments.keys, iteration=arguments.iteration, device=device
    )
    plot_attention(items, arguments.out)
    print(f"wrote {arguments.out}")


def _register_training(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "training",
        help="RSUM and similarities over the epochs",
        examples=["vl-plugins plot training logs/clip logs/unified --out training.pdf"],
        description="Draw RSUM, and the mean similarities of positives and hardest negatives where they were logged, "
        "over the epochs.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run or its results.jsonl; NAME=PATH gives it a name"
    )
    _add_out(parser, "training_curves.png")
    parser.set_defaults(run=_run_training)


def _run_training(arguments: argparse.Namespace) -> None:
    from vl_plugins.plots.training import find_results, plot_training_curves, read_results

    runs = [(name, str(find_results(path))) for name, path in map(split_name, arguments.runs)]
    names = run_names(runs)
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two runs are called {name!r}; name them: NAME=PATH OTHER=PATH")
    plot_training_curves({name: read_results(file) for name, (_, file) in zip(names, runs, strict=True)}, arguments.out)
    print(f"wrote {arguments.out}")


def _register_gradients(pictures: argparse._SubParsersAction) -> None:
    parser = pictures.add_parser(
        "gradients",
        help="how strongly a loss pulls at a triplet",
        usage="%(prog)s [options] LOSS [KEY=VALUE ...] ...",
        examples=["vl-plugins plot gradients unified scale=30 vlc", "vl-plugins plot gradients goal TripletMarginLoss"],
        description="Draw the size of the gradients of losses at the positive and the negative pair of a triplet.",
    )
    parser.add_argument(
        "losses",
        nargs="+",
        metavar="LOSS",
        help="losses of `vl-plugins losses`, each before its options, such as margin=0.2",
    )
    _add_out(parser, "gradients.png")
    parser.set_defaults(run=_run_gradients)


def _run_gradients(arguments: argparse.Namespace) -> None:
    losses: list[tuple[str, dict[str, Any]]] = []
    for word in arguments.losses:
        if "=" not in word:
            if not word[:1].isupper():  # a class of pytorch-metric-learning, which takes seconds to import
                one_of("loss", word, list_losses())
            losses.append((word, {}))
        elif losses:
            losses[-1][1].update(parse_key_values([word], "plot gradients"))
        else:
            raise UserError(f"{word}: give it after the loss that it is for")
    from vl_plugins.plots.figures import picture_file
    from vl_plugins.plots.gradients import plot_gradient_sizes

    picture_file(arguments.out)
    drawn = {}
    for name, options in losses:
        with user_errors(name):
            drawn[f"{name}({format_options(options)})" if options else name] = create_loss(name, **options)
    with user_errors(", ".join(drawn)):
        plot_gradient_sizes(drawn, arguments.out)
    print(f"wrote {arguments.out}")
