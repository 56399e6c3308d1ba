"""Embeddings of shards by a loaded model, in one process or split among several."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import vl_plugins
from vl_plugins.data.collection import Collection, first_captions
from vl_plugins.data.dataset import ShardDataset, evaluation_loader
from vl_plugins.data.files import read_bytes, sha256
from vl_plugins.data.images import scaled_picture
from vl_plugins.integrations.precision import autocast, input_dtype
from vl_plugins.retrieval import encoding
from vl_plugins.retrieval.features import Features, describe_similarity

__all__ = ["checkpoint_digest", "encode_batches", "encode_queries", "encode_shards"]


def encode_batches(
    model: nn.Module, batches: Iterable, device: torch.device | str, precision: str = "fp32"
) -> Iterator[encoding.Encoded]:
    """Encode as :func:`vl_plugins.retrieval.encoding.encode_batches` does, with open_clip's ``--precision``."""
    context = functools.partial(autocast, precision, device)
    return encoding.encode_batches(model, batches, device, input_dtype(precision), context)


def encode_shards(
    loaded: tuple[nn.Module, Callable, Callable],
    shards: str | Sequence[str] | Collection,
    *,
    max_captions: int | None = None,
    batch_size: int = 64,
    workers: int = 1,
    device: torch.device | str = "cpu",
    processes: tuple[int, int] = (0, 1),
    precision: str = "fp32",
    progress: str | None = None,
) -> tuple[Features, Collection] | None:
    """Encode every image and every caption of shards once; the processes share out the batches.

    Args:
        loaded: model, transform and tokenizer of :func:`vl_plugins.integrations.checkpoints.load_model`.
        shards: as for :class:`~vl_plugins.data.dataset.ShardDataset`.
        max_captions: only the first so many captions of each image.
        batch_size: images in a batch.
        workers: loader processes.
        device: where the model is.
        processes: rank of this process and number of processes.
        precision: as open_clip's ``--precision``.
        progress: label of a progress bar on standard error; None for no bar.

    Returns:
        Unit vectors or sets in float32 on the CPU, in the order of the shards, and what they are of; None in all
        processes but the first.

    Raises:
        UserError: a shard does not exist or cannot be read.
    """
    model, transform, tokenizer = loaded
    rank, world_size = processes
    dataset = ShardDataset(shards, transform, tokenizer, inputs=getattr(model, "inputs", "images"))
    batches = evaluation_loader(
        dataset, batch_size, max_captions=max_captions, workers=workers, rank=rank, world_size=world_size
    )
    bar = tqdm(batches, desc=progress, unit="batch", disable=progress is None or rank > 0)
    encoded = list(encode_batches(model, bar, device, precision))
    if world_size > 1:
        encoded = _gather(encoded, rank, world_size)
    if rank > 0:
        return None
    joined = encoding.join(encoded)
    collection = dataset.collection
    if max_captions is not None:
        collection = collection.with_captions(first_captions(collection.image_of_caption, max_captions))
    similarity = getattr(model, "similarity", None)
    features = Features(
        images=joined.images,
        captions=joined.captions,
        image_of_caption=joined.image_of_caption,
        image_ids=collection.image_ids,
        caption_ids=collection.caption_ids,
        description={
            **({} if similarity is None else describe_similarity(similarity)),
            "precision": precision,
            "versions": f"vl_plugins {vl_plugins.__version__}, torch {torch.__version__}",
        },
    )
    return features, collection


@torch.inference_mode()
def encode_queries(
    loaded: tuple[nn.Module, Callable, Callable],
    queries: Sequence[str],
    device: torch.device | str = "cpu",
    precision: str = "fp32",
) -> Tensor:
    """Encode texts, and images by the paths of their files.

    Args:
        loaded, device, precision: as for :func:`encode_shards`.
        queries: Q texts; one that is the path of a file stands for the image in it.

    Returns:
        (Q, D) unit vectors in float32 on the CPU, or sets (Q, K, D).

    Raises:
        UserError: an image cannot be read.
    """
    model: Any  # with encode_image and encode_text
    model, transform, tokenizer = loaded
    rows = []
    with autocast(precision, device):
        for query in queries:
            if Path(query).is_file():
                image = scaled_picture(read_bytes(query))
                image = transform(image)[None].to(device=device, dtype=input_dtype(precision))
                rows.append(model.encode_image(image, normalize=True))
            else:
                rows.append(model.encode_text(tokenizer([query]).to(device), normalize=True))
    return torch.cat(rows).float().cpu()


def checkpoint_digest(checkpoint: str | Path) -> str:
    """Return the SHA-256 of a checkpoint's file, or a pretrained tag as it is."""
    return sha256(checkpoint) if Path(checkpoint).is_file() else str(checkpoint)


def _gather(encoded: list[encoding.Encoded], rank: int, world_size: int) -> list[encoding.Encoded]:
    """Return the batches of all processes to the first one; others get nothing."""
    counts = [0] * world_size
    dist.all_gather_object(counts, len(encoded))
    gathered = []
    # One batch per process at a time, so that no message grows with the shards.
    for number in range(max(counts)):
        received: list[encoding.Encoded | None] = [None] * world_size if rank == 0 else []
        dist.gather_object(encoded[number] if number < len(encoded) else None, received or None)
        gathered += received
    return [batch for batch in gathered if batch is not None]
