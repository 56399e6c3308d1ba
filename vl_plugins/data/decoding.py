"""Samples of shards decoded: captions, pictures and features, and what becomes of those that cannot be read."""

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vl_plugins.data.batching import Group, Sample
from vl_plugins.data.feature_arrays import decode_features
from vl_plugins.data.shard_files import INPUTS, TEXTS, ScannedSample, input_of, read_samples, read_texts
from vl_plugins.errors import MissingExtraError, UserError, require

__all__ = [
    "OnError",
    "ShardSlice",
    "WarnOnce",
    "decode_image",
    "decode_input",
    "is_id",
    "parse_samples",
    "raise_error",
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


def read_slices(
    slices: Iterable[ShardSlice], inputs: str | None, on_error: OnError
) -> Iterator[tuple[int, str, ScannedSample]]:
    """Yield position, shard and files of the samples in slices of shards; ``inputs`` None reads texts only.

    A slice that cannot be read, or is too short, goes to ``on_error``.
    """
    extensions = {*(INPUTS[inputs] if inputs else ()), *TEXTS}
    for url, start, stop, offset in slices:
        position = start
        try:
            for sample in read_samples(url, start, stop, extensions):
                yield offset + position, url, sample
                position += 1
            if stop is not None and position < stop:
                raise UserError(f"it ends before sample {position}, expected {stop} samples")
        except Exception as error:  # damaged archives raise nearly anything
            on_error(f"shard {url}" if position == start else f"the end of shard {url}", error)


def parse_samples(
    samples: Iterable[tuple[int, str, ScannedSample]], inputs: str, on_error: OnError
) -> Iterator[Sample]:
    """Yield samples with their captions; one without captions or image goes to ``on_error``."""
    for position, url, files in samples:
        try:
            image = input_of(files, inputs)
            metadata, captions = read_texts(files)
        except ValueError as error:
            on_error(f"sample {files.key} of {url}", error)
        else:
            yield Sample(files.key, position, captions, image, url, _read_group(metadata))


def decode_input(sample: Sample, inputs: str, on_error: OnError, max_image_pixels: int | None = None) -> Any:
    """Return an RGB image, or an array (N, W), or None after an error that is skipped."""
    try:
        return decode_image(sample.image, inputs, max_image_pixels)
    except MissingExtraError:
        raise
    # Decoders of damaged files raise nearly anything.
    except Exception as error:
        on_error(f"sample {sample.key} of {sample.url}", error)
        return None


def decode_image(data: bytes, inputs: str, max_pixels: int | None = None) -> Any:
    """Return an RGB ``PIL.Image``, or with ``inputs="features"`` an array (N, W); damaged data raise any error."""
    if inputs == "features":
        return decode_features(data)
    image = require("PIL.Image", extra="data").open(io.BytesIO(data))
    if max_pixels is not None and image.width * image.height > max_pixels:
        raise UserError(f"{image.width} x {image.height} pixels are more than max_image_pixels {max_pixels}")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def stack_inputs(images: list[Tensor], samples: Sequence[Any], inputs: str) -> Tensor:
    """Return pictures (B, 3, H, W), or features (B, N, W) with rows of zeros where an image has fewer than N.

    The ``key`` of each of the B ``samples`` is for errors.
    """
    if inputs == "images":
        return torch.stack(images)
    for features, sample in zip(images, samples, strict=True):
        if features.shape[1:] != images[0].shape[1:]:
            raise UserError(
                f"features (N, W) must have the same W in all shards: those of {sample.key} are "
                f"{tuple(features.shape)}, those of {samples[0].key} {tuple(images[0].shape)}"
            )
    return pad_sequence(images, batch_first=True)


def _read_group(metadata: Mapping[str, Any]) -> Group | None:
    dataset, group = metadata.get("dataset"), metadata.get("group")
    return Group(dataset if isinstance(dataset, str) else None, group) if is_id(group) else None


def is_id(value: Any) -> TypeGuard[int | str]:
    """Return whether a value can be an id; in shards of other programs there may be anything."""
    return isinstance(value, (int, str)) and not isinstance(value, bool)


class WarnOnce:
    """Logs what cannot be read, each place once."""

    def __init__(self) -> None:
        self._places: set[str] = set()

    def __call__(self, place: str, error: Exception) -> None:
        if place not in self._places:
            self._places.add(place)
            logger.warning("leaving out %s, which cannot be read: %s", place, _reason(error))


def raise_error(place: str, error: Exception) -> NoReturn:
    """Stop at what cannot be read."""
    raise UserError(f"cannot read {place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else repr(error)
