"""The index of a shard: where each image is, hashes of its captions, its names, and what the shard was made of.

Beside ``coco-train-000000.tar``, ``__index__/coco-train-000000.tar.jsonl`` has a line of facts and arrays
(:class:`IndexHead`), which is all that training reads, and then a line for each image (:class:`Record`). A shard of
:func:`~vl_plugins.data.writer.write_shards` that has its name is complete and has an index. Shards of other programs
have none, unless ``vl-plugins shards index`` wrote one: they are scanned, headers first.
"""

import contextlib
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from vl_plugins.data.captions import RejectedImage, caption_hash, hash64
from vl_plugins.data.files import file_errors, join, locate, sha256, write_complete
from vl_plugins.data.samples import TEXTS, Record, parse_record, read_samples
from vl_plugins.errors import UserError, user_errors

INDEX_FOLDER = "__index__"  # `datasets` passes over such folders
RENEW = "write the shards again, or their indexes with `vl-plugins shards index`"
HASHES = np.dtype("<i8")
# Enough for the first line of most indexes; file systems behind URLs would read more at once.
BLOCK_BYTES = 1 << 18
# S3 calls a missing file forbidden where listing is.
NO_INDEX = (FileNotFoundError, PermissionError)


class IndexHead(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first line of an index.

    Args:
        size, sha256: of the archive, in bytes and as hexadecimal digits.
        fingerprint: of the images that the shard was made of; empty if another program wrote it.
        source: where the images come from, as :func:`~vl_plugins.data.writer.write_shards` was told.
        rejected: images that were left out.
        starts, sizes: (I,) first byte of each image's files in the archive, and their number of bytes, with headers.
        counts: (I,) number of captions.
        captions: (C,) int64, :func:`~vl_plugins.data.captions.caption_hash` of each caption, image by image.
        groups: (I,) int64, a hash of each image's data set and group, 0 without a group; empty if no image has one.
        only_txt: number of images without a list of captions in their ``json``, whose only caption is their ``txt``.
    """

    size: int
    sha256: str = ""
    fingerprint: str = ""
    source: dict[str, Any] = {}
    rejected: list[RejectedImage] = []
    starts: list[int]
    sizes: list[int]
    counts: list[int]
    captions: bytes
    groups: bytes = b""
    only_txt: int = 0


def index_file(shard: str) -> str:
    """Return the location of a shard's index.

    >>> index_file("s3://bucket/coco-train-000000.tar")
    's3://bucket/__index__/coco-train-000000.tar.jsonl'
    """
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


def read_head(shard: str) -> IndexHead:
    """Return the first line of a shard's index; without an index it is made from the archive.

    Raises:
        UserError: the shard or the index cannot be read; or the shard is not the one that the index was made of.
    """
    try:
        with _open_index(shard) as stream:
            head = msgspec.json.decode(stream.readline(), type=IndexHead)
    except NO_INDEX:
        return scan_shard(shard)[0]
    if (size := _size(shard)) != head.size:
        raise UserError(f"{shard} has {size:,} bytes, but its index says {head.size:,}; {RENEW}")
    return head


def read_records(shard: str) -> list[Record]:
    """Return the names and captions in a shard; errors are those of :func:`read_head`."""
    try:
        with _open_index(shard) as stream:
            stream.readline()
            return msgspec.json.Decoder(Record).decode_lines(stream.read())
    except NO_INDEX:
        return scan_shard(shard)[1]


@contextlib.contextmanager
def _open_index(shard: str) -> Iterator[BinaryIO]:
    files, path = locate(index_file(shard))
    with user_errors(f"{path} is damaged: {RENEW}"), files.open(path, block_size=BLOCK_BYTES) as stream:
        yield stream


def scan_shard(shard: str) -> tuple[IndexHead, list[Record]]:
    """Make the index of a shard from its headers and texts, without ``sha256``; errors as :func:`read_head`."""
    records, starts, sizes, only_txt = [], [], [], 0
    for sample in read_samples(shard, TEXTS):
        try:
            records.append(parse_record(sample.key, sample.members))
        except UserError as error:
            raise UserError(f"cannot read {shard}: {sample.key}: {error}") from error
        only_txt += b'"captions"' not in sample.members.get("json", b"")
        starts.append(sample.start)
        sizes.append(sample.end - sample.start)
    return make_head(records, starts, sizes, size=_size(shard), only_txt=only_txt), records


def index_shard(shard: str) -> int:
    """Write the index of a shard that another program wrote, in place of one; return the number of images in it."""
    head, records = scan_shard(shard)
    head.sha256 = sha256(shard)
    write_index(shard, head, records)
    return len(records)


def _size(url: str) -> int:
    with file_errors("read", url):
        files, path = locate(url)
        return files.size(path)
