"""What one call of a loss compares: its checked rows, with those of other processes, as anchors and candidates."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.engine import Comparison, KnownPositives, Pairs, label_pairs, numbers_of_pairs
from vl_plugins.numerics import NO_ID, captions_per_row, checked_rows

__all__ = ["Batch", "joined_sets"]


@dataclass(eq=False)
class Batch:
    """The rows and columns of a call, such as images and captions. Rows are anchors, columns may be.

    Attributes:
        embeddings, labels, ref_emb, ref_labels, ref_ids, matching_ids, negatives, negative_ids, copies: see
            :meth:`vl_plugins.losses.PairLoss.forward`; None for what a call does not give. With one set, ``ref_emb`` is
            the embeddings, and ``ref_labels`` the labels.
        numbers: (C,) by name, such as the ``confidence`` of each column.
        owners: (C,), the row of each column, counted among the rows of all processes once they are gathered, where
            positions say what belongs together.
        captions: how many columns each row has by position; None if rows differ in it.
        one_set: the columns are the rows, and none is compared with itself.
        first_row, first_column: the places of this batch among the rows and columns of all processes.
    """

    embeddings: Tensor
    labels: Any
    ref_emb: Tensor
    ref_labels: Any
    ref_ids: Any
    matching_ids: Any
    negatives: Any
    negative_ids: Any
    copies: Any
    numbers: dict[str, Tensor]
    owners: Tensor | None = None
    captions: Any = 1
    one_set: bool = False
    first_row: int = 0
    first_column: int = 0

    @classmethod
    def of(
        cls, arguments: dict[str, Any], numbers: dict[str, Any], compares_vectors: bool, is_mined: bool = False
    ) -> "Batch":
        """Check the arguments of a call that have rows, and the numbers that it gives for each column."""
        rows = checked_rows(arguments | numbers, compares_vectors)
        if rows["negative_ids"] is not None and rows["negatives"] is None:
            raise ValueError("negative_ids need negatives")
        if rows["ref_ids"] is None and not (rows["matching_ids"] is None and rows["negative_ids"] is None):
            raise ValueError("matching_ids and negative_ids need ref_ids, the ids of the candidates")
        if rows["copies"] is not None and (rows["labels"] is None or is_mined):
            raise ValueError("copies need labels, which say what the pairs are")
        dtype = rows["embeddings"].dtype
        numbers_of_columns = {}
        for name in numbers:
            values = rows.pop(name)
            numbers_of_columns[name] = values.to(torch.promote_types(dtype, values.dtype))
        batch = cls(**rows, numbers=numbers_of_columns)  # the arguments have the names of the attributes
        batch.one_set = rows["ref_emb"] is None
        if not is_mined and (batch.labels is None or batch.ref_labels is None):
            batch.captions = captions_per_row(rows)
        if batch.negatives is not None and not compares_vectors:
            _check_negatives(batch.embeddings if batch.one_set else batch.ref_emb, batch.negatives)
        if batch.one_set:
            batch.ref_emb, batch.ref_labels = batch.embeddings, batch.labels
            batch.copies = torch.arange(batch.embeddings.shape[0], device=batch.embeddings.device)
        elif not is_mined and batch.labels is None:
            columns = torch.arange(batch.ref_emb.shape[0], device=batch.ref_emb.device)
            batch.owners = columns
            if batch.captions != 1:
                batch.owners = columns // batch.captions
        elif not is_mined and batch.ref_labels is None:
            size = batch.ref_emb.shape[0]
            batch.ref_labels = batch.labels.repeat_interleave(batch.captions, output_size=size)
        return batch

    def comparisons(self, everything: "Batch", both: bool) -> list[Comparison]:
        """Return what is compared: rows with all candidates, and columns with all rows if they are anchors too.

        Where the anchors are those of all processes, both are read from one matrix.

        Args:
            everything: the batch of all processes; this one if there is one process, or if it computes the whole loss.
            both: columns are anchors too.
        """
        is_whole = everything is self
        positives = self._positives(everything)
        known_positives = None
        if everything.ref_ids is not None:
            known_positives = everything.known_positives(positives, self.matching_ids, self.copies)
        candidates = everything.ref_emb
        if everything.negatives is not None:
            candidates = joined_sets([candidates, everything.negatives])
        anchor_columns = 0
        if both and is_whole:
            anchor_columns = self.ref_emb.shape[0]
        # By position, the captions of other rows are negatives: of all rows, if each has as many, and not 0.
        is_certain = self.owners is not None and known_positives is None and bool(everything.captions)
        all_have_negatives = is_certain and everything.embeddings.shape[0] > 1
        numbers = {}
        if everything.numbers:
            numbers = numbers_of_pairs(everything.numbers, positives.columns)
        rows = Comparison(
            self.embeddings,
            candidates,
            positives,
            anchor_columns,
            self.copies,
            known_positives,
            all_have_negatives,
            numbers,
        )
        if is_whole or not both:
            return [rows]
        return [rows, self._columns_as_anchors(everything, all_have_negatives)]

    def _columns_as_anchors(self, everything: "Batch", all_have_negatives: bool) -> Comparison:
        """Return the comparison of this process's columns with the rows of all processes."""
        if self.owners is None:
            positives = label_pairs(self.ref_labels, everything.labels)
        else:
            positives = Pairs(torch.arange(len(self.owners), device=self.owners.device), self.owners, per_row=1)
        known_positives = None
        if everything.ref_ids is not None:
            positives_of_rows = everything._positives(everything)
            known_positives = everything.known_positives(positives_of_rows, everything.matching_ids, None, self.ref_ids)
        numbers = {}
        if self.numbers:
            numbers = numbers_of_pairs(self.numbers, positives.rows)
        return Comparison(
            self.ref_emb, everything.embeddings, positives, 0, None, known_positives, all_have_negatives, numbers
        )

    def _positives(self, everything: "Batch") -> Pairs:
        """Return the positive pairs of these rows and all columns, by labels or by position."""
        if self.owners is not None:
            # Owners count among the rows of all processes, pairs from this batch's first row. With one caption for each
            # row, and from row 0 on, a column has the number of its owner.
            rows = columns = self.owners
            if self.captions != 1 or self.first_row > 0:
                columns = torch.arange(self.owners.shape[0], device=self.owners.device)
            if self.first_row > 0 or self.first_column > 0:
                rows, columns = rows - self.first_row, columns + self.first_column
            return Pairs(rows, columns, per_row=self.captions)
        pairs = label_pairs(self.labels, everything.ref_labels)
        if self.copies is None:
            return pairs
        (others_than_copies,) = (self.copies[pairs.rows] != pairs.columns).nonzero(as_tuple=True)
        return Pairs(pairs.rows[others_than_copies], pairs.columns[others_than_copies])

    def known_positives(
        self, positives: Pairs, matching_ids: Tensor | None, copies: Tensor | None, single_ids: Tensor | None = None
    ) -> KnownPositives:
        """Return which rows and columns share an id: a row has the ids of its positives, and those that match it.

        Args:
            positives: pairs of rows, which may be those of one process, and the columns of this batch.
            matching_ids: (A, M), further ids of the rows.
            copies: (A,), the column that is each row's own copy, whose id it has too.
            single_ids: where columns are the anchors, their ids; otherwise rows are the anchors, and all candidates
                have one id each.
        """
        items, ids = [positives.rows], [self.ref_ids[positives.columns]]
        if matching_ids is not None:
            rows = torch.arange(matching_ids.shape[0], device=matching_ids.device)
            items.append(rows.repeat_interleave(matching_ids.shape[1], output_size=matching_ids.numel()))
            ids.append(matching_ids.flatten())
        if copies is not None:
            items.append(torch.arange(copies.shape[0], device=copies.device))
            ids.append(self.ref_ids[copies])
        of_candidates = self.ref_ids
        if self.negatives is not None:
            negative_ids = self.negative_ids
            if negative_ids is None:
                negative_ids = of_candidates.new_full(self.negatives.shape[:1], NO_ID)
            of_candidates = torch.cat([of_candidates, negative_ids])
        if single_ids is None:
            return KnownPositives.of(torch.cat(items), torch.cat(ids), of_candidates, items_are_rows=True)
        return KnownPositives.of(torch.cat(items), torch.cat(ids), single_ids, items_are_rows=False)

    def known_mask(self, mined: Pairs | None = None) -> Tensor:
        """Return which rows and columns share an id, (A, C).

        If both sides have labels, these define the positives, because a miner may have left out some.
        """
        positives: Any = mined
        if self.labels is not None and self.ref_labels is not None:
            positives = label_pairs(self.labels, self.ref_labels)
        known_positives = self.known_positives(positives, self.matching_ids, self.copies)
        return known_positives.mask(self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self.embeddings.shape[0], self.ref_emb.shape[0]

    def sides(self) -> list[Tensor]:
        """Return all embeddings that are compared."""
        sides = [self.embeddings]
        if not self.one_set:
            sides.append(self.ref_emb)
        if self.negatives is not None:
            sides.append(self.negatives)
        return sides

    def gathered(
        self, processes: Any, names_of_numbers: tuple[str, ...], equal: dict[str, Any], settings: tuple[str, ...]
    ) -> "Batch":
        """Return the batch of all processes. Sets the places of this one, whose owners then count among all rows.

        Args:
            processes: the :class:`~vl_plugins.distributed.Processes` that share the batch.
            names_of_numbers: that a call may give for each column.
            equal, settings: numbers and words that have to be equal in all processes.
        """
        # In all processes the same names, so that an argument that only some of them give is detected.
        tensors = {"embeddings": self.embeddings, "labels": self.labels, "matching_ids": self.matching_ids}
        if not self.one_set:
            tensors |= {"ref_emb": self.ref_emb, "ref_labels": self.ref_labels, "copies": self.copies}
        tensors |= {"ref_ids": self.ref_ids, "negatives": self.negatives, "negative_ids": self.negative_ids}
        for name in names_of_numbers:
            tensors[name] = self.numbers.get(name)
        tensors, counts, rank = processes.gather_rows(tensors, equal, settings)
        numbers = {}
        for name in names_of_numbers:
            values = tensors.pop(name)
            if values is not None:
                numbers[name] = values
        everything = replace(self, numbers=numbers, **tensors)
        if self.one_set:
            everything.ref_emb, everything.ref_labels = everything.embeddings, everything.labels
            everything.copies = torch.arange(everything.embeddings.shape[0], device=self.embeddings.device)
        elif self.owners is not None:
            rows, columns = counts["embeddings"], counts["ref_emb"]
            everything.owners, everything.captions = owners_of_columns(rows, columns, self.owners.device)
            self.first_row, self.first_column = sum(rows[:rank]), sum(columns[:rank])
            self.owners = self.owners + self.first_row
        return everything


def owners_of_columns(rows: list[int], columns: list[int], device: torch.device) -> tuple[Tensor, int | None]:
    """Return the row of each column among those of all processes, and how many columns a row has if all have as many.

    Args:
        rows, columns: how many each process has.
    """
    captions = []
    for rows_of_process, columns_of_process in zip(rows, columns, strict=True):
        captions.append(columns_of_process // max(1, rows_of_process))
    captions_of_rows = torch.tensor(captions).repeat_interleave(torch.tensor(rows)).to(device)
    owners = torch.arange(sum(rows), device=device).repeat_interleave(captions_of_rows, output_size=sum(columns))
    of_processes_with_rows = {count for count, size in zip(captions, rows, strict=True) if size > 0}
    if len(of_processes_with_rows) == 1:
        return owners, of_processes_with_rows.pop()
    return owners, None


def _check_negatives(candidates: Tensor, negatives: Tensor) -> None:
    """Raise ``ValueError`` for negatives that cannot be appended to the candidates, such as vectors to sets."""
    if negatives.ndim == candidates.ndim and negatives.shape[-1] == candidates.shape[-1]:
        return
    expected = f"(N, {candidates.shape[-1]})"
    if candidates.ndim == 3:
        expected = "(N, K, D), as the candidates"
    raise ValueError(f"negatives must be {expected}, got {tuple(negatives.shape)}")


def joined_sets(sides: list[Tensor]) -> Tensor:
    """Return vectors (N, D), or sets (N, K, D), one below the other; smaller sets are padded with zeros."""
    if sides[0].ndim == 3:
        longest = max(side.shape[1] for side in sides)
        sides = [pad(side, (0, 0, 0, longest - side.shape[1])) for side in sides]
    return torch.cat(sides)
