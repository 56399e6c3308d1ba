"""Retrieval metrics of a model in training, by either host."""

import copy
import logging
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from vl_plugins.integrations.encoding import encode_batches
from vl_plugins.retrieval import format_metrics_table
from vl_plugins.retrieval.encoding import join, validation_metrics

__all__ = ["log_metrics", "validate"]

logger = logging.getLogger(__name__)


def validate(
    model: nn.Module, batches: Iterable, device: torch.device | str, precision: str = "fp32"
) -> dict[str, float]:
    """Return :func:`vl_plugins.retrieval.encoding.validation_metrics`, computed on the CPU.

    Args:
        model: in evaluation mode, with ``encode_image`` and ``encode_text``, and a ``similarity`` if these return sets.
        batches: of a reader for evaluation.
        device: where the model is.
        precision: as open_clip's ``--precision``.
    """
    encoded = join(encode_batches(model, batches, device, precision))
    similarity = getattr(model, "similarity", None)
    # open_clip lets GPUs round products to TF32, which moves ranks.
    compare = None if similarity is None else copy.deepcopy(similarity).cpu().compute_mat
    return validation_metrics(encoded, compare)


def log_metrics(metrics: Mapping[str, float], epoch: int) -> None:
    """Log a table of the metrics of an epoch."""
    logger.info(f"epoch {epoch}: {metrics['num_samples']} images, {metrics['num_captions']} captions")
    for line in format_metrics_table({f"epoch {epoch}": metrics}).splitlines():
        logger.info(line)
    if "image_circular_variance" in metrics:
        images, captions = metrics["image_circular_variance"], metrics["caption_circular_variance"]
        logger.info(f"circular variance of the sets: images {images:.4g}, captions {captions:.4g}")
