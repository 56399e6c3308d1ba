"""Samples of shards decoded: captions, pictures and features, and what becomes of those that cannot be read."""

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vl_plugins.data.batching import Group, Sample
from vl_plugins.data.feature_arrays import decode_features
from vl_plugins.data.shard_files import INPUTS, TEXTS, input_of, read_samples
from vl_plugins.data.shard_scanner import ScannedSample
from vl_plugins.utils.errors import MissingExtraError, UserError
from vl_plugins.utils.optional import require

__all__ = [
    "OnError",
    "ShardSlice",
    "SliceSample",
    "WarnOnce",
    "decode_input",
    "parse_samples",
    "raise_error",
    "read_captions",
    "read_slices",
    "stack_inputs",
]

logger = logging.getLogger(__name__)

OnError = Callable[[str, Exception], None]


class ShardSlice(NamedTuple):
    """Samples ``start`` to ``stop`` of a shard whose first sample has the position ``offset``; None is its end."""

    url: str
    start: int
    stop: int | None
    offset: int


class SliceSample(NamedTuple):
    """A sample that has been read but not parsed: its position, its shard and its files."""

    position: int
    url: str
    files: ScannedSample


def read_slices(slices: Iterable[ShardSlice], inputs: str, on_error: OnError) -> Iterator[SliceSample]:
    """Yield the samples of slices of shards; a slice that cannot be read, or is too short, goes to ``on_error``."""
    extensions = {*INPUTS[inputs], *TEXTS}
    for url, start, stop, offset in slices:
        position = start
        try:
            for sample in read_samples(url, start, stop, extensions):
                yield SliceSample(offset + position, url, sample)
                position += 1
            if stop is not None and position < stop:
                raise ValueError(f"it ends after {position} samples, expected {stop}")
        except Exception as error:
            on_error(f"shard {url}" if position == start else f"the end of shard {url}", error)


def parse_samples(samples: Iterable[SliceSample], inputs: str, on_error: OnError) -> Iterator[Sample]:
    """Yield samples with their captions; one without captions or image goes to ``on_error``."""
    for position, url, files in samples:
        try:
            image = input_of(files, inputs)
            captions = read_captions(files)
        except Exception as error:
            on_error(f"sample {files.key} of {url}", error)
        else:
            yield Sample(files.key, position, captions, captions, image, url, _read_group(files))


def decode_input(sample: Sample, inputs: str, on_error: OnError, max_image_pixels: int | None = None) -> Any:
    """Return an RGB image, or an array (N, W), or None after an error that is skipped."""
    try:
        if inputs == "features":
            return decode_features(sample.image)
        return _decode_picture(sample.image, max_image_pixels)
    except MissingExtraError:
        raise
    # Decoders of damaged files raise nearly anything.
    except Exception as error:
        on_error(f"sample {sample.key} of {sample.url}", error)
        return None


def _decode_picture(data: bytes, max_pixels: int | None) -> Any:
    image = require("PIL.Image", extra="data").open(io.BytesIO(data))
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise ValueError(f"{image.width} x {image.height} pixels are more than max_image_pixels {max_pixels}")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def stack_inputs(images: Sequence[Tensor], samples: Sequence[Sample], inputs: str) -> Tensor:
    """Return pictures (B, 3, H, W), or features (B, N, W) with rows of zeros where an image has fewer than N."""
    if inputs == "images":
        return torch.stack(images)
    first = samples[0]
    for features, sample in zip(images, samples, strict=True):
        if features.shape[1:] != images[0].shape[1:]:
            raise UserError(
                f"features (N, W) must have the same W in all shards: those of sample {sample.key} of {sample.url} are "
                f"{tuple(features.shape)}, those of {first.key} of {first.url} {tuple(images[0].shape)}"
            )
    return pad_sequence(images, batch_first=True)


def read_captions(sample: ScannedSample) -> list[str]:
    """Return the captions of a sample of :func:`vl_plugins.data.shard_files.read_samples`.

    Raises:
        ValueError: it has none, or something else in their place.
    """
    captions = _metadata(sample).get("captions")
    if captions is None:
        if "txt" not in sample.data:
            raise ValueError("it has no captions; expected a list 'captions' in json, or txt")
        captions = [sample.data["txt"].decode()]
    if not isinstance(captions, list) or not captions or not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"'captions' must be a list of strings, got {captions!r:.60}")
    return captions


def _read_group(sample: ScannedSample) -> Group | None:
    metadata = _metadata(sample)
    dataset, group = metadata.get("dataset"), metadata.get("group")
    # In shards of other programs it may be anything.
    return Group(dataset if isinstance(dataset, str) else None, group) if type(group) in (int, str) else None


def _metadata(sample: ScannedSample) -> dict[str, Any]:
    metadata = json.loads(sample.data["json"]) if "json" in sample.data else {}
    return metadata if isinstance(metadata, dict) else {}


class WarnOnce:
    """Logs what cannot be read, each place once; as a string, the first place and how many others there are."""

    def __init__(self):
        self.places: dict[str, Exception] = {}

    def __str__(self) -> str:
        (place, error), *others = self.places.items()
        return f"{place}: {error!r}" + (f", and {len(others)} more that cannot be read" if others else "")

    def __call__(self, place: str, error: Exception) -> None:
        if place not in self.places:
            self.places[place] = error
            logger.warning("leaving out %s, which cannot be read: %r", place, error)


def raise_error(place: str, error: Exception) -> None:
    """Stop at what cannot be read."""
    raise UserError(f"cannot read {place}: {error!r}") from error
