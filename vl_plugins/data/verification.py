"""Whether shards are still what their ``manifest.json`` says, sample by sample."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vl_plugins.data.json_text import parse_json
from vl_plugins.data.manifest import (
    MANIFEST_FILE,
    REJECTED_FILE,
    SIZES_FILE,
    SplitEntry,
    is_shard_of,
    number_of_captions,
    read_manifest,
    read_sizes,
    select_splits,
)
from vl_plugins.data.parallel import map_in_processes
from vl_plugins.data.shard_verification import ShardReport, ShardTask, verify_shard
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["Verification", "verify_shards"]


@dataclass(frozen=True)
class Verification:
    """What :func:`verify_shards` found.

    Args:
        shards: number of shards that were read.
        samples: number of samples in them.
        captions: number of captions in them; those of a sample whose ``json`` cannot be read are not counted.
        problems: one line each, ``<file>: <what is wrong>`` or ``<shard>: <key>: <what is wrong>``; none when
            everything is right.
    """

    shards: int
    samples: int
    captions: int
    problems: tuple[str, ...]


def verify_shards(
    folder: Folder | str | os.PathLike, *, splits: Sequence[str] | None = None, workers: int = 1
) -> Verification:
    """Read shards again and compare them, sample by sample, with ``manifest.json`` and the files beside it.

    Every shard is read once from beginning to end, its images, or arrays of features, are decoded, and nothing is
    written. What does not follow from another problem is a problem of its own; the order of problems does not depend on
    ``workers``.

    Args:
        folder: of the shards, a path or a URL of fsspec.
        splits: only these, ``<dataset>-<split>`` or ``<split>``; by default all that the manifest lists.
        workers: number of processes; each holds one sample at a time.

    Raises:
        UserError: the manifest is missing, unreadable or not ours, does not list one of ``splits``, or ``workers`` is
            less than 1.
    """
    folder = folder if isinstance(folder, Folder) else Folder(folder)
    entries = read_manifest(folder)
    if entries is None:
        raise _no_manifest(folder)
    selected = {name: entries[name] for name in select_splits(entries, splits)}
    present = dict.fromkeys(folder.names())
    problems = [
        *_check_left_overs(present, None if splits is None else set(selected)),
        *_check_unlisted(present, selected, every_split=splits is None),
        *_check_sizes(folder, selected, every_split=splits is None),
        *_check_rejected(folder, selected, every_split=splits is None),
    ]
    tasks = []
    for name, entry in selected.items():
        problems += _check_totals(name, entry)
        for file, facts in sorted(entry["shards"].items()):
            # A name such as ../../x.tar is not opened.
            if not is_shard_of(name, file):
                problems.append(f"{MANIFEST_FILE}: {name}: {file!r} is not the name of a shard of this split")
            elif file not in present:
                problems.append(f"{file}: does not exist")
            else:
                tasks.append(ShardTask(name, file, facts, entry["options"]))

    reports: dict[str, list[ShardReport]] = {name: [] for name in selected}
    read_again = map_in_processes(partial(verify_shard, folder), tasks, workers)
    # disable=None: no bar where nobody watches, such as in a log file.
    bar = require("tqdm", extra="data").tqdm(total=len(tasks), desc="verify", unit="shard", disable=None)
    splits_read = {name: _SplitIds() for name in selected}
    with bar:
        for task, report in zip(tasks, read_again, strict=True):
            problems += report.problems
            problems += splits_read[task.split].add(task.file, report)
            # The ids of a whole data set are many; they have been compared.
            reports[task.split].append(report._replace(samples=[]))
            bar.update()
    for name, entry in selected.items():
        problems += _check_counts(name, entry, reports[name], len(splits_read[name].groups))
    every = [report for shards in reports.values() for report in shards]
    return Verification(
        shards=len(every),
        samples=sum(report.num_samples for report in every),
        captions=sum(number_of_captions(report.captions_per_image) for report in every),
        problems=tuple(map(_on_one_line, problems)),
    )


def _no_manifest(folder: Folder) -> UserError:
    names = folder.names()
    if any(_left_over_of(name) is not None for name in names):
        reason = "a conversion was interrupted; run it again"
    elif any(name.endswith(".tar") for name in names):
        reason = "these shards cannot be compared with anything"
    else:
        reason = "it holds no shards of vl-plugins"
    return UserError(f"there is no {folder / MANIFEST_FILE}: {reason}")


def _left_over_of(name: str) -> str | None:
    """Return the file that an interrupted conversion left ``name`` of, None when it is no such file."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.partial", name)
    file = match[1] if match else name
    record = re.fullmatch(r"\.(.+\.tar)\.done", file)
    if record:
        return record[1]
    return file if match else None


def _split_of(shard: str) -> str | None:
    match = re.fullmatch(r"(.+)-\d{6}\.tar", shard)
    return match[1] if match else None


def _check_left_overs(present: Iterable[str], splits: set[str] | None) -> Iterator[str]:
    for name in present:
        file = _left_over_of(name)
        # Of the files that describe the whole folder, left-overs concern every split.
        if file is not None and (splits is None or _split_of(file) in {None, *splits}):
            yield f"{name}: left over from an interrupted conversion; run it again"


def _check_unlisted(present: Iterable[str], entries: Mapping[str, SplitEntry], *, every_split: bool) -> Iterator[str]:
    listed = {file for entry in entries.values() for file in entry["shards"]}
    for name in present:
        split = _split_of(name)
        if split is not None and name not in listed and (every_split or split in entries):
            yield f"{name}: {MANIFEST_FILE} does not list it"


def _check_sizes(folder: Folder, entries: Mapping[str, SplitEntry], *, every_split: bool) -> Iterator[str]:
    try:
        sizes = read_sizes(folder)
    except UserError as error:
        yield f"{SIZES_FILE}: {str(error).removeprefix(f'{folder / SIZES_FILE} ')}"
        return
    if sizes is None:
        yield f"{SIZES_FILE}: does not exist"
        return
    listed = {file: facts["samples"] for entry in entries.values() for file, facts in entry["shards"].items()}
    for file, samples in sorted(listed.items()):
        if file not in sizes:
            yield f"{SIZES_FILE}: does not list {file}"
        elif sizes[file] != samples:
            yield f"{SIZES_FILE}: says {sizes[file]:,} samples for {file}, {MANIFEST_FILE} says {samples:,}"
    for file in sorted(sizes.keys() - listed.keys()):
        if every_split or _split_of(file) in entries:
            yield f"{SIZES_FILE}: lists {file}, {MANIFEST_FILE} does not"


def _check_rejected(folder: Folder, entries: Mapping[str, SplitEntry], *, every_split: bool) -> Iterator[str]:
    lines: Counter[str] = Counter()
    unreadable = False
    if folder.exists(REJECTED_FILE):
        # Not `splitlines`: the text of a reason may hold other characters that end a line.
        for number, line in enumerate(folder.read(REJECTED_FILE).removesuffix(b"\n").split(b"\n"), start=1):
            try:
                lines[str(parse_json(line, "it")["shards"])] += 1
            except (ValueError, LookupError, TypeError):
                yield f"{REJECTED_FILE}: line {number} is not a JSON object that names the 'shards' it belongs to"
                unreadable = True
    for name, entry in entries.items():
        # Lines that cannot be read may be the missing ones.
        if lines[name] != entry["rejected"] and not unreadable:
            yield f"{REJECTED_FILE}: has {lines[name]:,} lines of {name}, {MANIFEST_FILE} says {entry['rejected']:,}"
    if every_split:
        for name in sorted(lines.keys() - entries.keys()):
            yield f"{REJECTED_FILE}: has {lines[name]:,} lines of {name}, {MANIFEST_FILE} does not list it"


def _check_totals(name: str, entry: SplitEntry) -> Iterator[str]:
    """Compare the sums of an entry with its own parts; the parts are compared with the shards."""
    place = f"{MANIFEST_FILE}: {name}"
    for total, part in (("images", "samples"), ("captions", "captions")):
        added = sum(facts[part] for facts in entry["shards"].values())
        if entry[total] != added:
            yield f"{place}: says {entry[total]:,} {total}, and {added:,} when those of its shards are added up"
    counts = entry["captions_per_image"]
    histogram = [int(captions) for captions, images in counts["histogram"].items() if images]
    for key, function in (("min", min), ("max", max)):
        if histogram and counts[key] != function(histogram):
            yield f"{place}: says {key} {counts[key]} captions per image, its histogram {function(histogram)}"


def _check_counts(name: str, entry: SplitEntry, reports: Sequence[ShardReport], groups: int) -> Iterator[str]:
    # Where a shard differs already, so must the whole.
    if len(reports) < len(entry["shards"]) or not all(report.as_listed for report in reports):
        return
    counted = sum((report.captions_per_image for report in reports), Counter())
    # A Counter, because a number that no image has may be listed as 0.
    listed = Counter({int(captions): images for captions, images in entry["captions_per_image"]["histogram"].items()})
    if counted != listed:
        said, found = (json.dumps(dict(sorted(counts.items()))) for counts in (listed, counted))
        yield f"{MANIFEST_FILE}: {name}: says captions per image are {said}, its shards have {found}"
    if groups != entry.get("groups", 0):
        yield f"{MANIFEST_FILE}: {name}: says {entry.get('groups', 0):,} groups, its shards have {groups:,}"


class _SplitIds:
    """Keys and ids of one split, seen shard by shard.

    Attributes:
        groups: all there are.
    """

    def __init__(self) -> None:
        self.groups: set[int | str] = set()
        self._last = "", ""  # key and its shard
        self._key_by_id: dict[tuple[str, int | str], str] = {}

    def add(self, shard: str, report: ShardReport) -> Iterator[str]:
        """Yield what does not go with the shards before."""
        if report.first_key is not None:
            # Once for a shard: where a shard is in the wrong place, so is every sample in it.
            last_key, last_shard = self._last
            if report.first_key <= last_key:
                yield f"{shard}: begins with {report.first_key}, but {last_shard} before it ends with {last_key}"
            self._last = report.last_key, shard
        for key, record in report.samples:
            if record.group is not None:
                self.groups.add(record.group)
            for kind, value in [("image", record.image_id), *(("caption", value) for value in record.caption_ids)]:
                owner = self._key_by_id.setdefault((kind, value), key)
                if owner != key:
                    yield f"{shard}: {key}: {kind} id {value!r} was that of {owner} before"


def _on_one_line(text: str) -> str:
    """Return a text with names from the archive so that a terminal can print it."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
