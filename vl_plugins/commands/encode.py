"""``vl-plugins encode``: embed the images and captions of shards with a model, into a file of features."""

import argparse
import sys
from typing import Any

from vl_plugins.data import expand_shards
from vl_plugins.distributed import process_device, start_processes, stop_processes

__all__ = ["add_options", "encode", "register", "run"]


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``encode`` command."""
    parser = subparsers.add_parser(
        "encode",
        help="embed images and captions with a model",
        examples=[
            "vl-plugins encode logs/run/checkpoints/epoch_10.pt \\\n"
            "    'shards/coco-test-{000000..000004}.tar' run.safetensors",
            "vl-plugins encode openai shards/toy-test-000000.tar clip.npz --model ViT-B-32",
        ],
        description="Embed every image and every caption once. Under torchrun, processes share the work.",
    )
    parser.add_argument(
        "checkpoint", help="checkpoint or run folder, hf-hub:ORG/NAME, local-dir:FOLDER, or open_clip's pretrained tag"
    )
    parser.add_argument("shards", help="shards with the images and captions; {000000..000004} for several")
    parser.add_argument("out", help=".safetensors or .npz file")
    parser.add_argument("--model", help="open_clip model (default: that of the run)")
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: Any) -> None:
    """Add the options that tell how to encode, of this command and ``evaluate``."""
    parser.add_argument(
        "--model-config",
        metavar="FILE_OR_FOLDER",
        help="your own model configurations for open_clip (default: those of the run)",
    )
    parser.add_argument("--max-captions", type=int, metavar="N", help="only the first N captions of each image")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", default=64, help="images per batch (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, metavar="N", default=1, help="loader processes (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... for models (default: cuda if available)")
    parser.add_argument(
        "--precision", default="fp32", help="as in open_clip: fp32, bf16, amp_bf16, ... (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Encode and save; a progress bar goes to standard error."""
    from vl_plugins.retrieval.features import check_features_file, save_features

    check_features_file(arguments.out)
    (encoded,) = encode(arguments, [(arguments.checkpoint, arguments.model)])
    if encoded is not None:  # only the first process has the features
        save_features(encoded[0], arguments.out)
        print(f"wrote {arguments.out}: {len(encoded[0].images):,} images, {len(encoded[0].captions):,} captions")
    return 0


def encode(arguments: argparse.Namespace, models: list[tuple[str, str | None]]) -> list[Any]:
    """Return what :func:`vl_plugins.integrations.encoding.encode_checkpoint` does for checkpoints and their models."""
    from vl_plugins.integrations.encoding import encode_checkpoint

    expand_shards(arguments.shards)
    device = process_device(arguments.device)
    processes = start_processes()
    names = ("model_config", "max_captions", "batch_size", "workers", "precision")
    options = {name: getattr(arguments, name) for name in names}
    try:
        return [
            encode_checkpoint(
                checkpoint,
                arguments.shards,
                model,
                device=device,
                processes=processes,
                progress=f"encoding {checkpoint}" if sys.stderr.isatty() else None,
                **options,
            )
            for checkpoint, model in models
        ]
    finally:
        stop_processes()
