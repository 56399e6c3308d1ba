"""Embeddings of shards by a model, in one process or split among several, and its retrieval metrics in training."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

import vl_plugins
from vl_plugins.data import CaptionRule, Collection, EvaluationBatch, ShardDataset, evaluation_loader, read_collection
from vl_plugins.data.files import sha256
from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.distributed import world_size
from vl_plugins.errors import MALFORMED_CONTENT, user_errors
from vl_plugins.integrations.loading import AUTOCAST, INPUTS, find_checkpoint, load_model
from vl_plugins.retrieval.features import Features, describe_similarity
from vl_plugins.retrieval.protocols import evaluate

__all__ = ["encode_batches", "encode_checkpoint", "hash_shards", "retrieval_metrics", "validate"]


def encode_checkpoint(
    checkpoint: str | Path,
    shards: str | Sequence[str],
    model: str | None = None,
    *,
    batch_size: int = 64,
    workers: int = 1,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
    caption_lines: str | CaptionRule = "auto",
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    **options: Any,
) -> Features | None:
    """Encode every image and every caption of shards once; the processes of torch's group share out the batches.

    Args:
        checkpoint, model, device, precision, options: as for :func:`vl_plugins.integrations.loading.load_model`; or
            ``checkpoint`` is the folder of a run, see
            :func:`~vl_plugins.integrations.loading.find_checkpoint`.
        shards: as for :func:`vl_plugins.data.read_collection`.
        batch_size: images in a batch.
        workers: loader processes.
        caption_lines: see :func:`vl_plugins.data.read_collection`.
        max_image_pixels: see :class:`vl_plugins.data.ShardDataset`.

    Returns:
        Unit vectors or sets in float32 on the CPU, in the order of the shards. None in all processes but the first.

    Raises:
        UserError: the checkpoint or a shard does not exist or cannot be read.
    """
    file = find_checkpoint(checkpoint)
    loaded, transform, tokenizer = load_model(file, model, device=device, precision=precision, **options)
    inputs = getattr(loaded, "inputs", "images")
    collection = read_collection(shards, caption_lines=caption_lines)
    dataset = ShardDataset(collection, transform, tokenizer, inputs=inputs, max_image_pixels=max_image_pixels)
    processes = world_size()
    rank = dist.get_rank() if processes > 1 else 0
    batches = evaluation_loader(dataset, batch_size, workers=workers, rank=rank, world_size=processes)
    # None shows the bar in a terminal only.
    bar = tqdm(batches, desc=f"encoding {file}", unit="batch", disable=True if rank else None)
    with user_errors(f"checkpoint {file}", *MALFORMED_CONTENT):  # its model and tokenizer may not fit together
        encoded = encode_batches(loaded, bar, device, precision)
    encoded = _gather_batches(encoded)
    if rank:
        return None
    description = {
        "model": model,
        "checkpoint": str(file),
        "shards": shards,
        "precision": precision,
        "versions": f"vl_plugins {vl_plugins.__version__}, torch {torch.__version__}",
        "splits": list(collection.splits),
        **({"checkpoint_sha256": sha256(file)} if Path(file).is_file() else {}),
        "shards_sha256": hash_shards(collection),
    }
    ids = {"image_ids": collection.image_ids, "caption_ids": collection.caption_ids}
    return _features(loaded, encoded, description, **ids)


def hash_shards(collection: Collection) -> str:
    """Return a SHA-256 of the captions and of the sizes of the images, however these are divided into shards."""
    return collection.digest()


def validate(
    model: nn.Module,
    batches: Iterable[EvaluationBatch],
    device: str | torch.device,
    precision: str = "fp32",
    *,
    gather: bool = False,
) -> dict[str, float]:
    """Return the metrics of all images and captions, as :func:`vl_plugins.retrieval.evaluate` does, on the CPU.

    Args:
        model: in evaluation mode, with ``encode_image`` and ``encode_text``, and a ``similarity`` if these return sets.
        batches: of :func:`vl_plugins.data.evaluation_loader`.
        device: where the model is.
        precision: as open_clip's ``--precision``.
        gather: set in all processes of torch's group, each with its own share of the batches. The first process returns
            the metrics, exactly those of one process with all batches; the others return {}.

    Raises:
        UserError: the data cannot be read, or an embedding is not a finite unit vector.
    """
    encoded = encode_batches(model, batches, device, precision, gather=gather)
    return retrieval_metrics(model, encoded) if encoded else {}


def retrieval_metrics(model: nn.Module, encoded: Sequence[EvaluationBatch]) -> dict[str, float]:
    """Return the metrics of :func:`validate` of the batches of :func:`encode_batches`, in any order."""
    # On the CPU, because open_clip lets GPUs round products to TF32, which moves ranks.
    return evaluate([_features(model, encoded, {})]).metrics["plain"]


def encode_batches(
    model: Any, batches: Iterable[EvaluationBatch], device: Any, precision: str, *, gather: bool = False
) -> list[EvaluationBatch]:
    """Return the batches with embeddings, in float32 on the CPU, in place of images and texts.

    Args:
        model, batches, device, precision, gather: of :func:`validate`; with ``gather``, the first process returns the
            batches of all, and the others return none.
    """
    encoded = _encode_batches(model, batches, device, precision)
    return _gather_batches(encoded) if gather else encoded


@torch.inference_mode()
def _encode_batches(
    model: Any, batches: Iterable[EvaluationBatch], device: Any, precision: str
) -> list[EvaluationBatch]:
    encoded, autocast = [], AUTOCAST.get(precision)
    for batch in batches:
        with torch.autocast(torch.device(device).type, autocast, enabled=autocast is not None):
            images = batch.images.to(device=device, dtype=INPUTS.get(precision), non_blocking=True)
            images = model.encode_image(images, normalize=True)
            texts = model.encode_text(batch.texts.to(device=device, non_blocking=True), normalize=True)
        encoded.append(batch._replace(images=images.float().cpu(), texts=texts.float().cpu()))
    return encoded


def _gather_batches(encoded: list[EvaluationBatch]) -> list[EvaluationBatch]:
    """Return the batches of all processes in the first one, and none in the others."""
    processes = world_size()
    if processes == 1:
        return encoded
    gathered: Any = [None] * processes if dist.get_rank() == 0 else None
    dist.gather_object(encoded, gathered)
    batches = []
    for batches_of_process in gathered or ():
        batches.extend(batches_of_process)
    return batches


def _features(model: Any, encoded: Sequence[EvaluationBatch], description: dict[str, Any], **ids: Any) -> Features:
    encoded = sorted(encoded, key=lambda batch: batch.start)
    similarity = getattr(model, "similarity", None)
    return Features(
        images=torch.cat([batch.images for batch in encoded]),
        captions=torch.cat([batch.texts for batch in encoded]),
        image_of_caption=torch.cat([batch.image_of_caption + batch.start for batch in encoded]),
        description={**({} if similarity is None else describe_similarity(similarity)), **description},
        **ids,
    )
