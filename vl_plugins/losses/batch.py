"""What one call of a loss compares: the checked arguments, with the rows of all processes, cut into directions."""

from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.distances import check_widths
from vl_plugins.distributed import Processes, check_multiple, first_label
from vl_plugins.engine import Excluded, Ids, Pairs, label_pairs
from vl_plugins.numerics import (
    NO_ID,
    as_ids,
    as_labels,
    check_not_negative,
    check_tensors,
    full_precision,
    labels_of_one_set,
)

__all__ = [
    "Batch",
    "ContentIds",
    "Direction",
    "Side",
    "as_number",
    "by_pair",
    "is_one_of_each",
    "joined_sets",
    "number_of_each",
]


@dataclass(eq=False)
class Side:
    """One side of a comparison: N embeddings, and what belongs to each of them.

    Attributes:
        embeddings: (N, D), or what the distance compares.
        labels: (N,), or None if positions say what belongs together.
        ids: of each item's content, (N,), or of contents that match it, (N, M); or None. Negative numbers are not ids.
        numbers: (N,) by name, such as the ``confidence`` of each item.
    """

    embeddings: Any
    labels: Tensor | None = None
    ids: Tensor | None = None
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.embeddings)


class ContentIds(NamedTuple):
    """The ids of a call, which say what further captions match a row, see ``PairLoss.forward``."""

    ref_ids: Any = None
    matching_ids: Any = None
    negative_ids: Any = None

    def check(self, has_negatives: bool) -> None:
        """Raise ``ValueError`` for ids without the embeddings or the other ids that they need."""
        if self.negative_ids is not None and not has_negatives:
            raise ValueError("negative_ids need negatives")
        if self.ref_ids is None and not (self.matching_ids is None and self.negative_ids is None):
            raise ValueError("matching_ids and negative_ids need ref_ids, the ids of the candidates")


class Direction(NamedTuple):
    """Anchors, their candidates, and which pairs of them are positive.

    Attributes:
        anchors: (A, D).
        candidates: (C, D), the other side and then the further negatives of the call.
        positives: M pairs.
        excluded: further pairs that are no negatives.
        anchor_columns: the first so many candidates are also anchors, in the same matrix; 0 for none.
        pair_numbers: (M,) by name, of each positive pair.
    """

    anchors: Tensor
    candidates: Tensor
    positives: Pairs
    excluded: list[Excluded]
    anchor_columns: int
    pair_numbers: dict[str, Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        return self.anchors.shape[0], self.candidates.shape[0]

    def masks(self) -> tuple[Tensor, Tensor]:
        """Return which pairs are positive and which are negative, (A, C) each."""
        positive_mask = self.positives.mask(self.shape)
        negative_mask = ~positive_mask
        for excluded in self.excluded:
            negative_mask &= ~excluded.mask(self.shape)
        return positive_mask, negative_mask


@dataclass(eq=False)
class Batch:
    """The rows and columns of a call, such as images and captions. Rows are anchors, columns may be.

    In several processes, those of this process are compared with those of all, or all with all, see
    :mod:`vl_plugins.distributed`.

    Attributes:
        rows, columns: the anchors that this process compares, its own or all.
        all_rows, all_columns: the candidates, those of all processes.
        negatives: further candidates of the rows, of all processes, which are nobody's positives; or None.
        captions: how many columns of this process belong to each of its rows; read only with places instead of labels.
        one_set: the columns are the rows, and none is compared with itself.
        both: the columns are anchors too.
        is_mined: a miner says which pairs are compared.
        copies: the column that is each row's own copy, with which it is not compared; or None. With one set it is the
            row itself.
        counts: the numbers of rows and columns of each process.
        rank: the number of this process.
        is_whole: each process compares all rows and columns.
    """

    rows: Side
    columns: Side
    all_rows: Side
    all_columns: Side
    negatives: Side | None
    captions: int
    one_set: bool
    both: bool
    is_mined: bool = False
    copies: Tensor | None = None
    counts: list[tuple[int, int]] = field(default_factory=list)
    rank: int = 0
    is_whole: bool = True

    @classmethod
    def of(
        cls,
        embeddings: Tensor,
        labels: Any,
        ref_emb: Tensor | None,
        ref_labels: Any,
        *,
        distance: Any,
        both: bool,
        is_mined: bool,
        negatives: Tensor | None = None,
        ids: ContentIds = ContentIds(),  # noqa: B008 (a tuple does not change)
        copies: Tensor | None = None,
        numbers: dict[str, Tensor] | None = None,
    ) -> "Batch":
        """Check the arguments of a call, see :meth:`vl_plugins.losses.PairLoss.forward`.

        Args:
            numbers: (C,) by name.
        """
        ids.check(has_negatives=negatives is not None)
        one_set = ref_emb is None or ref_emb is embeddings
        if one_set:
            ref_emb = None
        x, y, extra = _checked_sides(distance, embeddings, ref_emb, negatives)
        captions = _captions_of_each(x, y)
        if one_set:
            labels = ref_labels = labels_of_one_set(labels, ref_labels, x)
            if labels is None and not is_mined:
                raise ValueError("labels must be given with one set of embeddings")
            copies = torch.arange(len(x), device=x.device)
        else:
            if copies is not None and (labels is None or is_mined):
                raise ValueError("copies need labels, which say what the pairs are")
            labels, ref_labels = _labels_of_two_sides(labels, ref_labels, x, y, captions, is_mined)
        columns = Side(y, ref_labels, as_ids("ref_ids", ids.ref_ids, y))
        rows = Side(x, labels, as_ids("matching_ids", ids.matching_ids, x, dimensions=2))
        side_of_negatives = None
        if extra is not None:
            side_of_negatives = Side(extra, None, as_ids("negative_ids", ids.negative_ids, extra))
        for name, values in (numbers or {}).items():
            columns.numbers[name] = number_of_each(name, values, y)
        both = both and not one_set
        return cls(rows, columns, rows, columns, side_of_negatives, captions, one_set, both, is_mined, copies)

    def gathered(
        self,
        processes: Processes,
        own_rows: bool,
        numbers: tuple[str, ...],
        learned: dict[str, Tensor],
        settings: tuple[str, ...] = (),
    ) -> "Batch":
        """Return the batch with the candidates of all processes.

        Args:
            processes: the processes that share the batch.
            own_rows: with two sides, compare only the rows and columns of this process; one set has both directions in
                one matrix.
            numbers: names of the numbers that a call may give for each caption.
            learned: learned numbers of the loss, which must be equal in all processes.
            settings: settings of the call, as strings, which must be equal too.
        """
        if processes.size == 1:
            return self
        own_rows = own_rows and not self.one_set
        batch = self
        if not own_rows and self.rows.labels is None and not self.is_mined:
            batch = self._labelled_by_place(processes.rank)
        gathered = processes.gather_rows(batch._tensors(numbers), learned, settings)
        batch = batch._of_tensors(gathered.tensors)
        if not own_rows:
            return batch
        counts = list(zip(gathered.counts["embeddings"], gathered.counts["ref_emb"], strict=True))
        # Own rows and columns are not the gathered copies: as anchors, they get their gradients here.
        return replace(
            batch,
            rows=self.rows,
            columns=self.columns,
            captions=self.captions,
            counts=counts,
            rank=processes.rank,
            is_whole=False,
        )

    def _labelled_by_place(self, rank: int) -> "Batch":
        """Return the batch with labels made from positions, different ones in each process."""
        places = torch.arange(len(self.rows), device=self.rows.embeddings.device) + first_label(rank)
        of_columns = places.repeat_interleave(self.captions, output_size=len(self.columns))
        return replace(self, rows=replace(self.rows, labels=places), columns=replace(self.columns, labels=of_columns))

    def _tensors(self, numbers: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return the tensors that have rows, by argument name; None for an argument that is not given.

        All processes have the same names, so that an argument given in only some of them is detected.
        """
        tensors = {"embeddings": self.rows.embeddings, "labels": self.rows.labels, "matching_ids": self.rows.ids}
        if not self.one_set:
            tensors |= {"ref_emb": self.columns.embeddings, "ref_labels": self.columns.labels}
        tensors["ref_ids"] = self.columns.ids
        for name in numbers:
            tensors[name] = self.columns.numbers.get(name)
        negatives = Side(None) if self.negatives is None else self.negatives
        return tensors | {"negatives": negatives.embeddings, "negative_ids": negatives.ids}

    def _of_tensors(self, tensors: dict[str, Any]) -> "Batch":
        """Return the batch with other rows, named as in :meth:`_tensors`."""
        rows = Side(tensors["embeddings"], tensors["labels"], tensors["matching_ids"])
        copies = None
        if self.one_set:
            columns = Side(rows.embeddings, rows.labels)
            copies = torch.arange(len(rows), device=rows.embeddings.device)
        else:
            columns = Side(tensors["ref_emb"], tensors["ref_labels"])
        columns.ids = tensors["ref_ids"]
        for name in self.columns.numbers:
            columns.numbers[name] = tensors[name]
        negatives = None
        if self.negatives is not None:
            negatives = Side(tensors["negatives"], None, tensors["negative_ids"])
        captions = _captions_of_each(rows.embeddings, columns.embeddings)
        return Batch(rows, columns, rows, columns, negatives, captions, self.one_set, self.both, self.is_mined, copies)

    @property
    def compares_all_by_place(self) -> bool:
        """True if places say what belongs together, and each embedding is compared with all of the other side."""
        is_by_place = self.rows.labels is None and not self.is_mined
        is_complete = self.both or self.is_whole  # or the rows of other processes are compared there only
        has_others = self.negatives is not None or self.columns.ids is not None
        return is_by_place and is_complete and not has_others and len(self.all_rows) > 1

    def inputs(self) -> list[Tensor]:
        """Return all embeddings that are compared."""
        inputs = [self.all_rows.embeddings]
        if not self.one_set:
            inputs.append(self.all_columns.embeddings)
        if self.negatives is not None:
            inputs.append(self.negatives.embeddings)
        return inputs

    def candidates(self) -> Tensor:
        """Return all columns, then the further negatives, (C + N, D)."""
        if self.negatives is None:
            return self.all_columns.embeddings
        return joined_sets([self.all_columns.embeddings, self.negatives.embeddings])

    def directions(self) -> list[Direction]:
        """Return what is compared: rows with all candidates, and columns with all rows if they are anchors too.

        Where the anchors are those of all processes, both are read from one matrix.
        """
        positives = self._positives()
        excluded = self._excluded(self.rows, positives)
        anchor_columns = 0
        if self.both and self.is_whole:
            anchor_columns = len(self.columns)
        numbers = by_pair(self.all_columns.numbers, positives.columns)
        x = self.rows.embeddings
        directions = [Direction(x, self.candidates(), positives, excluded, anchor_columns, numbers)]
        if self.both and not self.is_whole:
            directions.append(self._columns_as_anchors())
        return directions

    def _columns_as_anchors(self) -> Direction:
        """Return the comparison of this process's columns with all rows."""
        if self.rows.labels is None:
            columns = torch.arange(len(self.columns), device=self.columns.embeddings.device)
            positives = Pairs(columns, columns // self.captions + self._first()[0], per_row=1)
        else:
            positives = _pairs_by_label(self.columns, self.all_rows)
        excluded = []
        if self.columns.ids is not None:
            ids = self._ids_of_rows(self.all_rows, self._positives_of_all())
            excluded.append(Excluded.by_ids(ids, self.columns.ids, rows_have_one=True))
        numbers = by_pair(self.columns.numbers, positives.rows)
        return Direction(self.columns.embeddings, self.all_rows.embeddings, positives, excluded, 0, numbers)

    def _positives(self) -> Pairs:
        """Return the positive pairs of the rows and all columns, by labels or by places."""
        if self.rows.labels is None:
            rows = columns = torch.arange(len(self.columns), device=self.columns.embeddings.device)
            if self.captions > 1:
                rows = columns // self.captions
            _, first_column = self._first()
            if first_column > 0:
                columns = columns + first_column
            return Pairs(rows, columns, per_row=self.captions)
        pairs = _pairs_by_label(self.rows, self.all_columns)
        if self.copies is None:
            return pairs
        (not_copies,) = (self.copies[pairs.rows] != pairs.columns).nonzero(as_tuple=True)
        return Pairs(pairs.rows[not_copies], pairs.columns[not_copies])

    def _positives_of_all(self) -> Pairs:
        """Return the positive pairs of all rows and all columns, where this process compares its own."""
        if self.rows.labels is not None:
            return _pairs_by_label(self.all_rows, self.all_columns)
        columns = torch.arange(len(self.all_columns), device=self.all_columns.embeddings.device)
        rows_of_columns, first_row = [], 0
        for rows, columns_of_process in self.counts:
            places = torch.arange(first_row, first_row + rows, device=columns.device)
            captions = columns_of_process // max(rows, 1)
            rows_of_columns.append(places.repeat_interleave(captions, output_size=columns_of_process))
            first_row += rows
        return Pairs(torch.cat(rows_of_columns), columns)

    def _first(self) -> tuple[int, int]:
        """Return the places of this process's first row and column among all."""
        first_row = first_column = 0
        for rows, columns in self.counts[: self.rank]:
            first_row += rows
            first_column += columns
        return first_row, first_column

    def _excluded(self, rows: Side, positives: Pairs) -> list[Excluded]:
        """Return the pairs of rows and candidates that are no negatives, besides the positive ones."""
        excluded = []
        if self.copies is not None:
            excluded.append(Excluded.copies(self.copies))
        if self.all_columns.ids is not None:
            ids = self.all_columns.ids
            if self.negatives is not None:
                extra = self.negatives.ids
                if extra is None:
                    extra = ids.new_full((len(self.negatives),), NO_ID)
                ids = torch.cat([ids, extra])
            excluded.append(Excluded.by_ids(self._ids_of_rows(rows, positives), ids, rows_have_one=False))
        return excluded

    def known_positives(self, mined: Pairs | None = None) -> Tensor:
        """Return which pairs of rows and columns share an id, as a mask (A, C).

        A row has the ids of its positives. If both sides have labels, these define the positives, because a miner may
        have left out some; otherwise the positives are those that the miner chose.
        """
        if self.rows.labels is not None and self.columns.labels is not None:
            positives = _pairs_by_label(self.rows, self.columns)
        else:
            assert mined is not None
            positives = mined
        rows, order = positives.rows.sort(stable=True)
        pairs = Pairs(rows, positives.columns[order])
        assert self.columns.ids is not None
        excluded = Excluded.by_ids(self._ids_of_rows(self.rows, pairs), self.columns.ids, rows_have_one=False)
        return excluded.mask((len(self.rows), len(self.columns)))

    def _ids_of_rows(self, rows: Side, positives: Pairs) -> Ids:
        """Return the ids of each row: those of its positives, those that match it, and its own if it has a copy."""
        assert self.all_columns.ids is not None
        items, ids = [positives.rows], [self.all_columns.ids[positives.columns]]
        if rows.ids is None and self.copies is None:
            return Ids(items[0], ids[0])
        numbers = torch.arange(len(rows), device=positives.rows.device)
        if rows.ids is not None:
            items.append(numbers.repeat_interleave(rows.ids.shape[1], output_size=rows.ids.numel()))
            ids.append(rows.ids.flatten())
        if self.copies is not None:
            items.append(numbers)
            ids.append(self.all_columns.ids[self.copies])
        sorted_items, order = torch.cat(items).sort(stable=True)
        return Ids(sorted_items, torch.cat(ids)[order])


def by_pair(numbers: dict[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    """Return numbers of captions as numbers of pairs, given the caption of each pair."""
    return {name: values[places] for name, values in numbers.items()}


def _pairs_by_label(rows: Side, columns: Side) -> Pairs:
    assert rows.labels is not None
    assert columns.labels is not None
    return label_pairs(rows.labels, columns.labels)


def joined_sets(sides: list[Tensor]) -> Tensor:
    """Return vectors (N, D), or sets (N, K, D), one below the other; smaller sets are padded with zeros."""
    if sides[0].ndim == 3:
        longest = max(side.shape[1] for side in sides)
        sides = [pad(side, (0, 0, 0, longest - side.shape[1])) for side in sides]
    return torch.cat(sides)


def is_one_of_each(number: Any) -> bool:
    """Return whether a call gives a number for each caption or pair, not one for all."""
    return isinstance(number, Tensor) and number.ndim > 0


def as_number(value: Any) -> Any:
    """Return a list or an array of numbers as a tensor, a 0-D array as a number, and anything else unchanged."""
    is_array = hasattr(value, "__array__") and not isinstance(value, (Tensor, Real))
    if is_array and value.ndim == 0:
        return value.item()
    if is_array or isinstance(value, (list, tuple)):
        return torch.as_tensor(value, dtype=torch.float32)
    return value


def _checked_sides(distance: Any, embeddings: Tensor, ref_emb: Tensor | None, negatives: Any) -> tuple[Any, Any, Any]:
    """Return the three in their common type, float32 at least: one set twice, and None for no further negatives."""
    sides = {"embeddings": embeddings}
    if ref_emb is not None:
        sides["ref_emb"] = ref_emb
    if negatives is not None:
        sides["negatives"] = negatives
    check_tensors(**sides)
    if negatives is not None:
        _check_negatives(negatives, embeddings if ref_emb is None else ref_emb)
    for name, side in sides.items():
        check_widths(distance, embeddings, side, name)
    checked = dict(zip(sides, full_precision(*sides.values()), strict=True))
    x = checked["embeddings"]
    return x, checked.get("ref_emb", x), checked.get("negatives")


def _check_negatives(negatives: Tensor, candidates: Tensor) -> None:
    """Raise ``ValueError`` for negatives that cannot be appended to the candidates, such as vectors to sets."""
    expected = "(N, K, D), as the candidates" if candidates.ndim == 3 else f"(N, {candidates.shape[-1]})"
    if negatives.ndim != candidates.ndim or negatives.shape[-1] != candidates.shape[-1]:
        advice = "; those of each row become those of all by negatives.flatten(0, 1)" if negatives.ndim == 3 else ""
        raise ValueError(f"negatives must be {expected}, got {tuple(negatives.shape)}{advice}")


def _captions_of_each(x: Tensor, y: Tensor) -> int:
    rows, columns = x.shape[0], y.shape[0]
    return columns // rows if rows > 0 else 1


def _labels_of_two_sides(
    labels: Any, ref_labels: Any, x: Tensor, y: Tensor, captions: int, is_mined: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the labels of both sides, or None for both where places or a miner say what belongs together."""
    if labels is None and ref_labels is not None and not is_mined:
        raise ValueError("labels must be given with ref_labels")
    if labels is not None:
        labels = as_labels("labels", labels, x)
    if ref_labels is not None:
        ref_labels = as_labels("ref_labels", ref_labels, y)
    if ref_labels is not None or is_mined:
        return labels, ref_labels
    check_multiple(x, y)
    if labels is not None:
        ref_labels = labels.repeat_interleave(captions, output_size=len(y))
    return labels, ref_labels


def number_of_each(name: str, values: Any, columns: Tensor) -> Tensor:
    """Return numbers (C,) of the captions, in the type of their embeddings or a larger one."""
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values).to(columns)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} must be numbers: {error}") from error
    if values.shape != columns.shape[:1]:
        expected = "one number" if name == "confidence" else "a number, or one"
        shape = tuple(values.shape)
        raise ValueError(f"{name} must be {expected} for each caption, ({len(columns)},); got the shape {shape}")
    if name == "confidence":
        check_not_negative(name, values)
    return values.to(columns.device, torch.promote_types(columns.dtype, values.dtype))
