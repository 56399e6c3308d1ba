"""The index of a shard: where each image is, hashes of its captions, and its names.

Beside ``coco-train-000000.tar``, ``__index__/coco-train-000000.tar.jsonl`` has a line of facts and arrays
(:class:`IndexHead`), which is all that training reads, and then a line for each image (:class:`Record`). A shard of
:func:`~vl_plugins.data.writer.write_shards` that has its name is complete and has an index. Shards of other programs
have none, unless ``vl-plugins shards index`` or a training wrote one: they are scanned, headers first.
"""

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    lock,
    sha256,
    state,
    with_retries,
    write_complete,
)
from vl_plugins.data.records import DEFAULT_RULE, CaptionRule, Record, lines_without_list, parse_record
from vl_plugins.data.samples import scan
from vl_plugins.errors import UserError, user_errors

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
        starts, sizes, caption_hashes: as the arrays of a
            :class:`~vl_plugins.data.collection.Collection`; ``counts`` of captions by image.
        groups: (I,) int64, a hash of each image's data set and group, 0 without a group; empty if no image has one.
        texts: number of images without a list of captions in their ``json``, whose captions are in a text file.
        texts_of_lines: number of those whose text has several lines; unknown in an index of 0.3.
        rule: by which the captions were found.
    """

    size: int
    sha256: str = ""
    fingerprint: str = ""
    rejected: list[RejectedImage] = []
    starts: list[int]
    sizes: list[int]
    counts: list[int]
    caption_hashes: bytes = msgspec.field(name="captions")
    groups: bytes = b""
    texts: int = msgspec.field(name="only_txt", default=0)
    texts_of_lines: int | None = msgspec.field(name="text_lines", default=None)
    rule: CaptionRule = DEFAULT_RULE

    def serves(self, rule: CaptionRule, on_error: str) -> bool:
        """Return whether a scan by this rule would find the same; a rule that leaves ``lines`` open takes either."""
        # What a training has left out is an error elsewhere.
        was_kept = not self.sha256 and not self.fingerprint
        if self.rule.place() != rule.place() or (was_kept and self.rejected and on_error == "raise"):
            return False
        if self.texts == 0:
            return True
        return self.texts_of_lines is not None and rule.lines in (None, bool(self.rule.lines))


HEAD_DECODER = msgspec.json.Decoder(IndexHead)  # made once, because threads read the indexes of many shards


def index_file(shard: str) -> str:
    """Return the location of a shard's index, such as ``s3://bucket/__index__/coco-train-000000.tar.jsonl``."""
    folder, name = posixpath.split(shard)
    return join(folder, f"{INDEX_FOLDER}/{name}.jsonl")


def make_head(records: Sequence[Record], starts: list[int], sizes: list[int], **facts: Any) -> IndexHead:
    """Return the first line of the index of images at these places; ``facts`` are its other fields."""
    caption_hashes = np.fromiter(
        (caption_hash(caption) for record in records for caption in record.captions), dtype=HASHES
    )
    groups = np.fromiter(map(_group_hash, records), dtype=HASHES)
    return IndexHead(
        starts=starts,
        sizes=sizes,
        counts=[len(record.captions) for record in records],
        caption_hashes=caption_hashes.tobytes(),
        groups=groups.tobytes() if groups.any() else b"",
        **facts,
    )


def _group_hash(record: Record) -> int:
    """Return a hash of an image's data set and group, 0 without a group."""
    if record.group is None:
        return 0
    return hash64(msgspec.json.encode([record.dataset, record.group])) or 1


def write_index(shard: str, head: IndexHead, records: Sequence[Record]) -> None:
    """Write the index of a shard beside it."""
    _write(index_file(shard), head, records)


def _write(file: str, head: IndexHead, records: Sequence[Record]) -> None:
    with write_complete(file) as stream:
        stream.write(msgspec.json.encode(head) + b"\n")
        stream.write(msgspec.json.Encoder().encode_lines(records))


def read_head(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> IndexHead:
    """Return the first line of a shard's index; without an index it is made from the archive, see :func:`scan_shard`.

    An index that was made by another rule does not count.

    Raises:
        UserError, OSError: the shard or the index cannot be read; or the shard is not that which the index was made of.
    """
    index = find_index(shard, on_error, rule)
    return scan_shard(shard, on_error, rule)[0] if index is None else index[0]


def read_records(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> list[Record]:
    """Return the names and captions in a shard; arguments and errors are those of :func:`read_head`."""
    index = find_index(shard, on_error, rule, with_records=True)
    return scan_shard(shard, on_error, rule)[1] if index is None else index[1]


def find_index(
    shard: str, on_error: str = "raise", rule: CaptionRule | None = None, with_records: bool = False
) -> tuple[IndexHead, list[Record]] | None:
    """Return the index beside a shard, or that in the cache; None if there is none by the rule.

    Args:
        shard, on_error: as for :func:`scan_shard`.
        rule: None takes an index by any rule.
        with_records: read the names and captions, too; otherwise their list is empty.

    Raises:
        UserError, OSError: as for :func:`read_head`.
    """
    for file in _places(shard, rule or DEFAULT_RULE):
        try:
            head, records = with_retries(partial(_read, file, with_records))
        except NO_INDEX as error:
            check_answer(file, error)
            continue
        if (size := _size(shard)) != head.size:
            raise UserError(f"{shard} has {size:,} bytes, but its index says {head.size:,}; {RENEW}")
        if rule is None or head.serves(rule, on_error):
            return head, records
    return None


def _places(shard: str, rule: CaptionRule) -> Iterator[str]:
    yield index_file(shard)
    yield cached_index_file(shard, rule)  # which asks for the state of the shard


def _read(file: str, with_records: bool) -> tuple[IndexHead, list[Record]]:
    files, path = locate(file)
    with user_errors(f"{path} is damaged: {RENEW}"), files.open(path, block_size=BLOCK_BYTES) as stream:
        head = HEAD_DECODER.decode(stream.readline())
        if not with_records:
            return head, []
        return head, msgspec.json.Decoder(Record).decode_lines(stream.read())


def cached_index_file(shard: str, rule: CaptionRule = DEFAULT_RULE) -> str:
    """Return the location of a shard's index in the user's cache; that of a shard which has changed is another."""
    facts = [shard, state(shard), rule.place(), bool(rule.lines)]
    name = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
    return join(cache_folder(), f"{name}.jsonl")


def cache_folder() -> str:
    """Return the user's folder of indexes that cannot be beside their shards; VL_PLUGINS_CACHE chooses another one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return join(os.environ.get("VL_PLUGINS_CACHE") or join(cache, "vl_plugins"), "indexes")


def scan_shard(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> tuple[IndexHead, list[Record]]:
    """Make the index of a shard from its headers and texts, without ``sha256``; errors as :func:`read_head`.

    Args:
        shard: path or URL.
        on_error: ``"skip"`` leaves out samples without captions, which the index lists as ``rejected``.
        rule: where the captions of a sample are.
    """
    records, starts, sizes, rejected = [], [], [], []
    texts = texts_of_lines = 0
    has_lines = bool(rule.lines)
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
            texts += lines > 0
            texts_of_lines += lines > 1
            starts.append(sample.start)
            sizes.append(sample.end - sample.start)
    facts: dict[str, Any] = {"rejected": rejected}
    rule = rule.place()
    if texts > 0:
        facts |= {"texts": texts, "texts_of_lines": texts_of_lines}
        rule = msgspec.structs.replace(rule, lines=has_lines)
    if rule != DEFAULT_RULE:
        facts["rule"] = rule
    return make_head(records, starts, sizes, size=_size(shard), **facts), records


def read_or_keep(shard: str, on_error: str = "raise", rule: CaptionRule = DEFAULT_RULE) -> tuple[IndexHead, str | None]:
    """Return the first line of a shard's index; if there is none, scan the shard and keep its index.

    It is kept beside the shard, or in the user's cache where that cannot be. Of several processes, one scans the shard
    and the others wait.

    Returns:
        The first line, and the folder that the index was written to, if it was.
    """
    index = find_index(shard, on_error, rule)
    if index is not None:
        return index[0], None
    cached = cached_index_file(shard, rule)
    with _lock_if_possible(f"{cached}.lock"):
        index = find_index(shard, on_error, rule)
        if index is not None:
            return index[0], None
        head, records = scan_shard(shard, on_error, rule)
        files, _ = locate(shard)
        places = [cached]
        if isinstance(files, LocalFileSystem) and not exists(index_file(shard)):
            places.insert(0, index_file(shard))
        for file in places:
            with contextlib.suppress(UserError):  # the folder cannot be written to
                _write(file, head, records)
                return head, os.path.dirname(file)
    return head, None


@contextlib.contextmanager
def _lock_if_possible(file: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(lock(file, "an index", wait=True))
        yield
    with contextlib.suppress(OSError):
        os.remove(file)  # a process that has just opened it scans once more


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
    is_there = exists(index_file(shard))
    if is_there and _is_right(shard, head, records):
        return IndexedShard("unchanged", len(records), head.rejected)
    write_index(shard, head, records)
    return IndexedShard("rewritten" if is_there else "new", len(records), head.rejected)


def _is_right(shard: str, head: IndexHead, records: Sequence[Record]) -> bool:
    """Compare the index beside a shard with that which was made of the shard."""
    try:
        written, written_records = _read(index_file(shard), with_records=True)
    except (UserError, OSError):  # it is damaged
        return False
    if written.fingerprint:  # what only the writer knows
        written = msgspec.structs.replace(written, fingerprint="", rejected=head.rejected)
    return written == head and written_records == records


def _size(url: str) -> int:
    with file_errors("read", url):
        files, path = locate(url)
        return with_retries(lambda: files.size(path))
