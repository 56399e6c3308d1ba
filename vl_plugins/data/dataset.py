"""Shards as a data set of torch: any image by its index, for training and evaluation with any ``DataLoader``."""

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from vl_plugins.data.captions import content_ids
from vl_plugins.data.collection import Collection
from vl_plugins.data.limits import MAX_IMAGE_PIXELS, check_max_image_pixels
from vl_plugins.data.randomness import generators_kept, seed_cpu
from vl_plugins.data.reading import read_collection
from vl_plugins.data.samples import INPUTS, decode
from vl_plugins.errors import UserError, number, one_of
from vl_plugins.numerics import NO_ID

logger = logging.getLogger(__name__)

SKIPS_LOGGED = SKIPS_ALLOWED = 10  # images


class Draw(NamedTuple):
    """What a sampler asks of a :class:`ShardDataset`.

    Args:
        image: index of the image.
        captions: numbers of its captions, from 0, in the order in which they are wanted; None for all.
        seed: of the random numbers that the transform draws; empty for those of the process.
    """

    image: int
    captions: Sequence[int] | None = None
    seed: tuple[int, ...] = ()


class Draws(Sequence[Draw]):
    """What a sampler asks for in a batch. Thousands of :class:`Draw` would take longer to make than to sample.

    Args:
        images: (B,), indices.
        captions: (B, k), numbers of captions.
        passes: (B,), the pass over the data that each image belongs to.
        seed: of the training.
    """

    def __init__(self, images: np.ndarray, captions: np.ndarray, passes: np.ndarray, seed: int):
        self.images, self.captions, self.passes, self.seed = images, captions, passes, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: Any) -> Any:
        """Return a :class:`Draw`, or with a slice a part of the batch."""
        if isinstance(place, slice):
            return Draws(self.images[place], self.captions[place], self.passes[place], self.seed)
        image = int(self.images[place])
        return Draw(image, self.captions[place].tolist(), (self.seed, int(self.passes[place]), image))


class Item(NamedTuple):
    """A decoded image with the captions that were asked for.

    Attributes:
        image: (3, H, W), or features (N, W); None of captions without images.
        captions: texts.
        label: equal for images of one group; see :class:`ShardDataset`.
        index: of the image.
        ids: of the captions, see :func:`~vl_plugins.data.captions.content_ids`.
        other_ids: those of the image's other captions.
    """

    image: Tensor | None
    captions: list[str]
    label: int
    index: int  # type: ignore[assignment]  # hides the method of tuples
    ids: list[int]
    other_ids: list[int]


class ShardDataset(Dataset):
    """The images of shards with their captions.

    ``dataset[i]`` is image i with all its captions, and ``dataset[draw]`` what a
    :class:`~vl_plugins.data.sampler.CaptionSampler` asks for, both as an :class:`Item`. A ``DataLoader`` takes
    ``collate_fn=dataset.collate`` for batches of five tensors:

    - ``images`` (B, 3, H, W);
    - ``texts`` (k * B, L), of which ``texts[k * i : k * i + k]`` are the k captions of ``images[i]``;
    - ``labels`` (B,): the label of an image is its index, or that of the first image of its group; the labels of the
      texts are ``labels.repeat_interleave(k)``;
    - ``ref_ids`` (k * B,) and ``matching_ids`` (B, M): ids of the texts, and of the captions of each image that are not
      shown, -1 where an image has fewer than M. Losses take them under these names: what an image shares with another
      one is no negative.

    Args:
        shards: as for :func:`~vl_plugins.data.shard_names.expand_shards`; or what ``read_collection`` returned.
        transform: from an RGB ``PIL.Image``, or a float32 array (N, W) of features, to a tensor.
        tokenizer: from n captions to a tensor (n, L); L may change from batch to batch.
        inputs: ``"images"``, or ``"features"``: the ``.npy`` of each sample. Batches are then (B, N, W), with rows of
            zeros where an image has fewer than N features.
        captions: ``"flat"`` for texts (k * B, L) and ids (k * B,); ``"nested"`` for texts (B, k, L) and ids (B, k),
            which loaders that cut or gather every tensor along its first dimension need.
        on_error: ``"raise"`` stops at an image that cannot be read; ``"skip"`` repeats another image of its batch in
            its place, logs the first few, and counts them: see :meth:`describe_errors`. It leaves out samples without
            captions in the shards of other programs.
        max_errors: share of the images that may be skipped, [0, 1], and at least ten. With more, reading stops.
        max_image_pixels: largest width times height of a picture. A larger one cannot be read, and is not decoded. 0
            sets no limit.

    Raises:
        UserError: a shard does not exist or cannot be read, or an option is unknown or negative. While reading: with
            ``"raise"``, for all images of a batch, or for more than ``max_errors``, an image is damaged, too large, or
            not in JPEG, PNG or WebP format, or its shard is not the one that the index was made of. Or a server does
            not answer.
    """

    def __init__(
        self,
        shards: str | os.PathLike | Sequence[str | os.PathLike] | Collection,
        transform: Callable[[Any], Tensor],
        tokenizer: Callable[[list[str]], Tensor],
        *,
        inputs: str = "images",
        captions: str = "flat",
        on_error: str = "raise",
        max_errors: float = 0.01,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
    ):
        self.inputs = one_of("inputs", inputs, INPUTS)
        self.captions = one_of("captions", captions, ("flat", "nested"))
        self.on_error = one_of("on_error", on_error, ("raise", "skip"))
        self.max_image_pixels = check_max_image_pixels(max_image_pixels)
        self.max_errors = number("max_errors", max_errors, least=0)
        self.collection = shards if isinstance(shards, Collection) else read_collection(shards, on_error)
        self.transform, self.tokenizer = transform, tokenizer
        # Which images have been skipped, in memory that the processes of a loader share.
        self._is_skipped = torch.zeros(len(self.collection), dtype=torch.bool)
        if on_error == "skip":
            self._is_skipped.share_memory_()

    def __len__(self) -> int:
        return len(self.collection)

    def __getitem__(self, index: int | Draw) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | Draw]) -> list[Item]:
        """Return the items of a batch, whose bytes are read at the same time where the file system can do that."""
        images = range(len(self))  # negative indices count from the end, and others end an iteration
        draws = []
        for index in indices:
            draws.append(index if isinstance(index, Draw) else Draw(images[index]))
        contents = self.collection.read([draw.image for draw in draws])
        is_seeded = any(draw.seed for draw in draws)
        with generators_kept() if is_seeded else contextlib.nullcontext():
            results = list(map(self._read_item, draws, contents))
        items = [result for result in results if isinstance(result, Item)]
        for place, result in enumerate(results):
            if isinstance(result, UserError):
                if self.on_error == "raise" or not items:
                    raise result
                self._skip(draws[place].image, result)
                # Another image of the batch has its own captions and label, so it makes no wrong pairs.
                results[place] = items[place % len(items)]
        return results  # type: ignore[return-value]

    def _read_item(self, draw: Draw, data: bytes | Exception) -> Item | UserError:
        try:
            record, members = self.collection.parse(draw.image, data)
            image = decode(members, self.inputs, self.max_image_pixels)
        except Exception as error:  # decoders of damaged files raise nearly anything
            return unreadable(self.collection.place_of(draw.image), error)
        if draw.seed:
            seed_cpu(*draw.seed)
        image = self.transform(image)
        label = int(self.collection.labels[draw.image])
        ids = content_ids(record.captions)
        if draw.captions is None:
            return Item(image, list(record.captions), label, draw.image, ids, [])
        captions = [record.captions[number] for number in draw.captions]
        caption_ids = [ids[number] for number in draw.captions]
        other_ids = [ids[number] for number in sorted(set(range(len(ids))).difference(draw.captions))]
        return Item(image, captions, label, draw.image, caption_ids, other_ids)

    def _skip(self, image: int, error: UserError) -> None:
        """Note an image that is skipped; raise ``UserError`` for too many."""
        if self._is_skipped[image]:
            return
        self._is_skipped[image] = True
        skipped, total = int(self._is_skipped.sum()), len(self)
        if skipped <= SKIPS_LOGGED:
            logger.warning(error)
        if skipped > max(SKIPS_ALLOWED, self.max_errors * total):
            raise UserError(
                f"{skipped:,} of {total:,} images cannot be read, more than max_errors {self.max_errors:g}; the last: "
                f"{error}"
            )

    def describe_errors(self) -> str | None:
        """Return how many images have been skipped so far, in all processes of the loader; None for none."""
        skipped = int(self._is_skipped.sum())
        reasons = []
        if skipped > 0:
            reasons.append(f"{skipped:,} unreadable")
        if self.collection.rejected:
            reasons.append(f"{len(self.collection.rejected):,} without captions")
        if not reasons:
            return None
        left_out = skipped + len(self.collection.rejected)
        total = len(self) + len(self.collection.rejected)
        return f"{left_out:,} of {total:,} images skipped: {', '.join(reasons)}"

    def collate(self, items: Sequence[Item]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return images, texts, labels, and the ids of captions that are shown and of others.

        Raises:
            UserError: the images have different numbers of captions.
        """
        counts = {len(item.captions) for item in items}
        if len(counts) > 1:
            raise UserError(f"images of a batch have {sorted(counts)} captions: use a CaptionSampler")
        captions, ids = [], []
        longest = max(len(item.other_ids) for item in items)
        matching_ids = torch.full((len(items), longest), NO_ID)
        for row, item in enumerate(items):
            captions += item.captions
            ids += item.ids
            matching_ids[row, : len(item.other_ids)] = torch.tensor(item.other_ids)
        texts, ref_ids = self.tokenizer(captions), torch.tensor(ids)
        if self.captions == "nested":
            texts, ref_ids = texts.unflatten(0, (len(items), -1)), ref_ids.unflatten(0, (len(items), -1))
        images, labels = stack_inputs([item.image for item in items]), torch.tensor([item.label for item in items])
        return images, texts, labels, ref_ids, matching_ids


def unreadable(place: str, error: Exception) -> UserError:
    """Return the error of an image whose decoder has raised another one."""
    reason = str(error) if isinstance(error, ValueError) else repr(error)
    return UserError(f"cannot read {place}: {reason}")


def stack_inputs(images: Sequence[Any]) -> Tensor:
    """Return pictures (B, 3, H, W), or features (B, N, W) with rows of zeros where an image has fewer than N."""
    return torch.stack(list(images)) if images[0].ndim == 3 else pad_sequence(list(images), batch_first=True)


class EvaluationBatch(NamedTuple):
    """Consecutive images and their captions.

    Attributes:
        images: (B, 3, H, W), or features (B, N, W); None of captions without images.
        texts: (C, L), the tokens of all captions of all B images; None of images without captions.
        image_of_caption: (C,) int64, index in the batch of each caption's image.
        start: index of the first image; batches sorted by it are in source order.
    """

    images: Any
    texts: Any
    image_of_caption: Tensor
    start: int


def evaluation_loader(
    dataset: Any,
    batch_size: int,
    *,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    starts: Sequence[int] | None = None,
) -> DataLoader:
    """Return a loader of every image with all its captions once, shared out over processes.

    The batches are the same for any number of workers and processes. An image that cannot be read is an error, because
    results on the others could not be compared.

    Args:
        dataset: a :class:`ShardDataset`, or one of :mod:`vl_plugins.data.one_side`.
        batch_size: images in a batch; the last one may be smaller.
        workers: processes of the loader.
        rank, world_size: number of this process among those that share the batches, and their number.
        starts: indices of the first images of the batches to read, multiples of ``batch_size``; by default those of
            this process.

    Returns:
        A ``DataLoader`` of :class:`EvaluationBatch`.
    """
    dataset = copy.copy(dataset)
    dataset.on_error = "raise"
    if starts is None:
        starts = range(0, len(dataset), batch_size)[rank::world_size]
    batches = [list(range(start, min(start + batch_size, len(dataset)))) for start in starts]
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=partial(_collate_evaluation, dataset.tokenizer),
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # which leaves torch's random numbers alone
    )


def _collate_evaluation(tokenizer: Any, items: Sequence[Item]) -> EvaluationBatch:
    captions = [caption for item in items for caption in item.captions]
    texts = tokenizer(captions) if captions else None
    numbers = torch.tensor([len(item.captions) for item in items])
    image_of_caption = torch.arange(len(items)).repeat_interleave(numbers)
    images = None if items[0].image is None else stack_inputs([item.image for item in items])
    return EvaluationBatch(images, texts, image_of_caption, items[0].index)


def read_batches(subject: str, loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, then log how many images were skipped.

    A worker that was killed, perhaps for lack of memory, is a ``UserError``.

    Args:
        subject: the flag or the key of a configuration that names the data, for the message.
        loader: of training or evaluation.
    """
    batches = iter(loader)
    dataset: Any = getattr(loader, "dataset", None)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            if getattr(dataset, "on_error", None) == "skip" and (errors := dataset.describe_errors()):
                logger.warning(f"{subject}: {errors}")
            return
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(f"{subject}: {error}") from error
        yield batch
