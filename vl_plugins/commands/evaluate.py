"""``vl-plugins evaluate``: image-text retrieval of a checkpoint on a set of shards."""

import argparse
import json
import sys
from pathlib import Path

__all__ = ["register", "run"]

DESCRIPTION = """\
Encode every image and every caption of the shards once and print Recall@1, 5 and 10 in
percent, median ranks and RSUM. Image to text counts a hit when any caption of the image is
found; ties count against the model. Embedding sets are compared by the similarity that the
model was trained with."""

EPILOG = """\
example:
  vl-plugins evaluate --model ViT-B-32 --checkpoint logs/run/checkpoints/epoch_10.pt \\
      --shards 'shards/coco-test-{000000..000004}.tar' --max-captions 5"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``evaluate`` subcommand."""
    parser = subparsers.add_parser(
        "evaluate",
        help="retrieval recalls of an open_clip checkpoint on shards",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", help="name of an open_clip model, or vl-tiny; a checkpoint of a model with --head says it itself"
    )
    parser.add_argument(
        "--checkpoint", required=True, help="checkpoint file of a training run, or a pretrained tag of open_clip"
    )
    parser.add_argument("--shards", required=True, help="shards of `vl-plugins shards`, with {000000..000004} for many")
    parser.add_argument(
        "--max-captions", type=int, metavar="N", help="use the first N captions of an image (default: all)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="loader processes (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument(
        "--precision", default="fp32", help="as in open_clip: fp32, amp_bf16, ... (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; the progress bar goes to standard error."""
    from vl_plugins.optional import require

    require("open_clip", extra="open-clip")
    from vl_plugins.integrations.open_clip.evaluation import evaluate_checkpoint
    from vl_plugins.retrieval import format_metrics_table

    metrics = evaluate_checkpoint(
        arguments.model,
        arguments.checkpoint,
        arguments.shards,
        max_captions=arguments.max_captions,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        device=arguments.device,
        precision=arguments.precision,
        progress=sys.stderr.isatty(),
    )
    if arguments.json:
        print(json.dumps(metrics, indent=2))
    else:
        print(f"{metrics['num_samples']} images, {metrics['num_captions']} captions")
        print(format_metrics_table({arguments.model or Path(arguments.checkpoint).stem: metrics}))
        if "image_circular_variance" in metrics:
            print(
                f"circular variance of the sets: images {metrics['image_circular_variance']:.4g}, "
                f"captions {metrics['caption_circular_variance']:.4g}"
            )
    return 0
