"""Checks that shards hold what was written, and that everything in them can be decoded."""

import contextlib
import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
from tqdm import tqdm

from vl_plugins.data import engines
from vl_plugins.data.files import exists, join, names, read_bytes
from vl_plugins.data.index import INDEX_FOLDER, ShardIndex, index_file, make_index, read_head, read_records
from vl_plugins.data.inspection import MEMBERS, read_sample
from vl_plugins.data.samples import parse_record, scan
from vl_plugins.errors import UserError, user_errors
from vl_plugins.tables import printable

__all__ = ["Verification", "verify_shards"]

CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Verification:
    """Numbers of shards, samples and captions, and problems: ``<shard>: <problem>`` or ``<shard>: <key>: ...``."""

    shards: int
    samples: int
    captions: int
    problems: tuple[str, ...]


def verify_shards(
    shards: Sequence[str], *, folders: Sequence[str] = (), workers: int | None = None, executor: Any = None
) -> Verification:
    """Compare shards with their indexes, or with ``manifest.json`` of version 0.2, and decode all pictures and arrays.

    A shard that has neither is only decoded. Each shard is read once; a worker holds one sample at a time.

    Args:
        shards: paths or URLs.
        folders: those with all of their shards in ``shards``; their other files are checked too.
        workers: number of shards that are read at a time; by default one per core.
        executor: runs the jobs in place of threads, see :func:`vl_plugins.data.engines.executor`.

    Raises:
        UserError: a folder cannot be listed, or its ``manifest.json`` is damaged.
    """
    manifests = {folder: _read_manifest(folder) for folder in {*map(posixpath.dirname, shards), *folders}}
    jobs = [(shard, manifests[posixpath.dirname(shard)].get(posixpath.basename(shard))) for shard in shards]
    workers = engines.usable_cores() if workers is None else workers
    with contextlib.nullcontext(executor) if executor else engines.executor("threads", workers) as pool:
        results = engines.run_jobs(_verify_shard, jobs, pool, 2 * workers)
        results = list(tqdm(results, "verify", len(jobs), unit="shard", disable=None))
    problems = [f"{shard}: {each}" for shard, (*_, found) in zip(shards, results, strict=True) for each in found]
    samples = {shard: number for shard, (number, *_) in zip(shards, results, strict=True)}
    for folder in folders:
        here = {posixpath.basename(shard): samples[shard] for shard in shards if posixpath.dirname(shard) == folder}
        problems += _check_folder(folder, manifests[folder].keys(), here)
    captions = sum(number for _, number, _ in results)
    return Verification(len(shards), sum(samples.values()), captions, tuple(map(printable, problems)))


def _verify_shard(job: tuple[str, Mapping[str, Any] | None]) -> tuple[int, int, list[str]]:
    """Return the numbers of samples and captions of a shard, and its problems, given what a manifest says of it."""
    shard, manifest = job
    problems, records, starts, sizes, samples = [], [], [], [], 0
    try:
        with fsspec.open(shard, "rb") as stream:
            reader: Any = _HashingReader(stream)
            damage = ""
            try:
                for sample in scan(reader, MEMBERS):
                    samples += 1
                    try:
                        records.append(parse_record(sample.key, sample.members))
                        starts.append(sample.start)
                        sizes.append(sample.end - sample.start)
                        read_sample(sample, decode=True)
                    except UserError as error:
                        problems.append(f"{sample.key}: {error}")
            except UserError as error:
                damage = f"it cannot be read to its end: {error}"
            # An archive ends with zeros. They are read for the hash.
            other_data = max((any(chunk) for chunk in iter(lambda: reader.read(CHUNK), b"")), default=False)
            if damage or other_data or not samples:
                problems.append(damage or ("it has other data after its end" if other_data else "it has no samples"))
        found = make_index(records, starts, sizes, size=reader.end, sha256=reader.digest.hexdigest())
        if exists(index_file(shard)):
            index = ShardIndex(read_head(shard), read_records(shard))
            parts = ("starts", "sizes", "counts", "captions", "groups")
            wrong = [name for name in parts if getattr(found.head, name) != getattr(index.head, name)]
            wrong += [] if found.records == index.records else ["records"]
            if index.head.sha256 not in ("", found.head.sha256):
                problems.append("it is not what was written: its index has another SHA-256")
            elif wrong:
                problems.append(f"its index has other {', '.join(wrong)}")
        elif manifest and (samples, found.head.sha256) != (manifest["samples"], manifest["sha256"]):
            problems.append("it is not what was written: manifest.json has another SHA-256 or number of samples")
    except (UserError, OSError) as error:
        problems.append(str(error))
    return samples, sum(len(record.captions) for record in records), problems


def _check_folder(folder: str, manifest: Set[str], samples: Mapping[str, int]) -> Iterator[str]:
    """Yield the problems of a folder, given the shards of its manifest, and the number of samples of each shard."""
    indexes = join(folder, INDEX_FOLDER)
    for place, pattern in ((folder, ".*.partial"), (folder, ".*.done"), (indexes, ".*.partial")):
        for name in names(place, pattern):
            yield f"{join(place, name)}: left over from an interrupted run; run it again, or delete this file"
    indexed = {name.removesuffix(".jsonl") for name in names(indexes, "*.tar.jsonl")}
    sizes, file = samples, join(folder, "sizes.json")
    if indexed or exists(file):
        try:
            sizes = {**json.loads(read_bytes(file))}
        except (ValueError, TypeError) as error:
            yield f"{file}: {error}"
    for name in sorted({*samples, *sizes, *indexed, *manifest}):
        if name not in samples:
            yield f"{join(folder, name)}: does not exist, but sizes.json, manifest.json or an index has it"
        elif indexed and name not in indexed:
            yield f"{join(folder, name)}: has no index, unlike other shards of the folder"
        elif sizes.get(name) != samples[name]:
            yield f"{join(folder, name)}: has {samples[name]:,} samples, sizes.json says {sizes.get(name)}"


def _read_manifest(folder: str) -> dict[str, Any]:
    """Return what ``manifest.json`` of version 0.2 says of each shard; {} without one, or with another program's."""
    file = join(folder, "manifest.json")
    data = read_bytes(file) if exists(file) else b""
    if b'"splits"' not in data:
        return {}
    with user_errors(file):
        return {name: facts for split in json.loads(data)["splits"].values() for name, facts in split["shards"].items()}


class _HashingReader:
    """A stream that hashes all that it passes, also what :func:`scan` skips, so that a shard is read once."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.tell, self.digest, self.end = stream, stream.tell, hashlib.sha256(), 0

    def read(self, size: int) -> bytes:
        start, data = self.tell(), self.stream.read(size)
        self.digest.update(data[max(self.end - start, 0) :])
        self.end = max(self.end, start + len(data))
        return data

    def seek(self, position: int) -> int:
        self.stream.seek(min(position, self.end))
        while self.tell() < position and self.read(min(position - self.tell(), CHUNK)):
            pass
        return self.tell()
