"""Whether shards are still what was written, and whether everything in them can be decoded."""

import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vl_plugins.data.feature_arrays import decode_features
from vl_plugins.data.images import inspect_image
from vl_plugins.data.manifest import MANIFEST_FILE, SIZES_FILE, ShardFacts, read_manifest, read_sizes, select_splits
from vl_plugins.data.parallel import map_in_processes
from vl_plugins.data.shard_files import INPUTS, input_of, read_texts, scan_samples
from vl_plugins.data.storage import Folder, error_text
from vl_plugins.errors import UserError, require
from vl_plugins.tables import printable

__all__ = ["Verification", "verify_shards"]

LEFT_OVER = re.compile(r"\..+(\.tar\.done|\.[0-9a-f]{8}\.partial)")


@dataclass(frozen=True)
class Verification:
    """Numbers of shards, samples and captions read, and problems: ``<file>: <problem>``, ``<shard>: <key>: ...``."""

    shards: int
    samples: int
    captions: int
    problems: tuple[str, ...]


def verify_shards(
    folder: Folder | str | os.PathLike, *, splits: Sequence[str] | None = None, workers: int = 1
) -> Verification:
    """Compare shards with the SHA-256 and counts of ``manifest.json``, and decode every picture or array of features.

    A shard is read twice, for its hash and for its samples. The order of problems does not depend on ``workers``.

    Args:
        folder: of the shards, a path or a URL of fsspec.
        splits: only the shards of these; by default all that the manifest lists, and what else is in the folder.
        workers: number of processes; each holds one sample at a time.

    Raises:
        UserError: the manifest is missing, unreadable or of another program, or does not list one of ``splits``.
    """
    folder = Folder(folder)
    entries = read_manifest(folder)
    if entries is None:
        raise UserError(f"there is no {folder / MANIFEST_FILE}: no shards of vl-plugins, or an interrupted conversion")
    problems = list(_check_folder(folder, entries)) if splits is None else []
    present = set(folder.names())
    tasks: list[tuple[str, ShardFacts, str]] = []
    for name in select_splits(entries, splits):
        inputs = "features" if entries[name]["options"].get("inputs") == "features" else "images"
        for file, facts in sorted(entries[name]["shards"].items()):
            # A name such as ../x.tar is not in the folder either.
            if file in present:
                tasks.append((file, facts, inputs))
            else:
                problems.append(f"{file}: does not exist")
    samples = captions = 0
    read_again = map_in_processes(partial(_verify_shard, folder), tasks, workers)
    with require("tqdm", extra="data").tqdm(total=len(tasks), desc="verify", unit="shard", disable=None) as bar:
        for shard_samples, shard_captions, shard_problems in read_again:
            samples += shard_samples
            captions += shard_captions
            problems += shard_problems
            bar.update()
    return Verification(len(tasks), samples, captions, tuple(map(printable, problems)))


def _verify_shard(folder: Folder, task: tuple[str, ShardFacts, str]) -> tuple[int, int, list[str]]:
    """Return the numbers of samples and captions of a shard, and its problems."""
    file, facts, inputs = task
    decode: Callable[[bytes], Any] = inspect_image if inputs == "images" else decode_features
    problems: list[str] = []
    samples = captions = 0
    try:
        if folder.sha256(file) != facts["sha256"]:
            problems.append(f"its content is not what was written (SHA-256 differs from {MANIFEST_FILE})")
        with folder.open(file) as stream:
            for sample in scan_samples(stream, {*INPUTS[inputs], "json"}):
                samples += 1
                try:
                    captions += len(read_texts(sample)[1])
                    decode(input_of(sample, inputs))
                except UserError as error:
                    problems.append(f"{sample.key}: {error}")
    except (tarfile.TarError, OSError, UserError) as error:
        problems.append(f"cannot be read to its end: {error_text(error)}")
    else:
        if (samples, captions) != (facts["samples"], facts["captions"]):
            expected = f"{facts['samples']:,} and {facts['captions']:,}"
            problems.append(f"has {samples:,} samples and {captions:,} captions, {MANIFEST_FILE} says {expected}")
    return samples, captions, [f"{file}: {problem}" for problem in problems]


def _check_folder(folder: Folder, entries: Mapping[str, Any]) -> Iterator[str]:
    """Compare the names of files, and ``sizes.json``, with the manifest."""
    listed = {file: facts["samples"] for entry in entries.values() for file, facts in entry["shards"].items()}
    for name in folder.names():
        if LEFT_OVER.fullmatch(name):
            yield f"{name}: left over from an interrupted conversion; run it again"
        elif re.fullmatch(r"[^.].*-\d{6}\.tar", name) and name not in listed:
            yield f"{name}: {MANIFEST_FILE} does not list it"
    try:
        sizes = read_sizes(folder) or {}
    except UserError as error:
        yield str(error)
        return
    for file in sorted(listed.keys() | sizes.keys()):
        if sizes.get(file) != listed.get(file):
            found, expected = (samples.get(file, "not listed") for samples in (sizes, listed))
            yield f"{SIZES_FILE}: number of samples of {file}: {found}, in {MANIFEST_FILE}: {expected}"
