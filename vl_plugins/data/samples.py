"""The files of one sample: found in an archive, taken out of its bytes, and decoded."""

import io
import json
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import msgspec
import numpy as np
from PIL import Image

from vl_plugins.data.files import file_errors
from vl_plugins.errors import UserError, one_of

# Far above any image, array of features or text; more would fill the memory of a process that reads it.
MAX_FILE_BYTES = 1 << 30

TEXTS = ("json", "txt")
FEATURES = "npy"
# What a model takes of an image -> extensions of its file. Where a sample has several, the first counts.
INPUTS = {"images": ("jpg", "png", "webp", "jpeg"), "features": (FEATURES,)}
MEMBERS = {*TEXTS, *sum(INPUTS.values(), ())}

# As webdataset splits names: folders and name up to the first dot, and what follows it.
NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
# Files of webdataset itself.
META_NAME = re.compile(r"__[^/]*__($|/)")


class Record(msgspec.Struct, omit_defaults=True, gc=False):  # without cycles; tracking millions takes long
    """The names and captions of one image.

    Args:
        key: names its files in the archive, ``<key>.jpg``, ``<key>.json``, ``<key>.txt``.
        captions: at least one, in source order.
        image_id: the key where the shard has none.
        caption_ids: ``<image id>#<number>`` where the shard has none.
        dataset, split, group: as of :class:`~vl_plugins.data.captions.CaptionedImage`, where the shard has them.
    """

    key: str
    captions: tuple[str, ...]
    image_id: int | str
    caption_ids: tuple[int | str, ...]
    dataset: str | None = None
    split: str | None = None
    group: int | str | None = None


@dataclass(slots=True)
class Sample:
    """Files of one key in an archive, from byte ``start`` to ``end`` with headers; ``members`` by extension."""

    key: str
    start: int
    end: int
    members: dict[str, bytes]


def read_samples(shard: str, extensions: Collection[str] = MEMBERS) -> Iterator[Sample]:
    """Yield the samples of a shard as :func:`scan` does; errors begin with the shard."""
    with file_errors("read", shard), fsspec.open(shard, "rb") as stream:
        try:
            yield from scan(stream, extensions)
        except UserError as error:
            raise UserError(f"cannot read {shard}: {error}") from error


def scan(stream: BinaryIO, extensions: Collection[str] = MEMBERS) -> Iterator[Sample]:
    """Yield the samples of an archive; of files with other extensions only the headers are read.

    Files that belong to no sample are passed over.

    Raises:
        UserError: there is no archive, or it is compressed, cut off or damaged; or a sample has a file twice. Complete
            samples before that place have been yielded.
    """
    sample = None
    try:
        # Never `r:*`: a compressed archive of kilobytes may go on without end.
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # or the list of a large archive fills the memory
                if not 0 <= member.size <= MAX_FILE_BYTES or member.issparse():
                    raise UserError(f"the header of {member.name} says {member.size} bytes, or a sparse file")
                name = NAME.fullmatch(member.name)
                if not member.isreg() or not name or META_NAME.match(member.name):
                    continue
                key, extension = name[1], name[2].lower()
                if sample is None or key != sample.key:
                    if sample is not None:
                        yield sample
                    sample = Sample(key, member.offset, 0, {})
                if extension in sample.members:
                    raise UserError(f"{member.name} is in it twice")
                wanted = extension in extensions
                sample.members[extension] = archive.extractfile(member).read() if wanted else b""  # type: ignore[union-attr]
                sample.end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            # tarfile takes a cut between two members, garbage, or the first of two joined archives for the end.
            stream.seek(archive.offset)
            rest = stream.read(tarfile.RECORDSIZE)
            if len(rest) < tarfile.BLOCKSIZE or any(rest):
                raise UserError("it is cut off or damaged: an archive ends with zeros")
    except UserError:
        raise
    # What tarfile raises for headers that lie about sizes and names.
    except (tarfile.TarError, ValueError, OverflowError, EOFError, MemoryError, RecursionError) as error:
        raise UserError(f"it is damaged or compressed: {error or type(error).__name__}") from error
    if sample is not None:
        yield sample


def parse_sample(data: bytes) -> Sample:
    """Return a sample with all its files, given its bytes in an archive.

    Raises:
        UserError: the bytes are not those of one sample.
    """
    samples = list(scan(io.BytesIO(data + bytes(tarfile.BLOCKSIZE))))
    if len(samples) != 1:
        raise UserError(f"expected the files of one image, found those of {len(samples)}")
    return samples[0]


def parse_record(key: str, members: Mapping[str, bytes]) -> Record:
    """Return the names and captions of a sample: the captions of ``json``, or else ``txt`` as the only one.

    Raises:
        UserError: there are no captions, or something else in place of these or other fields.
    """
    try:
        found = json.loads(members.get("json", b"{}").decode("utf-8-sig"))
        found = found if isinstance(found, dict) else {}
        captions = found.get("captions")
        if captions is None and "txt" in members:
            captions = [members["txt"].decode()]
        if not captions:
            raise UserError("it has no captions; expected a list of strings 'captions' in json, or txt")
        image_id, ids = found.get("image_id", key), found.get("caption_ids")
        if not isinstance(ids, list) or len(ids) != len(captions):
            ids = [f"{image_id}#{number}" for number in range(len(captions))]
        fields = {"key": key, "captions": captions, "image_id": image_id, "caption_ids": ids}
        fields |= {name: found.get(name) for name in ("dataset", "split", "group")}
        record = msgspec.convert(fields, Record)
        msgspec.json.encode(record)  # which finds half a character, as JSON can have it
        return record
    except UserError:
        raise
    # Also for numbers of thousands of digits, and for brackets nested thousands of times.
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"its json or txt is not valid: {error}") from error


def decode(members: Mapping[str, bytes], inputs: str = "images", max_pixels: int | None = None) -> Any:
    """Return the RGB image of a sample, or with ``"features"`` its array (N, W); damaged data raise any error."""
    data = input_of(members, inputs)
    if inputs == "features":
        return decode_features(data)
    image = Image.open(io.BytesIO(data))
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise UserError(f"{image.width} x {image.height} pixels are more than {max_pixels}")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def input_of(members: Mapping[str, bytes], inputs: str = "images") -> bytes:
    """Return the content of a sample's picture, or of its array file; raise :class:`UserError` if there is none."""
    for extension in INPUTS[one_of("inputs", inputs, INPUTS)]:
        if extension in members:
            return members[extension]
    raise UserError(f"it has no {inputs}, expected {' or '.join(INPUTS[inputs])}; it has {', '.join(sorted(members))}")


def decode_features(data: bytes) -> np.ndarray:
    """Return the features of an image, (N, W) float32: a row for each region, or each cell of a grid.

    A row of zeros is a region that is not there: batches are padded with such rows. A grid ``(W, rows, columns)`` is
    stored as ``grid.reshape(len(grid), -1).T``.

    Args:
        data: content of an array file (``.npy``), of 16, 32 or 64 bit floats.

    Raises:
        UserError: the content is damaged, pickled or something else; the array is not two-dimensional or of another
            type, or all zeros; a value is not finite, or too large for 32 bits.
    """
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # headers of damaged files raise nearly anything
        raise UserError(f"the array cannot be read: {error}") from error
    if array.ndim != 2 or array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise UserError(
            f"the array must be (N, W) of float16, float32 or float64, it is {array.shape} of {array.dtype}; "
            "store a grid (W, rows, columns) as grid.reshape(len(grid), -1).T"
        )
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(features).all() or not features.any():
        raise UserError(f"the array {features.shape} has values that are not finite in 32 bits, or only zeros")
    return features
