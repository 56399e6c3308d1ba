"""Batches of images whose captions tell them apart."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from vl_plugins.errors import UserError

__all__ = ["SAME_GROUP", "DistinctBatches", "Group", "Sample", "normalize_caption", "parse_captions_per_image"]

# What becomes of images of one group.
SAME_GROUP = ("apart", "positive")


def normalize_caption(text: str) -> str:
    r"""Return a caption without what tokenizers such as CLIP's drop: differences of case and white space.

    Captions that become equal have one embedding; as captions of different images they are false negatives.

    >>> normalize_caption(" A Dog\n runs. ") == normalize_caption("a dog runs.")
    True
    """
    return " ".join(text.split()).casefold()


def parse_captions_per_image(value: str | int) -> str | int:
    """Return ``"random"``, ``"first"``, ``"all"`` or a positive int; raise :class:`UserError` for anything else."""
    text = str(value)
    number = int(text) if text.isdecimal() else 0
    if number < 1 and text not in ("random", "first", "all"):
        raise UserError(f"captions per image must be 'random', 'first', 'all' or a positive number, got {text!r}")
    return number or text


class Group(NamedTuple):
    """The group of an image, by its id in a data set."""

    dataset: str | None
    id: int | str


class Sample(NamedTuple):
    """An image that is not decoded yet, and its captions.

    Args:
        key: name, for messages.
        position: number that tells images apart.
        captions: all captions of the image, or those that it shows in a batch.
        image: content of the image file, or of the array file in its place.
        url: the shard it comes from.
        group: None for an image that is in none.
    """

    key: str
    position: int
    captions: list[str]
    image: bytes = b""
    url: str = ""
    group: Group | None = None


@dataclass(eq=False)
class DistinctBatches:
    """Batches in which no image occurs twice, and no two images have the same caption or group.

    Captions are compared by :func:`normalize_caption`; those of one image may be equal. A sample that does not go with
    the batch being filled waits for the next batches. Iterate once.

    Args:
        passes: endless iterables of :class:`Sample`. The first holds every image once; the following ones repeat
            images, for the batches that are still missing. They are read only as far as needed.
        batch_size: number B of images in a batch.
        num_batches: number of batches to make.
        max_waiting: number of samples that may wait; one more is left out.
        prepare: returns what a batch holds for a sample that gets a place, or None for one that cannot be used.
        allow_duplicates: whether different images may share a caption after all.
        same_group: ``"apart"``, or ``"positive"`` for images of one group that may meet, with any captions.
        source: where the samples come from, for errors.

    Attributes:
        left_out: keys by position of the images of the first pass that are in no batch; complete with the last batch.

    Raises:
        UserError: while iterating: a whole pass made no batch, although it began with an empty one.

    >>> first = [Sample("a", 0, ["A dog."]), Sample("b", 1, ["a dog."]), Sample("c", 2, ["A cat."])]
    >>> for batch in DistinctBatches([first, first], batch_size=2, num_batches=2, max_waiting=10):
    ...     print([sample.key for sample in batch])
    ['a', 'c']
    ['b', 'c']
    """

    passes: Iterable[Iterable[Sample]]
    batch_size: int
    num_batches: int
    _: KW_ONLY
    max_waiting: int
    prepare: Callable[[Sample], Any | None] = lambda sample: sample
    allow_duplicates: bool = False
    same_group: str = "apart"
    source: str = "the samples"
    left_out: dict[int, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._missing = self.num_batches
        self._waiting: list[Sample] = []
        self._shared: str | Group | None = None  # what two samples of different owners have
        self._start_batch()

    def __iter__(self) -> Iterator[list[Any]]:
        for number, samples in enumerate(self.passes):
            missing, began_empty, self._shared = self._missing, not self._batch, None
            for sample in samples:
                self._offer(sample, repeated=number > 0)
                while len(self._batch) == self.batch_size:  # those that wait may fill a batch alone
                    batch, self._missing = self._batch, self._missing - 1
                    self._start_batch()
                    if not self._missing:
                        self._leave_out_rest()
                    yield batch
                    if not self._missing:
                        return
                    waiting, self._waiting = self._waiting, []
                    for waiting_sample in waiting:
                        self._offer(waiting_sample, repeated=False)
            if number and missing == self._missing:
                if began_empty:
                    raise self._no_batch()
                # Nothing goes with what the batch began with.
                self._leave_out_rest()
                self._start_batch()

    def _start_batch(self) -> None:
        self._batch: list[Any] = []
        # Positions, captions and groups in the batch, and what is equal for images that may share them.
        self._taken: dict[int | str | Group, int | Group] = {}
        self._new: dict[int, str] = {}  # keys by position of the images that were in no batch before

    def _leave_out_rest(self) -> None:
        self.left_out |= self._new | {sample.position: sample.key for sample in self._waiting}
        self._waiting = []

    def _offer(self, sample: Sample, *, repeated: bool) -> None:
        """Put a sample into the batch, or let it wait if it is no repeat."""
        if sample.position in self._taken:
            return
        if len(self._batch) < self.batch_size and not self._collides(sample):
            prepared = self.prepare(sample)
            if prepared is not None:
                self._batch.append(prepared)
                self._taken |= dict.fromkeys([sample.position, *self._tokens(sample)], self._owner(sample))
                if self.left_out.pop(sample.position, None) is not None or not repeated:
                    self._new[sample.position] = sample.key
        elif not repeated and len(self._waiting) < self.max_waiting:
            self._waiting.append(sample)
        elif not repeated:
            self.left_out[sample.position] = sample.key

    def _collides(self, sample: Sample) -> bool:
        owner = self._owner(sample)
        for token in self._tokens(sample):
            if self._taken.get(token, owner) != owner:
                self._shared = token
                return True
        return False

    def _tokens(self, sample: Sample) -> Iterator[str | Group]:
        """Yield what no image of another owner in the batch may have too."""
        if sample.group is not None:
            yield sample.group
        if not self.allow_duplicates:
            yield from map(normalize_caption, sample.captions)

    def _owner(self, sample: Sample) -> int | Group:
        return sample.position if sample.group is None or self.same_group == "apart" else sample.group

    def _no_batch(self) -> UserError:
        if self._shared is None:
            return UserError(f"no full batch of {self.batch_size} can be read from {self.source}")
        kind, example = ("caption", self._shared) if isinstance(self._shared, str) else ("group", self._shared.id)
        return UserError(
            f"no batch of {self.batch_size} images with different {kind}s can be made of {self.source}: the {kind} "
            f"{example!r} belongs to several images; give a smaller batch size or fewer captions per image, or let "
            "such images meet by allow_duplicate_captions or same_group 'positive'"
        )
