"""``vl-plugins encode``: embed the images and captions of shards with a model, into a file of features."""

import argparse
import os
from typing import Any

from vl_plugins.errors import number
from vl_plugins.integrations.command_lines import add_caption_rule, add_max_image_pixels

__all__ = ["add_options", "encode", "positive", "register", "run"]


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
    data = "shards, {000000..000004} for several, or a table, Parquet file or folder, with the images and captions"
    parser.add_argument("shards", help=data)
    parser.add_argument("out", help=".safetensors or .npz file, or a folder")
    parser.add_argument("--model", help="open_clip model (default: that of the run)")
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: Any) -> None:
    """Add the options that tell how to encode, of this command and ``evaluate``, to a parser or a group."""
    add = parser.add_argument
    config = "your own model configurations for open_clip (default: those of the run)"
    add("--model-config", metavar="FILE_OR_FOLDER", help=config)
    add("--batch-size", type=positive, metavar="N", default=64, help="images per batch (default: %(default)s)")
    add("--workers", type=int, metavar="N", default=1, help="loader processes (default: %(default)s)")
    add("--device", help="cpu, cuda, cuda:1, ... for models (default: cuda if available)")
    add("--precision", default="fp32", help="as in open_clip: fp32, bf16, amp_bf16, ... (default: %(default)s)")
    add_caption_rule(parser)
    add_max_image_pixels(parser)


def positive(text: str) -> int:
    """Return an integer of at least 1, as the ``type`` of an option."""
    return number("N", int(text), least=1, kind=int)


def run(arguments: argparse.Namespace) -> int:
    """Encode and save; a progress bar goes to standard error."""
    from vl_plugins.retrieval.features import check_features_file, save_features

    check_features_file(arguments.out)
    (features,) = encode(arguments, [arguments.checkpoint])
    if features is not None:  # only the first process has the features
        save_features(features, arguments.out)
        print(f"wrote {arguments.out}: {len(features.images):,} images, {len(features.captions):,} captions")
    return 0


def encode(arguments: argparse.Namespace, checkpoints: list[str]) -> list[Any]:
    """Return the features of checkpoints; None in all processes but the first."""
    from vl_plugins.data.reading import check_data
    from vl_plugins.data.records import as_rule

    rule = as_rule(arguments.caption_lines, arguments.caption_fields)
    check_data(arguments.shards)  # before torch is imported and the processes meet
    import torch

    from vl_plugins.distributed import stop_processes
    from vl_plugins.integrations.encoding import encode_checkpoint

    own_device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    names = ("model", "model_config", "batch_size", "workers", "precision", "max_image_pixels")
    options = {name: getattr(arguments, name) for name in names}
    options |= {"device": arguments.device or own_device, "caption_lines": rule}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # set by torchrun
        # gloo gathers embeddings in CPU memory: on the GPU, all of them may not fit beside a model.
        torch.distributed.init_process_group("gloo")
    try:
        return [encode_checkpoint(checkpoint, arguments.shards, **options) for checkpoint in checkpoints]
    finally:
        stop_processes()
