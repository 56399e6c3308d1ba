"""Embeddings of shards by a model, in one process or split among several, and its retrieval metrics in training."""

import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import vl_plugins
from vl_plugins.data import Collection, EvaluationBatch, ShardDataset, evaluation_loader
from vl_plugins.errors import UserError, user_errors
from vl_plugins.integrations.loading import AUTOCAST, INPUTS, load_model
from vl_plugins.retrieval import format_metrics_table
from vl_plugins.retrieval.features import Features, describe_similarity
from vl_plugins.retrieval.protocols import evaluate

__all__ = ["encode_checkpoint", "find_checkpoint", "hash_shards", "log_metrics", "validate"]

logger = logging.getLogger(__name__)

PLAIN = (bool, int, float, str, tuple, type(None))
PROBE = "A photo of two dogs, no. 7, it's 4:30 p.m."  # a tokenizer is known by the tokens of this text


def encode_checkpoint(
    checkpoint: str | Path,
    shards: str | Sequence[str],
    model: str | None = None,
    *,
    model_config: str | Path | None = None,
    batch_size: int = 64,
    workers: int = 1,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
    processes: tuple[int, int] = (0, 1),
    progress: str | None = None,
) -> Features | None:
    """Encode every image and every caption of shards once; the processes share out the batches.

    Args:
        checkpoint, model, model_config, device, precision: as for :func:`vl_plugins.integrations.loading.load_model`;
            or ``checkpoint`` is the folder of a run, see :func:`find_checkpoint`.
        shards: as for :func:`vl_plugins.data.expand_shards`.
        batch_size: images in a batch.
        workers: loader processes.
        processes: rank of this process and number of processes.
        progress: label of a progress bar on standard error; None for no bar.

    Returns:
        Unit vectors or sets in float32 on the CPU, in the order of the shards, with hashes of weights, configuration,
        preprocessing and shards in their description. None in all processes but the first.

    Raises:
        UserError: the checkpoint or a shard does not exist or cannot be read.
    """
    file, (rank, world_size) = find_checkpoint(checkpoint), processes
    loaded, transform, tokenizer = load_model(
        file, model, model_config=model_config, device=device, precision=precision
    )
    dataset = ShardDataset(shards, transform, tokenizer, inputs=getattr(loaded, "inputs", "images"))
    collection = dataset.collection
    batches = evaluation_loader(dataset, batch_size, workers=workers, rank=rank, world_size=world_size)
    bar = tqdm(batches, desc=progress, unit="batch", disable=progress is None or rank > 0)
    with user_errors(f"checkpoint {file}"):  # its model and tokenizer may not fit together
        encoded = _gather(_encode_batches(loaded, bar, device, precision), rank, world_size)
    if rank > 0:
        return None
    weights = {name: value for name, value in loaded.state_dict().items() if isinstance(value, Tensor)}
    description = {
        **({} if model is None else {"model": model}),
        "checkpoint": str(file),
        "shards": shards,
        "precision": precision,
        "versions": f"vl_plugins {vl_plugins.__version__}, torch {torch.__version__}",
        "splits": list(collection.splits),
        "weights_sha256": _hash(part for name in sorted(weights) for part in (name, weights[name])),
        "configuration_sha256": _hash(_settings(loaded)),
        "preprocessing_sha256": _hash([repr(transform), repr(tokenizer), tokenizer([PROBE])]),
        "shards_sha256": hash_shards(collection),
    }
    names = {"image_ids": collection.image_ids, "caption_ids": collection.caption_ids}
    return _features(loaded, encoded, description, **names)


def find_checkpoint(checkpoint: str | Path) -> str | Path:
    """Return the best or else the newest checkpoint of a run's folder; anything else is returned as it is.

    The trainer for pytorch-metric-learning keeps the best one, ``best.pt``; open_clip those of epochs,
    ``checkpoints/epoch_10.pt``, of which the newest is taken.

    Raises:
        UserError: the folder has no checkpoint.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return checkpoint
    # epoch_9, epoch_10, epoch_latest
    epochs = sorted(folder.glob("checkpoints/epoch_*.pt"), key=lambda file: (len(file.name), file.name))
    found = [file for file in (folder / "latest.pt", *epochs, folder / "best.pt") if file.is_file()]
    if not found:
        raise UserError(f"{folder} is no run folder with checkpoints: no best.pt, latest.pt or checkpoints/epoch_*.pt")
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder}: the checkpoint is {found[-1]}", file=sys.stderr)
    return found[-1]


def hash_shards(collection: Collection) -> str:
    """Return a SHA-256 of the captions and of the sizes of the images, however these are divided into shards."""
    return _hash(map(torch.from_numpy, (collection.sizes, collection.caption_hashes)))


def validate(
    model: nn.Module, batches: Iterable[EvaluationBatch], device: str | torch.device, precision: str = "fp32"
) -> dict[str, float]:
    """Return the metrics of all images and captions, as :func:`vl_plugins.retrieval.evaluate` does, on the CPU.

    Args:
        model: in evaluation mode, with ``encode_image`` and ``encode_text``, and a ``similarity`` if these return sets.
        batches: of :func:`vl_plugins.data.evaluation_loader`.
        device: where the model is.
        precision: as open_clip's ``--precision``.

    Raises:
        UserError: the data cannot be read, or an embedding is not a finite unit vector.
    """
    # On the CPU, because open_clip lets GPUs round products to TF32, which moves ranks.
    return evaluate([_features(model, _encode_batches(model, batches, device, precision), {})]).metrics["plain"]


def log_metrics(metrics: Mapping[str, float], epoch: int) -> None:
    """Log a table of the metrics of an epoch."""
    logger.info(f"epoch {epoch}: {metrics['num_samples']} images, {metrics['num_captions']} captions")
    for line in format_metrics_table({f"epoch {epoch}": metrics}).splitlines():
        logger.info(line)
    if "image_circular_variance" in metrics:
        images, captions = metrics["image_circular_variance"], metrics["caption_circular_variance"]
        logger.info(f"circular variance of the sets: images {images:.4g}, captions {captions:.4g}")


@torch.inference_mode()
def _encode_batches(
    model: Any, batches: Iterable[EvaluationBatch], device: Any, precision: str
) -> list[EvaluationBatch]:
    """Return the batches with embeddings, in float32 on the CPU, in place of images and texts."""
    encoded, autocast = [], AUTOCAST.get(precision)
    for batch in batches:
        with torch.autocast(torch.device(device).type, autocast, enabled=autocast is not None):
            images = batch.images.to(device=device, dtype=INPUTS.get(precision), non_blocking=True)
            images = model.encode_image(images, normalize=True)
            texts = model.encode_text(batch.texts.to(device=device, non_blocking=True), normalize=True)
        encoded.append(batch._replace(images=images.float().cpu(), texts=texts.float().cpu()))
    return encoded


def _gather(encoded: list[EvaluationBatch], rank: int, world_size: int) -> list[EvaluationBatch]:
    """Return the batches of all processes to the first one; others get nothing."""
    if world_size == 1:
        return encoded
    counts = [0] * world_size
    dist.all_gather_object(counts, len(encoded))
    gathered = []
    # One batch per process at a time, so that no message grows with the shards.
    for number in range(max(counts)):
        received: list[EvaluationBatch | None] = [None] * world_size if rank == 0 else []
        dist.gather_object(encoded[number] if number < len(encoded) else None, received or None)
        gathered += received
    return [batch for batch in gathered if batch is not None]


def _features(model: Any, encoded: Sequence[EvaluationBatch], description: dict[str, Any], **names: Any) -> Features:
    encoded = sorted(encoded, key=lambda batch: batch.start)
    similarity = getattr(model, "similarity", None)
    return Features(
        images=torch.cat([batch.images for batch in encoded]),
        captions=torch.cat([batch.texts for batch in encoded]),
        image_of_caption=torch.cat([batch.image_of_caption + batch.start for batch in encoded]),
        description={**({} if similarity is None else describe_similarity(similarity)), **description},
        **names,
    )


def _settings(model: nn.Module) -> Iterator[str]:
    """Yield the type and the plain attributes of each module, such as a number of heads, which no weight tells."""
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, PLAIN) and key[0] != "_"}
        yield f"{name} {type(module).__name__} {module.extra_repr()} {sorted(plain.items())}"


def _hash(parts: Iterable[str | Tensor]) -> str:
    """Return the SHA-256 of tensors and texts, without the addresses of objects in memory."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", part).encode())
    return digest.hexdigest()
