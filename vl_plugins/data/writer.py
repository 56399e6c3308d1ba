"""Writer of WebDataset shards: plain tar files that any reader of open_clip, img2dataset or webdataset understands."""

import hashlib
import json
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from vl_plugins.data.captions import CaptionedImage, RejectedImage, hash64
from vl_plugins.data.engines import run_jobs
from vl_plugins.data.files import exists, join, lock, names, read_bytes, remove, sha256, write_complete, write_file
from vl_plugins.data.images import FileFolder, inspect_image, resize_image
from vl_plugins.data.index import INDEX_FOLDER, IndexHead, index_file, make_index, read_head, write_index
from vl_plugins.data.out_of_core import shuffled
from vl_plugins.data.samples import FEATURES, INPUTS, Record, decode_features
from vl_plugins.data.sources import Images
from vl_plugins.errors import UserError, one_of, user_errors

# Tar headers have room for 100 characters, and "-00000000.webp" follows.
LONGEST_NAME = 86
# These fields make the bytes reproducible: time 0, no owner, mode 644.
HEADER = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
HEADER_END = HEADER[156:]  # after name, mode, owner, size, time and checksum

SIZES_FILE = "sizes.json"
MOST_EXAMPLES = 20


class Written(NamedTuple):
    """What :func:`write_shards` wrote, now or before it was stopped.

    Args:
        shards: paths or URLs.
        images, captions: how many are in them.
        rejected: number of images that were left out; the indexes list them.
        examples: the first 20 of them.
    """

    shards: list[str]
    images: int
    captions: int
    rejected: int
    examples: list[RejectedImage]


def write_shards(
    images: Images,
    files: str | os.PathLike | FileFolder,
    out: str | os.PathLike,
    *,
    inputs: str = "images",
    samples_per_shard: int = 1000,
    txt: str = "first",
    resize: int | None = None,
    quality: int = 95,
    seed: int | None = None,
    workers: int | None = None,
    executor: Any = None,
    on_error: str = "raise",
    overwrite: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Written:
    """Write captioned images as shards ``<dataset>-<split>-000000.tar``, ..., with an index of each and ``sizes.json``.

    Image ``j`` of a split has the key ``<dataset>-<split>-<j, eight digits>`` and three members: ``.jpg``, ``.png`` or
    ``.webp`` (the bytes of the image file; the extension follows the content), ``.txt`` (see ``txt``) and ``.json``
    (``image_id``, ``captions``, ``caption_ids``, ``split``, ``dataset``, ``filename``, ``width``, ``height``; ``group``
    of an image that is in one). An image that cannot be used leaves its key unused. With features the first member is
    ``.npy``, the bytes of an array file (N, W) as :func:`~vl_plugins.data.samples.decode_features` takes it, and the
    ``.json`` has ``num_features`` (N) and ``feature_dim`` (W) in place of width and height.

    Images are a stream: memory does not grow with their number. The same input gives the same bytes with any number of
    workers. A shard appears when it and its index in ``__index__`` are complete. A run that was stopped, even by
    SIGKILL, continues when it is repeated: shards of the same images and options stay as they are. Image files are
    compared by size and time. ``sizes.json``, for open_clip, has the number of images of all shards in the folder.
    Different splits can be written into one folder at the same time.

    Args:
        images: what to write, of one or several splits, as sources yield it. Rejected ones are treated as ``on_error``
            says.
        files: the folder that ``CaptionedImage.file`` is relative to, or an object with the methods of ``FileFolder``.
            With features the folder of array files ``<image id>.npy``, or else ``<name of the image file>.npy``.
        out: folder for the shards, a path or a URL of fsspec; made when missing.
        inputs: ``"images"``, or ``"features"``: region or grid features in place of pictures.
        samples_per_shard: number of images in a shard.
        txt: content of ``.txt``: the ``"first"`` caption, as open_clip takes it, or ``"all"``, each in a line, as
            CLIP_benchmark does. Our readers take ``.json``.
        resize: number of pixels that the shorter side of larger images is reduced to; by default files stay untouched.
        quality: of JPEG and WebP images that are resized, 1 to 100.
        seed: shuffles the splits ``train...`` and ``restval...``; by default all splits are in the order of ``images``.
        workers: number of shards that are written at a time; by default one per core.
        executor: runs the jobs in place of threads, see :func:`~vl_plugins.data.engines.run_jobs`. Its workers must see
            the same files.
        on_error: ``"raise"`` stops at an image that cannot be used; ``"skip"`` lists it in the index.
        overwrite: whether shards of the same data set and split with other contents are replaced.
        source: where the images come from, for the index; values must be JSON.

    Raises:
        UserError: an argument is wrong; an image or array file cannot be used (with ``on_error="raise"``, or if a shard
            has no other); shards with other contents exist (without ``overwrite``); another process writes the same
            split; a file cannot be written. No partial shard is left behind.
    """
    one_of("inputs", inputs, INPUTS)
    one_of("txt", txt, ("first", "all"))
    one_of("on_error", on_error, ("raise", "skip"))
    if samples_per_shard < 1:
        raise UserError(f"samples_per_shard must be at least 1, got {samples_per_shard}")
    out, files = os.fspath(out), FileFolder(files) if isinstance(files, str | os.PathLike) else files
    images = _usable(images) if on_error == "raise" else images
    images = _with_array_files(images, files) if inputs == "features" else images
    images = images if seed is None else shuffled(images, seed)
    options: dict[str, Any] = {"inputs": inputs, "txt": txt, "on_error": on_error}
    options |= {} if resize is None else {"resize": resize, "quality": quality}
    facts = {"source": dict(source or {}), "options": {"samples_per_shard": samples_per_shard, "seed": seed, **options}}
    writer = _ShardWriter(files, options, facts, overwrite)
    counts: dict[str, tuple[int, int, int]] = {}
    examples: list[RejectedImage] = []
    # Locks are released last, when no worker writes any more. disable=None: no bar where nobody watches.
    with (
        ExitStack() as locks,
        closing(run_jobs(writer.write, _jobs(images, out, samples_per_shard, locks), workers, executor)) as written,
        tqdm(unit="image", disable=None) as progress,
    ):
        for shard, head in written:
            counts[shard] = len(head.counts), sum(head.counts), len(head.rejected)
            examples += head.rejected[: MOST_EXAMPLES - len(examples)]
            progress.update(len(head.counts) + len(head.rejected))
        _remove_others(out, counts, overwrite)
        _write_sizes(out)
    return Written(list(counts), *map(sum, zip(*counts.values(), strict=True)), examples)


class _Shard(NamedTuple):
    """A job: the images of a shard, and the number of the first one in the split ``<dataset>-<split>``."""

    file: str
    name: str
    start: int
    images: list[CaptionedImage]
    rejected: list[RejectedImage]


def _jobs(images: Images, out: str, samples_per_shard: int, locks: ExitStack) -> Iterator[_Shard]:
    """Yield the shards of a stream of images, and lock the split of each."""
    last: dict[str, _Shard] = {}
    rejected: dict[str, list[RejectedImage]] = defaultdict(list)
    for image in images:
        if isinstance(image, RejectedImage):
            rejected[image.split].append(image)
            continue
        name = f"{image.dataset}-{image.split}"
        if name not in last:
            if len(name) > LONGEST_NAME:
                raise UserError(f"{name} is longer than {LONGEST_NAME} characters, too long for names in tar files")
            locks.enter_context(lock(join(out, f"{INDEX_FOLDER}/.{name}.lock"), f"{name} to {out}"))
            last[name] = _Shard(join(out, f"{name}-000000.tar"), name, 0, [], [])
        # Not as soon as it is full, because images that are rejected may follow.
        elif len(last[name].images) == samples_per_shard:
            yield last[name]._replace(rejected=rejected.pop(image.split, []))
            start = last[name].start + samples_per_shard
            last[name] = _Shard(join(out, f"{name}-{start // samples_per_shard:06d}.tar"), name, start, [], [])
        last[name].images.append(image)
    for shard in last.values():
        yield shard._replace(rejected=rejected.pop(shard.images[0].split, []))
    for split, (first, *_) in rejected.items():
        raise UserError(f"none of the images of {split} can be used; {first.image}: {first.reason}")
    if not last:
        raise UserError("there are no images to write")


def _remove_others(out: str, shards: Iterable[str], overwrite: bool) -> None:
    """Remove shards of a run with more images, or raise an error for them, and what killed processes left."""
    written = {os.path.basename(shard) for shard in shards}
    if lost := sorted(written - {*names(out, "*.tar")}):
        raise UserError(f"{lost[0]} is not in {out}: its worker wrote it to a disk or memory of its own")
    splits = "|".join({name.rpartition("-")[0] for name in written})
    ours = re.compile(rf"\.?((?:{splits})-\d{{6,}}\.tar)(?:\.jsonl)?(\.[0-9a-f]{{8}}\.partial)?")
    for folder in (out, join(out, INDEX_FOLDER)):
        for name in names(folder):
            if (match := ours.fullmatch(name)) and (match[2] or match[1] not in written):
                if name == match[1] and not overwrite:
                    raise _conflict(join(out, name))
                remove(join(folder, name))


@dataclass(frozen=True)
class _ShardWriter:
    """Writes one shard at a time, in any thread or process."""

    files: FileFolder
    options: dict[str, Any]  # what the bytes of a shard depend on
    facts: dict[str, Any]  # further fields of its index
    overwrite: bool

    def write(self, shard: _Shard) -> tuple[str, IndexHead]:
        """Write a shard, unless its index shows that it is complete."""
        states = [self.files.state(image.file) for image in shard.images]
        content = msgspec.json.encode([shard[1:], states, self.options])
        fingerprint = hashlib.sha256(content).hexdigest()
        if exists(index_file(shard.file)):
            with suppress(UserError, OSError):  # it is damaged, or the shard is missing or of another size
                head = read_head(shard.file)
                if head.fingerprint == fingerprint:
                    return shard.file, head
        return shard.file, self._write(shard, fingerprint)

    def _write(self, shard: _Shard, fingerprint: str) -> IndexHead:
        records: list[Record] = []
        starts, sizes, rejected = [], [], list(shard.rejected)
        digest, end = hashlib.sha256(), 0
        with write_complete(shard.file) as stream:
            for position, image in enumerate(shard.images, shard.start):
                key = f"{shard.name}-{position:08d}"
                try:
                    data = _archive(self._encode(key, image))
                except UserError as error:
                    if self.options["on_error"] == "raise":
                        place = self.files.place(image.file)
                        raise UserError(f"{place} (image id {image.image_id}): {error}") from error
                    rejected.append(RejectedImage(image.file, image.split, str(error)))
                    continue
                stream.write(data)
                digest.update(data)
                starts.append(end)
                sizes.append(len(data))
                end += len(data)
                named = (image.image_id, image.caption_ids, image.dataset, image.split, image.group)
                records.append(Record(key, image.captions, *named))
            if not records:
                last = rejected[-1]
                raise UserError(f"no image of {shard.file} can be used, such as {last.image}: {last.reason}")
            # The end of an archive: two empty blocks, filled up to a record.
            zeros = 2 * tarfile.BLOCKSIZE
            zeros += -(end + zeros) % tarfile.RECORDSIZE
            stream.write(bytes(zeros))
            digest.update(bytes(zeros))
            if exists(shard.file) and sha256(shard.file) != digest.hexdigest():
                if not self.overwrite:
                    raise _conflict(shard.file)
                # A shard that is there has its own index, and its number of images in `sizes.json`.
                remove(join(os.path.dirname(shard.file), SIZES_FILE))
                remove(shard.file)
            facts = {"size": end + zeros, "sha256": digest.hexdigest(), "fingerprint": fingerprint, **self.facts}
            index = make_index(records, starts, sizes, rejected=rejected, **facts)
            write_index(shard.file, index)
        return index.head

    def _encode(self, key: str, image: CaptionedImage) -> dict[str, bytes]:
        """Return the members of a sample by name."""
        data = self.files.read(image.file)
        if self.options["inputs"] == "features":
            num_features, feature_dim = decode_features(data).shape
            extension, size = FEATURES, {"num_features": num_features, "feature_dim": feature_dim}
        else:
            if "resize" in self.options:
                data = resize_image(data, self.options["resize"], quality=self.options["quality"])
            extension, width, height = inspect_image(data, decode=False)
            size = {"width": width, "height": height}
        lines = (" ".join(caption.splitlines()) for caption in image.captions)
        text = image.captions[0] if self.options["txt"] == "first" else "\n".join(lines)
        unused = {"file", "group"} if image.group is None else {"file"}
        metadata = {name: value for name, value in vars(image).items() if name not in unused}
        return {f"{key}.{extension}": data, f"{key}.txt": text.encode(), f"{key}.json": _to_json(metadata | size)}


def _archive(members: Mapping[str, bytes]) -> bytes:
    """Return the part of a tar file with these members, whose headers differ in name, size and checksum only."""
    blocks = []
    for name, data in sorted(members.items()):
        front = name.encode().ljust(100, b"\0") + HEADER[100:124] + b"%011o" % len(data) + HEADER[135:148]
        checksum = b"%06o\0 " % (sum(front) + sum(b" " * 8) + sum(HEADER_END))
        blocks += [front, checksum, HEADER_END, data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join(blocks)


def _write_sizes(out: str) -> None:
    """Renew the number of images of all shards in a folder; those without an index keep theirs."""
    file = join(out, SIZES_FILE)
    with lock(join(out, f"{INDEX_FOLDER}/.{SIZES_FILE}.lock"), file, wait=True):
        for name in names(out, f".{SIZES_FILE}.*.partial"):  # of killed processes
            remove(join(out, name))
        before, sizes = read_bytes(file) if exists(file) else b"{}", {}
        with user_errors(file):
            old = msgspec.json.decode(before, type=dict[str, int])
        indexed = {*names(join(out, INDEX_FOLDER), "*.jsonl")}
        for name in names(out, "*.tar"):
            if f"{name}.jsonl" in indexed:
                # Another process may just be replacing it; that one comes here too.
                with suppress(UserError, OSError):
                    sizes[name] = len(read_head(join(out, name)).counts)
            elif name in old:
                sizes[name] = old[name]
        if (after := _to_json(sizes, indent=2)) != before:
            write_file(file, after)


def _usable(images: Images) -> Iterator[CaptionedImage]:
    for image in images:
        if isinstance(image, RejectedImage):
            raise UserError(f"{image.image}: {image.reason}")
        yield image


def _with_array_files(images: Images, files: FileFolder) -> Images:
    """Yield the images with the array file of each as their ``file``: all by id if the first has one, or all by name.

    Raises:
        UserError: two images have one file.
    """
    by_id, used = None, set()
    for image in images:
        if isinstance(image, CaptionedImage):
            name = f"{image.image_id}.{FEATURES}"
            by_id = files.state(name) is not None if by_id is None else by_id
            name = name if by_id else f"{PureWindowsPath(image.filename).stem}.{FEATURES}"
            image = replace(image, file=name)
            if not by_id and (key := hash64(name.encode())) in used:
                raise UserError(f"{files.place(name)} is one file for two images; name the array files by image id")
            used |= set() if by_id else {key}
        yield image


def _to_json(value: Any, **options: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, **options).encode()


def _conflict(shard: str) -> UserError:
    return UserError(f"{shard} has other contents; overwrite it, or choose another folder")
