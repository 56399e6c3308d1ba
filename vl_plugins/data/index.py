"""The index of a shard: where each image is, hashes of its captions, its names; and the images of several shards.

Beside ``coco-train-000000.tar``, ``__index__/coco-train-000000.tar.jsonl`` has a line of facts and arrays
(:class:`IndexHead`), which is all that training reads, and then a line for each image (:class:`Record`). A shard of
:func:`~vl_plugins.data.writer.write_shards` that has its name is complete and has an index. Shards of other programs
have none, unless ``vl-plugins shards index`` wrote one: they are scanned, headers first.
"""

import contextlib
import copy
import itertools
import json
import logging
import math
import os
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import fsspec
import msgspec
import numpy as np
from braceexpand import braceexpand
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from vl_plugins.data.captions import RejectedImage, caption_hash, hash64
from vl_plugins.data.files import (
    PAUSES,
    OpenFiles,
    check_answer,
    exists,
    file_errors,
    is_transient,
    join,
    locate,
    names,
    sha256,
    with_retries,
    write_complete,
)
from vl_plugins.data.samples import (
    TEXTS,
    Record,
    has_several_lines,
    input_of,
    parse_record,
    parse_sample,
    scan,
    texts_of,
)
from vl_plugins.errors import UserError, one_of, reason, user_errors

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

INDEX_FOLDER = "__index__"  # `datasets` passes over such folders
RENEW = "write the shards again, or their indexes with `vl-plugins shards index`"
HASHES = np.dtype("<i8")
# Enough for the first line of most indexes; file systems behind URLs would read more at once.
BLOCK_BYTES = 1 << 18
# Whether each line of a txt is a caption, by the option caption_lines.
RULES = {"yes": True, "no": False, "auto": None}
# S3 calls a missing file forbidden where listing is.
NO_INDEX = (FileNotFoundError, PermissionError)
# Files that are looked for or read at a time, which behind URLs takes as long as one.
AT_A_TIME = 16

MOST_SHARDS = 500_000  # in a pattern
GROUP = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")


class IndexHead(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first line of an index.

    Args:
        size, sha256: of the archive, in bytes and as hexadecimal digits.
        fingerprint: of the images that the shard was made of; empty if another program wrote it.
        rejected: images that were left out.
        starts, sizes, captions: as the arrays of a :class:`Collection`; ``counts`` of captions by image.
        groups: (I,) int64, a hash of each image's data set and group, 0 without a group; empty if no image has one.
        only_txt: number of images without a list of captions in their ``json``, whose only caption is their ``txt``.
        text_lines: number of images without such a list whose ``txt`` has several lines; unknown in an index of 0.3.
        has_lines: each line of these is a caption.
    """

    size: int
    sha256: str = ""
    fingerprint: str = ""
    rejected: list[RejectedImage] = []
    starts: list[int]
    sizes: list[int]
    counts: list[int]
    captions: bytes
    groups: bytes = b""
    only_txt: int = 0
    text_lines: int | None = None
    has_lines: bool = False

    @property
    def single_texts(self) -> int:
        """Number of images whose captions are those of a ``txt`` with a single line."""
        return self.only_txt - (0 if self.has_lines else self.text_lines or 0)


HEAD_DECODER = msgspec.json.Decoder(IndexHead)  # made once, because threads read the indexes of many shards


def index_file(shard: str) -> str:
    """Return the location of a shard's index, such as ``s3://bucket/__index__/coco-train-000000.tar.jsonl``."""
    folder, name = posixpath.split(shard)
    return join(folder, f"{INDEX_FOLDER}/{name}.jsonl")


def make_head(records: Sequence[Record], starts: list[int], sizes: list[int], **facts: Any) -> IndexHead:
    """Return the first line of the index of images at these places; ``facts`` are its other fields."""
    captions = (caption_hash(caption) for record in records for caption in record.captions)
    encode = msgspec.json.encode
    hashes = (0 if each.group is None else hash64(encode([each.dataset, each.group])) or 1 for each in records)
    groups = np.fromiter(hashes, HASHES)
    return IndexHead(
        starts=starts,
        sizes=sizes,
        counts=[len(record.captions) for record in records],
        captions=np.fromiter(captions, HASHES).tobytes(),
        groups=groups.tobytes() if groups.any() else b"",
        **facts,
    )


def write_index(shard: str, head: IndexHead, records: Sequence[Record]) -> None:
    """Write the index of a shard beside it."""
    with write_complete(index_file(shard)) as stream:
        stream.write(msgspec.json.encode(head) + b"\n")
        stream.write(msgspec.json.Encoder().encode_lines(records))


def read_head(shard: str, on_error: str = "raise", has_lines: bool | None = None) -> IndexHead:
    """Return the first line of a shard's index; without an index it is made from the archive, see :func:`scan_shard`.

    An index that was made by another rule than ``has_lines``, if that is given, does not count.

    Raises:
        UserError, OSError: the shard or the index cannot be read; or the shard is not that which the index was made of.
    """
    try:
        head = with_retries(lambda: _read_index_head(shard))
    except NO_INDEX as error:
        check_answer(index_file(shard), error)
        return scan_shard(shard, on_error, bool(has_lines))[0]
    if (size := _size(shard)) != head.size:
        raise UserError(f"{shard} has {size:,} bytes, but its index says {head.size:,}; {RENEW}")
    if not _has_rule(head, has_lines):
        return scan_shard(shard, on_error, bool(has_lines))[0]
    return head


def _has_rule(head: IndexHead, has_lines: bool | None) -> bool:
    """Return whether an index tells captions apart as asked for; None asks for any rule, but it must be known."""
    has_texts = head.only_txt > 0 or bool(head.text_lines)
    if not has_texts:
        return True
    return head.text_lines is not None and has_lines in (None, head.has_lines)


def read_records(shard: str, on_error: str = "raise", has_lines: bool | None = None) -> list[Record]:
    """Return the names and captions in a shard; arguments and errors are those of :func:`read_head`."""
    try:
        head, records = with_retries(lambda: _read_index_records(shard))
    except NO_INDEX as error:
        check_answer(index_file(shard), error)
        return scan_shard(shard, on_error, bool(has_lines))[1]
    if not _has_rule(head, has_lines):
        return scan_shard(shard, on_error, bool(has_lines))[1]
    return records


def _read_index_head(shard: str) -> IndexHead:
    with _open_index(shard) as stream:
        return HEAD_DECODER.decode(stream.readline())


def _read_index_records(shard: str) -> tuple[IndexHead, list[Record]]:
    with _open_index(shard) as stream:
        head = HEAD_DECODER.decode(stream.readline())
        return head, msgspec.json.Decoder(Record).decode_lines(stream.read())


@contextlib.contextmanager
def _open_index(shard: str) -> Iterator[BinaryIO]:
    files, path = locate(index_file(shard))
    with user_errors(f"{path} is damaged: {RENEW}"), files.open(path, block_size=BLOCK_BYTES) as stream:
        yield stream


def scan_shard(shard: str, on_error: str = "raise", has_lines: bool = False) -> tuple[IndexHead, list[Record]]:
    """Make the index of a shard from its headers and texts, without ``sha256``; errors as :func:`read_head`.

    Args:
        shard: path or URL.
        on_error: ``"skip"`` leaves out samples without captions, which the index lists as ``rejected``.
        has_lines: each line of a ``txt`` is a caption.
    """
    records, starts, sizes, rejected = [], [], [], []
    only_txt = text_lines = 0
    # A damaged header can ask for any amount of memory.
    damage = user_errors(f"cannot read {shard}, it is damaged or compressed", MemoryError)
    with damage, fsspec.open(shard, "rb") as stream:
        for sample in scan(stream, TEXTS):
            try:
                records.append(parse_record(sample.key, sample.members, has_lines))
            except UserError as error:
                if on_error == "raise":
                    raise UserError(f"cannot read {shard}: {sample.key}: {error}") from error
                rejected.append(RejectedImage(f"{shard}: {sample.key}", "", str(error)))
                continue
            metadata = sample.members.get("json", b"")
            if b'"captions"' not in metadata or not texts_of(json.loads(metadata.decode("utf-8-sig"))):
                has_several = has_several_lines(sample.members)
                text_lines += has_several
                only_txt += not (has_lines and has_several)
            starts.append(sample.start)
            sizes.append(sample.end - sample.start)
    facts: dict[str, Any] = {"rejected": rejected, "only_txt": only_txt}
    if only_txt > 0 or text_lines > 0:
        facts |= {"text_lines": text_lines, "has_lines": has_lines}
    return make_head(records, starts, sizes, size=_size(shard), **facts), records


class IndexedShard(NamedTuple):
    """What :func:`index_shard` did: ``state`` is ``"new"``, ``"rewritten"`` or ``"unchanged"``, of so many images."""

    state: str
    images: int
    rejected: list[RejectedImage]


def index_shard(shard: str, on_error: str = "raise", has_lines: bool = False) -> IndexedShard:
    """Write the index of a shard, unless it has one that is right; see :func:`scan_shard` for the arguments.

    The shard is read as a whole. An index of the writer that is replaced loses what only the writer knows: what the
    shard was made of, and which images were left out.

    Raises:
        UserError, OSError: the shard cannot be read, or the index cannot be written.
    """
    head, records = scan_shard(shard, on_error, has_lines)
    head.sha256 = sha256(shard)
    has_index = exists(index_file(shard))
    if has_index and _is_index_right(shard, head, records):
        return IndexedShard("unchanged", len(records), head.rejected)
    write_index(shard, head, records)
    return IndexedShard("rewritten" if has_index else "new", len(records), head.rejected)


def _is_index_right(shard: str, head: IndexHead, records: Sequence[Record]) -> bool:
    """Compare the index beside a shard with that which was made of the shard."""
    try:
        written = read_head(shard)
        written_records = read_records(shard)
    except (UserError, OSError):  # it is damaged, or of a shard of another size
        return False
    if written.fingerprint:  # what only the writer knows
        written = msgspec.structs.replace(written, fingerprint="", rejected=head.rejected)
    return written == head and written_records == records


def _size(url: str) -> int:
    with file_errors("read", url):
        files, path = locate(url)
        return with_retries(lambda: files.size(path))


def expand_braces(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for; raise ``ValueError`` if that is more than any data set has."""
    groups = ((group.count(","), RANGE.match(group)) for group in GROUP.findall(pattern))
    sizes = (abs(int(found[2]) - int(found[1])) if found else commas for commas, found in groups)
    if math.prod(size + 1 for size in sizes) <= MOST_SHARDS:  # each range is made as a whole
        shards = list(itertools.islice(braceexpand(pattern), MOST_SHARDS + 1))
        if len(shards) <= MOST_SHARDS:
            return shards
    raise ValueError(f"it names more than {MOST_SHARDS:,} shards")


def split_of(shard: str) -> str:
    """Return the name of a shard without its number, or ``shards`` for names such as img2dataset's.

    >>> split_of("s3://bucket/coco-train-000000.tar"), split_of("00000.tar")
    ('coco-train', 'shards')
    """
    return re.sub(r"[-_.]?[0-9]*\.tar$", "", posixpath.basename(shard)) or "shards"


def shards_in(folder: str, pattern: str = "[!.]*.tar") -> list[str]:
    """Return the shards in a folder, sorted.

    Raises:
        UserError: there are none, or those of several splits.
    """
    shards = [join(folder, name) for name in names(folder, pattern)]
    if not shards:
        raise UserError(f"{join(folder, pattern)}: there are no such shards")
    patterns: dict[str, str] = {}
    for shard in shards:
        split = split_of(shard)
        name = posixpath.basename(shard)
        if split not in patterns:
            patterns[split] = shard
        elif name.startswith(split):
            separator = name[len(split)]
            patterns[split] = join(folder, f"{split}{separator if separator in '-_.' else ''}*.tar")
        else:  # img2dataset's are numbers
            patterns[split] = join(folder, "[0-9]*.tar")
    if len(patterns) > 1:
        listed = ", ".join(map(repr, patterns.values()))
        raise UserError(f"{join(folder, pattern)} are shards of several splits: choose {listed}")
    return shards


def _shards_of(part: str) -> list[str]:
    """Return the shards of a part of a pattern: a folder, a name with ``*``, or a name with braces."""
    folder, name = posixpath.split(part)
    if "*" in name or "?" in name:
        return shards_in(folder, name)
    if part and not part.endswith(".tar"):
        files, path = locate(part)
        if files.isdir(path):
            return shards_in(part)
    return [shard for shard in expand_braces(part) if shard]


def expand_shards(pattern: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Return the shards that a pattern stands for.

    Args:
        pattern: a path or URL of fsspec (``s3://``, ``https://``): a folder of the shards of one split; a name with
            ``*``, such as ``shards/coco-train-*.tar``, or with ranges, such as ``coco-train-{000000..000113}.tar``;
            several of them joined by ``::``; or a list of single shards.

    Raises:
        UserError: the pattern is malformed or names no shard, or a folder has shards of several splits; a shard does
            not exist or is named twice; or they are in different file systems.
    """
    shards = []
    with user_errors(f"the shard pattern {pattern!r}"):
        if isinstance(pattern, (str, os.PathLike)):
            for part in os.fspath(pattern).split("::"):
                shards += _shards_of(part)
        else:
            shards = [os.fspath(shard) for shard in pattern]
    # Links to a local shard have one device and inode.
    if not shards or len({os.stat(each)[1:3] if os.path.isfile(each) else each for each in shards}) < len(shards):
        raise UserError(f"the shard pattern {pattern!r} names no shard, or one more than once")
    if len({fsspec.utils.get_protocol(shard) for shard in shards}) > 1:
        raise UserError(f"shards must be in one file system, such as all local or all s3://; got {pattern!r}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        missing = [shard for shard, is_there in zip(shards, pool.map(exists, shards), strict=True) if not is_there]
    if missing:
        raise UserError(f"{len(missing)} of {len(shards)} shards do not exist: {missing[0]}")
    return shards


def read_collection(
    shards: str | os.PathLike | Sequence[str | os.PathLike], on_error: str = "raise", caption_lines: str = "auto"
) -> "Collection":
    """Read where the images of shards are, from the indexes beside the shards or else from the shards.

    Args:
        shards: as for :func:`expand_shards`.
        on_error: ``"skip"`` leaves out samples without captions in the shards of other programs.
        caption_lines: whether each line of a ``.txt`` is a caption, ``"yes"`` or ``"no"``; ``"auto"``: yes, if each
            ``.txt`` of the shards has at least two lines that are not blank, as CLIP_benchmark writes them. Samples
            with a list of captions in their ``.json`` need none.

    Raises:
        UserError: a shard does not exist or cannot be read, an image in it has no captions, or there are no images.
    """
    shards = expand_shards(shards)
    has_lines = RULES[one_of("caption_lines", caption_lines, RULES)]
    collection = _read_collection(shards, on_error, has_lines)
    if has_lines is None and not collection.has_one_rule:
        has_lines = have_lines(collection.text_lines, collection.single_texts)
        collection = _read_collection(shards, on_error, has_lines)
    if len(collection) == 0:
        raise UserError(f"the shards hold no images: {shards[0]}, ...")
    if collection.has_lines and caption_lines == "auto":
        logger.info(
            f"each line of a .txt is a caption, {len(collection.caption_hashes):,} of {len(collection):,} images; "
            "--caption-lines no takes each text for one"
        )
    return collection


def has_caption_lines(shards: Sequence[str], caption_lines: str = "auto") -> bool:
    """Return the rule of :func:`read_collection` for shards, of which some may be damaged."""
    has_lines = RULES[one_of("caption_lines", caption_lines, RULES)]
    if has_lines is not None:
        return has_lines
    text_lines = single_texts = 0
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for lines, singles in pool.map(_count_texts, shards):
            text_lines += lines
            single_texts += singles
    return have_lines(text_lines, single_texts)


def have_lines(text_lines: int, single_texts: int) -> bool:
    """Return whether lines of texts are captions, if so many texts have several lines, and so many one."""
    return text_lines > 0 and single_texts == 0


def _count_texts(shard: str) -> tuple[int, int]:
    """Return the number of texts with several lines, and with one; none of a shard that cannot be read."""
    try:
        head = read_head(shard, "skip")
    except (UserError, OSError):
        return 0, 0
    return head.text_lines or 0, head.single_texts


def _read_collection(shards: list[str], on_error: str, has_lines: bool | None) -> "Collection":
    read = partial(read_head, on_error=on_error, has_lines=has_lines)
    with user_errors(f"indexes of {shards[0]}, ..."), ThreadPoolExecutor(AT_A_TIME) as pool:
        return Collection(shards, pool.map(read, shards), on_error)


class Collection:
    """The I images of shards and their C captions, in the order of the shards.

    It holds about 70 bytes for an image with five captions. Names and captions are read when first asked for.

    Args:
        shards: paths or URLs.
        heads: first lines of their indexes; consumed one at a time.
        on_error: with which the heads were read.

    Attributes:
        shards: paths or URLs.
        first_image: (S + 1,) index of each shard's first image, and I.
        starts, sizes: (I,) first byte of each image's files in its shard, and their number of bytes, with headers.
        first_caption: (I + 1,) index of each image's first caption, and C.
        caption_hashes: (C,) int64, see :func:`~vl_plugins.data.captions.caption_hash`.
        labels: (I,) int64: the index of each image, or that of the first image of its group.
        only_txt: number of images without a list of captions, whose only caption is ``txt``.
        rejected: samples of other programs' shards that were left out.
        has_lines: each line of a ``txt`` is a caption.
        text_lines, single_texts: number of images whose captions are those of ``txt``, with several lines and with one.
    """

    def __init__(self, shards: Sequence[str], heads: Iterable[IndexHead], on_error: str = "raise"):
        self.shards, self.on_error, self.only_txt = tuple(shards), on_error, 0
        self.text_lines = self.single_texts = 0
        rules = set()
        self._open_files = OpenFiles()
        self.rejected: list[RejectedImage] = []
        images, starts, sizes, counts, captions, groups = [0], [], [], [], [], []
        for head in heads:
            images.append(images[-1] + len(head.starts))
            starts.append(np.array(head.starts, dtype=np.int64))
            sizes.append(np.array(head.sizes, dtype=np.int32))
            counts.append(np.array(head.counts, dtype=np.int32))
            captions.append(np.frombuffer(head.captions, dtype=HASHES))
            groups.append(np.frombuffer(head.groups or bytes(HASHES.itemsize * len(head.starts)), dtype=HASHES))
            self.only_txt += head.only_txt
            if head.text_lines is not None:
                rules.add(head.has_lines)
                self.text_lines += head.text_lines
                self.single_texts += head.single_texts
            if not head.fingerprint:
                self.rejected += head.rejected
        self.has_lines = True in rules
        # Whether the heads follow the rule that "auto" stands for.
        self.has_one_rule = rules <= {have_lines(self.text_lines, self.single_texts)}
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

    def shard_of(self, images: Sequence[int]) -> list[str]:
        """Return the shard of each image."""
        return [self.shards[index] for index in np.searchsorted(self.first_image, images, side="right") - 1]

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
        record = parse_record(sample.key, sample.members, self.has_lines)
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
            read = partial(read_records, on_error=self.on_error, has_lines=self.has_lines)
            parts = pool.map(read, self.shards)
            records = [record for part in parts for record in part]
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
        return self._different([record.image_id for record in self.records], self.first_image)

    @cached_property
    def captions(self) -> list[str]:
        """The C captions, those of an image adjacent and in source order."""
        return [caption for record in self.records for caption in record.captions]

    @cached_property
    def caption_ids(self) -> list[int | str]:
        """The ids of the C captions; with the name of the shard, if captions of several shards have one id."""
        ids = [caption_id for record in self.records for caption_id in record.caption_ids]
        return self._different(ids, self.first_caption[self.first_image])

    def _different(self, ids: list[int | str], first_of_shards: np.ndarray) -> list[int | str]:
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
