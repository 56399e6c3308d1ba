"""Which images and captions are in the batches of training: a stream of passes, each of them a permutation.

Let N be the number of images and G that of a batch of all processes. Place n of the stream, n = 0, 1, 2, ..., is place
n mod N of pass p = n div N, a permutation of the images that depends on the seed and on p alone. Batch b has the places
b G to b G + G - 1. Where it reaches into the next pass, that pass begins with images that are not in the batch yet, and
those that are follow them.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from webdataset.utils import pytorch_worker_info

from vl_plugins.data.collection import Collection
from vl_plugins.data.dataset import Draw, Draws, ShardDataset
from vl_plugins.data.randomness import derived_seed, random_words
from vl_plugins.errors import UserError, number, warn_of_input

# A sort of one integer, an image of the batch and a random number, is several times as fast as one of two.
WORD_BITS, OWNER_BITS = np.uint64(64), np.uint64(24)


def parse_captions_per_image(value: str | int) -> str | int:
    """Return ``"random"``, ``"first"``, ``"all"`` or a positive int; raise :class:`UserError` for anything else."""
    text = str(value)
    captions = int(text) if text.isdecimal() else 0
    if captions < 1 and text not in ("random", "first", "all"):
        raise UserError(f"captions per image must be 'random', 'first', 'all' or a positive number, got {text!r}")
    return captions or text


class CaptionSampler(Sampler[Draw]):
    """Shuffles images for ``DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)``, in any number of
    processes.

    **Passes.** Training reads a stream of batches without end. A pass over the data has every image once, in an order
    that depends on ``seed`` and the number of the pass alone. No batch, over all processes, has an image twice.

    **Epochs.** An epoch is the next ``len(sampler) // batch_size`` batches of the stream, in every process: by default
    as many as the images fill. With ``samples_per_epoch``, epochs may be shorter or longer than a pass; every image
    comes once before any comes again, all the same. Each iteration reads the next epoch; ``set_epoch`` chooses one.

    **Equal captions.** A batch may have images with equal captions. Give the loss the ids that a batch of
    :class:`ShardDataset` has, so that such captions are not negatives.

    Args:
        collection: of the data set.
        batch_size: number of images in a batch of one process.
        captions_per_image: ``"random"``: one at random; a number k: k different ones at random; ``"first"``: the first;
            ``"all"``: all in source order, as many as the image with the most has. An image with fewer repeats its own.
            What is drawn depends on seed, pass and image alone.
        seed: of order, captions and transforms.
        samples_per_epoch: images that all processes together read in an epoch, rounded up to whole batches. By default
            the number of images, rounded down.
        distinct_captions: without effect; see "Equal captions".
        shuffle_window: by default all images are shuffled together. With a number, shards are shuffled, and images
            within windows of so many images, so that reads stay close to each other on spinning disks and in caches.
        rank, world_size: of this process; by default those of the environment or ``torch.distributed``.

    Raises:
        UserError: there are too few images for a batch, or ``captions_per_image`` is unknown.
        ValueError: ``samples_per_epoch`` or ``shuffle_window`` is no positive integer.
    """

    def __init__(
        self,
        collection: Collection,
        batch_size: int,
        *,
        captions_per_image: str | int = "random",
        seed: int = 0,
        samples_per_epoch: int | None = None,
        distinct_captions: bool | None = None,
        shuffle_window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        if distinct_captions is not None:
            warn_of_input("distinct_captions has no effect: the losses take the ids of captions, see known_positives")
        self.collection, self.batch_size, self.seed = collection, batch_size, seed
        self.captions_per_image = parse_captions_per_image(captions_per_image)
        self.shuffle_window = len(collection)
        if shuffle_window is not None:
            self.shuffle_window = number("shuffle_window", shuffle_window, least=1, kind=int)
        default_rank, default_world_size, *_ = pytorch_worker_info()
        self.rank = default_rank if rank is None else rank
        self.world_size = default_world_size if world_size is None else world_size
        self.global_batch = batch_size * self.world_size
        if len(collection) < self.global_batch:
            raise UserError(
                f"{len(collection)} images make no full batch of {batch_size} for each of {self.world_size} processes; "
                f"the batch size can be at most {len(collection) // self.world_size}"
            )
        self.steps = len(collection) // self.global_batch
        if samples_per_epoch is not None:
            samples = number("samples_per_epoch", samples_per_epoch, least=1, kind=int)
            self.steps = -(-samples // self.global_batch)
        self._epoch_start = self._next_start = 0  # batches of the stream
        self._orders: dict[int, np.ndarray] = {}  # of the latest two passes

    def __len__(self) -> int:
        """Number of images that this process reads in an epoch."""
        return self.steps * self.batch_size

    def describe(self) -> str:
        """Return a part of a line for the log, such as ``"an epoch reads each image once, 3 steps"``."""
        images = self.steps * self.global_batch
        count = "each image once" if images == len(self.collection) else f"{images:,} images"
        return f"an epoch reads {count}, {self.steps:,} steps"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads."""
        self._next_start = epoch * self.steps

    def __iter__(self) -> Iterator[Draw]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Draws]:
        """Yield what this process reads of each batch of the next epoch."""
        self._epoch_start = self._next_start
        self._next_start = self._epoch_start + self.steps
        for step in range(self._epoch_start, self._next_start):
            yield self._batch(step)

    def state_dict(self, steps: int | None = None) -> dict[str, int]:
        """Return the place in the stream after the epoch that is being read, or after so many of its steps.

        A loader reads ahead, so only the training loop knows how many steps it has taken.
        """
        place = self._next_start if steps is None else self._epoch_start + steps
        return {"step": place, **self._stream()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on where the state was taken, for an epoch of steps.

        Raises:
            UserError: the state is that of another stream: of other data, another global batch, seed or window.
        """
        for name, value in self._stream().items():
            if state[name] != value:
                raise UserError(
                    f"the state of the sampler is that of other batches: {name} was {state[name]}, now {value}"
                )
        self._next_start = state["step"]

    def _stream(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "images": len(self.collection),
            "global_batch": self.global_batch,
            "shuffle_window": self.shuffle_window,
        }

    def _batch(self, step: int) -> Draws:
        place = step * self.global_batch + self.rank * self.batch_size
        number_of_pass, place = divmod(place, len(self.collection))
        images = self._order(number_of_pass)[place : place + self.batch_size]
        captions = self._captions(images, number_of_pass)
        passes = np.full(self.batch_size, number_of_pass)
        missing = self.batch_size - len(images)
        if missing > 0:
            of_next_pass = self._order(number_of_pass + 1)[:missing]
            images = np.concatenate([images, of_next_pass])
            captions = np.concatenate([captions, self._captions(of_next_pass, number_of_pass + 1)])
            passes[-missing:] += 1
        return Draws(images, captions, passes, self.seed)

    def _order(self, number_of_pass: int) -> np.ndarray:
        """Return the images in the order of a pass, (N,)."""
        if number_of_pass not in self._orders:
            order = self._shuffled(number_of_pass)
            in_batch = number_of_pass * len(order) % self.global_batch  # of the pass before, in the first batch
            if in_batch > 0:
                last = self._last_images(number_of_pass - 1, in_batch)
                order = _moved_back(order, last, self.global_batch - in_batch)
            before = self._orders.get(number_of_pass - 1)
            self._orders = {number_of_pass: order}
            if before is not None:
                self._orders[number_of_pass - 1] = before
        return self._orders[number_of_pass]

    def _last_images(self, number_of_pass: int, count: int) -> np.ndarray:
        """Return the last images of a pass, fewer than a batch."""
        if number_of_pass not in self._orders:
            if len(self.collection) >= 2 * self.global_batch:  # none of them has been moved back
                return self._shuffled(number_of_pass)[-count:]
            for earlier in range(number_of_pass):
                self._order(earlier)
        return self._order(number_of_pass)[-count:]

    def _shuffled(self, number_of_pass: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, number_of_pass])
        order = np.arange(len(self.collection), dtype=np.int32)
        window = self.shuffle_window
        if window < len(order):
            shards = np.split(order, self.collection.first_image[1:-1])
            order = np.concatenate([shards[index] for index in rng.permutation(len(shards))])
        for start in range(0, len(order), window):
            rng.shuffle(order[start : start + window])
        return order

    def _captions(self, images: np.ndarray, number_of_pass: int) -> np.ndarray:
        """Return the numbers of the captions of some images, (B, k)."""
        first = self.collection.first_caption[images]
        counts = self.collection.first_caption[images + 1] - first
        if self.captions_per_image == "first":
            return np.zeros((len(images), 1), dtype=np.int64)
        if self.captions_per_image == "all":
            return np.arange(self.collection.most_captions) % counts[:, None]
        words = random_words(derived_seed(self.seed, number_of_pass), images)
        if self.captions_per_image == "random":
            return (words % counts.astype(np.uint64)).astype(np.int64)[:, None]
        # The captions of each image in a random order, of which the first k count.
        starts = counts.cumsum() - counts
        owners = np.repeat(np.arange(len(images), dtype=np.uint64), counts)
        numbers = np.arange(len(owners)) - np.repeat(starts, counts)
        low_bits = random_words(np.repeat(words, counts), numbers) >> OWNER_BITS
        shuffled = numbers[np.argsort((owners << (WORD_BITS - OWNER_BITS)) | low_bits)]
        return shuffled[starts[:, None] + np.arange(self.captions_per_image) % counts[:, None]]


def _moved_back(order: np.ndarray, images: np.ndarray, places: int) -> np.ndarray:
    """Return an order whose first places have none of some images, which follow there, and the others as they were."""
    head = order[: places + len(images)]
    is_moved = np.isin(head, images)
    first = np.flatnonzero(~is_moved)[:places]
    return np.concatenate([head[first], np.delete(head, first), order[len(head) :]])


class _Batches(Sampler[Draws]):
    """The batches of a sampler, as ``torch.utils.data.BatchSampler`` makes them, but each of them is one object."""

    drop_last = True

    def __init__(self, sampler: CaptionSampler):
        self.sampler, self.batch_size = sampler, sampler.batch_size

    def __len__(self) -> int:
        return self.sampler.steps

    def __iter__(self) -> Iterator[Draws]:
        return self.sampler.batches()


def training_loader(
    dataset: ShardDataset, sampler: CaptionSampler, *, workers: int = 0, prefetch_factor: int | None = None
) -> DataLoader:
    """Return a loader of the batches of a process, whose ``workers`` processes serve all epochs.

    Batches are in pinned memory where there is a GPU. ``loader.batch_sampler.sampler`` is the sampler.

    Args:
        dataset, sampler: of one collection.
        workers: processes of the loader; 0 reads in this one.
        prefetch_factor: batches that each of them reads ahead; by default torch's.
    """
    return DataLoader(
        dataset,
        batch_sampler=_Batches(sampler),  # type: ignore[arg-type]  # of a sequence in place of a list
        collate_fn=dataset.collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=prefetch_factor,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # which leaves torch's random numbers alone
    )
