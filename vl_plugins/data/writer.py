"""Writer of WebDataset shards: plain tar files that any reader of open_clip, img2dataset or webdataset understands."""

import hashlib
import json
import os
import re
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

import msgspec
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from vl_plugins.data.captions import CaptionedImage, RejectedImage
from vl_plugins.data.engines import run_jobs
from vl_plugins.data.files import (
    exists,
    join,
    locate,
    lock,
    names,
    read_bytes,
    remove,
    sha256,
    state,
    write_complete,
    write_file,
)
from vl_plugins.data.grouping import Images, shuffled
from vl_plugins.data.index import INDEX_FOLDER, IndexHead, find_index, make_head, read_head, write_index
from vl_plugins.data.limits import MAX_IMAGE_PIXELS, check_max_image_pixels
from vl_plugins.data.picture_formats import CONVERT, prepare_picture
from vl_plugins.data.records import Record, record_of
from vl_plugins.data.samples import FEATURES, INPUTS, decode_features, file_blocks
from vl_plugins.errors import UserError, one_of

SIZES_FILE = "sizes.json"


class FileFolder:
    """The image or array files of a data set, here those in a folder or behind a URL of fsspec.

    It is pickled for worker processes.
    """

    def __init__(self, root: str | os.PathLike):
        self.root = os.fspath(root)
        file_system, path = locate(self.root)
        self._is_local = isinstance(file_system, LocalFileSystem)
        if self._is_local and "://" in self.root:
            self.root = path

    def read(self, file: str) -> bytes:
        """Return the content of ``CaptionedImage.file``; raise :class:`UserError` if that cannot be read."""
        return read_bytes(self._path(file))

    def _path(self, file: str) -> str:
        """Return the path of a file, whose name may be composed otherwise: umlauts of one character, or of two.

        A server is not asked for other names.
        """
        path = join(self.root, file)
        if not self._is_local:
            return path
        for form in ("NFC", "NFD"):
            composed = join(self.root, unicodedata.normalize(form, file))
            if not os.path.exists(path) and os.path.exists(composed):
                return composed
        return path

    def state(self, file: str) -> Any:
        """Return a JSON value that changes with the content; None if the file cannot be read."""
        if not self._is_local:
            return state(self._path(file))
        try:
            status = os.stat(self._path(file))
        except (OSError, ValueError):
            return None
        return status.st_size, status.st_mtime_ns


class Written(NamedTuple):
    """What :func:`write_shards` wrote, now or before it was stopped.

    Args:
        shards: paths or URLs.
        images, captions: how many are in them.
        rejected: images that were left out; the indexes list them too.
    """

    shards: list[str]
    images: int
    captions: int
    rejected: list[RejectedImage]


def write_shards(
    images: Images,
    files: str | os.PathLike | FileFolder,
    out: str | os.PathLike,
    *,
    inputs: str = "images",
    samples_per_shard: int = 1000,
    seed: int | None = None,
    workers: int | None = None,
    executor: Any = None,
    on_error: str = "raise",
    overwrite: bool = False,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    convert: str | None = None,
    resize: int | None = None,
) -> Written:
    """Write captioned images as shards ``<dataset>-<split>-000000.tar``, ..., with an index of each and ``sizes.json``.

    Image ``j`` of a split has the key ``<dataset>-<split>-<j, eight digits>`` and three members: ``.jpg``, ``.png`` or
    ``.webp`` (the bytes of the image file, unless ``convert`` or ``resize`` changes them; the extension follows the
    content), ``.txt`` (the first caption, as open_clip takes it) and ``.json`` (``image_id``, ``captions``,
    ``caption_ids``, ``split``, ``dataset``, ``filename``, ``width``, ``height``; ``group`` of an image that is in one).
    An image that cannot be used leaves its key unused. With features the first member is ``.npy``, the bytes of an
    array file (N, W) as :func:`~vl_plugins.data.samples.decode_features` takes it, and the ``.json`` has
    ``num_features`` (N) and ``feature_dim`` (W) in place of width and height.

    Images are a stream: memory does not grow with their number. The same input gives the same bytes with any number of
    workers. A shard appears when it and its index in ``__index__`` are complete. A run that was stopped, even by
    SIGKILL, continues when it is repeated: shards of the same images and options stay as they are. Image files are
    compared by size and time, those behind a URL by what the server tells, such as an ETag. ``sizes.json``, for
    open_clip, has the number of images of all shards in the folder. Different splits can be written into one folder at
    the same time.

    Args:
        images: what to write, of one or several splits, as sources yield it. Rejected ones are treated as ``on_error``
            says.
        files: the folder that ``CaptionedImage.file`` is relative to, a path or a URL of fsspec, or an object with the
            methods of ``FileFolder``. With features the folder of array files ``<image id>.npy``, or else
            ``<name of the image file>.npy``.
        out: folder for the shards, a path or a URL of fsspec; made when missing.
        inputs: ``"images"``, or ``"features"``: region or grid features in place of pictures.
        samples_per_shard: number of images in a shard.
        seed: shuffles the splits ``train...``; by default all splits are in the order of ``images``.
        workers: number of shards that are written at a time; by default one per core.
        executor: runs the jobs in place of threads, see :func:`~vl_plugins.data.engines.run_jobs`. Its workers must see
            the same files.
        on_error: ``"raise"`` stops at an image that cannot be used; ``"skip"`` lists it in the index.
        overwrite: whether shards of the same data set and split with other contents are replaced.
        max_image_pixels: largest width times height of a picture, which readers check too; a larger one cannot be used.
            0 sets no limit.
        convert: ``"jpeg"`` (quality 95) or ``"png"``: a picture that readers do not take, a GIF, BMP or TIFF (the first
            in it) or gray of 16 bits, is written in this format. Others keep their bytes. In JPEG a transparent pixel
            has the color that it hides, as PIL's ``convert("RGB")`` gives it to readers anyway.
        resize: pictures whose shorter side is longer are resized to this one, their aspect ratio kept, and written
            upright and without metadata: as ``convert`` says, or else as PNG if they are PNG, or as JPEG. Others keep
            their bytes; none is enlarged.

    Raises:
        UserError: an argument is wrong; an image or array file cannot be used (with ``on_error="raise"``, or if a shard
            has no other); shards with other contents exist (without ``overwrite``); another process writes the same
            split; a file cannot be written. No partial shard is left behind.
    """
    if samples_per_shard < 1:
        raise UserError(f"samples_per_shard must be at least 1, got {samples_per_shard}")
    out = os.fspath(out)
    if isinstance(files, str | os.PathLike):
        files = FileFolder(files)
    writer = _ShardWriter(files, inputs, on_error, overwrite, max_image_pixels, convert, resize)
    if inputs == "features":
        images = _with_array_files(images, files)
    if seed is not None:
        images = shuffled(images, seed)
    written = Written([], 0, 0, [])
    # Locks are released last, when no worker writes any more. disable=None: no bar where nobody watches.
    with ExitStack() as locks, tqdm(unit="image", disable=None) as progress:
        jobs = writer.jobs(images, out, samples_per_shard, locks)
        with closing(run_jobs(writer.write, jobs, workers, executor)) as heads:
            for shard, head in heads:
                written.shards.append(shard)
                written.rejected.extend(head.rejected)
                images_written = written.images + len(head.counts)
                written = written._replace(images=images_written, captions=written.captions + sum(head.counts))
                progress.update(len(head.counts) + len(head.rejected))
            _remove_others(out, written.shards, overwrite)
            _write_sizes(out)
    return written


class _Shard(NamedTuple):
    """A job: the images of a shard, and the number of the first one in the split ``<dataset>-<split>``."""

    file: str
    name: str
    start: int
    images: list[CaptionedImage]
    rejected: list[RejectedImage]


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
    """Writes one shard at a time, in any thread or process; see :func:`write_shards`."""

    files: FileFolder
    inputs: str
    on_error: str
    overwrite: bool
    max_image_pixels: int
    convert: str | None
    resize: int | None

    def __post_init__(self) -> None:
        one_of("inputs", self.inputs, INPUTS)
        one_of("on_error", self.on_error, ("raise", "skip"))
        check_max_image_pixels(self.max_image_pixels)
        for name, value in (("convert", self.convert), ("resize", self.resize)):
            if value is not None and self.inputs == "features":
                raise UserError(f"--{name} changes pictures, but --features (inputs='features') has none")
        if self.convert is not None:
            one_of("convert", self.convert, CONVERT)
        if self.resize is not None and self.resize < 1:
            raise UserError(f"resize must be at least 1, got {self.resize}")

    def jobs(self, images: Images, out: str, samples_per_shard: int, locks: ExitStack) -> Iterator[_Shard]:
        """Yield the shards of a stream of images, each with those rejected before, and lock the split of each."""
        last: dict[str, _Shard] = {}
        rejected: list[RejectedImage] = []
        for image in images:
            if isinstance(image, RejectedImage):
                if self.on_error == "raise":
                    raise UserError(f"{image.image}: {image.reason}")
                rejected.append(image)
                continue
            name = f"{image.dataset}-{image.split}"
            if name not in last:
                locks.enter_context(lock(join(out, f"{INDEX_FOLDER}/.{name}.lock"), f"{name} to {out}"))
                last[name] = _Shard(join(out, f"{name}-000000.tar"), name, 0, [], [])
            # Not as soon as it is full, because images that are rejected may follow.
            elif len(last[name].images) == samples_per_shard:
                yield last[name]._replace(rejected=rejected)
                rejected = []
                start = last[name].start + samples_per_shard
                last[name] = _Shard(join(out, f"{name}-{start // samples_per_shard:06d}.tar"), name, start, [], [])
            last[name].images.append(image)
        if not last:
            reason = f", such as {rejected[0].image}: {rejected[0].reason}" if rejected else ""
            raise UserError(f"there are no images to write{reason}")
        for shard in last.values():
            yield shard._replace(rejected=rejected)
            rejected = []

    def write(self, shard: _Shard) -> tuple[str, IndexHead]:
        """Write a shard, unless its index shows that it is complete."""
        states = [self.files.state(image.file) for image in shard.images]
        content: list[Any] = [shard[1:], states, self.inputs, self.on_error]
        if self.max_image_pixels != MAX_IMAGE_PIXELS:  # so that fingerprints of version 0.3 stay valid
            content.append(self.max_image_pixels)
        if self.convert is not None or self.resize is not None:
            content.append({"convert": self.convert, "resize": self.resize})
        fingerprint = hashlib.sha256(msgspec.json.encode(content)).hexdigest()
        with suppress(UserError, OSError):  # it or its index is missing or damaged
            index = find_index(shard.file)
            if index is not None and index[0].fingerprint == fingerprint:
                return shard.file, index[0]
        return shard.file, self._write(shard, fingerprint)

    def _write(self, shard: _Shard, fingerprint: str) -> IndexHead:
        records: list[Record] = []
        sizes, rejected, digest = [], list(shard.rejected), hashlib.sha256()
        with write_complete(shard.file) as stream:
            for position, image in enumerate(shard.images, shard.start):
                key = f"{shard.name}-{position:08d}"
                try:
                    data = self._encode(key, image)
                except UserError as error:
                    if self.on_error == "raise":
                        raise UserError(f"{image.file} (image id {image.image_id}): {error}") from error
                    rejected.append(RejectedImage(image.file, image.split, str(error)))
                    continue
                stream.write(data)
                digest.update(data)
                sizes.append(len(data))
                records.append(record_of(key, image))
            if not records:
                last = rejected[-1]
                raise UserError(f"no image of {shard.file} can be used, such as {last.image}: {last.reason}")
            *starts, end = accumulate(sizes, initial=0)
            # The end of an archive: two empty blocks, filled up to a record.
            zeros = 2 * tarfile.BLOCKSIZE
            zeros += -(end + zeros) % tarfile.RECORDSIZE
            stream.write(bytes(zeros))
            digest.update(bytes(zeros))
            # The index is written first, and then the archive gets its name, so that an archive always has its index.
            if exists(shard.file) and sha256(shard.file) != digest.hexdigest():
                if not self.overwrite:
                    raise _conflict(shard.file)
                # So the former archive has to go before its index is replaced, and its number in `sizes.json` with it.
                remove(join(os.path.dirname(shard.file), SIZES_FILE))
                remove(shard.file)
            facts = {"size": end + zeros, "sha256": digest.hexdigest(), "fingerprint": fingerprint}
            head = make_head(records, starts, sizes, rejected=rejected, **facts)
            write_index(shard.file, head, records)
        return head

    def _encode(self, key: str, image: CaptionedImage) -> bytes:
        """Return the files of an image as a part of a tar archive."""
        data = self.files.read(image.file)
        metadata = {name: value for name, value in vars(image).items() if name != "file" and value is not None}
        if self.inputs == "features":
            extension, shape = FEATURES, decode_features(data).shape
            metadata |= zip(("num_features", "feature_dim"), shape, strict=True)
        else:
            extension, data, width, height = prepare_picture(
                data, convert=self.convert, resize=self.resize, max_image_pixels=self.max_image_pixels
            )
            metadata |= {"width": width, "height": height}
        members = {extension: data, "json": _to_json(metadata), "txt": image.captions[0].encode()}
        blocks = []
        for extension, content in sorted(members.items()):
            blocks += file_blocks(f"{key}.{extension}", content)
        return b"".join(blocks)


def _write_sizes(out: str) -> None:
    """Renew the number of images of all shards in a folder."""
    file = join(out, SIZES_FILE)
    with lock(join(out, f"{INDEX_FOLDER}/.{SIZES_FILE}.lock"), file, wait=True):
        for name in names(out, f".{SIZES_FILE}.*.partial"):  # of killed processes
            remove(join(out, name))
        sizes = {}
        for name in names(out, "*.tar"):
            with suppress(UserError, OSError):  # another process may just be replacing it; that one comes here too
                sizes[name] = len(read_head(join(out, name)).counts)
        content = _to_json(sizes, indent=2)
        if not exists(file) or read_bytes(file) != content:
            write_file(file, content)


def _with_array_files(images: Images, files: FileFolder) -> Images:
    """Yield the images with the array file of each: all named by id if the first has one, or all by image file."""
    are_named_by_id: bool | None = None
    used = set()
    for image in images:
        if isinstance(image, CaptionedImage):
            file, file_of_id = f"{PureWindowsPath(image.filename).stem}.{FEATURES}", f"{image.image_id}.{FEATURES}"
            if are_named_by_id is None:
                are_named_by_id = files.state(file_of_id) is not None
            image = replace(image, file=file_of_id if are_named_by_id else file)
            if image.file in used:
                raise UserError(f"{image.file} is one file for two images; name the array files by image id")
            used.add(image.file)
        yield image


def _to_json(value: Any, **options: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, **options).encode()


def _conflict(shard: str) -> UserError:
    return UserError(f"{shard} has other contents; overwrite it, or choose another folder")
