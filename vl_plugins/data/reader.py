"""Readers of shards: batches for training with one or several captions per image, and for evaluation in source order.

Both readers are iterable data sets that already yield batches, for ``DataLoader(reader, batch_size=None)`` or
``webdataset.WebLoader``. They can be pickled when the image transform and the tokenizer can.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from vl_plugins.data.batching import SAME_GROUP
from vl_plugins.data.captions import parse_captions_per_image
from vl_plugins.data.decoding import (
    ShardSlice,
    SliceSample,
    decode_input,
    parse_samples,
    raise_error,
    read_slices,
    stack_inputs,
)
from vl_plugins.data.manifest import MANIFEST_FILE, SIZES_FILE
from vl_plugins.data.shard_files import INPUTS, expand_shards
from vl_plugins.data.shard_info import read_shard_info, read_shard_sizes
from vl_plugins.data.training_batches import (
    EpochCounter,
    ImageTransform,
    SharedEpoch,
    Tokenizer,
    TrainingPipeline,
    worker_number,
)
from vl_plugins.utils.errors import UserError, check_name
from vl_plugins.utils.optional import require

__all__ = ["EvaluationPipeline", "batch_loader", "evaluation_pipeline", "training_pipeline"]

logger = logging.getLogger(__name__)


def training_pipeline(
    shards: str | Sequence[str],
    image_transform: ImageTransform,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    inputs: str = "images",
    captions_per_image: str | int = "random",
    num_captions: int | None = None,
    seed: int = 0,
    epoch: int | EpochCounter = 0,
    num_samples: int | None = None,
    shuffle_buffer: int = 5000,
    with_labels: bool = False,
    with_keys: bool = False,
    max_image_pixels: int | None = None,
    allow_duplicate_captions: bool = False,
    same_group: str = "apart",
    on_error: str = "skip",
    rank: int | None = None,
    world_size: int | None = None,
) -> TrainingPipeline:
    """Return a reader of shuffled batches ``images (B, 3, H, W), texts (k*B, L)``.

    With ``inputs="features"``, ``images`` is (B, N, W): W values for each of N regions, or cells of a grid. N is the
    largest of the batch; an image with fewer has rows of zeros at the end, and a row of zeros is a region that is not
    there.

    ``texts[k*i : k*i + k]`` are the k captions of ``images[i]``; with k = 1 the batches are what open_clip's own
    reader yields. An epoch has ``len(reader)`` batches in every process, which is the number of images divided by
    ``batch_size * world_size`` and rounded down, with any number of loader workers and of shards. Within
    an epoch every image occurs at most once over all processes and workers, so it never meets itself in a batch,
    gathered or not. The less than ``batch_size * world_size`` images that are left over are others in every epoch.

    Order and captions depend on ``seed``, the epoch, the rank, and the number of processes and workers; which captions
    an image shows depends on ``seed``, the epoch and its key alone, with the exception below. So do the random numbers
    that the image transform draws from torch, NumPy's legacy generator and ``random``; the generators themselves are
    left as they are.

    Captions of different images that :func:`vl_plugins.data.captions.normalize_caption` makes equal do not meet in a
    batch of one process, where each would be a false negative of the other. An image whose caption is there already
    waits for one of the next batches of its worker. If there is none, it shows another of its captions; with
    ``"first"`` and ``"all"``, or where all of them are there, it is left out of this epoch, and a warning says how many
    such images there are.

    Images of one group, ``group`` of their ``json`` in one data set, do not meet in a batch of one process either. With
    ``same_group="positive"`` they may, whatever their captions, and have the same label in all processes.

    A sample or shard that cannot be read is logged as a warning that names it and left out, or is an error: see
    ``on_error``. A worker that lacks images makes up the number of its batches with images that its process has shown
    before, so that all processes take the same number of steps; at the end of the epoch it warns how many there were.

    Args:
        shards: shards, or a pattern for :func:`expand_shards`. Samples have ``jpg``, ``jpeg``, ``png`` or ``webp`` (or
            ``npy``, see ``inputs``), and ``json`` with a list ``captions`` or otherwise ``txt``.
        image_transform: from an RGB ``PIL.Image`` to a tensor (3, H, W). With ``inputs="features"``, from a float32
            array (N, W) to such a tensor, as ``torch.from_numpy`` is; N may change.
        tokenizer: from a list of n strings to a tensor (n, L). It is called once for each batch, so L need only be the
            same within a batch.
        batch_size: number B of images in a batch.
        inputs: what is read of an image: ``"images"``, its picture, or ``"features"``, an array file ``npy`` of them
            (:func:`vl_plugins.data.feature_arrays.decode_features`).
        captions_per_image: how to choose captions. ``"random"``: one at random. ``"first"``: the first. A number k:
            k different ones at random; an image that has fewer repeats them in turn. ``"all"``: all in source order,
            where k is ``num_captions`` and an image that has fewer repeats them in turn.
        num_captions: k for ``"all"``; by default the largest number of captions of an image, from ``manifest.json``.
        seed: of order and captions.
        epoch: number of the epoch: an object with ``get_value()`` that loader workers see, such as open_clip's
            ``SharedEpoch``, or an int to start with; ``reader.set_epoch(n)`` changes it.
        num_samples: number of images in an epoch; by default all. Needed for shards without a ``sizes.json`` beside
            them, and for URLs that webdataset opens with a program, such as ``https://``. Those are read whole, each by
            one worker of one process, so there must be one for each process; a worker whose shards end early repeats
            them, and one whose shards are larger leaves a part out.
        shuffle_buffer: number of samples held by each worker to draw the next one from. The first is drawn when a
            twentieth of them has been read; the rest follows, two for each one drawn. At most as many again, or
            ``batch_size`` if that is more, wait for a batch without their captions. All of them are encoded images, or
            array files, which take more: 36 regions of 2,048 float32 are 0.3 MB.
        with_labels: whether batches are ``images, texts, labels (B,)``, with an int64 label that every image has for
            itself and keeps in every epoch: its position in ``shards`` when their sizes are known. Repeat it for
            the captions: ``labels.repeat_interleave(k)``. With ``same_group="positive"`` images of one group have a
            label together: a negative number, 63 bits of a hash of data set and group.
        with_keys: whether batches end with a list of the keys of the images.
        max_image_pixels: a picture with more of them, by its header, counts as one that cannot be read.
        allow_duplicate_captions: whether equal captions of different images may meet in a batch.
        same_group: ``"apart"`` keeps images of one group in different batches, ``"positive"`` takes them for positives
            of each other.
        on_error: ``"skip"`` leaves out what cannot be read; ``"raise"`` stops at it while iterating.
        rank: number of this process; by default from the environment or ``torch.distributed``.
        world_size: number of processes; by default likewise.

    Raises:
        UserError: a shard does not exist or is listed twice; their number of images is not known, or too small for one
            batch in every process; ``captions_per_image`` is malformed, or ``"all"`` and k is not known; ``inputs`` or
            ``same_group`` is none of the two; ``same_group`` is ``"positive"`` without groups or labels. While
            iterating: no batch can be made, because nothing can be read or too many images share their captions or
            groups; the features of a batch are not of the same W; with ``on_error="raise"``, a sample or shard cannot
            be read, or a shard has fewer samples than ``sizes.json`` says. From a worker of a ``DataLoader`` it arrives
            as a ``UserError`` too.
    """
    check_name("inputs", inputs, INPUTS)
    check_name("same_group", same_group, SAME_GROUP)
    if on_error not in ("skip", "raise"):
        raise UserError(f"on_error must be 'skip' or 'raise', got {on_error!r}")
    shards = expand_shards(shards)
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    selection = parse_captions_per_image(captions_per_image)
    if selection != "all":
        num_captions = selection if isinstance(selection, int) else 1
    elif num_captions is None:
        info = read_shard_info(shards)
        if info is None:
            raise UserError(f"captions_per_image 'all' needs a {MANIFEST_FILE} beside the shards, or num_captions")
        num_captions = info.max_captions

    if same_group == "positive":
        if not with_labels:
            raise UserError(
                "same_group 'positive' needs with_labels=True: equal labels are what makes images positives"
            )
        info = read_shard_info(shards)
        if info is not None and not info.has_groups:
            raise UserError(
                "same_group 'positive' needs shards with groups: write them with `vl-plugins shards --group-key`"
            )

    sizes = read_shard_sizes(shards)
    if sizes is None and num_samples is None:
        raise UserError(
            f"the number of images in {shards[0]} is not known: give the number of samples of an epoch, or put a "
            f"{SIZES_FILE} beside it, which is read in folders and at URLs of fsspec, not with pipe:, https:// or gs://"
        )
    if sizes is not None:
        available = sum(sizes)
        if num_samples is not None and num_samples > available:
            logger.warning("an epoch has the %d images of the shards, not %d", available, num_samples)
        num_samples = min(num_samples or available, available)
    default_rank, default_world_size, *_ = require("webdataset", extra="data").utils.pytorch_worker_info()
    rank = default_rank if rank is None else rank
    world_size = default_world_size if world_size is None else world_size
    if num_samples < batch_size * world_size:
        raise UserError(
            f"{num_samples} images make no full batch of {batch_size} for each of {world_size} processes; "
            f"the batch size can be at most {num_samples // world_size}"
        )
    if sizes is None and len(shards) < world_size:
        raise UserError(
            f"{len(shards)} shards of unknown size cannot be shared by {world_size} processes: put a {SIZES_FILE} "
            "beside them, or write smaller shards with --samples-per-shard"
        )
    return TrainingPipeline(
        shards=shards,
        sizes=sizes,
        num_batches=num_samples // (batch_size * world_size),
        image_transform=image_transform,
        tokenizer=tokenizer,
        batch_size=batch_size,
        inputs=inputs,
        selection=selection,
        num_captions=num_captions,
        seed=seed,
        epoch=SharedEpoch(epoch) if isinstance(epoch, int) else epoch,
        shuffle_buffer=shuffle_buffer,
        with_labels=with_labels,
        with_keys=with_keys,
        max_image_pixels=max_image_pixels,
        allow_duplicate_captions=allow_duplicate_captions,
        same_group=same_group,
        on_error=on_error,
        rank=rank,
        world_size=world_size,
    )


def evaluation_pipeline(
    shards: str | Sequence[str],
    image_transform: ImageTransform,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    inputs: str = "images",
    max_captions: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> "EvaluationPipeline":
    """Return a reader of every image and all its captions once, in source order.

    Batches are ``images (B, 3, H, W), texts (C, L), image_of_caption (C,), positions (B,)``: C is the number of
    captions of all B images, ``image_of_caption`` the int64 index in the batch of each caption's image, and
    ``positions`` the int64 positions of the images in ``shards``. The last batch may be smaller. With
    ``inputs="features"``, ``images`` is (B, N, W) as for :func:`training_pipeline`.

    Worker w of n makes the batches w, w + n, w + 2n, ... of its process, and a ``DataLoader`` takes from its workers in
    turn, so batches arrive in source order with any number of workers.

    Args:
        shards: as for :func:`training_pipeline`, in the order of evaluation.
        image_transform: as for :func:`training_pipeline`.
        tokenizer: likewise.
        batch_size: number B of images in a batch.
        inputs: as for :func:`training_pipeline`.
        max_captions: only the first so many captions of each image; all by default.
        rank: number of this process, of those that share the batches.
        world_size: how many they are: process r makes the batches r, r + world_size, ...

    Raises:
        UserError: a shard does not exist, or an argument is out of range. While iterating: a sample or shard cannot be
            read, since results on the remaining ones could not be compared with others; or the features of a batch are
            not of the same W.
    """
    check_name("inputs", inputs, INPUTS)
    for name, value in (("batch_size", batch_size), ("max_captions", max_captions)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    shards = expand_shards(shards)
    return EvaluationPipeline(
        shards=shards,
        sizes=read_shard_sizes(shards),
        image_transform=image_transform,
        tokenizer=tokenizer,
        batch_size=batch_size,
        inputs=inputs,
        max_captions=max_captions,
        rank=rank,
        world_size=world_size,
    )


@dataclass(eq=False, kw_only=True)
class EvaluationPipeline(IterableDataset):
    """Made by :func:`evaluation_pipeline`."""

    shards: list[str]
    sizes: list[int] | None
    image_transform: ImageTransform
    tokenizer: Tokenizer
    batch_size: int
    inputs: str
    max_captions: int | None
    rank: int
    world_size: int

    def __len__(self) -> int:
        """Number of batches of this process, over all workers of a loader."""
        if self.sizes is None:
            raise TypeError(f"the length is not known without a {SIZES_FILE} beside the shards")
        batches = ceil(sum(self.sizes) / self.batch_size)
        return len(range(self.rank, batches, self.world_size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        webdataset = require("webdataset", extra="data")
        worker, num_workers = worker_number()
        batches = webdataset.batched(self.batch_size, collation_fn=None)(self._samples())
        first, step = self.rank + worker * self.world_size, num_workers * self.world_size
        for number, batch in islice(enumerate(batches), first, None, step):
            samples = list(parse_samples(batch, self.inputs, raise_error))
            captions = [sample.captions[: self.max_captions] for sample in samples]
            images = [self.image_transform(decode_input(sample, self.inputs, raise_error)) for sample in samples]
            images = stack_inputs(images, samples, self.inputs)
            texts = self.tokenizer(list(chain.from_iterable(captions)))
            positions = torch.arange(len(samples))
            image_of_caption = positions.repeat_interleave(torch.tensor(list(map(len, captions))))
            yield images, texts, image_of_caption, number * self.batch_size + positions

    def _samples(self) -> Iterator[SliceSample]:
        for url, size in zip(self.shards, self.sizes or [None] * len(self.shards), strict=True):
            read = 0
            for sample in read_slices([ShardSlice(url, 0, None, 0)], self.inputs, raise_error):
                yield sample
                read += 1
            if size not in (None, read):
                raise_error(f"the end of shard {url}", ValueError(f"it ends after {read} samples, expected {size}"))


def batch_loader(batches: IterableDataset, workers: int) -> DataLoader:
    """Return a loader of a reader's batches, whose processes serve all epochs.

    It leaves torch's random numbers alone, so those of a training do not depend on where it started: a loader draws one
    whenever it starts processes, or reads in none.

    Args:
        batches: a reader of :func:`training_pipeline` or :func:`evaluation_pipeline`.
        workers: number of loader processes; 0 reads in this one.
    """
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator(),
    )
