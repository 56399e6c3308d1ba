"""The reader of shards for evaluation: every image and all its captions once."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from vl_plugins.data.collection import Record, parse_record
from vl_plugins.data.decoding import ShardSlice, decode_image, raise_error, read_slices, stack_inputs
from vl_plugins.data.manifest import SIZES_FILE
from vl_plugins.data.shard_files import INPUTS, ScannedSample, expand_shards, input_of
from vl_plugins.data.shard_info import read_shard_sizes
from vl_plugins.data.training_batches import ImageTransform, Tokenizer, worker_number
from vl_plugins.errors import UserError, one_of

__all__ = ["EvaluationBatch", "EvaluationReader"]


class EvaluationBatch(NamedTuple):
    """Consecutive images of one shard, and their captions.

    Attributes:
        images: (B, 3, H, W), or features (B, N, W).
        texts: (C, L), the tokens of all captions of all B images.
        image_of_caption: (C,) int64, index in the batch of each caption's image.
        records: B names and captions.
        shard: index of the shard.
        start: index of the first image in it. Batches sorted by shard and start are in source order.
    """

    images: Tensor
    texts: Tensor
    image_of_caption: Tensor
    records: list[Record]
    shard: int
    start: int


@dataclass(eq=False)
class EvaluationReader(IterableDataset):
    """Iterates over batches of every image with all its captions, for ``DataLoader(reader, batch_size=None)``.

    Each shard is read once, by one loader worker of one process, and no batch crosses shards. So the batches are the
    same for any number of workers and processes; only their order differs.

    Args:
        shards: as for :func:`vl_plugins.data.shard_files.expand_shards`, in the order of evaluation.
        image_transform: from an RGB ``PIL.Image`` to a tensor (3, H, W). With ``inputs="features"``, from a float32
            array (N, W) to such a tensor.
        tokenizer: from a list of n strings to a tensor (n, L); called once for each batch.
        batch_size: number B of images in a batch; the last one of a shard may be smaller.
        inputs: ``"images"`` or ``"features"``, as for the training reader.
        max_captions: only the first so many captions of each image; all by default.
        rank, world_size: number of this process among those that share the shards, and their number.

    Raises:
        UserError: a shard does not exist, or an argument is out of range. While iterating: a sample or shard cannot be
            read, as results on the others could not be compared; or the features of a batch differ in W.
    """

    shards: str | Sequence[str]
    image_transform: ImageTransform
    tokenizer: Tokenizer
    batch_size: int
    _: KW_ONLY
    inputs: str = "images"
    max_captions: int | None = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        one_of("inputs", self.inputs, INPUTS)
        for name in ("batch_size", "max_captions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        self.shards = expand_shards(self.shards)
        self._sizes = read_shard_sizes(self.shards)

    def __len__(self) -> int:
        """Number of batches of this process, over all workers of a loader."""
        if self._sizes is None:
            raise TypeError(f"the length is not known without a {SIZES_FILE} beside the shards")
        return sum(ceil(size / self.batch_size) for size in self._sizes[self.rank :: self.world_size])

    def __iter__(self) -> Iterator[EvaluationBatch]:
        worker, num_workers = worker_number()
        for index in range(self.rank + worker * self.world_size, len(self.shards), num_workers * self.world_size):
            samples = read_slices([ShardSlice(self.shards[index], 0, None, 0)], self.inputs, raise_error)
            start = 0
            while batch := [sample for _, _, sample in islice(samples, self.batch_size)]:
                yield self._collate(batch, index, start)
                start += len(batch)
            if self._sizes is not None and start != self._sizes[index]:
                raise UserError(f"{self.shards[index]} has {start} samples, {SIZES_FILE} says {self._sizes[index]}")

    def _collate(self, samples: list[ScannedSample], shard: int, start: int) -> EvaluationBatch:
        records = [parse_record(sample, self.shards[shard], self.max_captions) for sample in samples]
        images = []
        for sample in samples:
            try:
                image = decode_image(input_of(sample, self.inputs), self.inputs)
            except Exception as error:  # decoders of damaged files raise nearly anything
                raise_error(f"sample {sample.key} of {self.shards[shard]}", error)
            images.append(self.image_transform(image))
        return EvaluationBatch(
            stack_inputs(images, records, self.inputs),
            self.tokenizer([caption for record in records for caption in record.captions]),
            torch.tensor([index for index, record in enumerate(records) for _ in record.captions]),
            records,
            shard,
            start,
        )
