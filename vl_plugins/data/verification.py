"""Checks that shards hold what was written, and that everything in them can be decoded."""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
import msgspec
from tqdm import tqdm

from vl_plugins.data.engines import run_jobs
from vl_plugins.data.files import exists, join, names, read_bytes, sha256
from vl_plugins.data.index import INDEX_FOLDER, index_file, make_index, read_head, read_records
from vl_plugins.data.inspection import read_sample
from vl_plugins.data.samples import parse_record, scan
from vl_plugins.errors import UserError, user_errors
from vl_plugins.tables import printable

__all__ = ["Verification", "verify_shards"]


class Verification(NamedTuple):
    """Numbers of shards, samples and captions, and problems: ``<shard>: <problem>`` or ``<shard>: <key>: ...``."""

    shards: int
    samples: int
    captions: int
    problems: list[str]


def verify_shards(
    shards: Sequence[str], *, folders: Sequence[str] = (), workers: int | None = None, executor: Any = None
) -> Verification:
    """Compare shards with their indexes, and decode all pictures and arrays; without an index they are only decoded.

    Args:
        shards: paths or URLs.
        folders: those with all of their shards in ``shards``; their other files are checked too.
        workers, executor: see :func:`~vl_plugins.data.engines.run_jobs`; a job is a shard.

    Raises:
        UserError: a folder cannot be listed, or its ``sizes.json`` cannot be read.
    """
    results = run_jobs(_verify_shard, shards, workers, executor)
    results = list(tqdm(results, "verify", len(shards), unit="shard", disable=None))
    problems = [f"{shard}: {each}" for shard, (*_, found) in zip(shards, results, strict=True) for each in found]
    samples = {shard: number for shard, (number, *_) in zip(shards, results, strict=True)}
    for folder in folders:
        here = {posixpath.basename(shard): samples[shard] for shard in shards if posixpath.dirname(shard) == folder}
        problems += _check_folder(folder, here)
    captions = sum(number for _, number, _ in results)
    return Verification(len(shards), sum(samples.values()), captions, list(map(printable, problems)))


def _verify_shard(shard: str) -> tuple[int, int, list[str]]:
    """Return the numbers of samples and captions of a shard, and its problems."""
    problems, records, starts, sizes, samples = [], [], [], [], 0
    try:
        with fsspec.open(shard, "rb") as stream:
            for sample in scan(stream):
                samples += 1
                try:
                    records.append(parse_record(sample.key, sample.members))
                    starts.append(sample.start)
                    sizes.append(sample.end - sample.start)
                    read_sample(sample, decode=True)
                except UserError as error:
                    problems.append(f"{sample.key}: {error}")
        if not samples:
            problems.append("it has no samples")
    except (UserError, OSError) as error:
        problems.append(f"it cannot be read to its end: {error}")
    try:
        if exists(index_file(shard)):
            found, head = make_index(records, starts, sizes, size=0), read_head(shard)
            parts = ("starts", "sizes", "counts", "captions", "groups")
            wrong = [name for name in parts if getattr(found.head, name) != getattr(head, name)]
            wrong += [] if found.records == read_records(shard) else ["records"]
            if head.sha256 not in ("", sha256(shard)):
                problems.append("it is not what was written: its index has another SHA-256")
            elif wrong:
                problems.append(f"its index has other {', '.join(wrong)}")
    except (UserError, OSError) as error:
        problems.append(str(error))
    return samples, sum(len(record.captions) for record in records), problems


def _check_folder(folder: str, samples: Mapping[str, int]) -> Iterator[str]:
    """Yield the problems of a folder, given the number of samples of each shard in it."""
    indexes, file = join(folder, INDEX_FOLDER), join(folder, "sizes.json")
    for place in (folder, indexes):
        for name in names(place, ".*.partial"):
            yield f"{join(place, name)}: left over from an interrupted run; run it again, or delete this file"
    indexed = {name.removesuffix(".jsonl") for name in names(indexes, "*.tar.jsonl")}
    with user_errors(file):
        sizes = msgspec.json.decode(read_bytes(file), type=dict[str, int]) if exists(file) else {}
    for name in sorted({*samples, *sizes, *indexed}):
        if name not in samples:
            yield f"{join(folder, name)}: does not exist, but sizes.json or an index has it"
        elif indexed and name not in indexed:
            yield f"{join(folder, name)}: has no index, unlike other shards of the folder"
        elif (indexed or sizes) and sizes.get(name) != samples[name]:
            yield f"{join(folder, name)}: has {samples[name]:,} samples, sizes.json says {sizes.get(name)}"
