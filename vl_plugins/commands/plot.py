"""``vl-plugins plot``: pictures of training runs, of slot attention, and of losses."""

import argparse
from typing import Any

from vl_plugins.commands.run_names import run_names, split_name
from vl_plugins.errors import UserError, user_errors
from vl_plugins.integrations.key_values import parse_key_values
from vl_plugins.plots.figures import check_picture
from vl_plugins.registry import create_loss, format_options

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
    training = pictures.add_parser(
        "training",
        help="RSUM and similarities over the epochs",
        examples=["vl-plugins plot training logs/clip logs/unified --out training.pdf"],
        description="Draw RSUM, and the mean similarities of positives and hardest negatives where they were logged.",
    )
    training.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="folder of a run or its results.jsonl")
    attention = pictures.add_parser(
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
    add = attention.add_argument
    add("--checkpoint", metavar="FILE", required=True, help="checkpoint or run folder of a run with `--head set`")
    add("--model-config", metavar="FILE_OR_FOLDER", help="your own model configurations (default: those of the run)")
    add("--shards", metavar="PATTERN", required=True, help="shards with the images, and the captions to choose from")
    chosen = attention.add_mutually_exclusive_group()
    chosen.add_argument("--images", type=int, metavar="N", default=3, help="the first N images (default: %(default)s)")
    chosen.add_argument("--keys", nargs="+", metavar="KEY", default=(), help="these images, by key or image id")
    add("--iteration", type=int, metavar="T", help="iteration of slot attention, from 1 (default: the last)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    gradients = pictures.add_parser(
        "gradients",
        help="how strongly a loss pulls at a triplet",
        usage="%(prog)s [options] LOSS [KEY=VALUE ...] ...",
        examples=["vl-plugins plot gradients unified scale=30 vlc", "vl-plugins plot gradients goal TripletMarginLoss"],
        description="Draw the size of the gradients of losses at the positive and the negative pair of a triplet.",
    )
    gradients.add_argument("losses", nargs="+", metavar="LOSS", help="losses, each before its options as margin=0.2")
    for picture, run in ((training, _training), (attention, _attention), (gradients, _gradients)):
        default = f"{picture.prog.split()[-1]}.png"
        picture.add_argument("--out", metavar="FILE", default=default, help=".png, .pdf or .svg (default: %(default)s)")
        picture.set_defaults(run=_drawing(run))


def _drawing(draw: Any) -> Any:
    def run(arguments: argparse.Namespace) -> int:
        check_picture(arguments.out)
        draw(arguments)
        print(f"wrote {arguments.out}")
        return 0

    return run


def _training(arguments: argparse.Namespace) -> None:
    from vl_plugins.plots.training import plot_training_curves, read_results

    named = list(map(split_name, arguments.runs))
    names = run_names(named)
    if len(set(names)) < len(names):
        raise UserError("two runs have one name; name them: NAME=PATH OTHER=PATH")
    plot_training_curves(
        {name: read_results(path) for name, (_, path) in zip(names, named, strict=True)}, arguments.out
    )


def _attention(arguments: argparse.Namespace) -> None:
    from vl_plugins.data import read_collection
    from vl_plugins.integrations.checkpoints import load_model
    from vl_plugins.integrations.encoding import find_checkpoint
    from vl_plugins.plots.attention import attended_images, plot_attention

    collection, file = read_collection(arguments.shards), find_checkpoint(arguments.checkpoint)
    loaded = load_model(file, model_config=arguments.model_config, device=arguments.device)
    names = ("images", "keys", "iteration", "device")
    items = attended_images(*loaded, collection, **{name: getattr(arguments, name) for name in names})
    plot_attention(items, arguments.out)


def _gradients(arguments: argparse.Namespace) -> None:
    from vl_plugins.plots.gradients import plot_gradient_sizes

    losses: list[tuple[str, dict[str, Any]]] = []
    for word in arguments.losses:
        if "=" not in word:
            losses.append((word, {}))
        elif losses:
            losses[-1][1].update(parse_key_values([word], "plot gradients"))
        else:
            raise UserError(f"{word}: give it after the loss that it is for")
    drawn = {}
    for name, options in losses:
        with user_errors(name):
            drawn[f"{name}({format_options(options)})" if options else name] = create_loss(name, **options)
    plot_gradient_sizes(drawn, arguments.out)
