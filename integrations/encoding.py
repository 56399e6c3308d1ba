"""Embeddings of batches by a model, in one process or several, and its retrieval metrics in training."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vl_plugins.data import EvaluationBatch
from vl_plugins.distributed import world_size
from vl_plugins.integrations.loading import AUTOCAST, INPUTS
from vl_plugins.retrieval.features import Features, describe_similarity
from vl_plugins.retrieval.protocols import evaluate

__all__ = [
    "encode_batch",
    "encode_batches",
    "features_of",
    "gather_batches",
    "retrieval_metrics",
    "similarity_of",
    "validate",
]


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
    return evaluate([features_of(model, encoded, {})]).metrics["plain"]


def encode_batches(
    model: Any, batches: Iterable[EvaluationBatch], device: Any, precision: str, *, gather: bool = False
) -> list[EvaluationBatch]:
    """Return the batches with embeddings, in float32 on the CPU, in place of images and texts.

    Args:
        model, batches, device, precision, gather: of :func:`validate`; with ``gather``, the first process returns the
            batches of all, and the others return none.
    """
    encoded = [encode_batch(model, batch, device, precision) for batch in batches]
    return gather_batches(encoded) if gather else encoded


@torch.inference_mode()
def encode_batch(model: Any, batch: EvaluationBatch, device: Any, precision: str) -> EvaluationBatch:
    """Return a batch with embeddings as :func:`encode_batches` does."""
    autocast = AUTOCAST.get(precision)
    images, texts = batch.images, batch.texts
    with torch.autocast(torch.device(device).type, autocast, enabled=autocast is not None):
        if images is not None:
            images = images.to(device=device, dtype=INPUTS.get(precision), non_blocking=True)
            images = model.encode_image(images, normalize=True).float().cpu()
        if texts is not None:
            texts = texts.to(device=device, non_blocking=True)
            texts = model.encode_text(texts, normalize=True).float().cpu()
    return batch._replace(images=images, texts=texts)


def gather_batches(encoded: list[EvaluationBatch]) -> list[EvaluationBatch]:
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


def features_of(model: Any, encoded: Sequence[EvaluationBatch], description: dict[str, Any], **ids: Any) -> Features:
    """Return the embeddings of batches in the order of the data, with ids and a description."""
    encoded = sorted(encoded, key=lambda batch: batch.start)
    return Features(
        images=torch.cat([batch.images for batch in encoded]),
        captions=torch.cat([batch.texts for batch in encoded]),
        image_of_caption=torch.cat([batch.image_of_caption + batch.start for batch in encoded]),
        description={**similarity_of(model), **description},
        **ids,
    )


def similarity_of(model: Any) -> dict[str, Any]:
    """Return what compares the embeddings of a model; {} for cosines."""
    similarity = getattr(model, "similarity", None)
    return {} if similarity is None else describe_similarity(similarity)
