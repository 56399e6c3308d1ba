"""What shards hold besides pictures: names of images, and captions, in the order in which they are evaluated."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vl_plugins.data.decoding import read_captions
from vl_plugins.data.shard_files import EXTENSIONS, TEXTS, expand_shards, input_of, read_samples
from vl_plugins.data.shard_scanner import ScannedSample
from vl_plugins.utils.errors import UserError

__all__ = ["Collection", "Id", "first_captions", "read_collection"]

Id = int | str


@dataclass(frozen=True, eq=False, kw_only=True)
class Collection:
    """I images and their C captions, in the order of the shards.

    Args:
        shards: paths or URLs.
        sizes: number of samples of each shard.
        keys: of the I samples.
        image_ids: of the I images; the key where a shard has none.
        captions: the C texts, those of an image adjacent and in source order.
        caption_ids: of the C captions; ``<image id>#<number>`` where a shard has none.
        image_of_caption: (C,) int64, index of each caption's image.
        splits: ``<dataset>-<split>`` of the samples, each once, in the order of their first appearance; empty for
            shards that do not say.
    """

    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    keys: tuple[str, ...]
    image_ids: tuple[Id, ...]
    captions: tuple[str, ...]
    caption_ids: tuple[Id, ...]
    image_of_caption: Tensor
    splits: tuple[str, ...]

    def with_captions(self, kept: Tensor) -> "Collection":
        """Return the same images with some of the captions, given by their indices."""
        return replace(
            self,
            captions=tuple(self.captions[index] for index in kept.tolist()),
            caption_ids=tuple(self.caption_ids[index] for index in kept.tolist()),
            image_of_caption=self.image_of_caption[kept],
        )

    def pictures(self, images: Iterable[int]) -> dict[int, bytes]:
        """Read the files of some images from the shards again.

        Args:
            images: indices in [0, I).

        Returns:
            The bytes of each image's file by its index.

        Raises:
            UserError: a shard cannot be read, has changed since, or has features in place of pictures.
        """
        wanted = sorted(set(images))
        found, first = {}, 0
        for shard, size in zip(self.shards, self.sizes, strict=True):
            here = [index - first for index in wanted if first <= index < first + size]
            if here:
                try:
                    samples = read_samples(shard, here[0], here[-1] + 1, extensions=EXTENSIONS)
                    for index, sample in enumerate(samples, here[0]):
                        if index in here:
                            key = sample.key
                            if key != self.keys[first + index]:
                                raise ValueError(f"sample {index} is {key}, not {self.keys[first + index]}")
                            found[first + index] = input_of(sample)
                    if first + here[-1] not in found:
                        raise ValueError(f"it has no sample {here[-1]} any more")
                # Damaged archives raise nearly anything.
                except Exception as error:
                    raise UserError(f"cannot read the pictures of shard {shard}: {error!r}") from error
            first += size
        return found


def read_collection(shards: str | Sequence[str], max_captions: int | None = None) -> Collection:
    """Read the texts of shards, and leave their pictures where they are.

    Args:
        shards: as for :func:`vl_plugins.data.reader.evaluation_pipeline`, whose order this is.
        max_captions: only the first so many captions of each image.

    Raises:
        UserError: a shard does not exist or cannot be read, a sample has no captions, or ``max_captions`` is below 1.
    """
    if max_captions is not None and max_captions < 1:
        raise UserError(f"max_captions must be at least 1, got {max_captions}")
    shards = expand_shards(shards)
    sizes, records = [], []
    for shard in shards:
        before = len(records)
        try:
            for sample in read_samples(shard, extensions=TEXTS):
                records.append(_Record(sample))
        except Exception as error:
            raise UserError(f"cannot read sample {len(records) - before} of shard {shard}: {error}") from error
        sizes.append(len(records) - before)
    collection = Collection(
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
    return (
        collection
        if max_captions is None
        else collection.with_captions(first_captions(collection.image_of_caption, max_captions))
    )


def first_captions(image_of_caption: Tensor, number: int) -> Tensor:
    """Return the indices of the first captions of each image, at most so many of an image, ascending.

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


class _Record:
    """The texts of a sample."""

    def __init__(self, sample: ScannedSample):
        self.key = sample.key
        self.captions = read_captions(sample)
        texts = json.loads(sample.data["json"]) if "json" in sample.data else {}
        texts = texts if isinstance(texts, dict) else {}
        image_id, caption_ids = texts.get("image_id"), texts.get("caption_ids")
        self.image_id = image_id if _is_id(image_id) else self.key
        if not isinstance(caption_ids, list) or not all(map(_is_id, caption_ids)):
            caption_ids = []
        if len(caption_ids) != len(self.captions):
            caption_ids = [f"{self.image_id}#{number}" for number in range(len(self.captions))]
        self.caption_ids = caption_ids
        names = texts.get("dataset"), texts.get("split")
        self.split = "-".join(names) if all(isinstance(name, str) for name in names) else None


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)
