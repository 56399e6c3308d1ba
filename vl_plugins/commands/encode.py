"""``vl-plugins encode``: embed images and captions with a model, into a file or a folder of features."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from vl_plugins.errors import number
from vl_plugins.integrations.command_lines import add_caption_rule, add_max_image_pixels

__all__ = ["add_options", "device_of", "encode", "positive", "register", "run"]


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``encode`` command."""
    parser = subparsers.add_parser(
        "encode",
        help="embed images and captions with a model",
        examples=[
            "vl-plugins encode logs/run/checkpoints/epoch_10.pt \\\n"
            "    'shards/coco-test-{000000..000004}.tar' run.safetensors",
            "vl-plugins encode openai pictures/ pictures-clip --model ViT-B-32",
        ],
        description="Embed every image and every caption once. Under torchrun, processes share the work. A folder as "
        "OUT gets parts of .npy, and a run that was stopped continues with the missing ones.",
    )
    parser.add_argument(
        "checkpoint", help="checkpoint or run folder, hf-hub:ORG/NAME, local-dir:FOLDER, or open_clip's pretrained tag"
    )
    data = "images and captions: shards, {000000..000004} for several, or a table, Parquet file or folder; or a folder "
    data += "of pictures alone, or a .txt with one caption a line"
    parser.add_argument("data", metavar="input", help=data)
    parser.add_argument("out", help=".safetensors or .npz file, or a folder for parts of .npy")
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
    from vl_plugins.data.encodable import read_encodable
    from vl_plugins.data.records import as_rule
    from vl_plugins.retrieval.features import check_features_file, is_folder_name, save_features

    check_features_file(arguments.out)
    rule = as_rule(arguments.caption_lines, arguments.caption_fields)
    data = read_encodable(arguments.data, rule)  # before torch is imported and the processes meet
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        print(f"read {arguments.data} as {data.kind}: {data.describe()}", file=sys.stderr)
    if is_folder_name(arguments.out):
        from vl_plugins.integrations.encoder import encode_to_folder

        with _processes():
            options = _options(arguments, arguments.data)
            encode_to_folder(arguments.checkpoint, data, arguments.out, **options)
    else:
        (features,) = encode(arguments, [arguments.checkpoint], data, arguments.data)
        if features is not None:  # only the first process has the features
            save_features(features, arguments.out)
    if is_first:
        counts = []
        if data.image_ids is not None:
            counts.append(f"{len(data.image_ids):,} images")
        if data.caption_ids is not None:
            counts.append(f"{len(data.caption_ids):,} captions")
        print(f"wrote {arguments.out}: {', '.join(counts)}")
    return 0


def encode(arguments: argparse.Namespace, checkpoints: list[str], data: Any, name: str) -> list[Any]:
    """Return the features of checkpoints; None in all processes but the first.

    Args:
        arguments: of the command line.
        checkpoints: files, runs, tags or models.
        data: what :func:`~vl_plugins.data.encodable.read_encodable` returns.
        name: of the data.
    """
    from vl_plugins.integrations.encoder import encode_checkpoint

    with _processes():
        options = _options(arguments, name)
        return [encode_checkpoint(checkpoint, data, **options) for checkpoint in checkpoints]


def _options(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the options of an encoder, by the options of :func:`add_options`."""
    names = ("model", "model_config", "batch_size", "workers", "precision", "max_image_pixels")
    options = {name: getattr(arguments, name) for name in names}
    return options | {"device": device_of(arguments), "name": name}


def device_of(arguments: argparse.Namespace) -> str:
    """Return the device of ``--device``, or else this process's GPU, or the CPU."""
    import torch

    own_device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return arguments.device or own_device


@contextlib.contextmanager
def _processes() -> Iterator[None]:
    """Let the processes that torchrun has started meet, and stop them at the end."""
    import torch

    from vl_plugins.distributed import stop_processes

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo gathers embeddings in CPU memory: on the GPU, all of them may not fit beside a model.
        torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        stop_processes()
