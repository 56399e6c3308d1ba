"""Whether one shard is still what its manifest says: bytes, samples, and the content of each sample."""

import hashlib
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, NamedTuple

from vl_plugins.data.annotations import CaptionedImage, check_unique
from vl_plugins.data.captions import txt_content
from vl_plugins.data.feature_arrays import FEATURE_EXTENSION, inspect_features
from vl_plugins.data.images import IMAGE_EXTENSIONS, inspect_image
from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.manifest import MANIFEST_FILE, ShardFacts, number_of_captions
from vl_plugins.data.shard_scanner import ScannedSample, scan_samples
from vl_plugins.data.storage import Folder, error_text
from vl_plugins.utils.errors import UserError

__all__ = ["ShardReport", "ShardTask", "verify_shard"]

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


class ShardTask(NamedTuple):
    """A shard to read, with what the manifest says of it and the options that it was written with."""

    split: str
    file: str
    facts: ShardFacts
    options: Mapping[str, Any]


class ShardReport(NamedTuple):
    """What a shard contains.

    Args:
        problems: lines.
        first_key: of the first sample with a key of the split, None without any.
        last_key: of the last one.
        samples: keys and records of the samples whose json is right, in order.
        num_samples: number of all samples.
        captions_per_image: images by their number of captions.
        as_listed: whether it has as many samples and captions as the manifest says; False where they are not known.
    """

    problems: list[str]
    first_key: str | None
    last_key: str | None
    samples: list[tuple[str, CaptionedImage]]
    num_samples: int
    captions_per_image: Counter[int]
    as_listed: bool


@dataclass(kw_only=True)
class _Record:
    """The json of a sample."""

    image_id: int | str
    captions: list[str]
    caption_ids: list[int | str]
    split: str
    dataset: str
    filename: str
    group: int | str | None = None
    width: int | None = None
    height: int | None = None
    num_features: int | None = None
    feature_dim: int | None = None


def verify_shard(folder: Folder, task: ShardTask) -> ShardReport:
    """Read a shard from beginning to end. A function of the module, because it runs in other processes."""
    problems: list[str] = []
    sample_problems: list[str] = []
    samples, keys, num_samples, ended = [], [], 0, False
    try:
        with folder.open(task.file) as stream:
            hashing = _HashingStream(stream)
            try:
                for sample in scan_samples(hashing, KINDS, on_stray=sample_problems.append):
                    num_samples += 1
                    lines, record = _check_sample(sample, task)
                    if not _is_key(task.split, sample.key):
                        lines.insert(0, f"is not a key of {task.split}, which has the form {task.split}-00000000")
                    elif keys and sample.key <= keys[-1]:
                        lines.insert(0, f"comes after {keys[-1]}; keys are in ascending order, each once")
                    else:
                        keys.append(sample.key)
                    sample_problems += [f"{sample.key}: {line}" for line in lines]
                    if record is not None:
                        samples.append((sample.key, record))
                ended = True
            except tarfile.TarError as error:
                problems.append(f"cannot be read to its end: {error}")
            if hashing.read_rest() and ended:
                problems.append("has data behind its end-of-archive mark")
    except OSError as error:
        problems.append(f"cannot be read: {error_text(error)}")
    except UserError as error:
        problems.append(str(error))
    else:
        sha256 = hashing.digest.hexdigest()
        if sha256 != task.facts["sha256"]:
            problems.insert(0, f"sha256 is {sha256}, {MANIFEST_FILE} says {task.facts['sha256']}")
        if hashing.size != task.facts["bytes"]:
            problems.insert(0, f"has {hashing.size:,} bytes, {MANIFEST_FILE} says {task.facts['bytes']:,}")

    captions_per_image = Counter(len(record.captions) for _, record in samples)
    counts = {"samples": num_samples, "captions": number_of_captions(captions_per_image)}
    # The captions of a sample without a right json are not known.
    known = ["samples", "captions"] if len(samples) == num_samples else ["samples"]
    wrong = [key for key in known if counts[key] != task.facts[key]] if ended else []
    problems += [f"has {counts[key]:,} {key}, {MANIFEST_FILE} says {task.facts[key]:,}" for key in wrong]
    return ShardReport(
        problems=[f"{task.file}: {problem}" for problem in [*problems, *sample_problems]],
        first_key=keys[0] if keys else None,
        last_key=keys[-1] if keys else None,
        samples=samples,
        num_samples=num_samples,
        captions_per_image=captions_per_image,
        as_listed=ended and not wrong and len(known) == 2,
    )


class _HashingStream:
    """A stream that takes the hash of its bytes on the way, each once and in order, however it is read."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.digest = hashlib.sha256()
        self.size = 0  # bytes hashed so far

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int) -> int:
        if position > self.size:
            self._stream.seek(self.size)
            while self.size < position and self.read(min(READ_TOGETHER, position - self.size)):
                pass
        return self._stream.seek(position)

    def read(self, size: int) -> bytes:
        start = self._stream.tell()
        data = self._stream.read(size)
        new = data[max(self.size - start, 0) :]
        self.digest.update(new)
        self.size += len(new)
        return data

    def read_rest(self) -> bool:
        """Return whether anything but zeros is left."""
        found = False
        self._stream.seek(self.size)
        while data := self.read(READ_TOGETHER):
            found = found or any(data)
        return found


def _check_sample(sample: ScannedSample, task: ShardTask) -> tuple[list[str], CaptionedImage | None]:
    """Return what is wrong with a sample, and its captions and ids, None when they are not known."""
    kind = "features" if task.options.get("inputs") == "features" else "image"
    problems, content = [], {}
    for extension in sample.members:
        if KINDS.get(extension) not in (kind, "txt", "json"):
            problems.append(f"has an unknown file {sample.key}.{extension}")
        elif KINDS[extension] in content:
            problems.append(f"has more than one {kind}; {sample.key}.{extension} is another")
        else:
            content[KINDS[extension]] = extension
    missing = [name for name in (kind, "txt", "json") if name not in content]
    if missing:
        problems.append(f"has no {', no '.join(missing)}")

    image, size, txt = None, None, None
    try:
        if "json" in content:
            image, size = _parse_record(sample.data["json"], task.split, kind)
    except UserError as error:
        problems.append(f"its json: {error}")
    try:
        if "txt" in content:
            txt = sample.data["txt"].decode()
    except UnicodeDecodeError as error:
        problems.append(f"its txt is not UTF-8 text: {error.reason} at byte {error.start}")
    if txt is not None and image is not None:
        mode = "all" if task.options.get("txt") == "all" else "first"
        if txt != txt_content(image.captions, mode):
            expected = "the first caption of its json" if mode == "first" else "all captions of its json, one a line"
            problems.append(f"its txt is not {expected}")
    try:
        if kind in content:
            data = sample.data[content[kind]]
            info = inspect_image(data) if kind == "image" else inspect_features(data)
            if kind == "image" and info.extension != content[kind]:
                problems.append(f"its image is {info.extension}, its name says {content[kind]}")
            found = tuple(getattr(info, field) for field in SIZE_FIELDS[kind])
            if size is not None and size != found:
                problems.append(f"its json says {size[0]} x {size[1]}, its {kind} {found[0]} x {found[1]}")
    except UserError as error:
        problems.append(str(error))
    return problems, image


def _parse_record(data: bytes, split: str, kind: str) -> tuple[CaptionedImage, tuple[int, int]]:
    """Return the content of a json: the image, and its width and height, or number and size of features.

    Raises:
        UserError: it is not what a sample of this split has.
    """
    document = parse_json(data, "it")
    record = check_type(document, _Record)
    (others,) = (names for name, names in SIZE_FIELDS.items() if name != kind)
    check_unique("caption", record.caption_ids, ())
    unknown = document.keys() - {field.name for field in fields(_Record) if field.name not in others}
    if unknown:
        raise UserError(f"it has unknown keys: {', '.join(sorted(unknown))}")
    size = tuple(getattr(record, field) for field in SIZE_FIELDS[kind])
    if None in size:
        raise UserError(f"it has no {' and '.join(SIZE_FIELDS[kind])}")
    image = CaptionedImage(
        record.image_id,
        "",
        tuple(record.captions),
        tuple(record.caption_ids),
        record.split,
        record.dataset,
        record.filename,
        record.group,
    )
    if f"{image.dataset}-{image.split}" != split:
        raise UserError(f"it says data set {image.dataset!r} and split {image.split!r}, but it is in {split}")
    return image, size


def _is_key(split: str, key: str) -> bool:
    return re.fullmatch(rf"{re.escape(split)}-[0-9]{{8}}", key) is not None
