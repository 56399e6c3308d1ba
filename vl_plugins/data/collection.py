"""The images of several shards as one collection: where they are, and, when asked for, their names and captions."""

import copy
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
from braceexpand import braceexpand
from fsspec.asyn import reset_lock

from vl_plugins.data.files import exists, file_errors, locate
from vl_plugins.data.index import HASHES, IndexHead, read_head, read_records
from vl_plugins.data.samples import Record, input_of, parse_sample
from vl_plugins.errors import UserError, user_errors

if TYPE_CHECKING:
    from torch import Tensor


# Files that are looked for or read at a time, which behind URLs takes as long as one.
AT_A_TIME = 16
MOST_SHARDS = 500_000  # in a pattern
GROUP = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")

# Workers of a loader are forked. Older versions of fsspec, such as 2025.3, wait there for a thread of
# the parent, forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_lock)


def expand_braces(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for; raise ``ValueError`` if that is more than any data set has."""
    groups = ((group.count(","), RANGE.match(group)) for group in GROUP.findall(pattern))
    sizes = (abs(int(found[2]) - int(found[1])) if found else commas for commas, found in groups)
    if math.prod(size + 1 for size in sizes) <= MOST_SHARDS:  # each range is made as a whole
        shards = list(itertools.islice(braceexpand(pattern), MOST_SHARDS + 1))
        if len(shards) <= MOST_SHARDS:
            return shards
    raise ValueError(f"it names more than {MOST_SHARDS:,} shards")


def expand_shards(pattern: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Return the shards that a pattern stands for.

    Args:
        pattern: a path or URL of fsspec (``s3://``, ``https://``), with ranges such as
            ``coco-train-{000000..000113}.tar``; several of them joined by ``::``; or a list of single shards.

    Raises:
        UserError: the pattern is malformed or names no shard; a shard does not exist or is named twice; or they are in
            different file systems.
    """
    try:
        if isinstance(pattern, (str, os.PathLike)):
            shards = [shard for part in os.fspath(pattern).split("::") for shard in expand_braces(part) if shard]
        else:
            shards = [os.fspath(shard) for shard in pattern]
    except ValueError as error:
        raise UserError(f"cannot expand the shard pattern {pattern!r}: {error}") from error
    if not shards:
        raise UserError(f"the shard pattern {pattern!r} names no shards")
    if len({fsspec.utils.get_protocol(shard) for shard in shards}) > 1:
        raise UserError(f"shards must be in one file system, such as all local or all s3://; got {pattern!r}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        files = list(pool.map(_identity, shards))
    if missing := [shard for shard, file in zip(shards, files, strict=True) if file is None]:
        raise UserError(f"{len(missing)} of {len(shards)} shards do not exist: {missing[0]}")
    if len(set(files)) < len(files):
        raise UserError(
            f"the shard {shards[files.index(Counter(files).most_common(1)[0][0])]} is listed more than once"
        )
    return shards


def _identity(shard: str) -> Any:
    """Return what all links to a shard share, or its URL; None if there is no such file."""
    return None if not exists(shard) else os.stat(shard)[1:3] if os.path.isfile(shard) else shard


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
            with file_errors("read", shard):
                if isinstance(data, Exception):
                    raise data
            sample = parse_sample(data)
            if sample.key != self.keys[index]:
                raise UserError(f"{shard} has changed: {self.keys[index]} was where {sample.key} is now")
            found[index] = input_of(sample.members)
        return found
