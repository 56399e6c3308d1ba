"""Retrieval metrics of a saved open_clip model on shards, outside of training."""

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from vl_plugins.data.reader import evaluation_pipeline, expand_shards
from vl_plugins.integrations.open_clip.checkpoints import load_model
from vl_plugins.integrations.open_clip.validation import validation_metrics

__all__ = ["evaluate_checkpoint"]


def evaluate_checkpoint(
    model: str | None,
    checkpoint: str,
    shards: str,
    *,
    max_captions: int | None = None,
    batch_size: int = 64,
    workers: int = 1,
    device: str | None = None,
    precision: str = "fp32",
    progress: bool = False,
) -> dict[str, float]:
    """Return :func:`vl_plugins.retrieval.retrieval_metrics` of an open_clip model on shards, recalls in percent.

    Args:
        model: an open_clip model name, or one of ``configs/models``; None for a checkpoint of a model with heads.
        checkpoint: a file that open_clip's trainer wrote, a file of weights, or a pretrained tag of the model.
        shards: shards of ``vl-plugins shards``, in brace notation.
        max_captions: only the first so many captions of each image.
        precision: as open_clip's ``--precision``.
        progress: show a progress bar on standard error.

    Raises:
        UserError: an unknown model or tag, a file that is not there or does not fit the model.
    """
    urls = expand_shards(shards)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded, transform, tokenizer = load_model(checkpoint, model, device=device, precision=precision)
    pipeline = evaluation_pipeline(urls, transform, tokenizer, batch_size, max_captions=max_captions)
    batches = DataLoader(pipeline, batch_size=None, num_workers=workers)
    if progress:
        batches = tqdm(batches, desc="encoding", unit="batch")
    return validation_metrics(loaded, batches, device, precision)
