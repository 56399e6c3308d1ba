"""Embeddings of data by a checkpoint, in memory or in a folder, in one process or split among several."""

import contextlib
import datetime
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import vl_plugins
from vl_plugins.data.collection import Collection
from vl_plugins.data.dataset import EvaluationBatch, ShardDataset, evaluation_loader
from vl_plugins.data.encodable import CaptionFile, Encodable, PictureFolder
from vl_plugins.data.files import sha256
from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.data.one_side import CaptionDataset, PictureDataset
from vl_plugins.distributed import world_size
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.encoding import encode_batch, features_of, gather_batches, similarity_of
from vl_plugins.integrations.loading import find_checkpoint, load_model
from vl_plugins.retrieval.feature_folders import UnfinishedFolder
from vl_plugins.retrieval.features import Features, OneSide, check_embeddings

__all__ = ["Encoder", "encode_checkpoint", "encode_to_folder"]

LONGEST_WAIT = datetime.timedelta(days=1)
PART_ROWS = 1024  # images in a part of a folder, or captions without images


def encode_checkpoint(
    checkpoint: str | Path,
    data: Encodable,
    model: str | None = None,
    **options: Any,
) -> Features | OneSide | None:
    """Encode every image and every caption once; the processes of torch's group share out the batches.

    Args:
        checkpoint, data, model, options: of :class:`Encoder`.

    Returns:
        Unit vectors or sets in float32 on the CPU, in the order of the data. None in all processes but the first.

    Raises:
        UserError: the checkpoint or the data cannot be read.
    """
    encoder = Encoder(checkpoint, data, model, **options)
    rank, processes = _rank(), world_size()
    encoded = list(encoder.encode(encoder.starts[rank::processes]))
    encoded = gather_batches(encoded)
    if rank:
        return None
    if isinstance(data, Collection):
        ids = {"image_ids": data.image_ids, "caption_ids": data.caption_ids}
        return features_of(encoder.model, encoded, encoder.description(), **ids)
    encoded = sorted(encoded, key=lambda batch: batch.start)
    description = {**similarity_of(encoder.model), **encoder.description()}
    if isinstance(data, PictureFolder):
        images = torch.cat([batch.images for batch in encoded])
        return OneSide(side="image", embeddings=images, ids=data.image_ids, description=description)
    texts = torch.cat([batch.texts for batch in encoded])
    return OneSide(side="caption", embeddings=texts, ids=data.caption_ids, description=description)


def encode_to_folder(
    checkpoint: str | Path,
    data: Encodable,
    folder: str | Path,
    model: str | None = None,
    **options: Any,
) -> None:
    """Encode into a folder of features, part by part; the processes of torch's group share out the parts.

    A run that was stopped continues with the parts that are missing. A part has whole batches, and so the embeddings
    are those of :func:`encode_checkpoint`, bit by bit.

    Args:
        checkpoint, data, model, options: of :class:`Encoder`.
        folder: on a disk that all processes see; see :class:`~vl_plugins.retrieval.feature_folders.UnfinishedFolder`.

    Raises:
        UserError: the checkpoint or the data cannot be read, or the folder has parts of other settings.
    """
    encoder = Encoder(checkpoint, data, model, **options)
    rank, processes = _rank(), world_size()
    plan = _plan(encoder)
    unfinished = UnfinishedFolder(folder, [part.rows for part in plan])
    with contextlib.ExitStack() as stack:
        description = {}
        if rank == 0:
            description = {**similarity_of(encoder.model), **encoder.description()}
            settings = {**description, "batch_size": encoder.batch_size, "part_rows": PART_ROWS}
            stack.enter_context(unfinished.begun(settings | {"device": torch.device(encoder.device).type}))
        _wait(processes)
        missing = unfinished.missing()
        complete = len(plan) - len(missing)
        if rank == 0 and complete:
            print(f"continues: {complete:,} of {len(plan):,} parts are there", file=sys.stderr)
        # Which parts are this process's does not depend on those that are there.
        own_parts = [number for number in missing if number % processes == rank]
        own_starts: list[int] = []
        for number in own_parts:
            own_starts += plan[number].starts
        batches = encoder.encode(own_starts)
        for number in own_parts:
            encoded = list(itertools.islice(batches, len(plan[number].starts)))
            unfinished.write(number, _arrays(encoded))
        _wait(processes)
        if rank == 0:
            values: dict[str, Any] = {"description": description}
            for name, ids in (("image_ids", data.image_ids), ("caption_ids", data.caption_ids)):
                if ids is not None:
                    values[name] = list(ids)
            owners = data.image_of_caption.numpy() if isinstance(data, Collection) else None
            unfinished.finish(values, owners)


class Encoder:
    """A model and the data that it encodes, batch by batch.

    Args:
        checkpoint, model, device, precision, options: as for :func:`vl_plugins.integrations.loading.load_model`; or
            ``checkpoint`` is the folder of a run, see
            :func:`~vl_plugins.integrations.loading.find_checkpoint`.
        data: of :func:`vl_plugins.data.read_collection` or :func:`vl_plugins.data.encodable.read_encodable`.
        name: of the data, for the description.
        batch_size: images in a batch, or captions where there are no images.
        workers: loader processes.
        max_image_pixels: see :class:`vl_plugins.data.ShardDataset`.

    Attributes:
        starts: index of the first image of each batch, or of the first caption.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        data: Encodable,
        model: str | None = None,
        *,
        name: str = "",
        batch_size: int = 64,
        workers: int = 1,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        **options: Any,
    ):
        self.checkpoint, self.model_name, self.name, self.data = find_checkpoint(checkpoint), model, name, data
        self.batch_size, self.workers, self.device, self.precision = batch_size, workers, device, precision
        self.model, transform, tokenizer = load_model(
            self.checkpoint, model, device=device, precision=precision, **options
        )
        inputs = getattr(self.model, "inputs", "images")
        self.dataset: Any
        if isinstance(data, CaptionFile):
            self.dataset = CaptionDataset(data, tokenizer)
        elif isinstance(data, PictureFolder):
            if inputs != "images":
                raise UserError(f"checkpoint {self.checkpoint} takes {inputs}, and {data.folder} has pictures")
            self.dataset = PictureDataset(data, transform, max_image_pixels)
        else:
            self.dataset = ShardDataset(data, transform, tokenizer, inputs=inputs, max_image_pixels=max_image_pixels)
        self.starts = range(0, len(self.dataset), batch_size)

    def encode(self, starts: Sequence[int]) -> Iterator[EvaluationBatch]:
        """Yield batches, by their first images, with embeddings as :func:`encode_batches` does; show a bar."""
        batches = evaluation_loader(self.dataset, self.batch_size, workers=self.workers, starts=starts)
        # None shows the bar in a terminal only.
        bar = tqdm(batches, desc=f"encoding {self.checkpoint}", unit="batch", disable=True if _rank() else None)
        with user_errors(f"checkpoint {self.checkpoint}", *MALFORMED_CONTENT):  # model and tokenizer may not fit
            for batch in bar:
                yield encode_batch(self.model, batch, self.device, self.precision)

    def description(self) -> dict[str, Any]:
        """Return what a file of features says of its origin."""
        hashes = {}
        if Path(self.checkpoint).is_file():
            hashes["checkpoint_sha256"] = sha256(self.checkpoint)
        hashes["shards_sha256"] = self.data.digest()
        return {
            "model": self.model_name,
            "checkpoint": str(self.checkpoint),
            "shards": self.name,
            "precision": self.precision,
            "versions": f"vl_plugins {vl_plugins.__version__}, torch {torch.__version__}",
            "splits": list(self.data.splits),
            **hashes,
        }


class _Part(NamedTuple):
    """The first images of the batches of a part, or their first captions, and its number of rows by array."""

    starts: Sequence[int]
    rows: dict[str, int]


def _plan(encoder: Encoder) -> list[_Part]:
    """Return the parts of a folder, each of whole batches."""
    data = encoder.data
    batches_per_part = max(1, PART_ROWS // encoder.batch_size)
    plan = []
    for first in range(0, len(encoder.starts), batches_per_part):
        starts = encoder.starts[first : first + batches_per_part]
        end = min(starts[-1] + encoder.batch_size, len(data))
        if isinstance(data, CaptionFile):
            rows = {"caption_features": end - starts[0]}
        else:
            rows = {"image_features": end - starts[0]}
        if isinstance(data, Collection):
            rows["caption_features"] = int(data.first_caption[end] - data.first_caption[starts[0]])
        plan.append(_Part(starts, rows))
    return plan


def _arrays(encoded: Sequence[EvaluationBatch]) -> dict[str, np.ndarray]:
    """Return the embeddings of batches as arrays; raise ``UserError`` for one that is not a finite unit vector."""
    arrays = {}
    if encoded[0].images is not None:
        images = torch.cat([batch.images for batch in encoded])
        check_embeddings("image", images, None)
        arrays["image_features"] = images.numpy()
    if encoded[0].texts is not None:
        texts = torch.cat([batch.texts for batch in encoded])
        check_embeddings("caption", texts, None)
        arrays["caption_features"] = texts.numpy()
    return arrays


def _rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def _wait(processes: int) -> None:
    """Wait for the other processes, of which the slowest may have much more to do."""
    if processes > 1:
        dist.monitored_barrier(timeout=LONGEST_WAIT)
