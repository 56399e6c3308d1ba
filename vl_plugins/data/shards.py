"""Writer of WebDataset shards: plain tar files that any reader of open_clip, img2dataset or webdataset understands."""

import filecmp
import hashlib
import io
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from vl_plugins import __version__
from vl_plugins.data.annotations import CaptionedImage, RejectedImage, read_json
from vl_plugins.errors import UserError
from vl_plugins.optional import require

__all__ = [
    "IMAGE_EXTENSIONS",
    "MANIFEST_FILE",
    "SIZES_FILE",
    "ForeignManifestError",
    "inspect_image",
    "read_manifest",
    "write_shards",
]

MANIFEST_FILE = "manifest.json"
SIZES_FILE = "sizes.json"
REJECTED_FILE = "rejected.jsonl"

# PIL's name of a format -> extension. MPO is what cameras write: a JPEG with further pictures that readers ignore.
IMAGE_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


class ForeignManifestError(UserError):
    """A ``manifest.json`` that :func:`write_shards` did not write."""


def inspect_image(data: bytes) -> tuple[str, int, int]:
    """Decode an image completely, to be sure that training will be able to.

    Args:
        data: content of an image file.

    Returns:
        Extension that fits the content (``"jpg"``, ``"png"`` or ``"webp"``), width and height in pixels.

    Raises:
        UserError: the content is empty, not an image, of another format, damaged, or of more pixels than
            ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    image_module = require("PIL.Image", extra="data")
    if not data:
        raise UserError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            with image_module.open(io.BytesIO(data)) as image:
                extension = IMAGE_EXTENSIONS.get(image.format)
                if extension is not None:
                    image.load()
                image_format, (width, height) = image.format, image.size
    except image_module.UnidentifiedImageError:
        raise UserError("the file is not an image") from None
    except (image_module.DecompressionBombWarning, image_module.DecompressionBombError):
        raise UserError(f"the image has more than {image_module.MAX_IMAGE_PIXELS:,} pixels") from None
    # Decoders of damaged files raise nearly anything: OSError, SyntaxError, ValueError, struct.error, zlib.error.
    except Exception as error:
        raise UserError(f"the image is damaged: {error}") from error
    if extension is None:
        raise UserError(f"the format {image_format} is not supported; supported are JPEG, PNG and WebP")
    return extension, width, height


def read_manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return the entries that :func:`write_shards` made, by ``<dataset>-<split>``; None when there is no manifest.

    Raises:
        UserError: ``manifest.json`` cannot be read.
        ForeignManifestError: it is something else.
    """
    file = folder / MANIFEST_FILE
    if not file.exists():
        return None
    manifest = read_json(file)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("splits"), dict):
        raise ForeignManifestError(f"{file} is not a manifest of vl-plugins shards")
    return manifest["splits"]


def write_shards(
    images: Sequence[CaptionedImage],
    image_root: str | Path,
    out: str | Path,
    *,
    samples_per_shard: int = 1000,
    on_error: str = "raise",
    overwrite: bool = False,
    rejected: Sequence[RejectedImage] = (),
    source: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Write captioned images as shards ``<dataset>-<split>-000000.tar``, ... with ``sizes.json`` and ``manifest.json``.

    Shard ``i`` of a split holds its images ``i * samples_per_shard`` and following, in source order. Image ``j`` has
    the key ``<dataset>-<split>-<j, eight digits>`` and three members: ``.jpg``, ``.png`` or ``.webp`` (the bytes of
    the image file; the extension follows the content), ``.txt`` (the first caption) and ``.json`` (``image_id``,
    ``captions``, ``caption_ids``, ``split``, ``dataset``, ``filename``, ``width``, ``height``). An image that turns out
    to be unusable leaves its key unused, so the keys and shards of all others do not depend on it.

    The same input gives the same bytes. A shard gets its name when it is complete and on disk; after an error the
    complete shards stay, and a further run writes the same ones again. ``sizes.json`` and ``manifest.json`` cover all
    splits of the folder and are updated when a split is complete, ``manifest.json`` last.

    Args:
        images: what to write, of one or several splits.
        image_root: folder that ``CaptionedImage.file`` is relative to.
        out: folder for the shards; made when missing.
        samples_per_shard: number of images per shard.
        on_error: ``"raise"`` stops at the first image that cannot be used; ``"skip"`` leaves it out and lists it
            in ``rejected.jsonl``.
        overwrite: whether existing shards of the same data set and split with other contents are replaced.
        rejected: images rejected before, for ``rejected.jsonl`` and the counts.
        source: where the images come from, for the manifest; values must be JSON.

    Returns:
        The manifest's entry of each split written, by ``<dataset>-<split>``.

    Raises:
        UserError: there is nothing to write; an image is missing, damaged, of an unsupported format, or too large
            (with ``on_error="raise"``, or when all are); shards with other contents exist (without ``overwrite``);
            the folder cannot be written. No partial shard is left behind.
    """
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    if samples_per_shard < 1:
        raise UserError(f"samples_per_shard must be at least 1, got {samples_per_shard}")
    if not images:
        raise UserError("there are no images to write")
    # Now, because a missing module or a foreign manifest is nothing that `on_error` should skip.
    for module in ("webdataset", "PIL.Image"):
        require(module, extra="data")
    image_root, out = Path(image_root), Path(out)
    read_manifest(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}") from error

    splits: dict[str, list[CaptionedImage]] = {}
    for image in images:
        splits.setdefault(f"{image.dataset}-{image.split}", []).append(image)
    entries = {}
    for name, members in splits.items():
        unusable = [item for item in rejected if item.split == members[0].split]
        # None collects nothing: the first unusable image raises.
        skipped = unusable if on_error == "skip" else None
        shards, captions_per_image = _write_split(name, members, image_root, out, samples_per_shard, skipped, overwrite)
        entries[name] = {
            "source": dict(source or {}),
            "options": {"samples_per_shard": samples_per_shard, "on_error": on_error},
            "images": captions_per_image.total(),
            "captions": _number_of_captions(captions_per_image),
            "rejected": len(unusable),
            "captions_per_image": {
                "min": min(captions_per_image),
                "max": max(captions_per_image),
                "histogram": {str(captions): number for captions, number in sorted(captions_per_image.items())},
            },
            "shards": shards,
        }
        _update_index(out, name, entries[name], unusable)
    return entries


def _write_split(
    name: str,
    images: list[CaptionedImage],
    image_root: Path,
    out: Path,
    samples_per_shard: int,
    skipped: list[RejectedImage] | None,
    overwrite: bool,
) -> tuple[dict[str, dict[str, Any]], Counter[int]]:
    """Write one split; return the manifest's entry of each shard, and how many images have how many captions."""
    starts = range(0, len(images), samples_per_shard)
    paths = [out / f"{name}-{index:06d}.tar" for index in range(len(starts))]
    surplus = [path for path in out.iterdir() if _is_shard_of(name, path) and path not in paths]
    if surplus and not overwrite:
        raise _conflict(min(surplus))
    if overwrite and (out / MANIFEST_FILE).exists():
        # An index of shards that are about to change would be wrong if this run stopped half-way.
        _update_index(out, name, None, [])

    shards: dict[str, dict[str, Any]] = {}
    captions_per_image: Counter[int] = Counter()
    # disable=None: no bar where nobody watches, such as in a log file.
    with tqdm(total=len(images), desc=name, unit="image", disable=None) as progress:
        for path, start in zip(paths, starts, strict=True):
            chunk = images[start : start + samples_per_shard]
            members = {f"{name}-{index:08d}": image for index, image in enumerate(chunk, start)}
            shards[path.name], captions = _write_shard(path, members, image_root, skipped, overwrite, progress)
            captions_per_image += captions
    if not captions_per_image:
        for path in paths:
            path.unlink()
        last = skipped[-1]
        raise UserError(f"none of the {len(images)} images of {name} can be used; {last.image}: {last.reason}")
    for path in surplus:
        path.unlink()
    return shards, captions_per_image


def _write_shard(
    path: Path,
    images: Mapping[str, CaptionedImage],
    image_root: Path,
    skipped: list[RejectedImage] | None,
    overwrite: bool,
    progress: tqdm,
) -> tuple[dict[str, Any], Counter[int]]:
    """Write one shard of images by key; return its manifest entry, and how many images have how many captions."""
    webdataset = require("webdataset", extra="data")
    captions_per_image: Counter[int] = Counter()
    with _complete_file(path, overwrite) as stream:
        hashed = _HashedStream(stream)
        # A fixed owner, mode and time make the bytes reproducible.
        with webdataset.TarWriter(hashed, encoder=False, user="", group="", mode=0o644, mtime=0) as tar:
            for key, image in images.items():
                progress.update()
                try:
                    sample = _encode_sample(key, image, image_root)
                except UserError as error:
                    if skipped is None:
                        raise UserError(f"{image_root / image.file} (image id {image.image_id}): {error}") from error
                    skipped.append(RejectedImage(image.file, image.split, str(error)))
                    continue
                tar.write(sample)
                captions_per_image[len(image.captions)] += 1
    return {
        "samples": captions_per_image.total(),
        "captions": _number_of_captions(captions_per_image),
        "bytes": hashed.size,
        "sha256": hashed.digest.hexdigest(),
    }, captions_per_image


def _encode_sample(key: str, image: CaptionedImage, image_root: Path) -> dict[str, Any]:
    """Return the members of one sample as bytes, by extension."""
    try:
        data = (image_root / image.file).read_bytes()
    # ValueError: a null character in the path.
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the file: {getattr(error, 'strerror', None) or error}") from error
    extension, width, height = inspect_image(data)
    return {
        "__key__": key,
        extension: data,
        "txt": image.captions[0].encode(),
        "json": _to_json(
            {
                "image_id": image.image_id,
                "captions": image.captions,
                "caption_ids": image.caption_ids,
                "split": image.split,
                "dataset": image.dataset,
                "filename": image.filename,
                "width": width,
                "height": height,
            }
        ),
    }


class _HashedStream:
    """Passes on what is written, and takes its size and hash on the way."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.size += len(data)
        self.digest.update(data)
        return self.stream.write(data)


@contextmanager
def _complete_file(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when it is complete and on disk, or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if not overwrite and path.exists() and not filecmp.cmp(temporary, path, shallow=False):
            raise _conflict(path)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _update_index(out: Path, name: str, entry: dict[str, Any] | None, rejected: Sequence[RejectedImage]) -> None:
    """Put the entry of one split into the files that describe the folder, or with None take it out of them."""
    manifest_file, sizes_file, rejected_file = out / MANIFEST_FILE, out / SIZES_FILE, out / REJECTED_FILE
    splits = read_manifest(out) or {}
    sizes = read_json(sizes_file) if sizes_file.exists() else {}
    lines = rejected_file.read_text(encoding="utf-8").splitlines() if rejected_file.exists() else []

    splits.pop(name, None)
    sizes = {shard: samples for shard, samples in sizes.items() if not _is_shard_of(name, out / shard)}
    lines = [line for line in lines if json.loads(line)["shards"] != name]
    if entry is not None:
        splits[name] = entry
        sizes |= {shard: facts["samples"] for shard, facts in entry["shards"].items()}
        lines += [json.dumps({"shards": name, **asdict(item)}, ensure_ascii=False) for item in rejected]

    if lines:
        _write_file(rejected_file, "".join(f"{line}\n" for line in lines).encode())
    else:
        rejected_file.unlink(missing_ok=True)
    _write_file(sizes_file, _to_json(sizes, indent=2))
    _write_file(manifest_file, _to_json({"tool": f"vl_plugins {__version__}", "splits": splits}, indent=2))


def _write_file(path: Path, data: bytes) -> None:
    with _complete_file(path, overwrite=True) as stream:
        stream.write(data)


def _to_json(value: Any, **options: Any) -> bytes:
    # Readable in any language, and the same bytes whatever order the keys were set in.
    return json.dumps(value, ensure_ascii=False, sort_keys=True, **options).encode()


def _is_shard_of(name: str, path: Path) -> bool:
    return re.fullmatch(rf"{re.escape(name)}-\d{{6}}\.tar", path.name) is not None


def _number_of_captions(captions_per_image: Counter[int]) -> int:
    return sum(captions * images for captions, images in captions_per_image.items())


def _conflict(path: Path) -> UserError:
    return UserError(
        f"{path} exists and does not belong to this run; replace it with --overwrite, or choose another folder"
    )
