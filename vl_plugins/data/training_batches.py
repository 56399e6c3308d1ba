"""Reader of shards for training: shuffled batches, with one or several captions per image."""

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import accumulate, chain, cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vl_plugins.data.batching import SAME_GROUP, DistinctBatches, Sample, parse_captions_per_image
from vl_plugins.data.decoding import (
    OnError,
    ShardSlice,
    WarnOnce,
    decode_input,
    parse_samples,
    raise_error,
    read_slices,
    stack_inputs,
)
from vl_plugins.data.json_text import to_json
from vl_plugins.data.manifest import MANIFEST_FILE, SIZES_FILE
from vl_plugins.data.randomness import seeded
from vl_plugins.data.shard_files import INPUTS, expand_shards
from vl_plugins.data.shard_info import read_shard_info, read_shard_sizes
from vl_plugins.errors import UserError, one_of, require

__all__ = ["ImageTransform", "SharedEpoch", "Tokenizer", "TrainingPipeline", "batch_loader", "worker_number"]

logger = logging.getLogger(__name__)

ImageTransform = Callable[[Any], Tensor]
Tokenizer = Callable[[list[str]], Tensor]


class SharedEpoch:
    """Number of the epoch, which worker processes of a loader see too."""

    def __init__(self, epoch: int = 0):
        # A tensor, because a `multiprocessing.Value` of one start method cannot be handed to workers of another.
        self._epoch = torch.tensor(epoch).share_memory_()

    def get_value(self) -> int:
        return int(self._epoch)

    def set_value(self, epoch: int) -> None:
        self._epoch.fill_(epoch)


@dataclass(eq=False)
class TrainingPipeline(IterableDataset):
    """Reader of shards that yields shuffled batches ``images (B, 3, H, W), texts (k*B, L)``.

    ``texts[k*i : k*i + k]`` are the k captions of ``images[i]``; with k = 1 the batches are those of open_clip's
    reader. A ``DataLoader`` takes it with ``batch_size=None``.

    **Epochs.** Every process makes ``len(reader)`` batches: the number of images divided by ``batch_size * world_size``
    and rounded down. An image occurs at most once in an epoch, over all processes and workers; the few left over are
    others in each epoch. A worker that lacks images, because some cannot be read, repeats some of its process. The
    order depends on ``seed``, the epoch, the rank and the numbers of processes and workers. The captions of an image,
    and what its transform draws from torch, ``random`` and NumPy's legacy generator, depend on ``seed``, the epoch and
    its key alone.

    **False negatives.** Images whose captions are equal for :func:`vl_plugins.data.batching.normalize_caption`, or of
    one group (``group`` of their ``json``, within a data set), do not meet in a batch of one process. The second waits
    for a later batch of its worker; those that still wait at the end of the epoch are left out, with a warning.

    Args:
        shards: as for :func:`vl_plugins.data.shard_files.expand_shards`. Samples have ``json`` with a list
            ``captions``, or ``txt``; and ``jpg``, ``jpeg``, ``png`` or ``webp``, or for features ``npy``.
        image_transform: from an RGB ``PIL.Image``, or a float32 array (N, W) of features, to a tensor.
        tokenizer: from the n captions of a batch to a tensor (n, L); L may change from batch to batch.
        batch_size: number B of images in a batch.
        inputs: ``"images"``, or ``"features"``: ``images`` is then (B, N, W), W values for each of N regions or grid
            cells. N is the largest of the batch; images with fewer end with rows of zeros.
        captions_per_image: ``"random"``: one at random; ``"first"``: the first; a number k: k different ones at random;
            ``"all"``: all in source order, k is the largest number of an image in ``manifest.json``. An image with
            fewer than k repeats its own.
        seed: of order and captions.
        epoch: the first epoch; :meth:`set_epoch` changes it.
        num_samples: number of images in an epoch; by default all. Needed for shards without a ``sizes.json`` beside
            them, and for URLs that webdataset opens with a program (``https://``).
        shuffle_buffer: number of encoded samples of which each worker draws the next one. As many, and at least
            ``batch_size``, may wait because of their captions.
        with_labels: yield ``images, texts, labels (B,)``, int64: the positions of the images in the shards. Those of
            the texts are ``labels.repeat_interleave(k)``.
        with_keys: end batches with the list of the images' keys.
        max_image_pixels: a larger picture counts as one that cannot be read.
        allow_duplicate_captions: whether images with equal captions may meet in a batch.
        same_group: ``"positive"`` lets images of one group meet, with any captions, and gives them one label, the same
            in all processes: a negative hash of data set and group. ``"apart"`` keeps them apart.
        on_error: ``"skip"`` leaves out samples and shards that cannot be read, each with a warning; ``"raise"`` stops.
        rank, world_size: of this process; by default those of the environment or ``torch.distributed``.

    Raises:
        UserError: a wrong argument; a shard that does not exist; a number of images that is not known or makes no batch
            in every process; ``"positive"`` without groups or labels. While iterating: too little can be read, or too
            many images share captions or groups; features of different W; with ``"raise"``, what cannot be read.
    """

    shards: str | Sequence[str]
    image_transform: ImageTransform
    tokenizer: Tokenizer
    batch_size: int
    _: KW_ONLY
    inputs: str = "images"
    captions_per_image: str | int = "random"
    seed: int = 0
    epoch: InitVar[int] = 0
    num_samples: int | None = None
    shuffle_buffer: int = 5000
    with_labels: bool = False
    with_keys: bool = False
    max_image_pixels: int | None = None
    allow_duplicate_captions: bool = False
    same_group: str = "apart"
    on_error: str = "skip"
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self, epoch: int):
        one_of("inputs", self.inputs, INPUTS)
        one_of("same_group", self.same_group, SAME_GROUP)
        one_of("on_error", self.on_error, ("skip", "raise"))
        if self.batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {self.batch_size}")
        self.shared_epoch = SharedEpoch(epoch)
        self.shards = expand_shards(self.shards)
        self.captions_per_image = parse_captions_per_image(self.captions_per_image)
        if self.captions_per_image != "all":
            self._num_captions = 1 if isinstance(self.captions_per_image, str) else self.captions_per_image
        else:
            info = read_shard_info(self.shards)
            if info is None:
                raise UserError(f"captions_per_image 'all' needs a {MANIFEST_FILE} beside the shards; give a number")
            self._num_captions = info.max_captions
        if self.same_group == "positive":
            if not self.with_labels:
                raise UserError("same_group 'positive' needs with_labels=True: positives are images with equal labels")
            info = read_shard_info(self.shards)
            if info is not None and not info.has_groups:
                raise UserError("same_group 'positive' needs shards with groups: `vl-plugins shards --group-key`")
        default_rank, default_world_size, *_ = require("webdataset", extra="data").utils.pytorch_worker_info()
        self._rank = default_rank if self.rank is None else self.rank
        self._world_size = default_world_size if self.world_size is None else self.world_size
        self._sizes = read_shard_sizes(self.shards)
        self._num_batches = self._count_samples() // (self.batch_size * self._world_size)

    def _count_samples(self) -> int:
        number = self.num_samples
        if self._sizes is not None:
            available = sum(self._sizes)
            if number is not None and number > available:
                logger.warning("an epoch has the %d images of the shards, not %d", available, number)
            number = min(number or available, available)
        elif number is None:
            raise UserError(
                f"the number of images in {self.shards[0]} is not known: give num_samples, or put a {SIZES_FILE} "
                "beside the shards, which is read in folders and at URLs of fsspec, not with pipe:, https:// or gs://"
            )
        elif len(self.shards) < self._world_size:
            raise UserError(
                f"{len(self.shards)} shards of unknown size cannot be shared by {self._world_size} processes: put a "
                f"{SIZES_FILE} beside them, or write smaller shards with --samples-per-shard"
            )
        if number < self.batch_size * self._world_size:
            raise UserError(
                f"{number} images make no full batch of {self.batch_size} for each of {self._world_size} processes; "
                f"the batch size can be at most {number // self._world_size}"
            )
        return number

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads, in workers that persist too."""
        self.shared_epoch.set_value(epoch)

    def __len__(self) -> int:
        """Number of batches of an epoch in this process."""
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        worker, num_workers = worker_number()
        epoch = self.shared_epoch.get_value()
        slices, repeated, num_batches = self._share(epoch, worker, num_workers)
        if not num_batches:
            return
        on_error = raise_error if self.on_error == "raise" else WarnOnce()
        rng = random.Random(f"{self.seed}/{epoch}/{self._rank}/{worker}")
        webdataset = require("webdataset", extra="data")
        shuffle = webdataset.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer // 20, rng=rng)
        batches = DistinctBatches(
            (self._read(part, epoch, shuffle, on_error) for part in chain([slices], repeat(repeated))),
            self.batch_size,
            num_batches,
            max_waiting=max(self.batch_size, self.shuffle_buffer),
            prepare=lambda sample: self._prepare(sample, epoch, on_error),
            allow_duplicates=self.allow_duplicate_captions,
            same_group=self.same_group,
            source=f"{len(self.shards)} shards such as {self.shards[0]}",
        )
        for number, batch in enumerate(batches, 1):
            if number == num_batches and batches.left_out:
                logger.warning(
                    f"epoch {epoch}, worker {worker}: images left out that share captions or groups: "
                    f"{len(batches.left_out)}, as {min(batches.left_out.values())}"
                )
            yield self._collate(batch)

    def _share(self, epoch: int, worker: int, num_workers: int) -> tuple[list[ShardSlice], list[ShardSlice], int]:
        """Return what a worker reads in an epoch, what it may repeat, and how many batches it makes."""
        rng = random.Random(f"{self.seed}/{epoch}")
        order = rng.sample(range(len(self.shards)), len(self.shards))
        if self._sizes is None:
            mine = order[self._rank :: self._world_size]
            num_workers = min(num_workers, len(mine))
            if worker >= num_workers:
                return [], [], 0
            # Shards without sizes still need positions that do not overlap.
            slices = [ShardSlice(self.shards[index], 0, None, index << 32) for index in mine[worker::num_workers]]
            return slices, slices, len(_share_of(self._num_batches, worker, num_workers))
        # The shards in this epoch's order form a ring, and every worker of every process takes the next section of it.
        # The first begins anywhere, so that the images left over are not the last ones of a shard every time.
        offsets = [0, *accumulate(self._sizes)]
        ring = [(self.shards[index], self._sizes[index], offsets[index]) for index in order]
        start = rng.randrange(offsets[-1]) + self._rank * self._num_batches * self.batch_size
        share = _share_of(self._num_batches, worker, num_workers)
        slices = _section(ring, start + share.start * self.batch_size, start + share.stop * self.batch_size)
        # What a process repeats is its own: images of other processes could meet themselves in a gathered batch.
        return slices, _section(ring, start, start + self._num_batches * self.batch_size), len(share)

    def _read(self, slices: list[ShardSlice], epoch: int, shuffle: Callable, on_error: OnError) -> Iterator[Sample]:
        samples = shuffle(read_slices(slices, self.inputs, on_error))
        for sample in parse_samples(samples, self.inputs, on_error):
            yield sample._replace(captions=self._choose(sample, epoch))

    def _choose(self, sample: Sample, epoch: int) -> list[str]:
        captions = sample.captions
        if self.captions_per_image not in ("first", "all"):
            rng = random.Random(f"{self.seed}/{epoch}/{sample.key}")
            captions = rng.sample(captions, min(self._num_captions, len(captions)))
        return list(islice(cycle(captions), self._num_captions))

    def _prepare(self, sample: Sample, epoch: int, on_error: OnError) -> tuple[Tensor, Sample] | None:
        image = decode_input(sample, self.inputs, on_error, self.max_image_pixels)
        if image is None:
            return None
        with seeded(self.seed, epoch, sample.key):
            image = self.image_transform(image)
        return image, sample._replace(image=b"")  # what has been decoded need not be kept

    def _collate(self, batch: list[tuple[Tensor, Sample]]) -> tuple[Any, ...]:
        images, samples = zip(*batch, strict=True)
        images = stack_inputs(list(images), samples, self.inputs)
        texts = self.tokenizer([caption for sample in samples for caption in sample.captions])
        labels = (torch.tensor([self._label(sample) for sample in samples]),) if self.with_labels else ()
        keys = ([sample.key for sample in samples],) if self.with_keys else ()
        return images, texts, *labels, *keys

    def _label(self, sample: Sample) -> int:
        if self.same_group == "apart" or sample.group is None:
            return sample.position
        digest = hashlib.blake2b(to_json(sample.group), digest_size=8).digest()
        return ~(int.from_bytes(digest, "big") >> 1)  # negative, as no position is


def batch_loader(batches: IterableDataset, workers: int) -> DataLoader:
    """Return a loader of a reader's batches, whose ``workers`` processes serve all epochs; 0 reads in this one."""
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # which leaves torch's random numbers alone
    )


def worker_number() -> tuple[int, int]:
    """Return the number of this worker of a loader, and how many there are."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _share_of(total: int, number: int, parts: int) -> range:
    """Return share ``number`` of ``total`` things, shared out as evenly as possible."""
    return range(total * number // parts, total * (number + 1) // parts)


def _section(ring: list[tuple[str, int, int]], start: int, stop: int) -> list[ShardSlice]:
    """Cut a range out of a ring of shards: URL, size, and position of the first sample of each."""
    section = []
    begin = 0
    for url, size, offset in [*ring, *ring]:
        lower, upper = max(start - begin, 0), min(stop - begin, size)
        if lower < upper:
            section.append(ShardSlice(url, lower, upper, offset))
        begin += size
    return section
