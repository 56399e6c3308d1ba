"""Whether shards are still what their ``manifest.json`` says, sample by sample."""

import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from vl_plugins.data.annotations import check_caption
from vl_plugins.data.captions import txt_content
from vl_plugins.data.feature_arrays import FEATURE_EXTENSION, inspect_features
from vl_plugins.data.images import IMAGE_EXTENSIONS, inspect_image
from vl_plugins.data.json_text import parse_json
from vl_plugins.data.manifest import (
    MANIFEST_FILE,
    REJECTED_FILE,
    SIZES_FILE,
    ForeignManifestError,
    is_shard_of,
    number_of_captions,
    read_manifest,
    read_sizes,
    select_splits,
)
from vl_plugins.data.parallel import map_in_processes
from vl_plugins.data.storage import Folder, error_text
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["Verification", "verify_shards"]

# More than any image of as many pixels as PIL decodes; only a wrong header claims that.
LARGEST_MEMBER = 1 << 29  # bytes
READ_TOGETHER = 1 << 20  # bytes

# What a sample has of an image -> the fields of its size in the json.
SIZE_FIELDS = {"image": ("width", "height"), "features": ("num_features", "feature_dim")}
# Of files of a sample, by extension.
KINDS = {
    **dict.fromkeys(IMAGE_EXTENSIONS.values(), "image"),
    FEATURE_EXTENSION: "features",
    "txt": "txt",
    "json": "json",
}

ID = (int, str)
RECORD_FIELDS = {
    "image_id": ID,
    "captions": (list,),
    "caption_ids": (list,),
    "split": (str,),
    "dataset": (str,),
    "filename": (str,),
    "group": ID,
    **{field: (int,) for fields in SIZE_FIELDS.values() for field in fields},
}
OPTIONAL_FIELDS = {"group"}
ELEMENTS = {"captions": (str,), "caption_ids": ID}
TYPE_NAMES = {int: "a whole number", str: "a string", list: "a list", dict: "an object"}


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
    entries = _read_entries(folder)
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
        for file in sorted(entry["shards"]):
            # A name such as ../../x.tar is not opened.
            if not is_shard_of(name, file):
                problems.append(f"{MANIFEST_FILE}: {name}: {file!r} is not the name of a shard of this split")
            elif file not in present:
                problems.append(f"{file}: does not exist")
            else:
                tasks.append(_Task(name, file, entry["shards"][file], _options(entry)))

    reports: dict[str, list[_Report]] = {name: [] for name in selected}
    read_again = map_in_processes(partial(_verify_shard, folder), tasks, workers)
    # disable=None: no bar where nobody watches, such as in a log file.
    bar = require("tqdm", extra="data").tqdm(total=len(tasks), desc="verify", unit="shard", disable=None)
    unique = {name: _UniqueIds(name) for name in selected}
    with bar:
        for task, report in zip(tasks, read_again, strict=True):
            problems += report.problems
            problems += unique[task.split].check(task.file, report.samples)
            # The ids of a whole data set are many; they have been compared.
            reports[task.split].append(report._replace(samples=[]))
            bar.update()
    for name, entry in selected.items():
        problems += _check_counts(name, entry, reports[name], len(unique[name].groups))
    every = [report for of_split in reports.values() for report in of_split]
    return Verification(
        shards=len(every),
        samples=sum(report.num_samples for report in every),
        captions=sum(number_of_captions(report.captions_per_image) for report in every),
        problems=tuple(map(_on_one_line, problems)),
    )


class _Task(NamedTuple):
    split: str
    file: str
    facts: dict[str, Any]
    options: "_Options"


class _Options(NamedTuple):
    """How samples were written.

    Args:
        input_kind: what a sample has of an image, ``"image"`` or ``"features"``.
        txt: as for :func:`vl_plugins.data.shards.write_shards`.
    """

    input_kind: str
    txt: str


class _Ids(NamedTuple):
    """Key and ids of a sample; without ids where its json has none that can be used."""

    key: str
    image: list[int | str]
    captions: list[int | str]
    groups: list[int | str]


class _Report(NamedTuple):
    """What a shard contains.

    Args:
        problems: lines.
        samples: of every sample, in order.
        num_samples: their number.
        captions_per_image: images by their number of captions.
        as_listed: whether it has as many samples and captions as the manifest says; False where they are not known.
    """

    problems: list[str]
    samples: list[_Ids]
    num_samples: int
    captions_per_image: Counter[int]
    as_listed: bool


def _read_entries(folder: Folder) -> dict[str, dict[str, Any]]:
    entries = read_manifest(folder)
    if entries is None:
        names = folder.names()
        if any(_left_over_of(name) is not None for name in names):
            reason = "a conversion was interrupted; run it again"
        elif any(name.endswith(".tar") for name in names):
            reason = "these shards cannot be compared with anything"
        else:
            reason = "it holds no shards of vl-plugins"
        raise UserError(f"there is no {folder / MANIFEST_FILE}: {reason}")
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise ForeignManifestError(f"{folder / MANIFEST_FILE} is damaged: its entry {name!r} is not one of ours")
    return entries


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of the manifest has all that is compared, of the right types."""
    numbers = ("images", "captions", "rejected")
    if not isinstance(entry, dict) or not all(type(entry.get(key)) is int for key in numbers):
        return False
    if type(entry.get("groups", 0)) is not int:
        return False
    shards, counts = entry.get("shards"), entry.get("captions_per_image")
    if not isinstance(shards, dict) or not isinstance(counts, dict):
        return False
    histogram = counts.get("histogram")
    return (
        isinstance(histogram, dict)
        and all(key.isdecimal() and len(key) < 10 and type(images) is int for key, images in histogram.items())
        and all(type(counts.get(key)) is int for key in ("min", "max"))
        and all(_is_facts(facts) for facts in shards.values())
    )


def _is_facts(facts: Any) -> bool:
    if not isinstance(facts, dict) or not isinstance(facts.get("sha256"), str):
        return False
    return all(type(facts.get(key)) is int for key in ("samples", "captions", "bytes"))


def _options(entry: Mapping[str, Any]) -> _Options:
    options = entry.get("options")
    options = options if isinstance(options, dict) else {}
    return _Options(
        input_kind="features" if options.get("inputs") == "features" else "image",
        txt="all" if options.get("txt") == "all" else "first",
    )


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


def _check_unlisted(present: Iterable[str], entries: Mapping[str, Any], *, every_split: bool) -> Iterator[str]:
    listed = {file for entry in entries.values() for file in entry["shards"]}
    for name in present:
        split = _split_of(name)
        if split is not None and name not in listed and (every_split or split in entries):
            yield f"{name}: {MANIFEST_FILE} does not list it"


def _check_sizes(folder: Folder, entries: Mapping[str, Any], *, every_split: bool) -> Iterator[str]:
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


def _check_rejected(folder: Folder, entries: Mapping[str, Any], *, every_split: bool) -> Iterator[str]:
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


def _check_totals(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Compare the sums of an entry with its own parts; the parts are compared with the shards."""
    place = f"{MANIFEST_FILE}: {name}"
    for total, part in (("images", "samples"), ("captions", "captions")):
        of_shards = sum(facts[part] for facts in entry["shards"].values())
        if entry[total] != of_shards:
            yield f"{place}: says {entry[total]:,} {total}, and {of_shards:,} when those of its shards are added up"
    counts = entry["captions_per_image"]
    histogram = [int(captions) for captions, images in counts["histogram"].items() if images]
    for key, function in (("min", min), ("max", max)):
        if histogram and counts[key] != function(histogram):
            yield f"{place}: says {key} {counts[key]} captions per image, its histogram {function(histogram)}"


def _check_counts(name: str, entry: Mapping[str, Any], reports: Sequence[_Report], groups: int) -> Iterator[str]:
    # Where a shard differs already, so must the whole.
    if len(reports) < len(entry["shards"]) or not all(report.as_listed for report in reports):
        return
    counted = sum((report.captions_per_image for report in reports), Counter())
    # A Counter, because a number that no image has may be listed as 0.
    listed = Counter({int(captions): images for captions, images in entry["captions_per_image"]["histogram"].items()})
    if counted != listed:
        yield (
            f"{MANIFEST_FILE}: {name}: says captions per image are {_format_histogram(listed)}, its shards have "
            f"{_format_histogram(counted)}"
        )
    if groups != entry.get("groups", 0):
        yield f"{MANIFEST_FILE}: {name}: says {entry.get('groups', 0):,} groups, its shards have {groups:,}"


def _format_histogram(histogram: Mapping[int, int]) -> str:
    return json.dumps({str(captions): images for captions, images in sorted(histogram.items())})


class _UniqueIds:
    """Keys and ids of one split, seen shard by shard.

    Args:
        split: ``<dataset>-<split>``.

    Attributes:
        groups: all there are.
    """

    def __init__(self, split: str):
        self.groups: set[int | str] = set()
        self._split = split
        self._last: tuple[str, str] | None = None  # key and its shard
        self._shard_of: dict[str, str] = {}
        self._key_of: dict[str, dict[int | str, str]] = {"image": {}, "caption": {}}

    def check(self, shard: str, samples: Sequence[_Ids]) -> Iterator[str]:
        """Yield what does not go with the shards before."""
        keys = [sample.key for sample in samples if _is_key(self._split, sample.key)]
        if keys:
            # Once for a shard: where a shard is in the wrong place, so is every sample in it.
            if self._last and keys[0] < self._last[0]:
                yield f"{shard}: begins with {keys[0]}, but {self._last[1]} before it ends with {self._last[0]}"
            self._last = keys[-1], shard
        for key, images, captions, groups in samples:
            self.groups.update(groups)
            if self._shard_of.setdefault(key, shard) != shard:
                yield f"{shard}: {key}: {self._shard_of[key]} has a sample of this key too"
            for kind, ids in (("image", images), ("caption", captions)):
                for value in ids:
                    if value in self._key_of[kind]:
                        yield f"{shard}: {key}: {kind} id {value!r} was that of {self._key_of[kind][value]} before"
                    self._key_of[kind].setdefault(value, key)


class _BrokenArchive(Exception):
    """From here on, nothing in the archive can be read."""


def _verify_shard(folder: Folder, task: _Task) -> _Report:
    """Read a shard from beginning to end. A function of the module, because it runs in other processes."""
    contents = _Contents(task.split, task.options)
    problems = []
    facts = task.facts
    ended = False
    try:
        with folder.open(task.file) as stream:
            reader = _HashedReader(stream)
            try:
                contents.read(reader)
                ended = True
            except _BrokenArchive as error:
                problems.append(str(error))
            if reader.read_rest() and ended:
                problems.append("has data behind its end-of-archive mark")
            size, sha256 = reader.position, reader.digest.hexdigest()
    except OSError as error:
        problems.append(f"cannot be read: {error_text(error)}")
    except UserError as error:
        problems.append(str(error))
    else:
        if sha256 != facts["sha256"]:
            problems.insert(0, f"sha256 is {sha256}, {MANIFEST_FILE} says {facts['sha256']}")
        if size != facts["bytes"]:
            problems.insert(0, f"has {size:,} bytes, {MANIFEST_FILE} says {facts['bytes']:,}")

    num_samples, captions = len(contents.samples), number_of_captions(contents.captions_per_image)
    as_listed = ended and num_samples == facts["samples"]
    if ended:
        if not as_listed:
            problems.append(f"has {num_samples:,} samples, {MANIFEST_FILE} says {facts['samples']:,}")
        if contents.captions_per_image.total() < num_samples:
            as_listed = False  # those of some samples are not known
        elif captions != facts["captions"]:
            as_listed = False
            problems.append(f"has {captions:,} captions, {MANIFEST_FILE} says {facts['captions']:,}")
    return _Report(
        problems=[f"{task.file}: {problem}" for problem in [*problems, *contents.problems]],
        samples=contents.samples,
        num_samples=num_samples,
        captions_per_image=contents.captions_per_image,
        as_listed=as_listed,
    )


class _HashedReader:
    """Reads a stream once from beginning to end, and takes its hash on the way."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        self.position = 0
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or as many as there are."""
        data = self._stream.read(size)
        self.position += len(data)
        self.digest.update(data)
        return data

    def skip_to(self, position: int) -> None:
        while self.position < position and self.read(min(READ_TOGETHER, position - self.position)):
            pass

    def read_rest(self) -> bool:
        """Return whether anything but zeros is left."""
        found = False
        while data := self.read(READ_TOGETHER):
            found = found or any(data)
        return found


def _members(reader: _HashedReader) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive, whose data may be read then.

    ``tarfile`` would not do: it takes a cut inside a header for the end, and reads backwards.

    Raises:
        _BrokenArchive: there is no end-of-archive mark, or no header where one must be.
    """
    place = "before its first file"
    while True:
        header = reader.read(tarfile.BLOCKSIZE)
        if not header:
            raise _BrokenArchive(f"is cut off {place}: it has no end-of-archive mark")
        if len(header) < tarfile.BLOCKSIZE:
            raise _BrokenArchive(f"is cut off {place}, in a header")
        if not any(header):
            second = reader.read(tarfile.BLOCKSIZE)
            if len(second) < tarfile.BLOCKSIZE:
                raise _BrokenArchive(f"is cut off {place}, in its end-of-archive mark")
            if any(second):
                raise _BrokenArchive(f"has an empty header {place}")
            return
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.TarError as error:
            raise _BrokenArchive(f"has no tar header {place}: {error}") from error
        start = reader.position
        # As tarfile has it: links, folders and devices have no data, whatever they say.
        size = member.size if member.isreg() or member.type not in tarfile.SUPPORTED_TYPES else 0
        size = member.size if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK) else size
        if size < 0:
            raise _BrokenArchive(f"has a header of {size:,} bytes: {member.name}")
        if size > reader.size - start:
            raise _BrokenArchive(
                f"is cut off in {member.name}, or its header is wrong: of {size:,} bytes {reader.size - start:,} are "
                "there"
            )
        yield member
        place = f"after {member.name}"
        reader.skip_to(start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)


@dataclass
class _Sample:
    """Consecutive files of one key.

    Args:
        key: name up to the first dot.
        content: of the ``image`` or the ``features`` (width and height, or number and size of them), ``txt`` (str) and
            ``json`` (anything); None where there is one that cannot be used.
        problems: lines, without the key.
    """

    key: str
    content: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Contents:
    """The samples of a shard and what is wrong with them; of their data, one file at a time is held.

    Args:
        split: ``<dataset>-<split>``.
        options: of the split.
    """

    def __init__(self, split: str, options: _Options):
        self._split = split
        self._options = options
        self._expected = (options.input_kind, "txt", "json")
        self._ids: dict[str, _Ids] = {}  # by key
        self._kinds: dict[str, set[str]] = {}  # likewise
        self._last_key = ""
        self.problems: list[str] = []
        self.captions_per_image: Counter[int] = Counter()

    @property
    def samples(self) -> list[_Ids]:
        """Every sample, in order."""
        return list(self._ids.values())

    def read(self, reader: _HashedReader) -> None:
        """Read up to the end-of-archive mark.

        Raises:
            _BrokenArchive: there is none; what was read before counts, but for a last sample that is not complete.
        """
        sample = None
        try:
            for member in _members(reader):
                # As webdataset splits names.
                match = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name, re.DOTALL)
                if not match:
                    expected = "named <key>.<extension>" if member.isreg() else "a plain file"
                    self.problems.append(f"{member.name} is not {expected}")
                    continue
                key, extension = match.groups()
                if sample is None or sample.key != key:
                    if sample is not None:
                        self._end(sample)
                    sample = self._begin(key)
                self._add(sample, extension, member, reader)
        except _BrokenArchive:
            if sample is not None and not set(self._expected) <= sample.content.keys():
                sample = None
            raise
        finally:
            if sample is not None:
                self._end(sample)
            for key, kinds in self._kinds.items():
                missing = [kind for kind in self._expected if kind not in kinds]
                if missing:
                    self.problems.append(f"{key}: has no {', no '.join(missing)}")

    def _begin(self, key: str) -> _Sample:
        sample = _Sample(key)
        if key in self._ids:
            sample.problems.append(f"occurs again after {self._last_key}; keys are unique and their files together")
        elif not _is_key(self._split, key):
            sample.problems.append(f"is not a key of {self._split}, which has the form {self._split}-00000000")
        elif key < self._last_key:
            sample.problems.append(f"comes after {self._last_key}; keys are in ascending order")
        if _is_key(self._split, key):
            self._last_key = key
        return sample

    def _add(self, sample: _Sample, extension: str, member: tarfile.TarInfo, reader: _HashedReader) -> None:
        kind = KINDS.get(extension)
        if kind not in self._expected:
            sample.problems.append(f"has an unknown file {member.name}")
            return
        if kind in sample.content:
            sample.problems.append(f"has more than one {kind}; {member.name} is another")
            return
        sample.content[kind] = None
        # By type: `isreg` is true of sparse files too.
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            sample.problems.append(f"{member.name} is not a plain file")
            return
        if member.size > LARGEST_MEMBER:
            sample.problems.append(f"{member.name} has {member.size:,} bytes, which readers would hold in memory")
            return
        data = reader.read(member.size)
        if len(data) < member.size:
            raise _BrokenArchive(f"became shorter while it was read, in {member.name}")
        try:
            if kind == "image":
                info = inspect_image(data)
                sample.content[kind] = info.width, info.height
                if info.extension != extension:
                    sample.problems.append(f"its image is {info.extension}, its name says {extension}")
            elif kind == "features":
                sample.content[kind] = tuple(inspect_features(data))
            else:
                sample.content[kind] = _parse(kind, data)
        except UserError as error:
            sample.problems.append(str(error))

    def _end(self, sample: _Sample) -> None:
        record = sample.content.get("json")
        ids = self._ids.setdefault(sample.key, _Ids(sample.key, [], [], []))
        kinds = self._kinds.setdefault(sample.key, set())
        if record is not None:
            sample.problems += _check_record(record, self._split, self._options.input_kind)
            sample.problems += _compare(record, sample.content, self._options)
            # What occurs again has been counted.
            if "json" not in kinds:
                ids.image.extend([record["image_id"]] if _has(record, "image_id") else [])
                ids.groups.extend([record["group"]] if _has(record, "group") else [])
                ids.captions.extend(record["caption_ids"] if _has(record, "caption_ids") else [])
                self.captions_per_image.update([len(record["captions"])] if _has(record, "captions") else [])
        kinds.update(sample.content)
        self.problems += [f"{sample.key}: {problem}" for problem in sample.problems]


def _is_key(split: str, key: str) -> bool:
    return re.fullmatch(rf"{re.escape(split)}-[0-9]{{8}}", key) is not None


def _parse(kind: str, data: bytes) -> Any:
    """Return what the ``json`` or the ``txt`` of a sample contains.

    Raises:
        UserError: it cannot be used; the message says why.
    """
    if kind == "json":
        record = parse_json(data, "its json")
        if not isinstance(record, dict):
            raise UserError(f"its json must be an object, it is {_kind_of(record)}")
        return record
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"its txt is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _check_record(record: Mapping[str, Any], split: str, input_kind: str) -> Iterator[str]:
    """Yield what is wrong with the content of a json."""
    (others,) = (fields for kind, fields in SIZE_FIELDS.items() if kind != input_kind)
    expected_fields = {key: types for key, types in RECORD_FIELDS.items() if key not in others}
    for key, types in expected_fields.items():
        if key not in record:
            if key not in OPTIONAL_FIELDS:
                yield f"its json has no {key!r}"
        elif type(record[key]) not in types:
            expected = " or ".join(TYPE_NAMES[of] for of in types)
            yield f"{key!r} of its json must be {expected}, it is {_kind_of(record[key])}"
        elif not _has(record, key):
            wrong = next(element for element in record[key] if type(element) not in ELEMENTS[key])
            expected = " or ".join(TYPE_NAMES[of] for of in ELEMENTS[key])
            yield f"each of {key!r} of its json must be {expected}, one is {_kind_of(wrong)}"
    unknown = record.keys() - expected_fields.keys()
    if unknown:
        yield f"its json has unknown keys: {', '.join(sorted(unknown))}"

    if _has(record, "captions"):
        if not record["captions"]:
            yield "it has no captions"
        for caption in record["captions"]:
            try:
                check_caption(caption)
            except UserError as error:
                yield str(error)
    if _has(record, "captions") and _has(record, "caption_ids"):
        ids, captions = len(record["caption_ids"]), len(record["captions"])
        if ids != captions:
            yield f"it has {ids} caption ids for {captions} captions"
    if _has(record, "split") and _has(record, "dataset") and f"{record['dataset']}-{record['split']}" != split:
        yield f"its json says data set {record['dataset']!r} and split {record['split']!r}, but it is in {split}"


def _compare(record: Mapping[str, Any], content: Mapping[str, Any], options: _Options) -> Iterator[str]:
    """Yield where json, txt and image, or features, of a sample contradict each other."""
    # Without any caption there is no first one, which is a problem already.
    captions = record["captions"] if _has(record, "captions") else []
    if content.get("txt") is not None and captions and content["txt"] != txt_content(captions, options.txt):
        expected = "the first caption of its json" if options.txt == "first" else "all captions of its json, one a line"
        yield f"its txt is not {expected}"
    size, fields = content.get(options.input_kind), SIZE_FIELDS[options.input_kind]
    if size is not None and all(_has(record, field) for field in fields):
        said = tuple(record[field] for field in fields)
        if said != size:
            what = "pixels, its image has" if options.input_kind == "image" else "values, its array has"
            yield f"its json says {said[0]} x {said[1]} {what} {size[0]} x {size[1]}"


def _has(record: Mapping[str, Any], key: str) -> bool:
    """Return whether a field is there and of its type, and so are the elements of a list."""
    value = record.get(key)
    # By `type`: true and false are instances of int.
    if type(value) not in RECORD_FIELDS[key]:
        return False
    return key not in ELEMENTS or all(type(element) in ELEMENTS[key] for element in value)


def _kind_of(value: Any) -> str:
    """Return what a JSON value is; the value itself may be long or deep."""
    return TYPE_NAMES.get(type(value)) or json.dumps(value)


def _on_one_line(text: str) -> str:
    """Return a text with names from the archive so that a terminal can print it."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
