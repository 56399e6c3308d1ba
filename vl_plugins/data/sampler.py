"""The order of a training epoch: batches of images whose captions tell them apart."""

import logging
from collections.abc import Iterator
from itertools import chain, cycle, islice, repeat

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from webdataset.utils import pytorch_worker_info

from vl_plugins.data.dataset import Draw, ShardDataset
from vl_plugins.data.index import Collection
from vl_plugins.errors import UserError

logger = logging.getLogger(__name__)

# Images whose captions are drawn at a time.
AT_A_TIME = 1024
# Orders that are tried to fill a batch with different captions.
ATTEMPTS = 10


def parse_captions_per_image(value: str | int) -> str | int:
    """Return ``"random"``, ``"first"``, ``"all"`` or a positive int; raise :class:`UserError` for anything else."""
    text = str(value)
    number = int(text) if text.isdecimal() else 0
    if number < 1 and text not in ("random", "first", "all"):
        raise UserError(f"captions per image must be 'random', 'first', 'all' or a positive number, got {text!r}")
    return number or text


# An image, its label, and the number and hash of each of its captions, preferred ones first.
_Candidate = tuple[int, int, list[tuple[int, int]]]


class CaptionSampler(Sampler[Draw]):
    """Shuffles images for ``DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)``, in any number of
    processes.

    **Epochs.** Every process makes ``len(sampler) // batch_size`` batches: the number of images divided by
    ``batch_size * world_size`` and rounded down. An image occurs at most once in an epoch, over all processes; the few
    left over are others in each epoch. Order, captions and the seeds of transforms depend on ``seed`` and the epoch
    alone, and not on workers. ``set_epoch`` sets the epoch.

    **False negatives.** In a batch, over all processes, no two images of different labels have equal captions, compared
    by :func:`~vl_plugins.data.captions.normalize_caption`. The second image shows another of its captions instead. If
    the batch has all of them, the image waits for a later batch; the log says how many images were left out at the end
    of an epoch. Where the last batches cannot be filled so, they repeat images of the epoch.

    Args:
        collection: of the data set.
        batch_size: number of images in a batch of one process.
        captions_per_image: ``"random"``: one at random; a number k: k different ones at random; ``"first"``: the first;
            ``"all"``: all in source order, as many as the image with the most has. An image with fewer repeats its own.
        seed: of order, captions and transforms.
        distinct_captions: False lets images with equal captions meet.
        shuffle_window: by default all images are shuffled together. With a number, shards are shuffled, and images
            within windows of so many images, so that reads stay close to each other on spinning disks and in caches.
        rank, world_size: of this process; by default those of the environment or ``torch.distributed``.

    Raises:
        UserError: there are too few images for a batch, or ``captions_per_image`` is unknown. While iterating: too many
            images share their captions.
    """

    def __init__(
        self,
        collection: Collection,
        batch_size: int,
        *,
        captions_per_image: str | int = "random",
        seed: int = 0,
        distinct_captions: bool = True,
        shuffle_window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        self.collection, self.batch_size, self.seed, self.epoch = collection, batch_size, seed, 0
        self.captions_per_image = parse_captions_per_image(captions_per_image)
        self.distinct_captions, self.shuffle_window = distinct_captions, shuffle_window
        default_rank, default_world_size, *_ = pytorch_worker_info()
        self.rank = default_rank if rank is None else rank
        self.world_size = default_world_size if world_size is None else world_size
        self._steps = len(collection) // (batch_size * self.world_size)
        if not self._steps:
            raise UserError(
                f"{len(collection)} images make no full batch of {batch_size} for each of {self.world_size} processes; "
                f"the batch size can be at most {len(collection) // self.world_size}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration draws."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of images that this process reads in an epoch."""
        return self._steps * self.batch_size

    def __iter__(self) -> Iterator[Draw]:
        epoch = self.epoch
        own = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        for batch in self._batches(epoch):
            for image, captions in batch[own]:
                yield Draw(image, captions, (self.seed, epoch, image))

    def _batches(self, epoch: int) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield the batches of all processes together: images and the numbers of their captions."""
        size, number = self.batch_size * self.world_size, self.captions_per_image
        if isinstance(number, str):
            number = int(self.collection.captions_per_image.max()) if number == "all" else 1
        fresh = self._candidates(np.random.default_rng([self.seed, epoch]))
        waiting: list[_Candidate] = []
        for step in range(self._steps):
            for attempt in range(ATTEMPTS):
                batch: dict[int, list[int]] = {}
                owners: dict[int, int] = {}  # label by hash of a caption in the batch
                earlier, kept, taken = iter(waiting), [], []
                # Images of the epoch come again only when nothing else is left.
                again = self._candidates(np.random.default_rng([self.seed, epoch, step, attempt]))
                for is_new, candidate in chain(zip(repeat(True), chain(earlier, fresh)), zip(repeat(False), again)):
                    image, label, free = candidate
                    if self.distinct_captions:
                        free = [pair for pair in free if owners.get(pair[1], label) == label]
                    if free and image not in batch:
                        owners.update((caption, label) for _, caption in free[:number])
                        batch[image] = list(islice(cycle(caption for caption, _ in free), number))
                        taken += [candidate] * is_new
                        if len(batch) == size:
                            break
                    elif is_new:
                        kept.append(candidate)
                waiting = [*kept, *earlier]
                if len(batch) == size:
                    break
                waiting += taken  # begin with those that did not fit
            else:
                raise UserError(
                    f"no {size} images have different captions: give a smaller batch size, or let images with equal "
                    "captions meet by distinct_captions=False (--allow-duplicate-captions)"
                )
            yield list(batch.items())
        if waiting and self.rank == 0:
            logger.warning(
                f"epoch {epoch}: {len(waiting)} of {len(self.collection)} images are left out, because all their "
                "captions are those of other images in each batch"
            )

    def _order(self, rng: np.random.Generator) -> np.ndarray:
        """Return the images in the order of an epoch, (I,)."""
        order = np.arange(len(self.collection), dtype=np.int32)
        window = self.shuffle_window or len(order)
        if window < len(order):
            shards = np.split(order, self.collection.first_image[1:-1])
            order = np.concatenate([shards[index] for index in rng.permutation(len(shards))])
        for start in range(0, len(order), window):
            rng.shuffle(order[start : start + window])
        return order

    def _candidates(self, rng: np.random.Generator) -> Iterator[_Candidate]:
        """Yield every image once, with its captions in the order of preference."""
        collection, order = self.collection, self._order(rng)
        for start in range(0, len(order), AT_A_TIME):
            images = order[start : start + AT_A_TIME]
            first, ends = collection.first_caption[images], collection.first_caption[images + 1]
            counts = ends - first
            ends = counts.cumsum()
            numbers = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
            if self.captions_per_image not in ("first", "all"):
                places = np.repeat(np.arange(len(images)), counts)
                numbers = numbers[np.lexsort((rng.random(len(numbers)), places))]
            hashes = collection.caption_hashes[np.repeat(first, counts) + numbers]
            captions = list(zip(numbers.tolist(), hashes.tolist(), strict=True))
            labels, begins = collection.labels[images].tolist(), (ends - counts).tolist()
            for image, label, begin, end in zip(images.tolist(), labels, begins, ends.tolist(), strict=True):
                yield image, label, captions[begin:end]


def training_loader(dataset: ShardDataset, sampler: CaptionSampler, *, workers: int = 0) -> DataLoader:
    """Return a loader of the batches of a process, whose ``workers`` processes serve all epochs.

    Args:
        dataset, sampler: of one collection.
        workers: processes of the loader; 0 reads in this one.
    """
    return DataLoader(
        dataset,
        sampler.batch_size,
        sampler=sampler,
        drop_last=True,
        collate_fn=dataset.collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # which leaves torch's random numbers alone
    )
