"""Batches of the training reader: which images each worker of each process reads in an epoch, and in which order."""

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vl_plugins.data.batching import REMEDIES, DistinctBatches, Group, Sample
from vl_plugins.data.captions import normalize_caption
from vl_plugins.data.decoding import (
    OnError,
    ShardSlice,
    SliceSample,
    WarnOnce,
    decode_input,
    parse_samples,
    raise_error,
    read_slices,
    stack_inputs,
)
from vl_plugins.data.manifest import to_json
from vl_plugins.data.randomness import seeded
from vl_plugins.utils.errors import UserError

__all__ = ["EpochCounter", "ImageTransform", "SharedEpoch", "Tokenizer", "TrainingPipeline", "worker_number"]

logger = logging.getLogger(__name__)

ImageTransform = Callable[[Any], Tensor]
Tokenizer = Callable[[list[str]], Tensor]


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
        worker, num_workers = worker_number()
        epoch = self.epoch.get_value()
        share = self._share(epoch, worker, num_workers)
        unreadable = WarnOnce()
        on_error = raise_error if self.on_error == "raise" else unreadable
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
            slices = [ShardSlice(self.shards[index], 0, None, index << 32) for index in mine[worker::num_workers]]
            return _Share(slices, slices, stop - first)
        # The shards in this epoch's order form a ring, and every worker of every process takes the next section of it.
        # The first begins anywhere, so that the images left over are not the last ones of a shard every time.
        offsets = [0, *accumulate(self.sizes)]
        ring = [ShardSlice(self.shards[index], 0, self.sizes[index], offsets[index]) for index in order]
        first, stop = _share_of(self.num_batches, worker, num_workers)
        start = rng.randrange(offsets[-1]) + self.rank * self.num_batches * self.batch_size
        begin, mine, others, end = (start + batches * self.batch_size for batches in (0, first, stop, self.num_batches))
        # What a process repeats is its own: images of other processes could meet themselves in a gathered batch.
        reserve = _section(ring, others, end) + _section(ring, begin, others)
        return _Share(_section(ring, mine, others), reserve, stop - first)

    def _passes(self, share: "_Share", epoch: int, rng: random.Random, on_error: OnError) -> Iterator[Iterator[Sample]]:
        slices = share.slices
        while True:
            shuffled = _shuffled(read_slices(slices, self.inputs, on_error), self.shuffle_buffer, rng)
            samples = parse_samples(shuffled, self.inputs, on_error)
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
        captions = [caption for caption in sample.captions if normalize_caption(caption) not in taken]
        return self._choose(sample.key, captions, epoch) if captions else None

    def _prepare(self, sample: Sample, epoch: int, on_error: OnError) -> tuple[Tensor, Sample] | None:
        image = decode_input(sample, self.inputs, on_error, self.max_image_pixels)
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
        images = stack_inputs(images, samples, self.inputs)
        texts = self.tokenizer([caption for sample in samples for caption in sample.shown])
        labels = (torch.tensor([self._label(sample) for sample in samples]),) if self.with_labels else ()
        keys = ([sample.key for sample in samples],) if self.with_keys else ()
        return images, texts, *labels, *keys


class _Share(NamedTuple):
    """What a worker reads in an epoch, what it may repeat when that is not enough, and how many batches it makes."""

    slices: list[ShardSlice]
    reserve: list[ShardSlice]
    num_batches: int


def _names(shards: Iterable[str]) -> str:
    first, *rest = sorted(shards) or ["no shards"]
    return f"{first} and {len(rest)} more" if rest else first


def worker_number() -> tuple[int, int]:
    """Return the number of this worker of a loader, and how many there are."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _share_of(total: int, number: int, parts: int) -> tuple[int, int]:
    """Return the range of share ``number`` when ``total`` things are shared out as evenly as possible."""
    return total * number // parts, total * (number + 1) // parts


def _section(ring: list[ShardSlice], start: int, stop: int) -> list[ShardSlice]:
    """Cut the range out of whole shards that are laid end to end, and once more for a range that passes the end."""
    section = []
    begin = 0
    for part in [*ring, *ring]:
        lower, upper = max(start - begin, 0), min(stop - begin, part.stop)
        if lower < upper:
            section.append(part._replace(start=lower, stop=upper))
        begin += part.stop
    return section


def _shuffled(samples: Iterator[SliceSample], size: int, rng: random.Random) -> Iterator[SliceSample]:
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
