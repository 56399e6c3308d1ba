"""The index of a shard: where each image is, hashes of its captions, and its names.

Beside ``coco-train-000000.tar``, ``__index__/coco-train-000000.tar.jsonl`` has a line of facts and arrays
(:class:`IndexHead`), which is all that training reads, and then a line for each image (:class:`Record`). A shard of
:func:`~vl_plugins.data.writer.write_shards` that has its name is complete and has an index. Shards of other programs
have none, unless ``vl-plugins shards index`` wrote one: they are scanned, headers first.
"""

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

import fsspec
import msgspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from vl_plugins.data.captions import RejectedImage, caption_hash, hash64
from vl_plugins.data.files import (
    check_answer,
    exists,
    file_errors,
    join,
    locate,
    sha256,
    state,
    with_retries,
    write_complete,
)
from vl_plugins.data.records import DEFAULT_RULE, CaptionRule, Record, lines_without_list, parse_record
from vl_plugins.data.samples import scan
from vl_plugins.errors import UserError, user_errors

Found = TypeVar("Found")

INDEX_FOLDER = "__index__"  # `datasets` passes over such folders
RENEW = "write the shards again, or their indexes with `vl-plugins shards index`"
HASHES = np.dtype("<i8")
# Enough for the first line of most indexes; file systems behind URLs would read more at once.
BLOCK_BYTES = 1 << 18
# S3 calls a missing file forbidden where listing is.
NO_INDEX = (FileNotFoundError, NotADirectoryError, PermissionError)


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
        rule: by which the captions were found.
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
    rule: CaptionRule = DEFAULT_RULE

    @property
    def single_texts(self) -> int:
        """Number of images whose captions are those of a ``txt`` with a single line."""
        return self.only_txt - (0 if self.rule.lines else self.text_lines or 0)

    def follows(self, rule: CaptionRule) -> bool:
        """Return whether the captions are those of a rule; one that leaves ``lines`` open has to be known only."""
        if not self.rule.agrees(rule):
            return False
        if self.only_txt == 0 and not self.text_lines:  # all captions are in json
            return True
        return self.text_lines is not None and rule.lines in (None, self.rule.lines)


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
    _write_index(index_file(shard), head, records)


def _write_index(file: str, head: IndexHead, records: Sequence[Record]) -> None:
    with write_complete(file) as stream:
        stream.write(msgspec.json.encode(head) + b"\n")
        stream.write(msgspec.json.Encoder().encode_lines(records))


def read_head(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> IndexHead:
    """Return the first line of a shard's index; without an index it is made from the archive, see :func:`scan_shard`.

    An index that was made by another rule does not count.

    Raises:
        UserError, OSError: the shard or the index cannot be read; or the shard is not that which the index was made of.
    """
    head = _read_index(shard, _read_index_head)
    if head is None:
        return scan_shard(shard, on_error, rule)[0]
    if (size := _size(shard)) != head.size:
        raise UserError(f"{shard} has {size:,} bytes, but its index says {head.size:,}; {RENEW}")
    return head if head.follows(rule) else scan_shard(shard, on_error, rule)[0]


def read_records(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> list[Record]:
    """Return the names and captions in a shard; arguments and errors are those of :func:`read_head`."""
    head, records = _read_index(shard, _read_index_records) or (None, [])
    if head is None or not head.follows(rule):
        return scan_shard(shard, on_error, rule)[1]
    return records


def _read_index(shard: str, read: Callable[[str], Found]) -> Found | None:
    """Return what a function reads from the index beside a shard or in the cache; None if there is none."""
    try:
        return with_retries(lambda: read(index_file(shard)))
    except NO_INDEX as error:
        check_answer(index_file(shard), error)
    with contextlib.suppress(*NO_INDEX):
        return read(cached_index_file(shard))
    return None


def cached_index_file(shard: str) -> str:
    """Return the location of a shard's index in the user's cache; that of a shard which has changed is another."""
    name = hashlib.sha256(f"{shard} {state(shard)}".encode()).hexdigest()
    return join(cache_folder(), f"{name}.jsonl")


def cache_folder() -> str:
    """Return the user's folder of indexes that cannot be beside their shards; VL_PLUGINS_CACHE chooses another one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return join(os.environ.get("VL_PLUGINS_CACHE") or join(cache, "vl_plugins"), "indexes")


def _read_index_head(file: str) -> IndexHead:
    with _open_index(file) as stream:
        return HEAD_DECODER.decode(stream.readline())


def _read_index_records(file: str) -> tuple[IndexHead, list[Record]]:
    with _open_index(file) as stream:
        head = HEAD_DECODER.decode(stream.readline())
        return head, msgspec.json.Decoder(Record).decode_lines(stream.read())


@contextlib.contextmanager
def _open_index(file: str) -> Iterator[BinaryIO]:
    files, path = locate(file)
    with user_errors(f"{path} is damaged: {RENEW}"), files.open(path, block_size=BLOCK_BYTES) as stream:
        yield stream


def scan_shard(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> tuple[IndexHead, list[Record]]:
    """Make the index of a shard from its headers and texts, without ``sha256``; errors as :func:`read_head`.

    Args:
        shard: path or URL.
        on_error: ``"skip"`` leaves out samples without captions, which the index lists as ``rejected``.
        rule: where the captions of a sample are.
    """
    records, starts, sizes, rejected = [], [], [], []
    only_txt = text_lines = 0
    # A damaged header can ask for any amount of memory.
    damage = user_errors(f"cannot read {shard}, it is damaged or compressed", MemoryError)
    with damage, fsspec.open(shard, "rb") as stream:
        for sample in scan(stream, ("json", *rule.texts)):
            try:
                records.append(parse_record(sample.key, sample.members, rule))
            except UserError as error:
                if on_error == "raise":
                    raise UserError(f"cannot read {shard}: {sample.key}: {error}") from error
                rejected.append(RejectedImage(f"{shard}: {sample.key}", "", str(error)))
                continue
            lines = lines_without_list(sample.members, rule)
            text_lines += lines > 1
            only_txt += lines == 1 or (lines > 1 and not rule.lines)
            starts.append(sample.start)
            sizes.append(sample.end - sample.start)
    facts: dict[str, Any] = {"rejected": rejected, "only_txt": only_txt}
    has_texts = only_txt > 0 or text_lines > 0
    rule = msgspec.structs.replace(rule, lines=bool(rule.lines) if has_texts else None, pictures=())
    if has_texts:
        facts["text_lines"] = text_lines
    if rule != DEFAULT_RULE:
        facts["rule"] = rule
    return make_head(records, starts, sizes, size=_size(shard), **facts), records


def has_index(shard: str) -> bool:
    """Return whether a shard has an index, beside it or in the cache."""
    return exists(index_file(shard)) or exists(cached_index_file(shard))


def keep_index(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> tuple[IndexHead, str]:
    """Scan a shard, and write its index beside it, or into the cache where that cannot be.

    Returns:
        The first line of the index, and the folder that has it now.
    """
    head, records = scan_shard(shard, on_error, rule)
    files, _ = locate(shard)
    file = index_file(shard)
    if not isinstance(files, LocalFileSystem) or not _write_if_possible(file, head, records):
        file = cached_index_file(shard)
        _write_index(file, head, records)
    return head, os.path.dirname(file)


def _write_if_possible(file: str, head: IndexHead, records: Sequence[Record]) -> bool:
    try:
        _write_index(file, head, records)
    except UserError:
        return False
    return True


class IndexedShard(NamedTuple):
    """What :func:`index_shard` did: ``state`` is ``"new"``, ``"rewritten"`` or ``"unchanged"``, of so many images."""

    state: str
    images: int
    rejected: list[RejectedImage]


def index_shard(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> IndexedShard:
    """Write the index of a shard, unless it has one that is right; see :func:`scan_shard` for the arguments.

    The shard is read as a whole. An index of the writer that is replaced loses what only the writer knows: what the
    shard was made of, and which images were left out.

    Raises:
        UserError, OSError: the shard cannot be read, or the index cannot be written.
    """
    head, records = scan_shard(shard, on_error, rule)
    head.sha256 = sha256(shard)
    has_index = exists(index_file(shard))
    if has_index and _is_index_right(shard, head, records):
        return IndexedShard("unchanged", len(records), head.rejected)
    write_index(shard, head, records)
    return IndexedShard("rewritten" if has_index else "new", len(records), head.rejected)


def _is_index_right(shard: str, head: IndexHead, records: Sequence[Record]) -> bool:
    """Compare the index beside a shard with that which was made of the shard."""
    try:
        written = read_head(shard, rule=head.rule)
        written_records = read_records(shard, rule=head.rule)
    except (UserError, OSError):  # it is damaged, or of a shard of another size
        return False
    if written.fingerprint:  # what only the writer knows
        written = msgspec.structs.replace(written, fingerprint="", rejected=head.rejected)
    return written == head and written_records == records


def _size(url: str) -> int:
    with file_errors("read", url):
        files, path = locate(url)
        return with_retries(lambda: files.size(path))
