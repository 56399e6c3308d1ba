"""``vl-plugins plot``: pictures of training runs, of slot attention, and of losses."""

import argparse
import os
import sys

from vl_plugins.commands.encode import positive
from vl_plugins.commands.run_names import run_names
from vl_plugins.errors import MALFORMED_CONTENT, user_errors
from vl_plugins.integrations.command_lines import key_value
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
    chosen.add_argument(
        "--images", type=positive, metavar="N", default=3, help="the first N images (default: %(default)s)"
    )
    chosen.add_argument("--keys", nargs="+", metavar="KEY", default=(), help="these images, by key or image id")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    gradients = pictures.add_parser(
        "gradients",
        help="how strongly a loss pulls at a triplet",
        usage="%(prog)s [options] LOSS [KEY=VALUE ...] ...",
        examples=["vl-plugins plot gradients unified scale=30 vlc", "vl-plugins plot gradients goal TripletMarginLoss"],
        description="Draw the size of the gradients of losses at the positive and the negative pair of a triplet.",
    )
    gradients.add_argument("losses", nargs="+", metavar="LOSS", help="losses, or module:Class, each before its options")
    for picture, draw in ((training, _training), (attention, _attention), (gradients, _gradients)):
        default = f"{picture.prog.split()[-1]}.png"
        picture.add_argument("--out", metavar="FILE", default=default, help=".png, .pdf or .svg (default: %(default)s)")
        picture.set_defaults(run=run, draw=draw)


def run(arguments: argparse.Namespace) -> int:
    """Draw a picture and print its name."""
    from vl_plugins.plots.figures import check_picture

    check_picture(arguments.out)
    arguments.draw(arguments)
    print(f"wrote {arguments.out}")
    return 0


def _training(arguments: argparse.Namespace) -> None:
    from vl_plugins.plots.curves import plot_training_curves, read_results

    runs = {name: read_results(path) for name, path in run_names(arguments.runs).items()}
    plot_training_curves(runs, arguments.out)


def _attention(arguments: argparse.Namespace) -> None:
    from vl_plugins.data import read_collection

    collection = read_collection(arguments.shards)  # before torch is imported
    from vl_plugins.integrations.loading import find_checkpoint, load_model
    from vl_plugins.plots.attention import attended_images, plot_attention

    file = find_checkpoint(arguments.checkpoint)
    loaded = load_model(file, model_config=arguments.model_config, device=arguments.device)
    options = {name: getattr(arguments, name) for name in ("images", "keys", "device")}
    plot_attention(attended_images(*loaded, collection, **options), arguments.out)


def _gradients(arguments: argparse.Namespace) -> None:
    losses: list[list[str]] = []
    for word in arguments.losses:
        if "=" in word and losses:
            losses[-1].append(word)
        else:
            losses.append([word])
    if any(":" in name for name, *_ in losses):
        sys.path.append(os.getcwd())  # module:Class may be a file here, as it may with `python -m`
    curves = {}
    for name, *words in losses:
        with user_errors(name, argparse.ArgumentTypeError):
            options = dict(map(key_value, words))
            label = f"{name}({format_options(options)})" if options else name
            curves[label] = create_loss(name, **options)
    from vl_plugins.plots.gradients import plot_gradient_sizes

    # Some losses of pytorch-metric-learning cannot be called with two sets of embeddings. In a loss of the user's own
    # the same errors are bugs, which keep their traceback.
    is_users_own = any(":" in name for name, *_ in losses)
    expected = () if is_users_own else MALFORMED_CONTENT
    with user_errors(" ".join(arguments.losses), *expected):
        plot_gradient_sizes(curves, arguments.out)
