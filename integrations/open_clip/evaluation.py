"""Embeddings of shards by a saved open_clip model, in one process or shared out among several."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import open_clip
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import vl_plugins
from vl_plugins.data.collection import Collection
from vl_plugins.data.reader import evaluation_pipeline
from vl_plugins.data.shard_files import expand_shards
from vl_plugins.integrations.open_clip.validation import encode_batches
from vl_plugins.retrieval.features import Features, describe_similarity

__all__ = [
    "checkpoint_digest",
    "encode_shards",
    "process_device",
]

LoadedModel = tuple[nn.Module, Callable, Callable]


def process_device(device: str | None = None) -> str:
    """Return where this process computes: ``device``, or a GPU of its own where there is one."""
    if device is not None:
        return device
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def encode_shards(
    loaded: LoadedModel,
    shards: str | Sequence[str],
    *,
    collection: Collection | None = None,
    max_captions: int | None = None,
    batch_size: int = 64,
    workers: int = 1,
    device: str | None = None,
    processes: tuple[int, int] = (0, 1),
    precision: str = "fp32",
    progress: bool = False,
    description: str = "encoding",
) -> Features | None:
    """Encode every image and every caption of shards once.

    Of several processes each encodes every so many-th batch; batches are those of one process, and so are the results.

    Args:
        loaded: model, transform and tokenizer of
            :func:`vl_plugins.integrations.open_clip.checkpoints.load_model`.
        shards: shards of ``vl-plugins shards`` or others with captions, in brace notation.
        collection: what :func:`vl_plugins.data.collection.read_collection` read from them with ``max_captions``, for
            the ids; without it the features have none.
        max_captions: only the first so many captions of each image.
        batch_size: images in a batch.
        workers: loader processes.
        device: where the model is; by default :func:`process_device`.
        processes: number of this process and how many there are, for the batches to be shared out.
        precision: as open_clip's ``--precision``.
        progress: show a progress bar on standard error.
        description: of the bar.

    Returns:
        Unit vectors or sets in float32 on the CPU, in the order of the shards; None in all processes but the first.

    Raises:
        UserError: a shard does not exist or cannot be read.
    """
    model, transform, tokenizer = loaded
    similarity = getattr(model, "similarity", None)
    rank, world_size = processes
    pipeline = evaluation_pipeline(
        expand_shards(shards),
        transform,
        tokenizer,
        batch_size,
        max_captions=max_captions,
        rank=rank,
        world_size=world_size,
        inputs=getattr(model, "inputs", "images"),
    )
    batches = DataLoader(pipeline, batch_size=None, num_workers=workers)
    bar = tqdm(batches, desc=description, unit="batch", disable=not progress or rank > 0)
    parts = list(encode_batches(model, bar, process_device(device), precision))
    parts = _in_turn(parts, rank, world_size)
    if parts is None:
        return None
    images, captions, image_of_caption = (torch.cat(column) for column in zip(*parts, strict=True))
    return Features(
        images=images,
        captions=captions,
        image_of_caption=image_of_caption,
        image_ids=None if collection is None else collection.image_ids,
        caption_ids=None if collection is None else collection.caption_ids,
        description=({} if similarity is None else describe_similarity(similarity))
        | {
            "precision": precision,
            "versions": f"vl_plugins {vl_plugins.__version__}, open_clip {open_clip.__version__}",
        },
    )


def checkpoint_digest(checkpoint: str | Path) -> str:
    """Return the SHA-256 of a checkpoint's file, or a pretrained tag as it is."""
    if not Path(checkpoint).is_file():
        return str(checkpoint)
    with open(checkpoint, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _in_turn(parts: list[tuple[Tensor, ...]], rank: int, world_size: int) -> list[tuple[Tensor, ...]] | None:
    """Return the batches of all processes to the first one, in the order in which one process makes them."""
    if world_size == 1:
        return parts
    shapes = [None] * world_size if rank == 0 else None
    dist.gather_object([[(tensor.shape, tensor.dtype) for tensor in part] for part in parts], shapes)
    if rank > 0:
        for part in parts:
            for tensor in part:
                dist.send(tensor.contiguous(), 0)
        return None
    received = [parts]
    for sender in range(1, world_size):
        of_sender = []
        for part in shapes[sender]:
            tensors = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in part)
            for tensor in tensors:
                dist.recv(tensor, sender)
            of_sender.append(tensors)
        received.append(of_sender)
    batches = sum(len(of_process) for of_process in received)
    return [received[number % world_size][number // world_size] for number in range(batches)]
