"""One image as a sample of a shard: the bytes of its members, and their size."""

import hashlib
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.captions import txt_content
from vl_plugins.data.feature_arrays import FEATURE_EXTENSION, inspect_features
from vl_plugins.data.image_files import FileSource
from vl_plugins.data.images import inspect_image, resize_image
from vl_plugins.data.manifest import to_json
from vl_plugins.data.parallel import map_in_processes
from vl_plugins.utils.errors import UserError

__all__ = [
    "SampleEncoding",
    "content_fingerprint",
    "cut_by_size",
    "encode_sample",
    "first_feature_dim",
    "padded",
    "sample_sizes",
    "tar_pieces",
]

# Images that a worker measures at a time; a shard is not known yet when shards are cut by size after a resize.
MEASURED_TOGETHER = 256

# Of pixels or features; a number has at most as many digits.
MOST = 10**9


@dataclass(frozen=True)
class SampleEncoding:
    """How an image becomes a sample.

    Args:
        files: where the image files are, or the array files in their place.
        txt: see :func:`write_shards`.
        resize: likewise.
        quality: likewise.
        on_error: likewise.
        feature_dim: number of values of every feature, 0 where no array file can be used; None for image files.
    """

    files: FileSource
    txt: str
    resize: int | None
    quality: int
    on_error: str
    feature_dim: int | None


def first_feature_dim(images: Iterable[CaptionedImage], files: FileSource) -> int:
    """Return the number of values of each feature of the first image whose array file can be used, 0 without any."""
    for image in images:
        with suppress(UserError):  # said where it is written
            return inspect_features(files.read(image.file)).feature_dim
    return 0


def encode_sample(key: str, image: CaptionedImage, encoding: SampleEncoding) -> dict[str, bytes]:
    """Return the members of one sample by name."""
    data = encoding.files.read(image.file)
    if encoding.feature_dim is not None:
        info = inspect_features(data)
        if info.feature_dim != encoding.feature_dim:
            raise UserError(
                f"its features have {info.feature_dim} values each, those of the first image {encoding.feature_dim}"
            )
        return _members(key, image, encoding.txt, FEATURE_EXTENSION, data, info._asdict())
    if encoding.resize is None:
        info = inspect_image(data, decode=False)
    else:
        data, info = resize_image(data, encoding.resize, quality=encoding.quality)
    return _members(key, image, encoding.txt, info.extension, data, {"width": info.width, "height": info.height})


def _members(
    key: str, image: CaptionedImage, txt: str, extension: str, data: bytes, size: Mapping[str, int]
) -> dict[str, bytes]:
    metadata = {
        "image_id": image.image_id,
        "captions": image.captions,
        "caption_ids": image.caption_ids,
        "split": image.split,
        "dataset": image.dataset,
        "filename": image.filename,
        **({} if image.group is None else {"group": image.group}),
        **size,
    }
    return {
        f"{key}.{extension}": data,
        f"{key}.txt": txt_content(image.captions, txt).encode(),
        f"{key}.json": to_json(metadata),
    }


def tar_pieces(members: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the bytes of one sample in a tar file.

    ``tarfile`` makes the headers; its ``addfile`` would take as long again to copy the data in small pieces.
    """
    for name, data in sorted(members.items()):
        # The defaults make the bytes reproducible: time 0, no owner, mode 644.
        member = tarfile.TarInfo(name)
        member.size = len(data)
        yield member.tobuf(tarfile.USTAR_FORMAT)
        yield data
        yield bytes(padded(len(data)) - len(data))


def content_fingerprint(shard_images: Mapping[str, CaptionedImage], encoding: SampleEncoding) -> str:
    """Return a hash of all that the content of a shard depends on."""
    images = [[key, vars(image), encoding.files.state(image.file)] for key, image in shard_images.items()]
    options = [encoding.txt, encoding.resize, encoding.quality, encoding.on_error, encoding.feature_dim]
    return hashlib.sha256(to_json([images, options])).hexdigest()


def sample_sizes(name: str, images: Sequence[CaptionedImage], encoding: SampleEncoding, workers: int) -> Iterable[int]:
    """Yield the bytes that each image will take in a shard, or slightly more; 0 for one that cannot be used."""
    keyed = [(f"{name}-{index:08d}", image) for index, image in enumerate(images)]
    if encoding.resize is None:
        return (_size_from_file(key, image, encoding) for key, image in keyed)
    chunks = [keyed[start : start + MEASURED_TOGETHER] for start in range(0, len(keyed), MEASURED_TOGETHER)]
    results = map_in_processes(partial(_sizes_encoded, encoding), chunks, workers)
    progress = tqdm(results, desc=f"{name}: sizes", total=len(chunks), unit=f"{MEASURED_TOGETHER} images", disable=None)
    return (size for sizes in progress for size in sizes)


def _size_from_file(key: str, image: CaptionedImage, encoding: SampleEncoding) -> int:
    state = encoding.files.state(image.file)
    if state is None:
        return 0
    if encoding.feature_dim is None:
        members = _members(key, image, encoding.txt, "webp", b"", {"width": MOST, "height": MOST})
    else:
        most = {"num_features": MOST, "feature_dim": MOST}
        members = _members(key, image, encoding.txt, FEATURE_EXTENSION, b"", most)
    return _size_in_tar(members) + padded(state[0])


def _sizes_encoded(encoding: SampleEncoding, keyed: Sequence[tuple[str, CaptionedImage]]) -> list[int]:
    sizes = []
    for key, image in keyed:
        try:
            sizes.append(_size_in_tar(encode_sample(key, image, encoding)))
        except UserError:
            sizes.append(0)  # said where it is written
    return sizes


def _size_in_tar(members: Mapping[str, bytes]) -> int:
    return sum(tarfile.BLOCKSIZE + padded(len(data)) for data in members.values())


def padded(size: int, unit: int = tarfile.BLOCKSIZE) -> int:
    return -(-size // unit) * unit


def cut_by_size(sizes: Iterable[int], limit: float) -> list[int]:
    """Return where each shard starts, when none has more than ``limit`` bytes unless it holds one sample."""
    # What the end of an archive takes at most.
    start_bytes = tarfile.RECORDSIZE + 2 * tarfile.BLOCKSIZE
    starts, filled = [0], start_bytes
    for index, size in enumerate(sizes):
        if index > starts[-1] and filled + size > limit:
            starts.append(index)
            filled = start_bytes
        filled += size
    return starts
