"""``vl-plugins evaluate``: image-text retrieval of models on shards, or of saved features."""

import argparse

from vl_plugins.commands.members import collect_members
from vl_plugins.errors import UserError

__all__ = ["register", "run"]

# Not imported from open_clip and `protocols`: `--help` does without torch. Tests compare them.
PRECISIONS = ("amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")
PROTOCOLS = ("plain", "flickr30k-1k", "coco-5k", "coco-1k", "eccv")

PROTOCOL_TABLE = """\
protocols:
  plain         any shards: all images and all captions
  flickr30k-1k  Flickr30K test split: 1,000 images, 5,000 captions
  coco-5k       Karpathy's COCO test split: 5,000 images, 25,000 captions
  coco-1k       mean over five folds of 1,000 images of that split
  eccv          ECCV Caption (mAP@R, R-Precision, R@1) and CxC on that split"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``evaluate`` subcommand."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure image-text retrieval of checkpoints or features",
        usage="%(prog)s [options]",
        examples=[
            "vl-plugins evaluate --checkpoint logs/run/checkpoints/epoch_10.pt \\\n"
            "    --shards 'shards/coco-test-{000000..000004}.tar' --protocol coco-5k eccv",
            "vl-plugins evaluate --features vit.safetensors other.npz --ensemble",
        ],
        description="Rank all captions for each image and all images for each caption, and print Recall@1, 5 and 10, "
        "median ranks and RSUM.",
        epilog=PROTOCOL_TABLE,
    )
    what = parser.add_argument_group("what to evaluate")
    what.add_argument(
        "--checkpoint",
        nargs="+",
        metavar="[NAME=]FILE",
        default=[],
        help="checkpoint file, hf-hub:ORG/NAME, local-dir:FOLDER, or pretrained tag of open_clip",
    )
    what.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        default=[],
        help="open_clip model, one for all checkpoints or one each (default: that of the run)",
    )
    what.add_argument(
        "--model-config",
        metavar="FILE_OR_FOLDER",
        help="your own model configurations for open_clip (default: those of the run)",
    )
    what.add_argument(
        "--features",
        nargs="+",
        metavar="[NAME=]FILE",
        default=[],
        help="embeddings from --save-features or another program, .npz or .safetensors",
    )
    what.add_argument("--ensemble", action="store_true", help="also evaluate the mean of all similarities")
    what.add_argument("--shards", help="shards to evaluate on; {000000..000004} for several")
    what.add_argument(
        "--protocol",
        nargs="+",
        choices=PROTOCOLS,
        metavar="PROTOCOL",
        default=["plain"],
        help="one or more of the protocols below (default: plain)",
    )
    what.add_argument("--max-captions", type=int, metavar="N", help="use only the first N captions of each image")
    what.add_argument("--normalize", action="store_true", help="normalize --features, which must have norm 1 otherwise")
    how = parser.add_argument_group("how to run")
    how.add_argument("--batch-size", type=int, metavar="N", default=64, help="images per batch (default: %(default)s)")
    how.add_argument("--workers", type=int, metavar="N", default=1, help="data loader workers (default: %(default)s)")
    how.add_argument("--device", help="cpu, cuda, cuda:1, ... for the models (default: cuda if available)")
    how.add_argument(
        "--precision",
        choices=PRECISIONS,
        metavar="PRECISION",
        default="fp32",
        help="as in open_clip: fp32, bf16, amp_bf16, ... (default: %(default)s)",
    )
    how.add_argument(
        "--ranking-device",
        default="cpu",
        metavar="DEVICE",
        help="device that compares embeddings (default: %(default)s)",
    )
    out = parser.add_argument_group("what to write")
    out.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument(
        "--save-features",
        nargs="+",
        metavar="FILE",
        default=[],
        help="save embeddings as .npz or .safetensors, one file per checkpoint",
    )
    out.add_argument("--csv", metavar="FILE.csv", help="append the results, and skip models whose results it has")
    out.add_argument("--force", action="store_true", help="evaluate models even if --csv has their results")
    out.add_argument(
        "--report",
        metavar="FILE.html",
        help="write a report of the ensemble or the first model: metrics, plots, successes and failures",
    )
    out.add_argument(
        "--queries",
        nargs="+",
        metavar="TEXT_OR_IMAGE",
        help="show the images and captions nearest to these texts or image files in --report",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; progress bars go to standard error."""
    _check_options(arguments)
    members = collect_members(arguments.checkpoint, arguments.features, arguments.model, arguments.save_features)
    # Files and names, before torch is imported.
    from vl_plugins.integrations.open_clip.names import check_file, check_model_name

    for member in members:
        check_file("--checkpoint" if member.is_checkpoint else "--features", member.file)
        if member.model is not None:
            check_model_name(member.model, arguments.model_config)
    if arguments.shards:
        from vl_plugins.data.collection import expand_shards

        expand_shards(arguments.shards)
    from vl_plugins.commands.evaluation import evaluate

    return evaluate(arguments, members)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise an error for options that do not fit together."""
    checkpoints, features, saved = arguments.checkpoint, arguments.features, arguments.save_features
    problems = [
        (not checkpoints and not features, "give --checkpoint with --shards, or --features"),
        (checkpoints and not arguments.shards, "--checkpoint needs --shards: the images and captions to encode"),
        (arguments.model and not checkpoints, "--model needs --checkpoint: a file, or a pretrained tag of open_clip"),
        (
            len(arguments.model) not in (0, 1, len(checkpoints)),
            f"give one --model for all checkpoints or one for each, got {len(arguments.model)} for {len(checkpoints)}",
        ),
        (
            arguments.ensemble and len(checkpoints) + len(features) < 2,
            "--ensemble averages the similarities of two or more checkpoints or files of features, got one",
        ),
        (
            len(saved) not in (0, len(checkpoints)),
            f"--save-features needs one file for each checkpoint, got {len(saved)} for {len(checkpoints)}",
        ),
        (arguments.normalize and not features, "--normalize is for --features; what a model encodes has norm 1"),
        (arguments.batch_size < 1, f"--batch-size must be at least 1, got {arguments.batch_size}"),
        (
            arguments.max_captions is not None and arguments.max_captions < 1,
            f"--max-captions must be at least 1, got {arguments.max_captions}",
        ),
        (
            arguments.queries and not (arguments.report and checkpoints),
            "--queries needs --report, which shows the answers, and --checkpoint, whose model encodes them",
        ),
        (arguments.force and not arguments.csv, "--force needs --csv: otherwise nothing is left out"),
    ]
    for found, problem in problems:
        if found:
            raise UserError(problem)
