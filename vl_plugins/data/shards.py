"""Writer of WebDataset shards: plain tar files that any reader of open_clip, img2dataset or webdataset understands."""

import hashlib
import os
import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from vl_plugins.data.feature_arrays import FEATURE_EXTENSION, decode_features, with_array_files
from vl_plugins.data.images import FileFolder, inspect_image, resize_image
from vl_plugins.data.json_text import check_type, parse_json, to_json
from vl_plugins.data.manifest import ShardFacts, is_shard_of, read_manifest, shard_name, update_index
from vl_plugins.data.parallel import map_in_processes
from vl_plugins.data.shard_files import INPUTS
from vl_plugins.data.sources import CaptionedImage, RejectedImage
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError, one_of, require

__all__ = ["TXT", "write_shards"]

# What the `.txt` of a sample has: a caption, or a line for each.
TXT = ("first", "all")

# Tar headers have room for 100 characters, and "-00000000.webp" follows.
LONGEST_NAME = 86

ImagesByKey = Mapping[str, CaptionedImage]


def write_shards(
    images: Sequence[CaptionedImage],
    files: str | os.PathLike | FileFolder,
    out: str | os.PathLike,
    *,
    inputs: str = "images",
    samples_per_shard: int = 1000,
    txt: str = "first",
    resize: int | None = None,
    quality: int = 95,
    workers: int = 1,
    seed: int | None = None,
    on_error: str = "raise",
    overwrite: bool = False,
    dry_run: bool = False,
    rejected: Sequence[RejectedImage] = (),
    source: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Write captioned images as shards ``<dataset>-<split>-000000.tar``, ... with ``sizes.json`` and ``manifest.json``.

    Image ``j`` of a split, in source order or shuffled by ``seed``, has the key ``<dataset>-<split>-<j, eight digits>``
    and three members: ``.jpg``, ``.png`` or ``.webp`` (the bytes of the image file; the extension follows the content),
    ``.txt`` (see ``txt``) and ``.json`` (``image_id``, ``captions``, ``caption_ids``, ``split``, ``dataset``,
    ``filename``, ``width``, ``height``; ``group`` of an image that is in one). An image that cannot be used leaves its
    key unused. With features the first member is ``.npy``, the bytes of an array file (N, W) as
    :func:`~vl_plugins.data.feature_arrays.decode_features` takes it, and the ``.json`` has ``num_features`` (N) and
    ``feature_dim`` (W) in place of width and height.

    The same input gives the same bytes with any number of workers. A shard gets its name when it is complete and on
    disk. A run that is repeated after it was stopped keeps the complete shards and writes the others; an image file
    that has changed in between is noticed by its size and time. ``sizes.json`` and ``manifest.json`` cover all splits
    of the folder and are updated when a split is complete. Only one process at a time can write to a folder.

    Args:
        images: what to write, of one or several splits.
        files: folder that ``CaptionedImage.file`` is relative to; or, with features, folder of array files, which
            :func:`~vl_plugins.data.feature_arrays.with_array_files` finds.
        out: folder for the shards, a path or a URL of fsspec; made when missing.
        inputs: ``"images"``, or ``"features"``: region or grid features in place of pictures.
        samples_per_shard: number of images in a shard.
        txt: content of ``.txt``: the ``"first"`` caption, as open_clip takes it, or ``"all"``, each in a line, as
            CLIP_benchmark does. Our readers take ``.json``.
        resize: number of pixels that the shorter side of larger images is reduced to; by default files stay untouched.
        quality: of JPEG and WebP images that are resized, 1 to 100.
        workers: number of processes, started by ``spawn``: scripts need ``if __name__ == "__main__":``.
        seed: shuffles the splits ``train...`` and ``restval``; by default all splits are in source order.
        on_error: ``"raise"`` stops at an image that cannot be used; ``"skip"`` lists it in ``rejected.jsonl``.
        overwrite: whether existing shards of the same data set and split with other contents are replaced.
        dry_run: whether to read and check everything and to write nothing.
        rejected: images rejected before, for ``rejected.jsonl`` and the counts.
        source: where the images come from, for the manifest; values must be JSON.

    Returns:
        The manifest's entry of each split, by ``<dataset>-<split>``.

    Raises:
        UserError: an argument is wrong; an image or array file cannot be used (with ``on_error="raise"``, or when all
            are such); shards with other contents exist (without ``overwrite``); the folder cannot be written, or
            another process writes to it. No partial shard is left behind.
    """
    one_of("inputs", inputs, INPUTS)
    one_of("txt", txt, TXT)
    one_of("on_error", on_error, ("raise", "skip"))
    for name, value in (("samples_per_shard", samples_per_shard), ("resize", resize), ("workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if not 1 <= quality <= 100:
        raise UserError(f"quality must be 1 to 100, got {quality}")
    if inputs == "features" and resize is not None:
        raise UserError("resize is for pictures; array files of features are written as they are")
    if not images:
        raise UserError("there are no images to write")
    files = files if isinstance(files, FileFolder) else FileFolder(files)
    if inputs == "features":
        images = with_array_files(images, files.root)
    splits: dict[str, list[CaptionedImage]] = {}
    for image in images:
        splits.setdefault(f"{image.dataset}-{image.split}", []).append(image)
    if len(longest := max(splits, key=len)) > LONGEST_NAME:
        raise UserError(f"the name {longest} is longer than {LONGEST_NAME} characters, too long for names in tar files")
    for name, members in splits.items():
        if seed is not None and members[0].split.startswith(("train", "restval")):
            random.Random(f"{seed}/{name}").shuffle(members)
    # Now, because a missing module or a foreign manifest is nothing that `on_error` should skip.
    require("PIL.Image" if inputs == "images" else "numpy", extra="data")
    out = Folder(out)
    read_manifest(out)

    writer = _ShardWriter(files, out, inputs, txt, resize, quality, on_error, overwrite, dry_run)
    options = {"inputs": inputs, "samples_per_shard": samples_per_shard, "txt": txt, "on_error": on_error, "seed": seed}
    options |= {} if resize is None else {"resize": resize, "quality": quality}
    entries = {}
    if not dry_run:
        out.make()
    with nullcontext() if dry_run else out.lock():
        if not dry_run:
            out.remove_partial()  # of killed runs
        for name, members in splits.items():
            keyed = [(f"{name}-{index:08d}", image) for index, image in enumerate(members)]
            shards = {
                shard_name(name, number): dict(keyed[start : start + samples_per_shard])
                for number, start in enumerate(range(0, len(keyed), samples_per_shard))
            }
            records = _write_split(name, shards, writer, workers)
            left_out = [item for item in rejected if item.split == members[0].split]
            left_out += [item for record in records for item in record.rejected]
            entries[name] = {
                "source": dict(source or {}),
                "options": options,
                "rejected": len(left_out),
                **_describe(shards, records),
            }
            if not dry_run:
                update_index(out, name, entries[name], left_out)
        # Not before, or a run that stops in the last split would begin again with the first.
        for file in () if dry_run else out.names():
            if re.fullmatch(rf"\.({'|'.join(splits)})-\d{{6}}\.tar\.done", file):
                out.remove(file)
    return entries


@dataclass
class _Record:
    """What is known of a shard. It is stored beside a complete one for a run that goes on after this one stopped."""

    fingerprint: str  # of all that the shard depends on
    bytes: int
    sha256: str
    rejected: list[RejectedImage]


@dataclass(frozen=True)
class _ShardWriter:
    """Writes one shard at a time, in any process; arguments as for :func:`write_shards`."""

    files: FileFolder
    out: Folder
    inputs: str  # "images" or "features"
    txt: str
    resize: int | None
    quality: int
    on_error: str
    overwrite: bool
    dry_run: bool

    def write(self, shard: tuple[str, ImagesByKey]) -> _Record:
        """Write a shard, given its file name and images, unless a record shows that it is complete."""
        file, images = shard
        states = [[key, vars(image), self.files.state(image.file)] for key, image in images.items()]
        options = [self.inputs, self.txt, self.resize, self.quality, self.on_error]
        fingerprint = hashlib.sha256(to_json([states, options])).hexdigest()
        record = self._read_record(file)
        if record is not None and record.fingerprint == fingerprint:
            return record
        rejected: list[RejectedImage] = []
        digest, size = hashlib.sha256(), 0
        with open(os.devnull, "wb") if self.dry_run else self.out.write(file) as stream:
            for data in self._tar(images, rejected):
                stream.write(data)
                digest.update(data)
                size += len(data)
            if not self.overwrite and self.out.exists(file) and self.out.sha256(file) != digest.hexdigest():
                raise _conflict(self.out / file)
        record = _Record(fingerprint, size, digest.hexdigest(), rejected)
        if not self.dry_run:
            self.out.write_bytes(_record_file(file), to_json(asdict(record)))
        return record

    def _read_record(self, file: str) -> _Record | None:
        try:
            record = check_type(parse_json(self.out.read(_record_file(file)), file), _Record)
            return record if self.out.sha256(file) == record.sha256 else None
        except UserError:
            return None  # there is none, or it is not ours

    def _tar(self, images: ImagesByKey, rejected: list[RejectedImage]) -> Iterator[bytes]:
        """Yield the bytes of a tar file, and note what is rejected."""
        size = 0  # not by `tarfile.addfile`, which copies data in small pieces
        for key, image in images.items():
            try:
                members = self._encode(key, image)
            except UserError as error:
                if self.on_error == "raise":
                    place = self.files.place(image.file)
                    raise UserError(f"{place} (image id {image.image_id}): {error}") from error
                rejected.append(RejectedImage(image.file, image.split, str(error)))
                continue
            for name, data in sorted(members.items()):
                # The defaults make the bytes reproducible: time 0, no owner, mode 644.
                member = tarfile.TarInfo(name)
                member.size = len(data)
                block = member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
                size += len(block)
                yield block
        # The end of an archive: two empty blocks, filled up to a record.
        end = 2 * tarfile.BLOCKSIZE
        yield bytes(end + -(size + end) % tarfile.RECORDSIZE)

    def _encode(self, key: str, image: CaptionedImage) -> dict[str, bytes]:
        """Return the members of a sample by name."""
        data = self.files.read(image.file)
        if self.inputs == "features":
            num_features, feature_dim = decode_features(data).shape
            extension, size = FEATURE_EXTENSION, {"num_features": num_features, "feature_dim": feature_dim}
        else:
            if self.resize is not None:
                data = resize_image(data, self.resize, quality=self.quality)
            extension, width, height = inspect_image(data, decode=False)
            size = {"width": width, "height": height}
        lines = (" ".join(caption.splitlines()) for caption in image.captions)
        text = image.captions[0] if self.txt == "first" else "\n".join(lines)
        unused = {"file", "group"} if image.group is None else {"file"}
        metadata = {name: value for name, value in vars(image).items() if name not in unused}
        return {
            f"{key}.{extension}": data,
            f"{key}.txt": text.encode(),
            f"{key}.json": to_json(metadata | size),
        }


def _write_split(name: str, shards: Mapping[str, ImagesByKey], writer: _ShardWriter, workers: int) -> list[_Record]:
    """Write the shards of one split, images by key by file name; return what is known of each."""
    out, dry_run = writer.out, writer.dry_run
    surplus = [file for file in out.names() if is_shard_of(name, file) and file not in shards]
    if surplus and not writer.overwrite:
        raise _conflict(out / surplus[0])
    if writer.overwrite and not dry_run and name in (read_manifest(out) or {}):
        # An index of shards that are about to change would be wrong if this run stopped half-way.
        update_index(out, name, None)
    records = []
    number = sum(map(len, shards.values()))
    # disable=None: no bar where nobody watches, such as in a log file.
    with tqdm(total=number, desc=name, unit="image", disable=None) as progress:
        written = map_in_processes(writer.write, list(shards.items()), workers)
        for images, record in zip(shards.values(), written, strict=True):
            records.append(record)
            progress.update(len(images))
    if sum(len(record.rejected) for record in records) == number:
        for file in () if dry_run else shards:
            out.remove(file)
            out.remove(_record_file(file))
        last = records[-1].rejected[-1]
        raise UserError(f"none of the {number} images of {name} can be used; {last.image}: {last.reason}")
    if not dry_run and (lost := shards.keys() - set(out.names())):
        raise UserError(f"only the process that wrote {out / min(lost)} can see it: give --workers 1")
    for file in () if dry_run else surplus:
        out.remove(file)
    return records


def _describe(shards: Mapping[str, ImagesByKey], records: Sequence[_Record]) -> dict[str, Any]:
    """Return what the manifest says of the shards of a split."""
    facts: dict[str, ShardFacts] = {}
    written: list[CaptionedImage] = []
    for (file, images), record in zip(shards.items(), records, strict=True):
        rejected = {item.image for item in record.rejected}
        kept = [image for image in images.values() if image.file not in rejected]
        captions = sum(len(image.captions) for image in kept)
        facts[file] = ShardFacts(samples=len(kept), captions=captions, bytes=record.bytes, sha256=record.sha256)
        written += kept
    groups = {image.group for image in written} - {None}
    histogram = Counter(len(image.captions) for image in written)
    return {
        "images": len(written),
        "captions": sum(fact["captions"] for fact in facts.values()),
        **({"groups": len(groups)} if groups else {}),
        "captions_per_image": {
            "min": min(histogram),
            "max": max(histogram),
            "histogram": {str(captions): number for captions, number in sorted(histogram.items())},
        },
        "shards": facts,
    }


def _record_file(file: str) -> str:
    """Return the name of the file with the record of a shard, which is there until all splits are complete."""
    return f".{file}.done"


def _conflict(file: str) -> UserError:
    return UserError(f"{file} exists and does not belong to this run; give --overwrite, or another folder")
