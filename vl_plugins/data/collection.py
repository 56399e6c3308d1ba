"""The names and captions in shards, in the order in which they are evaluated."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.data.decoding import ShardSlice, is_id, raise_error, read_slices
from vl_plugins.data.shard_files import ScannedSample, expand_shards, input_of, read_texts
from vl_plugins.errors import UserError

__all__ = ["Collection", "Id", "Record", "first_captions", "parse_record", "read_collection", "read_records"]

Id = int | str


class Record(NamedTuple):
    """The names and captions of one image."""

    key: str
    image_id: Id  # the key where the shard has none
    captions: list[str]  # at least one, in source order
    caption_ids: list[Id]  # "<image id>#<number>" where the shard has none
    split: str | None  # "<dataset>-<split>"


@dataclass(frozen=True, eq=False, kw_only=True)
class Collection:
    """I images and their C captions, in the order of the shards.

    Args:
        shards: paths or URLs.
        sizes: number of samples of each shard.
        keys: of the I samples.
        image_ids: of the I images, see :class:`Record`.
        captions: the C texts, those of an image adjacent and in source order.
        caption_ids: of the C captions, see :class:`Record`.
        image_of_caption: (C,) int64, index of each caption's image.
        splits: the different ``<dataset>-<split>`` of the samples, in the order of their first appearance.
    """

    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    keys: tuple[str, ...]
    image_ids: tuple[Id, ...]
    captions: tuple[str, ...]
    caption_ids: tuple[Id, ...]
    image_of_caption: Tensor
    splits: tuple[str, ...]

    @classmethod
    def from_records(cls, shards: Sequence[str], sizes: Sequence[int], records: Sequence[Record]) -> "Collection":
        """Return the collection of all records, in the order of the shards."""
        return cls(
            shards=tuple(shards),
            sizes=tuple(sizes),
            keys=tuple(record.key for record in records),
            image_ids=tuple(record.image_id for record in records),
            captions=tuple(caption for record in records for caption in record.captions),
            caption_ids=tuple(caption for record in records for caption in record.caption_ids),
            image_of_caption=torch.tensor(
                [index for index, record in enumerate(records) for _ in record.captions], dtype=torch.int64
            ),
            splits=tuple(dict.fromkeys(record.split for record in records if record.split)),
        )

    def with_captions(self, kept: Tensor) -> "Collection":
        """Return the same images with some of the captions, given by their indices."""
        captions = tuple(self.captions[index] for index in kept.tolist())
        caption_ids = tuple(self.caption_ids[index] for index in kept.tolist())
        return replace(self, captions=captions, caption_ids=caption_ids, image_of_caption=self.image_of_caption[kept])

    def pictures(self, images: Iterable[int]) -> dict[int, bytes]:
        """Read the files of some images, given by indices in [0, I), from the shards again.

        Raises:
            UserError: a shard cannot be read, has changed since, or has features in place of pictures.
        """
        images, found = set(images), {}
        slices = []
        for shard, size, end in zip(self.shards, self.sizes, accumulate(self.sizes), strict=True):
            first = end - size
            if wanted := [index - first for index in images if first <= index < end]:
                slices.append(ShardSlice(shard, min(wanted), max(wanted) + 1, first))
        for index, shard, sample in read_slices(slices, "images", raise_error):
            if index in images:
                try:
                    if sample.key != self.keys[index]:
                        raise UserError(f"{self.keys[index]} was in its place before")
                    found[index] = input_of(sample)
                except UserError as error:
                    raise_error(f"sample {sample.key} of {shard}", error)
        return found


def read_collection(shards: str | Sequence[str], max_captions: int | None = None) -> Collection:
    """Read the names and captions in shards, without their pictures.

    Args:
        shards: as for :func:`vl_plugins.data.shard_files.expand_shards`.
        max_captions: only the first so many captions of each image; all by default.

    Raises:
        UserError: a shard does not exist or cannot be read, a sample has no captions, or ``max_captions`` is below 1.
    """
    if max_captions is not None and max_captions < 1:
        raise UserError(f"max_captions must be at least 1, got {max_captions}")
    shards = expand_shards(shards)
    records = [list(read_records(shard, max_captions)) for shard in shards]
    return Collection.from_records(shards, list(map(len, records)), list(chain.from_iterable(records)))


def read_records(shard: str, max_captions: int | None = None) -> Iterator[Record]:
    """Yield the names and captions of a shard's samples, see :func:`read_collection`."""
    for _, _, sample in read_slices([ShardSlice(shard, 0, None, 0)], None, raise_error):
        yield parse_record(sample, shard, max_captions)


def parse_record(sample: ScannedSample, shard: str, max_captions: int | None = None) -> Record:
    """Return the names and captions of a sample that was read with its texts; errors as :func:`read_collection`."""
    try:
        metadata, captions = read_texts(sample)
    except ValueError as error:
        raise_error(f"sample {sample.key} of {shard}", error)
    image_id: Any = metadata.get("image_id")
    caption_ids: Any = metadata.get("caption_ids")
    if not is_id(image_id):
        image_id = sample.key
    if not isinstance(caption_ids, list) or len(caption_ids) != len(captions) or not all(map(is_id, caption_ids)):
        caption_ids = [f"{image_id}#{number}" for number in range(len(captions))]
    names = [name for name in (metadata.get("dataset"), metadata.get("split")) if isinstance(name, str)]
    split = "-".join(names) if len(names) == 2 else None
    return Record(sample.key, image_id, captions[:max_captions], caption_ids[:max_captions], split)


def first_captions(image_of_caption: Tensor, number: int) -> Tensor:
    """Return the ascending indices of the first ``number`` captions of each image.

    Args:
        image_of_caption: (C,) int64, index of each caption's image.
        number: at least 1.

    >>> first_captions(torch.tensor([0, 0, 0, 1, 0]), 2)
    tensor([0, 1, 3])
    """
    if number < 1:
        raise ValueError(f"number must be at least 1, got {number}")
    order = image_of_caption.argsort(stable=True)
    counts = image_of_caption.bincount()
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order)) - first[image_of_caption[order]]
    return order[place < number].sort().values
