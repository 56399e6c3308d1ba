"""The images of several shards as one collection: where they are, and, when asked for, their names and captions."""

import copy
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import fsspec
import numpy as np
from braceexpand import braceexpand
from fsspec.asyn import reset_lock

from vl_plugins.data.captions import caption_hash
from vl_plugins.data.files import exists, file_errors, locate
from vl_plugins.data.index import HASHES, IndexHead, read_head, read_records
from vl_plugins.data.samples import Record, input_of, parse_record, parse_sample
from vl_plugins.errors import UserError, user_errors

if TYPE_CHECKING:
    from torch import Tensor


# Files that are looked for or read at a time, which behind URLs takes as long as one.
AT_A_TIME = 16

# Workers of a loader are forked. Older versions of fsspec, such as 2025.3, wait there for a thread of
# the parent, forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_lock)


def expand_shards(pattern: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Return the shards that a pattern stands for.

    Args:
        pattern: a path or URL of fsspec (``s3://``, ``https://``), with ranges such as
            ``coco-train-{000000..000113}.tar``; several of them joined by ``::``; or a list of single shards.

    Raises:
        UserError: the pattern is malformed or names no shard; a shard does not exist or is named twice; or they are in
            different file systems.
    """
    with user_errors(f"the shard pattern {pattern!r}"):
        if isinstance(pattern, (str, os.PathLike)):
            shards = [shard for part in os.fspath(pattern).split("::") for shard in braceexpand(part) if shard]
        else:
            shards = [os.fspath(shard) for shard in pattern]
    if not shards or len({*map(os.path.realpath, shards)}) < len(shards):
        raise UserError(f"the shard pattern {pattern!r} names no shard, or one more than once")
    if len({fsspec.utils.get_protocol(shard) for shard in shards}) > 1:
        raise UserError(f"shards must be in one file system, such as all local or all s3://; got {pattern!r}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        missing = [shard for shard, is_there in zip(shards, pool.map(exists, shards), strict=True) if not is_there]
    if missing:
        raise UserError(f"{len(missing)} of {len(shards)} shards do not exist: {missing[0]}")
    return shards


def read_collection(shards: str | os.PathLike | Sequence[str | os.PathLike]) -> "Collection":
    """Read where the images of shards are, from the indexes beside the shards or else from the shards.

    Args:
        shards: as for :func:`expand_shards`.

    Raises:
        UserError: a shard does not exist or cannot be read, an image in it has no captions, or there are no images.
    """
    shards = expand_shards(shards)
    with user_errors(f"indexes of {shards[0]}, ..."), ThreadPoolExecutor(AT_A_TIME) as pool:
        collection = Collection(shards, pool.map(read_head, shards))
    if not len(collection):
        raise UserError(f"the shards hold no images: {shards[0]}, ...")
    return collection


class Collection:
    """The I images of shards and their C captions, in the order of the shards.

    It holds about 70 bytes for an image with five captions. Names and captions are read when first asked for.

    Args:
        shards: paths or URLs.
        heads: first lines of their indexes; consumed one at a time.

    Attributes:
        shards: paths or URLs.
        first_image: (S + 1,) index of each shard's first image, and I.
        starts, sizes: (I,) first byte of each image's files in its shard, and their number of bytes, with headers.
        first_caption: (I + 1,) index of each image's first caption, and C.
        caption_hashes: (C,) int64, see :func:`~vl_plugins.data.captions.caption_hash`.
        labels: (I,) int64: the index of each image, or that of the first image of its group.
        only_txt: number of images without a list of captions, whose only caption is ``txt``.
    """

    def __init__(self, shards: Sequence[str], heads: Iterable[IndexHead]):
        self.shards = tuple(shards)
        self.only_txt = 0
        images, starts, sizes, counts, captions, groups = [0], [], [], [], [], []
        for head in heads:
            images.append(images[-1] + len(head.starts))
            starts.append(np.array(head.starts, dtype=np.int64))
            sizes.append(np.array(head.sizes, dtype=np.int32))
            counts.append(np.array(head.counts, dtype=np.int32))
            captions.append(np.frombuffer(head.captions, dtype=HASHES))
            groups.append(np.frombuffer(head.groups or bytes(HASHES.itemsize * len(head.starts)), dtype=HASHES))
            self.only_txt += head.only_txt
        self.first_image = np.array(images)
        self.starts, self.sizes = np.concatenate(starts), np.concatenate(sizes)
        self.caption_hashes = np.concatenate(captions)
        self.first_caption = np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])
        self.labels = np.arange(images[-1])
        all_groups = np.concatenate(groups)
        grouped = np.flatnonzero(all_groups)
        _, first, group = np.unique(all_groups[grouped], return_index=True, return_inverse=True)
        self.labels[grouped] = grouped[first][group]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def captions_per_image(self) -> np.ndarray:
        """(I,) number of captions."""
        return np.diff(self.first_caption)

    def shard_of(self, images: Sequence[int]) -> list[str]:
        """Return the shard of each image."""
        return [self.shards[index] for index in np.searchsorted(self.first_image, images, side="right") - 1]

    def read(self, images: Sequence[int]) -> list[bytes | Exception]:
        """Return the bytes of each image's files in its shard, with headers, or the error; all are read at a time."""
        if not len(images):
            return []
        files, _ = locate(self.shards[0])  # that of this process
        paths = [files._strip_protocol(shard) for shard in self.shard_of(images)]
        starts = self.starts[images]
        return files.cat_ranges(paths, starts.tolist(), (starts + self.sizes[images]).tolist(), on_error="return")

    def parse(self, image: int, data: bytes | Exception) -> tuple[Record, dict[str, bytes]]:
        """Return the names, captions and files of an image that :meth:`read` has read.

        Raises:
            Exception: it could not be read, or is not the image that the index was made of.
        """
        if isinstance(data, Exception):
            raise data
        sample = parse_sample(data)
        record = parse_record(sample.key, sample.members)
        first, end = self.first_caption[image : image + 2]
        if [*map(caption_hash, record.captions)] != self.caption_hashes[first:end].tolist():
            raise UserError("its captions are not those of the index; write the index or the shards again")
        return record, sample.members

    @cached_property
    def records(self) -> list[Record]:
        """The names and captions of the I images.

        Raises:
            UserError: a shard or its index cannot be read or has changed.
        """
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            records = [record for part in pool.map(read_records, self.shards) for record in part]
        if [len(record.captions) for record in records] != self.captions_per_image.tolist():
            raise UserError(f"the shards have changed since they were opened: {self.shards[0]}, ...")
        return records

    @cached_property
    def keys(self) -> list[str]:
        """The names of the I images in the shards."""
        return [record.key for record in self.records]

    @cached_property
    def image_ids(self) -> list[int | str]:
        """The ids of the I images."""
        return [record.image_id for record in self.records]

    @cached_property
    def captions(self) -> list[str]:
        """The C captions, those of an image adjacent and in source order."""
        return [caption for record in self.records for caption in record.captions]

    @cached_property
    def caption_ids(self) -> list[int | str]:
        """The ids of the C captions."""
        return [caption_id for record in self.records for caption_id in record.caption_ids]

    @cached_property
    def image_of_caption(self) -> "Tensor":
        """(C,) int64, index of each caption's image."""
        import torch  # what writes and checks shards does without it

        return torch.arange(len(self)).repeat_interleave(torch.from_numpy(self.captions_per_image))

    @cached_property
    def splits(self) -> list[str]:
        """The different ``<dataset>-<split>`` of the images, in the order of their first appearance."""
        splits = (f"{record.dataset}-{record.split}" for record in self.records if record.dataset and record.split)
        return list(dict.fromkeys(splits))

    def with_captions(self, kept: "Tensor") -> "Collection":
        """Return the names of the same images with some of the captions, given by their indices."""
        found = copy.copy(self)
        indices = kept.tolist()
        found.captions = [self.captions[index] for index in indices]
        found.caption_ids = [self.caption_ids[index] for index in indices]
        found.image_of_caption = self.image_of_caption[kept]
        return found

    def pictures(self, images: Iterable[int]) -> dict[int, bytes]:
        """Return the picture files of some images.

        Raises:
            UserError: a shard cannot be read, has changed, or has features in place of pictures.
        """
        images = sorted(set(images))
        found = {}
        for index, data, shard in zip(images, self.read(images), self.shard_of(images), strict=True):
            with file_errors("read", shard), user_errors(shard):
                found[index] = input_of(self.parse(index, data)[1])
        return found
