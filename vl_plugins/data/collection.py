"""The images of shards: where each one is, and its captions."""

import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from vl_plugins.data.captions import RejectedImage, caption_hash
from vl_plugins.data.files import PAUSES, OpenFiles, file_errors, is_transient, locate
from vl_plugins.data.index import HASHES, IndexHead, read_records
from vl_plugins.data.records import DEFAULT_RULE, CaptionRule, Record, only_picture, parse_record
from vl_plugins.data.samples import input_of, parse_sample
from vl_plugins.data.shard_names import AT_A_TIME
from vl_plugins.errors import UserError, reason, user_errors

if TYPE_CHECKING:
    from torch import Tensor


IMAGES_COMPARED = 1_000_000


class Collection:
    """The I images of shards and their C captions, in the order of the shards.

    It holds about 70 bytes for an image with five captions. Names and captions are read when first asked for.

    Args:
        shards: paths or URLs.
        heads: first lines of their indexes; consumed one at a time.
        on_error: with which the heads were read.
        rule: where the captions are, by which the heads were read.

    Attributes:
        shards: paths or URLs.
        first_image: (S + 1,) index of each shard's first image, and I.
        starts, sizes: (I,) first byte of each image's files in its shard, and their number of bytes, with headers.
        first_caption: (I + 1,) index of each image's first caption, and C.
        caption_hashes: (C,) int64, see :func:`~vl_plugins.data.captions.caption_hash`.
        labels: (I,) int64: the index of each image, or that of the first image of its group.
        texts, texts_of_lines: number of images without a list of captions, whose captions are in a text file; and of
            those whose text has several lines.
        rejected: samples of other programs' shards that were left out.
        line_rules: whether the heads of shards with texts took each line for a caption.
    """

    kind = "shards"
    ARRAYS: tuple[str, ...] = ("first_image", "starts", "sizes", "first_caption", "caption_hashes", "labels")

    def __init__(
        self,
        shards: Sequence[str],
        heads: Iterable[IndexHead],
        on_error: str = "raise",
        rule: CaptionRule = DEFAULT_RULE,
    ):
        self.shards, self.on_error, self.rule = tuple(shards), on_error, rule
        self.texts = self.texts_of_lines = 0
        self.line_rules: set[bool] = set()
        self._open_files = OpenFiles()
        self._shared: dict[str, Any] = {}  # tensors of arrays
        self.rejected: list[RejectedImage] = []
        images, starts, sizes, counts, captions, groups = [0], [], [], [], [], []
        for head in heads:
            images.append(images[-1] + len(head.starts))
            starts.append(np.array(head.starts, dtype=np.int64))
            sizes.append(np.array(head.sizes, dtype=np.int32))
            counts.append(np.array(head.counts, dtype=np.int32))
            captions.append(np.frombuffer(head.caption_hashes, dtype=HASHES))
            groups.append(np.frombuffer(head.groups or bytes(HASHES.itemsize * len(head.starts)), dtype=HASHES))
            if head.texts > 0:
                self.line_rules.add(bool(head.rule.lines))
                self.texts += head.texts
                self.texts_of_lines += head.texts_of_lines or 0
            if not head.fingerprint:
                self.rejected += head.rejected
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
    def only_txt(self) -> int:
        """Number of images without a list of captions, whose only caption is their text."""
        return self.texts - self.texts_of_lines if self.rule.lines else self.texts

    @property
    def captions_per_image(self) -> np.ndarray:
        """(I,) number of captions."""
        return np.diff(self.first_caption)

    @cached_property
    def most_captions(self) -> int:
        """The number of captions of the image with the most."""
        return int(self.captions_per_image.max())

    def describe(self) -> str:
        """Return a part of a line for the log, such as ``"30 images with 1 to 5 captions"``."""
        fewest, most = int(self.captions_per_image.min()), self.most_captions
        if fewest < most:
            return f"{len(self):,} images with {fewest} to {most} captions"
        return f"{len(self):,} images with {most} caption{'s' if most > 1 else ''}"

    def share_of_equal_captions(self) -> float:
        """Return the share of the pairs of two images that have an equal caption, [0, 1].

        It may be too large where pairs have several. Of more than a million images, a million are compared.
        """
        images = np.arange(len(self))
        if len(images) > IMAGES_COMPARED:
            images = np.random.default_rng(0).choice(images, IMAGES_COMPARED, replace=False)
        if len(images) < 2:
            return 0.0
        first = self.first_caption[images]
        counts = self.first_caption[images + 1] - first
        owners = np.repeat(np.arange(len(images)), counts)
        numbers = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
        hashes = self.caption_hashes[np.repeat(first, counts) + numbers]
        order = np.argsort(hashes, kind="stable")  # within equal ones, by image
        hashes, owners = hashes[order], owners[order]
        is_first = np.ones(len(hashes), dtype=bool)  # of an image's equal captions
        is_first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
        _, images_of_caption = np.unique(hashes[is_first], return_counts=True)
        equal = (images_of_caption * (images_of_caption - 1)).sum()
        return min(1.0, float(equal / (len(images) * (len(images) - 1))))

    def describe_equal_captions(self, are_negatives: bool) -> str:
        """Return a part of a line for the log about images with equal captions; "" without any.

        Args:
            are_negatives: the loss takes no ids of captions.
        """
        share = self.share_of_equal_captions()
        if share == 0:
            return ""
        meaning = "and are negatives, because this loss takes no ids" if are_negatives else "and are no negatives"
        return f"; {100 * share:.2g} % of the pairs of images have an equal caption, {meaning}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process gets: arrays in shared memory, of which a loader's workers have no copies."""
        import torch

        state = vars(self).copy()
        for name in self.ARRAYS:
            if name not in self._shared:
                self._shared[name] = torch.from_numpy(getattr(self, name)).share_memory_()
                setattr(self, name, self._shared[name].numpy())
            state[name] = self._shared[name]
        state["_shared"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for name in self.ARRAYS:
            setattr(self, name, state[name].numpy())

    def shard_of(self, images: Sequence[int]) -> list[str]:
        """Return the shard of each image."""
        return [self.shards[index] for index in np.searchsorted(self.first_image, images, side="right") - 1]

    def place_of(self, image: int) -> str:
        """Return where an image is, for errors."""
        return f"image {image}, in {self.shard_of([image])[0]}"

    def read(self, images: Sequence[int]) -> list[bytes | Exception]:
        """Return the bytes of each image's files in its shard, with headers, or the error.

        Behind URLs all images are read at the same time, and those that fail for want of an answer again.

        Raises:
            UserError: a server does not answer, however often it is asked. This is no error of an image.
        """
        contents = self._read_once(images)
        for pause in PAUSES:
            failed = [place for place, content in enumerate(contents) if is_transient(content)]
            if not failed:
                return contents
            time.sleep(pause)
            again = self._read_once([images[place] for place in failed])
            for place, content in zip(failed, again, strict=True):
                contents[place] = content
        for image, content in zip(images, contents, strict=True):
            if isinstance(content, Exception) and is_transient(content):
                tries = len(PAUSES) + 1
                raise UserError(f"cannot read {self.shard_of([image])[0]}, in {tries} tries: {reason(content)}")
        return contents

    def _read_once(self, images: Sequence[int]) -> list[bytes | Exception]:
        if len(images) == 0:
            return []
        files, _ = locate(self.shards[0])  # that of this process
        paths = [files._strip_protocol(shard) for shard in self.shard_of(images)]
        starts = self.starts[images]
        ends = starts + self.sizes[images]
        if isinstance(files, AsyncFileSystem):
            return files.cat_ranges(paths, starts.tolist(), ends.tolist(), on_error="return")
        if isinstance(files, LocalFileSystem):
            return self._open_files.read(paths, starts.tolist(), self.sizes[images].tolist())
        contents: list[bytes | Exception] = []
        for path, start, end in zip(paths, starts.tolist(), ends.tolist(), strict=True):
            try:
                # Without a cache, because the default one reads megabytes ahead.
                contents.append(files.cat_file(path, start=start, end=end, cache_type="none"))
            except Exception as error:
                contents.append(error)
        return contents

    def parse(self, image: int, data: bytes | Exception) -> tuple[Record, dict[str, bytes]]:
        """Return the names, captions and files of an image that :meth:`read` has read.

        Raises:
            Exception: it could not be read, or is not the image that the index was made of.
        """
        if isinstance(data, Exception):
            raise data
        sample = parse_sample(data)
        record = parse_record(sample.key, sample.members, self.rule)
        first, end = self.first_caption[image : image + 2]
        if [*map(caption_hash, record.captions)] != self.caption_hashes[first:end].tolist():
            raise UserError("its captions are not those of the index; write the index or the shards again")
        return record, only_picture(sample.members, self.rule)

    @cached_property
    def records(self) -> list[Record]:
        """The names and captions of the I images.

        Raises:
            UserError: a shard or its index cannot be read or has changed.
        """
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            read = partial(read_records, on_error=self.on_error, rule=self.rule)
            records = list(itertools.chain.from_iterable(pool.map(read, self.shards)))
        if [len(record.captions) for record in records] != self.captions_per_image.tolist():
            raise UserError(f"the shards have changed since they were opened: {self.shards[0]}, ...")
        return records

    @cached_property
    def keys(self) -> list[str]:
        """The names of the I images in the shards."""
        return [record.key for record in self.records]

    @cached_property
    def image_ids(self) -> list[int | str]:
        """The ids of the I images; with the name of the shard, if images of several shards have one id."""
        return self._made_unique([record.image_id for record in self.records], self.first_image)

    @cached_property
    def captions(self) -> list[str]:
        """The C captions, those of an image adjacent and in source order."""
        return [caption for record in self.records for caption in record.captions]

    @cached_property
    def caption_ids(self) -> list[int | str]:
        """The ids of the C captions; with the name of the shard, if captions of several shards have one id."""
        ids = [caption_id for record in self.records for caption_id in record.caption_ids]
        return self._made_unique(ids, self.first_caption[self.first_image])

    def _made_unique(self, ids: list[int | str], first_of_shards: np.ndarray) -> list[int | str]:
        """Return ids that tell all items apart, also in shards of several data sets that count from 0 each."""
        if len(set(ids)) == len(ids):
            return ids
        folder, _, _ = os.path.commonprefix(self.shards).rpartition("/")  # noqa: RUF071 (paths and URLs)
        different: list[int | str] = []
        for shard, start, end in zip(self.shards, first_of_shards[:-1], first_of_shards[1:], strict=True):
            name = shard.removeprefix(f"{folder}/")
            different += [f"{name}/{value}" for value in ids[start:end]]
        return different

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
        """Return the names of the same images with some of the captions, given by their indices.

        Only ``captions``, ``caption_ids`` and ``image_of_caption`` are theirs; arrays, records and counts stay.
        """
        collection = object.__new__(type(self))  # `copy` would move the arrays to shared memory
        vars(collection).update(vars(self))
        indices = kept.tolist()
        collection.captions = [self.captions[index] for index in indices]
        collection.caption_ids = [self.caption_ids[index] for index in indices]
        collection.image_of_caption = self.image_of_caption[kept]
        return collection

    def digest(self) -> str:
        """Return a SHA-256 of the captions and of the sizes of the images, however these are divided into shards."""
        return hashlib.sha256(self.sizes.tobytes() + self.caption_hashes.tobytes()).hexdigest()

    def pictures(self, images: Iterable[int]) -> dict[int, bytes]:
        """Return the picture files of some images.

        Raises:
            UserError: a shard cannot be read, has changed, or has features in place of pictures.
        """
        images = sorted(set(images))
        pictures = {}
        for index, data, shard in zip(images, self.read(images), self.shard_of(images), strict=True):
            with file_errors("read", shard), user_errors(shard):
                pictures[index] = input_of(self.parse(index, data)[1])
        return pictures
