"""Embeddings of images and captions, and their retrieval metrics."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.data.dataset import EvaluationBatch
from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval.metrics import retrieval_metrics
from vl_plugins.retrieval.ranks import retrieval_ranks
from vl_plugins.retrieval.similarities import Similarity

__all__ = ["Encoded", "encode_batches", "join", "validation_metrics"]


class Encoded(NamedTuple):
    """Embeddings in float32 on the CPU, of unit length.

    Attributes:
        images: (I, D), or sets (I, K, D).
        captions: (C, D), or sets (C, K, D).
        image_of_caption: (C,) int64, index of each caption's image.
        start: index of the first image.
    """

    images: Tensor
    captions: Tensor
    image_of_caption: Tensor
    start: int


@torch.inference_mode()
def encode_batches(
    model: Any,
    batches: Iterable[EvaluationBatch],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[Encoded]:
    """Encode every image and every caption once.

    Args:
        model: a module with ``encode_image`` and ``encode_text``, both taking ``normalize``, in evaluation mode.
        batches: of :func:`~vl_plugins.data.dataset.evaluation_loader`.
        device: where the model is.
        dtype: of the images; as they are by default.
        autocast: makes the context in which the model runs.
    """
    for images, texts, image_of_caption, start in batches:
        with autocast():
            image_features = model.encode_image(
                images.to(device=device, dtype=dtype, non_blocking=True), normalize=True
            )
            caption_features = model.encode_text(texts.to(device=device, non_blocking=True), normalize=True)
        embeddings = image_features.float().cpu(), caption_features.float().cpu()
        yield Encoded(*embeddings, image_of_caption, start)


def join(batches: Iterable[Encoded]) -> Encoded:
    """Return all batches as one, in source order."""
    batches = sorted(batches, key=lambda batch: batch.start)
    return Encoded(
        torch.cat([batch.images for batch in batches]),
        torch.cat([batch.captions for batch in batches]),
        torch.cat([batch.image_of_caption + batch.start for batch in batches]),
        batches[0].start,
    )


def validation_metrics(encoded: Encoded, similarity: Similarity | None = None) -> dict[str, float]:
    """Return :func:`vl_plugins.retrieval.retrieval_metrics` of all images and captions, recalls in percent.

    Of embedding sets there are besides, each a mean in [0, 1], the circular variances ``image_circular_variance`` and
    ``caption_circular_variance`` (Kim et al. 2023, Table 3).

    Args:
        encoded: what to rank.
        similarity: of sets, on the CPU; None for the cosine of vectors.
    """
    metrics = {
        **retrieval_metrics(retrieval_ranks(encoded.images, encoded.captions, encoded.image_of_caption, similarity)),
        "num_samples": len(encoded.images),
        "num_captions": len(encoded.captions),
    }
    if encoded.images.ndim == 3:
        metrics["image_circular_variance"] = circular_variance(encoded.images).mean().item()
        metrics["caption_circular_variance"] = circular_variance(encoded.captions).mean().item()
    return metrics
