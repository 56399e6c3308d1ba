"""Writer of WebDataset shards: plain tar files that any reader of open_clip, img2dataset or webdataset understands."""

import hashlib
import os
import random
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from tqdm import tqdm

from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.captions import TXT
from vl_plugins.data.feature_arrays import with_array_files
from vl_plugins.data.image_files import FileFolder, FileSource
from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.manifest import (
    ShardFacts,
    is_shard_of,
    number_of_captions,
    read_manifest,
    shard_name,
    to_json,
    update_index,
)
from vl_plugins.data.parallel import map_in_processes
from vl_plugins.data.sample_encoding import (
    SampleEncoding,
    content_fingerprint,
    cut_by_size,
    encode_sample,
    first_feature_dim,
    padded,
    sample_sizes,
    tar_pieces,
)
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError, check_name
from vl_plugins.utils.optional import require

__all__ = ["is_training_split", "write_shards"]

# Tar headers have room for 100 characters, and "-00000000.webp" follows.
LONGEST_NAME = 86


@dataclass(frozen=True)
class _Shard:
    """A shard to write: its file name, and the images by key."""

    file: str
    images: Mapping[str, CaptionedImage]


@dataclass(frozen=True)
class _Written:
    """What became of a shard.

    Args:
        facts: the shard's entry in the manifest.
        captions_per_image: how many images have how many captions.
        rejected: images that could not be used.
    """

    facts: ShardFacts
    captions_per_image: dict[int, int]
    rejected: list[RejectedImage]


def write_shards(
    images: Sequence[CaptionedImage],
    image_root: str | os.PathLike | FileSource | None,
    out: str | os.PathLike,
    *,
    features: str | os.PathLike | None = None,
    samples_per_shard: int = 1000,
    shard_size_mb: float | None = None,
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
    ``filename``, ``width``, ``height``; ``group`` of an image that is in one). An image that turns out to be unusable
    leaves its key unused, so the keys and shards of all others do not depend on it.

    With ``features`` the first member is ``.npy``, the bytes of an array file of region or grid features (N, W) as
    :func:`~vl_plugins.data.feature_arrays.decode_features` takes it, and the ``.json`` has ``num_features`` (N) and
    ``feature_dim`` (W) in place of width and height. W is the same for all images: that of the first usable one.

    The same input gives the same bytes with any number of workers. A shard gets its name when it is complete and on
    disk. A run that is repeated after it was stopped, in whatever way, keeps the complete shards and writes the others;
    the result is the same as without the interruption. Image files must not change in between: one that has changed is
    noticed by its size and time. ``sizes.json`` and ``manifest.json`` cover all splits of the folder and are updated
    when a split is complete, ``manifest.json`` last.

    Images are checked by :func:`~vl_plugins.data.images.inspect_image`; the pixels of JPEG files are decoded only where
    the end is missing or a resize asks for it. ``vl-plugins shards verify`` decodes them all.

    Args:
        images: what to write, of one or several splits.
        image_root: folder that ``CaptionedImage.file`` is relative to, or another source of files; None with
            ``features``.
        out: folder for the shards, a path or a URL of fsspec; made when missing.
        features: folder of array files in place of the image files, found by
            :func:`~vl_plugins.data.feature_arrays.with_array_files`: ``<image id>.npy``, or else
            ``<name of the image file>.npy``.
        samples_per_shard: number of images per shard; not used when ``shard_size_mb`` is given.
        shard_size_mb: size in megabytes (10^6 bytes) that no shard exceeds, unless one image alone does.
        txt: what ``.txt`` has. ``"first"``: the first caption, as open_clip trains on it. ``"all"``: each caption in a
            line, as CLIP_benchmark reads it; open_clip would take them for one text. Our readers take ``.json``.
        resize: number of pixels that the shorter side of larger images is reduced to; by default files stay untouched.
        quality: of JPEG and WebP images that are resized, 1 to 100.
        workers: number of processes. They are started by the method ``spawn``: a script that asks for more than one
            needs ``if __name__ == "__main__":``.
        seed: shuffles the training splits (:func:`is_training_split`); by default all splits are in source order.
        on_error: ``"raise"`` stops at the first image that cannot be used; ``"skip"`` leaves it out and lists it
            in ``rejected.jsonl``.
        overwrite: whether existing shards of the same data set and split with other contents are replaced.
        dry_run: whether to read and check everything and to write nothing.
        rejected: images rejected before, for ``rejected.jsonl`` and the counts.
        source: where the images come from, for the manifest; values must be JSON.

    Returns:
        The manifest's entry of each split, by ``<dataset>-<split>``.

    Raises:
        UserError: there is nothing to write; an image is missing, damaged, of an unsupported format, or too large, or
            an array file is none of these features (with ``on_error="raise"``, or when all are); it is not clear which
            array file is whose; shards with other contents exist (without ``overwrite``); the folder cannot be written;
            an argument is out of range, ``resize`` is given with ``features``, or ``seed`` and no split is for
            training. No partial shard is left behind.
    """
    check_name("txt", txt, TXT)
    _check_options(samples_per_shard, shard_size_mb, resize, quality, workers, on_error)
    if (image_root is None) == (features is None):
        raise UserError("give either image_root or features, the folder that files are read from")
    if features is not None and resize is not None:
        raise UserError("resize is for pictures; array files of features are written as they are")
    if not images:
        raise UserError("there are no images to write")
    if features is not None:
        images = with_array_files(images, features)
    splits: dict[str, list[CaptionedImage]] = {}
    for image in images:
        splits.setdefault(f"{image.dataset}-{image.split}", []).append(image)
    if len(longest := max(splits, key=len)) > LONGEST_NAME:
        raise UserError(f"the name {longest} is longer than {LONGEST_NAME} characters, too long for names in tar files")
    if seed is not None:
        _shuffle_training_splits(splits, seed)
    # Now, because a missing module or a foreign manifest is nothing that `on_error` should skip.
    require("PIL.Image" if features is None else "numpy", extra="data")
    out = Folder(out)
    read_manifest(out)
    if not dry_run:
        out.make()

    root = image_root if features is None else features
    files = FileFolder(root) if isinstance(root, (str, os.PathLike)) else root
    feature_dim = None if features is None else first_feature_dim(images, files)
    encoding = SampleEncoding(files, txt, resize, quality, on_error, feature_dim)
    options = {
        **({} if features is None else {"inputs": "features"}),
        **({"samples_per_shard": samples_per_shard} if shard_size_mb is None else {"shard_size_mb": shard_size_mb}),
        **({} if txt == "first" else {"txt": txt}),
        **({} if resize is None else {"resize": resize, "quality": quality}),
        "on_error": on_error,
    }
    entries = {}
    for name, members in splits.items():
        if shard_size_mb is None:
            starts = range(0, len(members), samples_per_shard)
        else:
            starts = cut_by_size(sample_sizes(name, members, encoding, workers), shard_size_mb * 1e6)
        shards = _shards(name, members, starts)
        written = _write_split(name, shards, encoding, out, workers, overwrite, dry_run)
        left_out = [item for item in rejected if item.split == members[0].split]
        left_out += [item for shard in written for item in shard.rejected]
        shuffled = {"seed": seed} if seed is not None and is_training_split(members[0].split) else {}
        entries[name] = _manifest_entry(shards, written, dict(source or {}), options | shuffled, len(left_out))
        if not dry_run:
            update_index(out, name, entries[name], left_out)
    # Not before, or a run that stops in the last split would begin again with the first.
    for name in () if dry_run else splits:
        _remove_traces(name, out)
    return entries


def is_training_split(split: str) -> bool:
    """Return whether a split is for training: ``train``, ``restval``, or a name that begins with ``train``.

    >>> [is_training_split(split) for split in ("train", "train2017", "restval", "val", "test")]
    [True, True, True, False, False]
    """
    return split.startswith("train") or split == "restval"


def _check_options(
    samples_per_shard: int, shard_size_mb: float | None, resize: int | None, quality: int, workers: int, on_error: str
) -> None:
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    for name, value in (("samples_per_shard", samples_per_shard), ("resize", resize), ("workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if shard_size_mb is not None and not 0 < shard_size_mb < float("inf"):
        raise UserError(f"shard_size_mb must be more than 0, got {shard_size_mb}")
    if not 1 <= quality <= 100:
        raise UserError(f"quality must be 1 to 100, got {quality}")


def _shuffle_training_splits(splits: dict[str, list[CaptionedImage]], seed: int) -> None:
    training = [name for name, members in splits.items() if is_training_split(members[0].split)]
    if not training:
        raise UserError(f"seed shuffles training splits, and none of {', '.join(splits)} is one")
    for name in training:
        random.Random(f"{seed}/{name}").shuffle(splits[name])


def _shards(name: str, images: Sequence[CaptionedImage], starts: Sequence[int]) -> list[_Shard]:
    stops = [*starts[1:], len(images)]
    return [
        _Shard(shard_name(name, number), {f"{name}-{index:08d}": images[index] for index in range(start, stop)})
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def _write_split(
    name: str,
    shards: Sequence[_Shard],
    encoding: SampleEncoding,
    out: Folder,
    workers: int,
    overwrite: bool,
    dry_run: bool,
) -> list[_Written]:
    """Write the shards of one split; return what became of each."""
    present = out.names()
    files = {shard.file for shard in shards}
    surplus = [file for file in present if is_shard_of(name, file) and file not in files]
    if surplus and not overwrite:
        raise _conflict(out / surplus[0])
    if not dry_run:
        for pattern in (rf"\.?{name}-\d{{6}}\.tar(\.done)?", r"(manifest|sizes)\.json", r"rejected\.jsonl"):
            out.remove_partial(pattern)
        if overwrite and name in (read_manifest(out) or {}):
            # An index of shards that are about to change would be wrong if this run stopped half-way.
            update_index(out, name, None)
    write = partial(_write_shard, encoding, out, overwrite, dry_run)
    written = []
    number = sum(len(shard.images) for shard in shards)
    # disable=None: no bar where nobody watches, such as in a log file.
    with tqdm(total=number, desc=name, unit="image", disable=None) as progress:
        for shard, result in zip(shards, map_in_processes(write, shards, workers), strict=True):
            written.append(result)
            progress.update(len(shard.images))
    if not dry_run and (lost := files - set(out.names())):
        raise UserError(
            f"{out / min(lost)} was written by a process of its own and cannot be seen here: give --workers 1"
        )
    if not any(result.captions_per_image for result in written):
        if not dry_run:
            for file in files:
                out.remove(file)
            _remove_traces(name, out)
        last = written[-1].rejected[-1]
        raise UserError(f"none of the {number} images of {name} can be used; {last.image}: {last.reason}")
    for file in () if dry_run else surplus:
        out.remove(file)
    return written


def _write_shard(encoding: SampleEncoding, out: Folder, overwrite: bool, dry_run: bool, shard: _Shard) -> _Written:
    """Write one shard, unless the record of an earlier run shows that it is there."""
    fingerprint = content_fingerprint(shard.images, encoding)
    written = _read_record(out, shard.file, fingerprint)
    if written is not None:
        return written
    with open(os.devnull, "wb") if dry_run else out.write(shard.file) as stream:
        written = _write_samples(shard, encoding, stream)
        if not overwrite and out.exists(shard.file) and out.sha256(shard.file) != written.facts["sha256"]:
            raise _conflict(out / shard.file)
    if not dry_run:
        with out.write(_record_file(shard.file)) as stream:
            record = {"fingerprint": fingerprint, **vars(written), "rejected": list(map(vars, written.rejected))}
            stream.write(to_json(record))
    return written


def _write_samples(shard: _Shard, encoding: SampleEncoding, stream: BinaryIO) -> _Written:
    captions_per_image: Counter[int] = Counter()
    rejected = []
    hashed = _HashedStream(stream)
    for key, image in shard.images.items():
        try:
            members = encode_sample(key, image, encoding)
        except UserError as error:
            if encoding.on_error == "raise":
                place = encoding.files.place(image.file)
                raise UserError(f"{place} (image id {image.image_id}): {error}") from error
            rejected.append(RejectedImage(image.file, image.split, str(error)))
            continue
        for piece in tar_pieces(members):
            hashed.write(piece)
        captions_per_image[len(image.captions)] += 1
    # The end of an archive: two empty blocks, filled up to a record.
    hashed.write(bytes(padded(hashed.size + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE) - hashed.size))
    facts = {
        "samples": captions_per_image.total(),
        "captions": number_of_captions(captions_per_image),
        "bytes": hashed.size,
        "sha256": hashed.digest.hexdigest(),
    }
    return _Written(facts, dict(captions_per_image), rejected)


class _HashedStream:
    """Passes on what is written, and takes its size and hash on the way."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)
        self.stream.write(data)


def _record_file(file: str) -> str:
    """Return the name of the file that records, until its split is complete, that a shard is."""
    return f".{file}.done"


def _read_record(out: Folder, file: str, fingerprint: str) -> _Written | None:
    """Return what an earlier run has recorded of a shard, if this run would write the same and it is still there."""
    try:
        record = parse_json(out.read(_record_file(file)), file)
        written = check_type(record, _Written)
        is_same = record.get("fingerprint") == fingerprint and out.sha256(file) == written.facts["sha256"]
        return written if is_same else None
    except UserError:
        return None  # there is none, or it is not ours


def _remove_traces(name: str, out: Folder) -> None:
    """Remove what only an interrupted run needs."""
    for file in out.names():
        shard = file.removeprefix(".").removesuffix(".done")
        if file == _record_file(shard) and is_shard_of(name, shard):
            out.remove(file)


def _manifest_entry(
    shards: Sequence[_Shard],
    written: Sequence[_Written],
    source: dict[str, Any],
    options: dict[str, Any],
    rejected: int,
) -> dict[str, Any]:
    captions_per_image = sum((Counter(result.captions_per_image) for result in written), Counter())
    left_out = {item.image for result in written for item in result.rejected}
    groups = {image.group for shard in shards for image in shard.images.values() if image.file not in left_out}
    groups.discard(None)
    return {
        "source": source,
        "options": options,
        "images": captions_per_image.total(),
        "captions": number_of_captions(captions_per_image),
        "rejected": rejected,
        **({"groups": len(groups)} if groups else {}),
        "captions_per_image": {
            "min": min(captions_per_image),
            "max": max(captions_per_image),
            "histogram": {str(captions): number for captions, number in sorted(captions_per_image.items())},
        },
        "shards": {shard.file: result.facts for shard, result in zip(shards, written, strict=True)},
    }


def _conflict(file: str) -> UserError:
    return UserError(
        f"{file} exists and does not belong to this run; replace it with --overwrite, or choose another folder"
    )
