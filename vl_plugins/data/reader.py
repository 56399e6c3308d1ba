"""Readers of shards: batches for training with one or several captions per image, and for evaluation in source order.

Both readers are iterable data sets that already yield batches, for ``DataLoader(reader, batch_size=None)`` or
``webdataset.WebLoader``. They can be pickled when the image transform and the tokenizer can.
"""

import hashlib
import io
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vl_plugins.data.batching import REMEDIES, SAME_GROUP, DistinctBatches, Group, Sample
from vl_plugins.data.captions import normalise_caption, parse_captions_per_image
from vl_plugins.data.feature_arrays import decode_features
from vl_plugins.data.manifest import (
    MANIFEST_FILE,
    SIZES_FILE,
    ForeignManifestError,
    read_manifest,
    read_sizes,
    to_json,
)
from vl_plugins.data.randomness import seeded
from vl_plugins.data.shard_files import INPUTS, TEXTS, expand_shards, input_of, locate, read_samples
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import MissingExtraError, UserError, check_name
from vl_plugins.utils.optional import require

__all__ = [
    "EvaluationPipeline",
    "ShardInfo",
    "SharedEpoch",
    "TrainingPipeline",
    "batch_loader",
    "check_first_sample",
    "check_shards",
    "evaluation_pipeline",
    "read_captions",
    "read_shard_info",
    "training_pipeline",
]

logger = logging.getLogger(__name__)

ImageTransform = Callable[[Any], Tensor]
Tokenizer = Callable[[list[str]], Tensor]
OnError = Callable[[str, Exception], None]


class EpochCounter(Protocol):
    """What open_clip's ``SharedEpoch`` and ours have in common."""

    def get_value(self) -> int: ...

    def set_value(self, epoch: int) -> None: ...


class SharedEpoch:
    """Number of the epoch, seen by the worker processes of a loader too, forked or spawned."""

    def __init__(self, epoch: int = 0):
        # A tensor, because a `multiprocessing.Value` of one start method cannot be handed to workers of another.
        self._epoch = torch.tensor(epoch).share_memory_()

    def get_value(self) -> int:
        return int(self._epoch)

    def set_value(self, epoch: int) -> None:
        self._epoch.fill_(epoch)


@dataclass(frozen=True)
class ShardInfo:
    """What ``manifest.json`` says of some shards.

    Args:
        num_samples: number of images in these shards.
        num_captions: number of captions in these shards.
        min_captions: smallest number of captions of an image in the splits that the shards belong to.
        max_captions: largest number of captions of an image in the splits that the shards belong to.
        has_groups: whether an image in these splits is in a group.
    """

    num_samples: int
    num_captions: int
    min_captions: int
    max_captions: int
    has_groups: bool = False


def read_shard_info(shards: str | Sequence[str]) -> ShardInfo | None:
    """Return what the ``manifest.json`` beside the shards says of them, or None when a shard has none of ours.

    Args:
        shards: shards, or a pattern for :func:`expand_shards`.

    Raises:
        UserError: a shard does not exist, or a manifest cannot be read or does not list a shard of its folder.
    """
    places = [locate(shard) for shard in expand_shards(shards)]
    if None in places:
        return None
    try:
        manifests = {folder: read_manifest(folder) for folder in dict.fromkeys(place.folder for place in places)}
    except ForeignManifestError:
        return None
    if None in manifests.values():
        return None
    entries, facts = [], []
    for place in places:
        entry = next((entry for entry in manifests[place.folder].values() if place.name in entry["shards"]), None)
        if entry is None:
            manifest = Folder(place.folder) / MANIFEST_FILE
            raise UserError(f"{manifest} does not list {place.name}; write these shards again")
        entries.append(entry)
        facts.append(entry["shards"][place.name])
    return ShardInfo(
        num_samples=sum(fact["samples"] for fact in facts),
        num_captions=sum(fact["captions"] for fact in facts),
        min_captions=min(entry["captions_per_image"]["min"] for entry in entries),
        max_captions=max(entry["captions_per_image"]["max"] for entry in entries),
        has_groups=any(entry.get("groups") for entry in entries),
    )


def check_first_sample(shard: str, *, inputs: str = "images") -> Any:
    """Read the first sample of a shard, to find before training that it holds no captioned images.

    A shard that webdataset opens with a program (``pipe:``, ``https://``) is left alone.

    Args:
        shard: path or URL.
        inputs: as for :func:`training_pipeline`.

    Returns:
        What an image transform would get: an RGB ``PIL.Image`` or features (N, W); None of a shard that is left alone.

    Raises:
        UserError: the shard cannot be read, is empty, or its first sample lacks an image, or features, or captions.
    """
    check_name("inputs", inputs, INPUTS)
    if locate(shard) is None:
        return None
    sample = next(_parse(_read([_Slice(shard, 0, None, 0)], inputs, _stop), inputs, _stop), None)
    if sample is None:
        raise UserError(f"shard {shard} holds no samples")
    return _decode(sample, inputs, _stop)


def check_shards(shards: str | Sequence[str], *, inputs: str = "images") -> None:
    """Read the first sample of each shard, and the headers of the others where it is a file of this machine.

    So a shard that is damaged, empty or cut off is found before training; no data of the other samples are read.
    Shards that webdataset opens with a program are left alone.

    Args:
        shards: as for :func:`training_pipeline`.
        inputs: likewise.

    Raises:
        UserError: a shard does not exist, cannot be read or has another number of samples than its ``sizes.json`` says,
            or its first sample is wrong, as for :func:`check_first_sample`.
    """
    shards = expand_shards(shards)
    for shard, size in zip(shards, _read_sizes(shards) or [None] * len(shards), strict=True):
        check_first_sample(shard, inputs=inputs)
        place = locate(shard)
        if place is None or not place.is_local:
            continue
        try:
            samples = sum(1 for _ in read_samples(shard, members=()))
            if size not in (None, samples):
                raise ValueError(f"it has {samples} samples, {SIZES_FILE} says {size}")
        # Damaged archives raise nearly anything.
        except Exception as error:
            _stop(f"shard {shard}", error)


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
) -> "TrainingPipeline":
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

    Captions of different images that :func:`vl_plugins.data.captions.normalise_caption` makes equal do not meet in a
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

    sizes = _read_sizes(shards)
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
        sizes=_read_sizes(shards),
        image_transform=image_transform,
        tokenizer=tokenizer,
        batch_size=batch_size,
        inputs=inputs,
        max_captions=max_captions,
        rank=rank,
        world_size=world_size,
    )


@dataclass(eq=False, kw_only=True)
class TrainingPipeline(IterableDataset):
    """Made by :func:`training_pipeline`."""

    shards: list[str]
    sizes: list[int] | None
    num_batches: int
    image_transform: ImageTransform
    tokenizer: Tokenizer
    batch_size: int
    inputs: str
    selection: str | int
    num_captions: int
    seed: int
    epoch: EpochCounter
    shuffle_buffer: int
    with_labels: bool
    with_keys: bool
    max_image_pixels: int | None
    allow_duplicate_captions: bool
    same_group: str
    on_error: str
    rank: int
    world_size: int

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads, in workers that persist too."""
        self.epoch.set_value(epoch)

    def __len__(self) -> int:
        """Number of batches of an epoch in this process."""
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        worker, num_workers = _worker()
        epoch = self.epoch.get_value()
        share = self._share(epoch, worker, num_workers)
        unreadable = _Warn()
        on_error = _stop if self.on_error == "raise" else unreadable
        batches = DistinctBatches(
            self._passes(share, epoch, random.Random(f"{self.seed}/{epoch}/{self.rank}/{worker}"), on_error),
            self.batch_size,
            share.num_batches,
            max_waiting=max(self.batch_size, self.shuffle_buffer),
            prepare=lambda sample: self._prepare(sample, epoch, on_error),
            other_captions=lambda sample, taken: self._other_captions(sample, taken, epoch),
            allow_duplicates=self.allow_duplicate_captions,
            same_group=self.same_group,
            source=_names({part.url for part in share.slices}),
        )
        for number, batch in enumerate(batches, 1):
            if number == share.num_batches and batches.left_out:
                self._warn_of_left_out(batches, epoch, worker)
            if number == share.num_batches and batches.repeats and unreadable.places:
                total = share.num_batches * self.batch_size
                logger.warning(
                    "epoch %d, worker %d: %d of %d images were shown, the other %d were repeats, because of %s",
                    epoch,
                    worker,
                    total - batches.repeats,
                    total,
                    batches.repeats,
                    unreadable,
                )
            yield self._collate(batch)

    def _warn_of_left_out(self, batches: DistinctBatches, epoch: int, worker: int) -> None:
        logger.warning(
            "images left out of epoch %d by worker %d: %d, such as %s. No batch had a place for them where another "
            "image does not have the same %s, such as %r; %s lets such images meet",
            epoch,
            worker,
            len(batches.left_out),
            min(batches.left_out.values()),
            batches.obstacle,
            batches.example,
            REMEDIES.get(batches.obstacle),
        )

    def _share(self, epoch: int, worker: int, num_workers: int) -> "_Share":
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.shards)))
        rng.shuffle(order)
        if self.sizes is None:
            mine = order[self.rank :: self.world_size]
            num_workers = min(num_workers, len(mine))
            if worker >= num_workers:
                return _Share([], [], 0)
            first, stop = _share_of(self.num_batches, worker, num_workers)
            # Shards without sizes still need positions that do not overlap.
            slices = [_Slice(self.shards[index], 0, None, index << 32) for index in mine[worker::num_workers]]
            return _Share(slices, slices, stop - first)
        # The shards in this epoch's order form a ring, and every worker of every process takes the next section of it.
        # The first begins anywhere, so that the images left over are not the last ones of a shard every time.
        offsets = [0, *accumulate(self.sizes)]
        ring = [_Slice(self.shards[index], 0, self.sizes[index], offsets[index]) for index in order]
        first, stop = _share_of(self.num_batches, worker, num_workers)
        start = rng.randrange(offsets[-1]) + self.rank * self.num_batches * self.batch_size
        begin, mine, others, end = (start + batches * self.batch_size for batches in (0, first, stop, self.num_batches))
        # What a process repeats is its own: images of other processes could meet themselves in a gathered batch.
        reserve = _section(ring, others, end) + _section(ring, begin, others)
        return _Share(_section(ring, mine, others), reserve, stop - first)

    def _passes(self, share: "_Share", epoch: int, rng: random.Random, on_error: OnError) -> Iterator[Iterator[Sample]]:
        slices = share.slices
        while True:
            shuffled = _shuffled(_read(slices, self.inputs, on_error), self.shuffle_buffer, rng)
            samples = _parse(shuffled, self.inputs, on_error)
            yield (sample._replace(shown=self._choose(sample.key, sample.captions, epoch)) for sample in samples)
            slices = share.reserve

    def _choose(self, key: str, captions: list[str], epoch: int) -> list[str]:
        if self.selection == "all" and len(captions) > self.num_captions:
            raise UserError(f"{key} has {len(captions)} captions, but num_captions is {self.num_captions}")
        if self.selection not in ("first", "all"):
            rng = random.Random(f"{self.seed}/{epoch}/{key}")
            captions = rng.sample(captions, min(self.num_captions, len(captions)))
        return list(islice(cycle(captions), self.num_captions))

    def _other_captions(self, sample: Sample, taken: set[str | Group], epoch: int) -> list[str] | None:
        if self.selection in ("first", "all"):
            return None
        captions = [caption for caption in sample.captions if normalise_caption(caption) not in taken]
        return self._choose(sample.key, captions, epoch) if captions else None

    def _prepare(self, sample: Sample, epoch: int, on_error: OnError) -> tuple[Tensor, Sample] | None:
        image = _decode(sample, self.inputs, on_error, self.max_image_pixels)
        if image is None:
            return None
        with seeded(self.seed, epoch, sample.key):
            image = self.image_transform(image)
        return image, sample._replace(image=b"")  # what has been decoded need not be kept

    def _label(self, sample: Sample) -> int:
        if self.same_group == "apart" or sample.group is None:
            return sample.position
        digest = hashlib.blake2b(to_json(sample.group), digest_size=8).digest()
        return ~(int.from_bytes(digest, "big") >> 1)  # negative, as no position is

    def _collate(self, batch: list[tuple[Tensor, Sample]]) -> tuple[Any, ...]:
        images, samples = zip(*batch, strict=True)
        images = _stack(images, samples, self.inputs)
        texts = self.tokenizer([caption for sample in samples for caption in sample.shown])
        labels = (torch.tensor([self._label(sample) for sample in samples]),) if self.with_labels else ()
        keys = ([sample.key for sample in samples],) if self.with_keys else ()
        return images, texts, *labels, *keys


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
        worker, num_workers = _worker()
        batches = webdataset.batched(self.batch_size, collation_fn=None)(self._samples())
        first, step = self.rank + worker * self.world_size, num_workers * self.world_size
        for number, batch in islice(enumerate(batches), first, None, step):
            samples = list(_parse(batch, self.inputs, _stop))
            captions = [sample.captions[: self.max_captions] for sample in samples]
            images = [self.image_transform(_decode(sample, self.inputs, _stop)) for sample in samples]
            images = _stack(images, samples, self.inputs)
            texts = self.tokenizer([caption for of_image in captions for caption in of_image])
            positions = torch.arange(len(samples))
            image_of_caption = positions.repeat_interleave(torch.tensor([len(of_image) for of_image in captions]))
            yield images, texts, image_of_caption, number * self.batch_size + positions

    def _samples(self) -> Iterator[dict[str, Any]]:
        for url, size in zip(self.shards, self.sizes or [None] * len(self.shards), strict=True):
            read = 0
            for sample in _read([_Slice(url, 0, None, 0)], self.inputs, _stop):
                yield sample
                read += 1
            if size not in (None, read):
                _stop(f"the end of shard {url}", ValueError(f"it ends after {read} samples, expected {size}"))


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


class _Slice(NamedTuple):
    """Samples ``start`` to ``stop`` of a shard whose first sample has the position ``offset``; None is its end."""

    url: str
    start: int
    stop: int | None
    offset: int


class _Share(NamedTuple):
    """What a worker reads in an epoch, what it may repeat when that is not enough, and how many batches it makes."""

    slices: list[_Slice]
    reserve: list[_Slice]
    num_batches: int


def _names(shards: Iterable[str]) -> str:
    first, *rest = sorted(shards) or ["no shards"]
    return f"{first} and {len(rest)} more" if rest else first


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _share_of(total: int, number: int, parts: int) -> tuple[int, int]:
    """Return the range of share ``number`` when ``total`` things are shared out as evenly as possible."""
    return total * number // parts, total * (number + 1) // parts


def _section(ring: list[_Slice], start: int, stop: int) -> list[_Slice]:
    """Cut the range out of whole shards that are laid end to end, and once more for a range that passes the end."""
    section = []
    begin = 0
    for part in [*ring, *ring]:
        lower, upper = max(start - begin, 0), min(stop - begin, part.stop)
        if lower < upper:
            section.append(part._replace(start=lower, stop=upper))
        begin += part.stop
    return section


def _shuffled(samples: Iterator[dict[str, Any]], size: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield samples in random order, drawn from a buffer that fills while it is drawn from.

    The first batch of an epoch waits for the first fill, so it is small: a twentieth. Three samples in for each one out
    make up for that. webdataset's ``shuffle`` takes two, and batches would be mixed less well for longer.
    """
    buffer = list(islice(samples, max(size // 20, 1)))
    while buffer:
        drawn = rng.randrange(len(buffer))
        buffer[drawn], buffer[-1] = buffer[-1], buffer[drawn]
        yield buffer.pop()
        buffer.extend(islice(samples, min(3, size - len(buffer))))


def _read(slices: Iterable[_Slice], inputs: str, on_error: OnError) -> Iterator[dict[str, Any]]:
    """Yield samples as bytes by extension."""
    members = {*INPUTS[inputs], *TEXTS}
    for url, start, stop, offset in slices:
        position = start
        try:
            for sample in read_samples(url, start, stop, members):
                sample["__url__"], sample["__position__"] = url, offset + position
                yield sample
                position += 1
            if stop is not None and position < stop:
                raise ValueError(f"it ends after {position} samples, expected {stop}")
        except Exception as error:
            on_error(f"shard {url}" if position == start else f"the end of shard {url}", error)


def _parse(samples: Iterable[dict[str, Any]], inputs: str, on_error: OnError) -> Iterator[Sample]:
    for sample in samples:
        key, url = sample["__key__"], sample["__url__"]
        try:
            image = input_of(sample, inputs)
            captions = read_captions(sample)
        except Exception as error:
            on_error(f"sample {key} of {url}", error)
        else:
            yield Sample(key, sample["__position__"], captions, captions, image, url, _read_group(sample))


def _decode(sample: Sample, inputs: str, on_error: OnError, max_image_pixels: int | None = None) -> Any:
    """Return an RGB image, or an array (N, W), or None after an error that is skipped."""
    try:
        if inputs == "features":
            return decode_features(sample.image)
        return _decode_picture(sample.image, max_image_pixels)
    except MissingExtraError:
        raise
    # Decoders of damaged files raise nearly anything.
    except Exception as error:
        on_error(f"sample {sample.key} of {sample.url}", error)
        return None


def _decode_picture(data: bytes, max_pixels: int | None) -> Any:
    image = require("PIL.Image", extra="data").open(io.BytesIO(data))
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise ValueError(f"{image.width} x {image.height} pixels are more than max_image_pixels {max_pixels}")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _stack(images: Sequence[Tensor], samples: Sequence[Sample], inputs: str) -> Tensor:
    """Return pictures (B, 3, H, W), or features (B, N, W) with rows of zeros where an image has fewer than N."""
    if inputs == "images":
        return torch.stack(images)
    first = samples[0]
    for features, sample in zip(images, samples, strict=True):
        if features.shape[1:] != images[0].shape[1:]:
            raise UserError(
                f"features (N, W) must have the same W in all shards: those of sample {sample.key} of {sample.url} are "
                f"{tuple(features.shape)}, those of {first.key} of {first.url} {tuple(images[0].shape)}"
            )
    return pad_sequence(images, batch_first=True)


def read_captions(sample: dict[str, Any]) -> list[str]:
    """Return the captions of a sample of :func:`vl_plugins.data.shard_files.read_samples`.

    Raises:
        ValueError: it has none, or something else in their place.
    """
    captions = _metadata(sample).get("captions")
    if captions is None:
        if "txt" not in sample:
            raise ValueError("it has no captions; expected a list 'captions' in json, or txt")
        captions = [sample["txt"].decode()]
    if not isinstance(captions, list) or not captions or not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"'captions' must be a list of strings, got {captions!r:.60}")
    return captions


def _read_group(sample: dict[str, Any]) -> Group | None:
    metadata = _metadata(sample)
    dataset, group = metadata.get("dataset"), metadata.get("group")
    # In shards of other programs it may be anything.
    return Group(dataset if isinstance(dataset, str) else None, group) if type(group) in (int, str) else None


def _metadata(sample: dict[str, Any]) -> dict[str, Any]:
    metadata = json.loads(sample["json"]) if "json" in sample else {}
    return metadata if isinstance(metadata, dict) else {}


class _Warn:
    """Logs what cannot be read, each place once; as a string, the first place and how many others there are."""

    def __init__(self):
        self.places: dict[str, Exception] = {}

    def __str__(self) -> str:
        (place, error), *others = self.places.items()
        return f"{place}: {error!r}" + (f", and {len(others)} more that cannot be read" if others else "")

    def __call__(self, place: str, error: Exception) -> None:
        if place not in self.places:
            self.places[place] = error
            logger.warning("leaving out %s, which cannot be read: %r", place, error)


def _stop(place: str, error: Exception) -> None:
    raise UserError(f"cannot read {place}: {error!r}") from error


def _read_sizes(shards: Sequence[str]) -> list[int] | None:
    """Return the number of samples of each shard from ``sizes.json``, None when one has none beside it."""
    places = [locate(shard) for shard in shards]
    if None in places:
        return None
    sizes = {folder: read_sizes(folder) for folder in dict.fromkeys(place.folder for place in places)}
    if None in sizes.values():
        return None
    unlisted = next((place for place in places if place.name not in sizes[place.folder]), None)
    if unlisted is not None:
        raise UserError(f"{Folder(unlisted.folder) / SIZES_FILE} does not list {unlisted.name}")
    return [sizes[place.folder][place.name] for place in places]
