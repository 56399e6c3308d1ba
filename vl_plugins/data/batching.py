"""Batches of images whose captions tell them apart."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from vl_plugins.data.captions import normalize_caption
from vl_plugins.utils.errors import UserError

__all__ = ["REMEDIES", "SAME_GROUP", "DistinctBatches", "Group", "Sample"]

# What becomes of images of one group.
SAME_GROUP = ("apart", "positive")

# What keeps images out of a batch -> how they may meet after all.
REMEDIES = {
    "caption": "--allow-duplicate-captions (allow_duplicate_captions=True)",
    "group": "--same-group positive (same_group='positive')",
}


class Group(NamedTuple):
    """The group of an image: its data set, whose groups those of another have nothing to do with, and its id there."""

    dataset: str | None
    id: int | str


class Sample(NamedTuple):
    """An image that is not decoded yet, and its captions.

    Args:
        key: name, for messages.
        position: number that tells images apart; samples with the same one are the same image.
        captions: all captions of the image.
        shown: those that it shows in this epoch.
        image: content of the image file, or of the array file in its place.
        url: the shard it comes from.
        group: its group; None for an image that is in none.
    """

    key: str
    position: int
    captions: list[str]
    shown: list[str]
    image: bytes = b""
    url: str = ""
    group: Group | None = None


class DistinctBatches:
    """Batches in which no two images show the same caption text or are of one group, and no image occurs twice.

    A loss takes the captions of other images for negatives, so a text that two images of a batch share would be pushed
    away from the image it describes. Texts are the same when :func:`vl_plugins.data.captions.normalize_caption` makes
    them equal; those of one image may be. A sample that does not fit into the batch being filled waits and is offered
    to the following ones, the oldest first, so that every image still occurs once.

    A group is one more thing that images of a batch must not share. Where its images are positives of each other they
    may meet, and show the same texts.

    Samples that still wait at the end of the first pass show other captions of theirs where that helps. Batches that
    are then missing are filled up with images of further passes. Iterate it once; a pass is read only as far as it is
    needed.

    Args:
        passes: iterables of :class:`Sample`. The first holds every image once; the following ones repeat images and
            may go on for ever.
        batch_size: number B of images in a batch.
        num_batches: number of batches to make; fewer when ``passes`` ends before.
        max_waiting: number of samples that may wait. One more shows other captions at once, or is left out.
        prepare: returns what a batch holds for a sample, or None for a sample that cannot be used. It is called when
            the sample gets its place, so what waits is not decoded, and another sample takes a place that stays free.
        other_captions: returns other captions for a sample to show, given a set with the normalized texts to avoid,
            or None when there are none; by default there are none.
        allow_duplicates: whether different images may share a text after all.
        same_group: ``"apart"``, or ``"positive"`` for images of one group that may meet.
        source: where the samples come from, for errors.

    Attributes:
        left_out: keys by position of the images of the first pass that no batch has a place for; complete when the last
            batch is there.
        repeats: number of images in the batches so far that were in one before, or are read because others are missing.
        obstacle: what kept an image out of a batch, ``"caption"`` or ``"group"``; None when nothing did.
        example: that caption, or the id of that group.

    Raises:
        UserError: while iterating: a whole pass made no batch, although it began with an empty one.

    >>> first = [Sample("a", 0, ["A dog."], ["A dog."]), Sample("b", 1, ["a dog."], ["a dog."])]
    >>> second = [Sample("c", 2, ["A cat."], ["A cat."]), Sample("d", 3, ["A cow."], ["A cow."])]
    >>> for batch in DistinctBatches([first + second], batch_size=2, num_batches=2, max_waiting=10):
    ...     print([sample.key for sample in batch])
    ['a', 'c']
    ['b', 'd']
    """

    def __init__(
        self,
        passes: Iterable[Iterable[Sample]],
        batch_size: int,
        num_batches: int,
        *,
        max_waiting: int,
        prepare: Callable[[Sample], Any | None] = lambda sample: sample,
        other_captions: Callable[[Sample, set[str | Group]], list[str] | None] = lambda sample, taken: None,
        allow_duplicates: bool = False,
        same_group: str = "apart",
        source: str = "the samples",
    ):
        self.left_out: dict[int, str] = {}
        self.repeats = 0
        self.obstacle: str | None = None
        self.example: int | str | None = None
        self._passes = passes
        self._batch_size = batch_size
        self._missing = num_batches
        self._max_waiting = max_waiting
        self._prepare = prepare
        self._other_captions = other_captions
        self._allow_duplicates = allow_duplicates
        self._same_group = same_group
        self._source = source
        self._repeating = False
        self._waiting: list[tuple[Sample, set[str | Group]]] = []
        self._collisions: Counter[tuple[str, int | str]] = Counter()  # in this pass, by obstacle and example
        self._start_batch()

    def __iter__(self) -> Iterator[list[Any]]:
        for samples in self._passes if self._missing else ():
            missing, began_empty = self._missing, not self._batch
            self._collisions.clear()
            for sample in samples:
                self._offer(sample)
                yield from self._full_batches()
                if not self._missing:
                    return
            if not self._repeating:
                self._repeating = True
                self._refill()
                yield from self._full_batches()
                if not self._missing:
                    return
            elif self._missing == missing:
                # Nothing in this pass goes with what was there: begin anew, once.
                if began_empty:
                    raise self._no_batch()
                self._leave_out_rest()
                self._start_batch()
        self._leave_out_rest()

    def _start_batch(self) -> None:
        self._batch: list[Any] = []
        self._positions: set[int] = set()
        self._taken: dict[str | Group, int | Group] = {}  # texts and groups in the batch, and whose they are
        self._first_shown: dict[int, str] = {}  # keys by position of the images that no batch had before

    def _full_batches(self) -> Iterator[list[Any]]:
        # Those that wait may fill a batch alone.
        while len(self._batch) == self._batch_size:
            batch = self._batch
            self.repeats += len(batch) - len(self._first_shown)
            self._start_batch()
            self._missing -= 1
            if self._missing:
                yield batch
                self._refill()
            else:
                if self._repeating:
                    self._leave_out_rest()
                yield batch

    def _refill(self) -> None:
        """Put those that wait into the batch, with other captions only where nothing new can come in their place."""
        for reword in (False, True) if self._repeating else (False,):
            waiting, self._waiting = self._waiting, []
            for sample, tokens in waiting:
                full = len(self._batch) == self._batch_size
                if full or not self._place(sample, tokens, first_shown=True, reword=reword):
                    self._waiting.append((sample, tokens))

    def _offer(self, sample: Sample) -> None:
        if sample.position in self._positions:
            return
        tokens = self._tokens(sample)
        first_shown = not self._repeating or sample.position in self.left_out
        if self._place(sample, tokens, first_shown=first_shown, reword=self._repeating):
            return
        self.obstacle, self.example = self._obstacle(sample)
        self._collisions[self.obstacle, self.example] += 1
        if self._repeating:
            return
        if len(self._waiting) < self._max_waiting:
            self._waiting.append((sample, tokens))
        elif not self._place(sample, tokens, first_shown=True, reword=True):
            self.left_out[sample.position] = sample.key

    def _place(self, sample: Sample, tokens: set[str | Group], *, first_shown: bool, reword: bool) -> bool:
        """Put a sample into the batch unless it cannot be used; return False if it does not go with the others."""
        owner = self._owner(sample)
        if self._collides(tokens, owner):
            if not reword:
                return False
            others = self._other_captions(sample, {token for token, other in self._taken.items() if other != owner})
            if others is None:
                return False
            sample = sample._replace(shown=others)
            tokens = self._tokens(sample)
            if self._collides(tokens, owner):  # of its group, which other captions do not change
                return False
        prepared = self._prepare(sample)
        if prepared is not None:
            self._batch.append(prepared)
            self._positions.add(sample.position)
            self._taken |= dict.fromkeys(tokens, owner)
            if first_shown:
                self._first_shown[sample.position] = sample.key
                self.left_out.pop(sample.position, None)
        return True

    def _tokens(self, sample: Sample) -> set[str | Group]:
        """Return what no image of another owner in the batch may have too."""
        tokens = set() if self._allow_duplicates else {normalize_caption(caption) for caption in sample.shown}
        return tokens if sample.group is None else {*tokens, sample.group}

    def _owner(self, sample: Sample) -> int | Group:
        """Return what is equal for images that may share everything."""
        return sample.position if sample.group is None or self._same_group == "apart" else sample.group

    def _collides(self, tokens: Iterable[str | Group], owner: int | Group) -> bool:
        return any(self._taken.get(token, owner) != owner for token in tokens)

    def _obstacle(self, sample: Sample) -> tuple[str, int | str]:
        owner = self._owner(sample)
        for caption in sample.shown:
            if self._collides([normalize_caption(caption)], owner):
                return "caption", caption
        return "group", sample.group.id

    def _leave_out_rest(self) -> None:
        self.left_out |= self._first_shown | {sample.position: sample.key for sample, _ in self._waiting}
        self._waiting = []

    def _no_batch(self) -> UserError:
        if not self._collisions:
            return UserError(f"no full batch of {self._batch_size} can be read from {self._source}")
        (((obstacle, example), _),) = self._collisions.most_common(1)
        advice = {
            "caption": " or fewer captions per image, or let such images meet as false negatives",
            "group": ", spread the groups with `vl-plugins shards --seed`, or let such images meet as positives",
        }
        return UserError(
            f"no batch of {self._batch_size} images with different {obstacle}s can be made of {self._source}: the last "
            f"try ended with {len(self._batch)}, and {example!r} for one is a {obstacle} of several images; give a "
            f"smaller batch size{advice[obstacle]} with {REMEDIES[obstacle]}"
        )
