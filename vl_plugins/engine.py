r"""What a loss needs from each anchor's negatives: their maximum or soft maximum, in both directions.

Let :math:`S = X Y^\top` be the similarities of A rows and C columns, of unit vectors for the cosine. Let E be the
pairs that are not negatives: the positive pairs, and others that the caller excludes. Most losses of this package need
the similarities of the positive pairs and, for each row i and each column j, one number that summarizes the negatives:

.. math::
    \text{maximum:} \quad \max_{j : (i, j) \notin E} S_{ij}
    \qquad \text{soft maximum:} \quad L_i = \frac{1}{\gamma} \log \sum_{j : (i, j) \notin E} e^{\gamma S_{ij}}

A gradient :math:`g` of these numbers becomes a gradient W of S, with an entry for each pair:

.. math::
    W_{ij} = g^\text{row}_i e^{\gamma (S_{ij} - L_i)} + g^\text{column}_j e^{\gamma (S_{ij} - L_j)}
    \quad \text{for negatives}, \qquad W_{ij} = g^\text{pair}_{ij} \quad \text{for positives}

and then gradients of the vectors, :math:`\partial X = W Y` and :math:`\partial Y = W^\top X`. For the maximum, W has
one entry for the negatives of each row and of each column. S is computed in blocks of rows. For the gradient of a soft
maximum, the matrix is kept, or recomputed in tiles.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, threshold

from vl_plugins.numerics import fill_at

__all__ = [
    "LEAST_NORM",
    "MATRIX_BYTES",
    "Excluded",
    "Ids",
    "Maxima",
    "Pairs",
    "block_rows",
    "cosines",
    "label_pairs",
    "matrix_maximum",
    "maxima",
    "soft_maxima",
    "unit_vectors",
]

# Similarities of a block: on the CPU they should stay in the cache; elsewhere fewer, larger steps are faster.
CPU_BLOCK = 2**20
DEVICE_BLOCK = 2**24
FEW = 2**16  # up to this many pairs are compared at once
MANY = 2**22  # up to this many pairs are listed; beyond that, each block of rows gets a mask
MATRIX_BYTES = 2**30  # a larger matrix is computed twice rather than kept
LEAST_NORM = 1e-12  # as in torch's normalize; here a shorter vector has no gradient, and in a set it is padding


class Pairs(NamedTuple):
    """M pairs of a row and a column; sorted by row where blocks of rows are taken from them.

    Attributes:
        rows, columns: (M,).
        per_row: how many pairs each row has, where all have the same number; otherwise None.
    """

    rows: Tensor
    columns: Tensor
    per_row: int | None = None

    @classmethod
    def of_mask(cls, mask: Tensor) -> "Pairs":
        """Return the positions where a matrix is True. Synchronizes the GPU."""
        rows, columns = mask.nonzero(as_tuple=True)
        return cls(rows, columns)

    def mask(self, shape: Sequence[int]) -> Tensor:
        """Return a bool matrix that is True where the pairs are."""
        mask = torch.zeros(shape, dtype=torch.bool, device=self.rows.device)
        fill_at(mask, (self.rows, self.columns), True)
        return mask

    def transposed(self) -> tuple["Pairs", Tensor]:
        """Return the pairs of the transposed matrix, sorted by row, and the index of each in the original pairs."""
        order = self.columns.argsort(stable=True)
        return Pairs(self.columns[order], self.rows[order]), order

    def of_blocks(self, starts: list[int]) -> Iterator["Pairs"]:
        """Yield the pairs of each block of rows, with rows counted from the start of the block.

        Synchronizes the GPU, unless there is only one block or ``per_row`` is known.

        Args:
            starts: the first row of each block, then the total number of rows.
        """
        if len(starts) == 2:
            yield self
            return
        if self.per_row is None:
            bounds = torch.searchsorted(self.rows, torch.tensor(starts, device=self.rows.device)).tolist()
        else:
            bounds = [start * self.per_row for start in starts]
        for number, start in enumerate(starts[:-1]):
            places = slice(bounds[number], bounds[number + 1])
            yield Pairs(self.rows[places] - start, self.columns[places], self.per_row)


def label_pairs(labels: Tensor, ref_labels: Tensor) -> Pairs:
    """Return all pairs of equal labels, sorted by row, then by column. Synchronizes the GPU.

    Args:
        labels, ref_labels: (A,) and (C,), on one device.
    """
    if labels.shape[0] * ref_labels.shape[0] <= FEW:
        return Pairs.of_mask(labels[:, None] == ref_labels)
    join = _Join.of(labels, ref_labels)
    rows = torch.repeat_interleave(join.counts)
    return join.pairs(rows)


class _Join(NamedTuple):
    """Matches equal numbers of two sides without comparing all pairs: each row has a range of the sorted other side."""

    order: Tensor  # (C,), sorts the other side
    first: Tensor  # (A,), where the range of a row begins
    counts: Tensor  # (A,), how long the range is

    @classmethod
    def of(cls, numbers: Tensor, others: Tensor) -> "_Join":
        dtype = torch.promote_types(numbers.dtype, others.dtype)
        order = others.argsort(stable=True)
        numbers, ordered = numbers.to(dtype), others[order].to(dtype)
        first = torch.searchsorted(ordered, numbers)
        return cls(order, first, torch.searchsorted(ordered, numbers, right=True) - first)

    def pairs(self, rows: Tensor) -> Pairs:
        """Return all pairs, given each row as often as its range is long."""
        rank = torch.arange(len(rows), device=rows.device) - (self.counts.cumsum(0) - self.counts)[rows]
        return Pairs(rows, self.order[self.first[rows] + rank])


class Ids(NamedTuple):
    """Which ids the items of one side have: L entries, each of an item and one of its ids, sorted by item."""

    items: Tensor
    ids: Tensor


@dataclass(eq=False)
class Excluded:
    """Pairs that are neither positive nor negative, in one of two forms.

    Attributes:
        listed: the pairs themselves; None if there are too many, and each block of rows gets a mask instead.
        many, one: for masks: the ids of the items on one side, which may have several each, and the single id of each
            item on the other side, both from 0 to ``number_of_ids`` - 1. A pair that shares an id is excluded.
        rows_have_one: whether ``one`` belongs to the rows.
        are_copies: whether they are pairs of an item and its own copy.
    """

    listed: Pairs | None = None
    many: Any = None
    one: Any = None
    number_of_ids: int = 0
    rows_have_one: bool = False
    are_copies: bool = False

    @classmethod
    def copies(cls, columns: Tensor) -> "Excluded":
        """Exclude one column of each row, (A,), such as its own copy."""
        pairs = Pairs(torch.arange(len(columns), device=columns.device), columns, per_row=1)
        return cls(pairs, are_copies=True)

    @classmethod
    def by_ids(cls, many: Ids, one: Tensor, rows_have_one: bool) -> "Excluded":
        """Exclude the pairs that share an id. Synchronizes the GPU.

        Args:
            many: the ids of the items on one side. Negative numbers are not ids.
            one: (N,), the id of each item on the other side.
            rows_have_one: whether ``one`` belongs to the rows.
        """
        if len(many.ids) * len(one) <= FEW:
            entries, entries_of_one = ((many.ids[:, None] == one) & (one >= 0)).nonzero(as_tuple=True)
        else:
            join = _Join.of(many.ids, one)
            counts = join.counts * (many.ids >= 0)
            total = int(counts.sum())
            if total > MANY:
                return cls._of_masks(many, one, rows_have_one)
            repeated = torch.repeat_interleave(counts, output_size=total)
            entries, entries_of_one, _ = join._replace(counts=counts).pairs(repeated)
        items = many.items[entries]
        if not rows_have_one:
            return cls(Pairs(items, entries_of_one))
        rows, order = entries_of_one.sort(stable=True)
        return cls(Pairs(rows, items[order]))

    @classmethod
    def _of_masks(cls, many: Ids, one: Tensor, rows_have_one: bool) -> "Excluded":
        is_id = many.ids >= 0  # a negative number of the other side is then the id of nothing
        many = Ids(many.items[is_id], many.ids[is_id])
        values, numbers = torch.cat([many.ids, one]).unique(return_inverse=True)
        of_many, of_one = numbers.split([len(many.ids), len(one)])
        return cls(None, many._replace(ids=of_many), of_one, len(values), rows_have_one)

    def transposed(self, rows: int) -> "Excluded":
        """Return what is excluded of the first rows of the transposed matrix."""
        if self.listed is not None:
            pairs, _ = self.listed.transposed()
            number = int((pairs.rows < rows).sum())  # waits for the device
            return Excluded(Pairs(pairs.rows[:number], pairs.columns[:number]))
        return Excluded(None, self.many, self.one, self.number_of_ids, not self.rows_have_one)

    def mask(self, shape: Sequence[int]) -> Tensor:
        """Return a bool matrix that is True where pairs are excluded."""
        rows, columns = shape
        if self.listed is not None:
            return self.listed.mask(shape)
        # Items of one id stand for each other: the mask is made for one of them, and copied to the others.
        representative = self.one.new_full((self.number_of_ids,), len(self.one))
        representative[self.one] = torch.arange(len(self.one), device=self.one.device)
        of_entries = representative[self.many.ids]  # an id without an item points past the end, to an unread mask
        extra = 1, 0
        places = of_entries, self.many.items
        if not self.rows_have_one:
            extra, places = (0, 1), (self.many.items, of_entries)
        mask = torch.zeros(rows + extra[0], columns + extra[1], dtype=torch.bool, device=self.one.device)
        fill_at(mask, places, True)
        if self.rows_have_one:
            return mask[representative[self.one]]
        return mask[:, representative[self.one]]

    def of_blocks(self, starts: list[int]) -> Iterator["Excluded"]:
        """Yield what is excluded of each block of rows, see :meth:`Pairs.of_blocks`."""
        if self.listed is not None:
            for pairs in self.listed.of_blocks(starts):
                yield Excluded(pairs)
        elif self.rows_have_one:
            for start, end in pairwise(starts):
                yield Excluded(None, self.many, self.one[start:end], self.number_of_ids, rows_have_one=True)
        else:
            for entries in Pairs(self.many.items, self.many.ids).of_blocks(starts):
                yield Excluded(None, Ids(entries.rows, entries.columns), self.one, self.number_of_ids)

    def fill(self, products: Tensor, value: float) -> None:
        """Set the entries of a block that are excluded, in place."""
        if self.listed is None:
            products.masked_fill_(self.mask((products.shape[0], products.shape[1])), value)
        else:
            fill_at(products, (self.listed.rows, self.listed.columns), value)


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return the vectors (N, D) with length 1; zero vectors stay zero, with zero gradients."""
    return vectors / _norms(vectors)


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine similarities (A, C) of vectors (A, D) and (C, D); differentiable any number of times."""
    return unit_vectors(x) @ unit_vectors(y).T


def matrix_maximum(similarities: Tensor, negative_mask: Tensor, scale: float | Tensor | None = None) -> Tensor:
    """Return the (soft) maximum of the negatives of each row, (A,); -inf for a row without negatives.

    Args:
        similarities, negative_mask: (A, C), floating point and bool.
        scale: of the soft maximum, ``log(sum(exp(scale * s))) / scale``; None for the maximum.
    """
    if scale is None:
        return similarities.masked_fill(~negative_mask, -torch.inf).amax(dim=1)
    # Not -inf, whose log-sum-exp has NaN gradients.
    least = torch.finfo(similarities.dtype).min
    sums = (scale * similarities).masked_fill(~negative_mask, least).logsumexp(dim=1) / scale
    return sums.masked_fill(~negative_mask.any(dim=1), -torch.inf)


class Maxima(NamedTuple):
    """What is known of the pairs of a batch.

    Attributes:
        positive: (M,), the similarities of the positive pairs.
        of_anchors: the (soft) maximum of each anchor's negatives, first of the A rows, (A,), then of the columns that
            are anchors too; -inf for an anchor without negatives.
        rows: A.
    """

    positive: Tensor
    of_anchors: Tensor
    rows: int

    @classmethod
    def of(cls, values: Tensor, pairs: int, rows: int) -> "Maxima":
        """Cut one tensor into the similarities of so many pairs, and the maxima."""
        positive, of_anchors = values.split_with_sizes([pairs, values.shape[0] - pairs])
        return cls(positive, of_anchors, rows)

    @property
    def of_rows(self) -> Tensor:
        return self.of_anchors[: self.rows]

    @property
    def of_columns(self) -> Tensor:
        """Those of the columns; empty if only rows are anchors."""
        return self.of_anchors[self.rows :]

    def of_pairs(self, pairs: Pairs) -> Tensor:
        """Return the maximum of each pair's row, (M,), and then those of its column, (2 M,), if columns are anchors."""
        if self.of_anchors.shape[0] == self.rows:
            return self.of_anchors[pairs.rows]
        return self.of_anchors[torch.cat([pairs.rows, pairs.columns + self.rows])]


def maxima(
    x: Tensor, y: Tensor, positives: Pairs, excluded: list[Excluded], *, normalize: bool, anchor_columns: int
) -> Maxima:
    """Return the similarities of the positive pairs, and the maximum similarity of each anchor's negatives.

    No matrix is kept. Among equal maxima, only one gets the gradient. The result can be differentiated only once.

    Args:
        x, y: (A, D) and (C, D), of the same type, float32 or float64.
        positives: the positive pairs, which are not negatives.
        excluded: further pairs that are not negatives.
        normalize: compare by cosine; otherwise by dot product.
        anchor_columns: how many of the first columns are anchors too; 0 for none.
    """
    of_positives, of_rows, row_places = [], [], []
    columns = _ColumnMaxima()
    with torch.no_grad():
        units = _Vectors.of(x, y, normalize).to_units()
        for block in _blocks(positives, excluded, len(x), len(y)):
            products = units.x[block.rows] @ units.y.T
            of_positives.append(block.take_out(products))
            values, places = products.max(dim=1)
            of_rows.append(values)
            row_places.append(places)
            if anchor_columns > 0:
                columns.add(products[:, :anchor_columns], block.rows.start)
        # The pairs whose similarities are returned: the positive ones, and each anchor with its hardest negative.
        numbers = torch.arange(max(len(x), len(y)), device=x.device)
        pair_rows, pair_columns = [positives.rows, numbers[: len(x)]], [positives.columns, *row_places]
        values = [*of_positives, *of_rows]
        if anchor_columns > 0:
            pair_rows.append(columns.places)
            pair_columns.append(numbers[:anchor_columns])
            values.append(columns.values)
        pairs = Pairs(torch.cat(pair_rows), torch.cat(pair_columns))
    similarities = _PairSimilarities.apply(x, y, units, pairs, numbers, torch.cat(values))
    return Maxima.of(similarities, len(positives.rows), len(x))


def soft_maxima(
    x: Tensor,
    y: Tensor,
    positives: Pairs,
    excluded: list[Excluded],
    scale: float | Tensor,
    *,
    normalize: bool,
    tiled: bool,
    anchor_columns: int,
) -> Maxima:
    """Return the similarities of the positive pairs, and the soft maximum of each anchor's negatives.

    Args:
        x, y, positives, excluded, normalize, anchor_columns: see :func:`maxima`.
        scale: see :func:`matrix_maximum`; a number, or a 0-D tensor, which receives a gradient.
        tiled: compute each block again for the gradients, instead of keeping the matrix (A, C).
    """
    values = _SoftMaxima.apply(x, y, scale, positives, excluded, normalize, tiled, anchor_columns)
    return Maxima.of(values, len(positives.rows), len(x))


class _Vectors(NamedTuple):
    """The two sides of a product, with their norms where they are compared by cosine."""

    x: Tensor
    y: Tensor
    x_norms: Tensor | None
    y_norms: Tensor | None

    @classmethod
    def of(cls, x: Tensor, y: Tensor, normalize: bool) -> "_Vectors":
        if not normalize:
            return cls(x, y, None, None)
        return cls(x, y, _norms(x), _norms(y))

    def x_units(self, rows: slice) -> Tensor:
        return self.x[rows] if self.x_norms is None else self.x[rows] / self.x_norms[rows]

    def to_units(self) -> "_Vectors":
        """Return all vectors divided by their norms."""
        if self.x_norms is None or self.y_norms is None:
            return self
        return self._replace(x=self.x / self.x_norms, y=self.y / self.y_norms)


class _Block(NamedTuple):
    """A block of rows, the positive pairs in it, and what is excluded."""

    rows: slice
    positives: Pairs
    excluded: list[Excluded]

    def take_out(self, products: Tensor) -> Tensor:
        """Return the positives' entries of the block, and set all that are no negatives to -inf."""
        at = self.positives.rows, self.positives.columns
        of_positives = products[at]
        fill_at(products, at, -torch.inf)
        for excluded in self.excluded:
            excluded.fill(products, -torch.inf)
        return of_positives


def _blocks(positives: Pairs, excluded: list[Excluded], rows: int, columns: int) -> Iterator[_Block]:
    """Yield the blocks of a matrix (rows, columns)."""
    step = block_rows(columns, positives.rows.device)
    starts = [*range(0, max(rows, 1), step), rows]
    excluded_of_blocks = [pairs.of_blocks(starts) for pairs in excluded]
    for number, pairs in enumerate(positives.of_blocks(starts)):
        rows_of_block = slice(starts[number], starts[number + 1])
        yield _Block(rows_of_block, pairs, [next(of_blocks) for of_blocks in excluded_of_blocks])


def block_rows(size: int, device: torch.device, least: int = 32) -> int:
    """Return the number of rows in a block, for rows of ``size`` numbers; products of fewer than ``least`` are slow."""
    return max(least, (CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK) // max(1, size))


class _ColumnMaxima:
    """The maxima of the columns of a matrix that comes in blocks of rows, and the rows where they are."""

    values: Any = None
    places: Any = None

    def add(self, block: Tensor, start: int) -> None:
        values, places = block.T.contiguous().max(dim=1)  # twice as fast as max(dim=0)
        if self.values is not None:
            is_larger = ~(values <= self.values)  # NaN too
            places = torch.where(is_larger, places + start, self.places)
            values = torch.where(is_larger, values, self.values)
        self.values, self.places = values, places


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward pass: it runs in full precision, and raises an error if it would be differentiated again.

    Otherwise, a backward pass that the caller runs under autocast would multiply in half precision.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise RuntimeError(
                "the gradient of embeddings that are compared in blocks has no derivative (create_graph=True): give "
                "the loss a matrix, loss.from_similarities(...)"
            )
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    return checked


class _SoftMaxima(torch.autograd.Function):
    """The similarities of positive pairs, and soft maxima by row and by column, one after the other."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, y, scale, positives, excluded, normalize, tiled, anchor_columns = arguments
        vectors = _Vectors.of(x, y, normalize)
        matrix: Any = None
        if not tiled:
            matrix = _exponents(vectors, slice(0, x.shape[0]), scale)
        of_positives, row_sums = [], []
        column_sums: Any = None
        for block in _blocks(positives, excluded, x.shape[0], y.shape[0]):
            exponents = None  # frees that of the last block
            exponents = _exponents(vectors, block.rows, scale) if matrix is None else matrix[block.rows]
            of_positives.append(block.take_out(exponents))
            row_sums.append(exponents.logsumexp(dim=1))
            if anchor_columns > 0:
                sums = exponents[:, :anchor_columns].logsumexp(dim=0)
                column_sums = sums if column_sums is None else torch.logaddexp(column_sums, sums)
        if column_sums is not None:
            row_sums.append(column_sums)
        values = torch.cat([*of_positives, *row_sums])
        norms = [tensor for tensor in (vectors.x_norms, vectors.y_norms) if tensor is not None]
        ctx.save_for_backward(x, y, values, *norms)
        ctx.pairs, ctx.matrix, ctx.scale = (positives, excluded), matrix, scale
        return values / scale

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, y, values, *norms = ctx.saved_tensors
        vectors = _Vectors(x, y, *(norms or (None, None)))
        matrix, ctx.matrix = ctx.matrix, None  # overwritten here; a second backward pass computes it again
        gradient = _SoftGradient(vectors, ctx.needs_input_grad, ctx.scale)
        positives, excluded = ctx.pairs
        sizes = positives.rows.shape[0], x.shape[0]
        grads = Maxima.of(grad, *sizes)
        finite = values.clamp(min=torch.finfo(x.dtype).min)  # not -inf, which minus itself is NaN
        sums = Maxima.of(finite, *sizes)
        done = 0
        for block in _blocks(positives, excluded, x.shape[0], y.shape[0]):
            exponents = weights = None  # frees those of the last block
            if matrix is None:
                exponents = _exponents(vectors, block.rows, ctx.scale)
                block.take_out(exponents)
            else:
                exponents = matrix[block.rows]
            weights = _soft_weights(exponents, block.rows, sums, grads)
            number = block.positives.rows.shape[0]
            weights[block.positives.rows, block.positives.columns] = grads.positive[done : done + number]
            done += number
            gradient.add(block.rows, weights)
        matrix = exponents = weights = None  # before more is allocated
        return gradient.x, gradient.of_y(), gradient.of_scale(values, grad), *[None] * 5


def _exponents(vectors: _Vectors, rows: slice, scale: float | Tensor) -> Tensor:
    """Return the similarities of a block of rows times the scale."""
    products = (vectors.x_units(rows) * scale) @ vectors.y.T
    return products if vectors.y_norms is None else products.div_(vectors.y_norms.T)


def _soft_weights(exponents: Tensor, rows: slice, sums: Maxima, grads: Maxima) -> Tensor:
    """Return the gradient of a block of similarities, still without the positives; changes ``exponents``."""
    weights = (exponents - sums.of_rows[rows, None]).exp_().mul_(grads.of_rows[rows, None])
    if sums.of_columns.shape[0] > 0:
        anchors = slice(0, sums.of_columns.shape[0])
        by_column = exponents[:, anchors].sub_(sums.of_columns).exp_()
        weights[:, anchors].addcmul_(by_column, grads.of_columns)
    return weights


class _SoftGradient:
    """The gradients of vectors and scale, added up over blocks of the gradient W of their similarities.

    With unit vectors u = x / |x| and v = y / |y|, the gradient of u is W v. The gradient of x is the part of it
    orthogonal to u, divided by the length of x. Only what is needed is computed.

    Attributes:
        x: (A, D), or None.
    """

    def __init__(self, vectors: _Vectors, needs: tuple[bool, ...], scale: float | Tensor):
        self.vectors, self.scale = vectors, scale
        self.needs_x, self.needs_y, self.needs_scale = needs[:3]
        self.x = torch.empty_like(vectors.x) if self.needs_x else None
        self.y = torch.zeros_like(vectors.y) if self.needs_y else None
        self.products: Any = None  # sum of all similarities times their gradients

    def add(self, rows: slice, weights: Tensor) -> None:
        """Add the gradient of a block of similarities, which is changed."""
        x_units, y_norms = self.vectors.x_units(rows), self.vectors.y_norms
        if y_norms is not None:
            weights.div_(y_norms.T)
        if self.needs_x or self.needs_scale:
            of_units = torch.mm(weights, self.vectors.y, out=None if self.x is None else self.x[rows])
            if self.needs_scale:
                products = (of_units * x_units).sum()
                self.products = products if self.products is None else self.products + products
            if self.x is not None:
                _across(of_units, x_units, None if self.vectors.x_norms is None else self.vectors.x_norms[rows])
        if self.y is not None:
            self.y.addmm_(weights.T, x_units)

    def of_y(self) -> Tensor | None:
        """Return the gradient of y, which is divided by its lengths already, after the last block."""
        norms = self.vectors.y_norms
        if self.y is None or norms is None:
            return self.y
        along = (self.y * self.vectors.y).sum(dim=1, keepdim=True).div_(norms.square())
        return self.y.addcmul_(self.vectors.y, along, value=-1)

    def of_scale(self, values: Tensor, grad: Tensor) -> Tensor | None:
        """Return the gradient of the scale: through all similarities, less the derivative of 1 / scale."""
        if not self.needs_scale:
            return None
        products = 0 if self.products is None else self.products / self.scale
        finite = values.clamp(min=torch.finfo(values.dtype).min)
        return products - (finite * grad).sum() / self.scale**2


class _PairSimilarities(torch.autograd.Function):
    """Known similarities of M pairs, whose gradient does not copy the vectors of each pair."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _, _, units, pairs, numbers, values = arguments
        vectors_and_norms = [tensor for tensor in units if tensor is not None]
        ctx.save_for_backward(pairs.rows, pairs.columns, numbers, *vectors_and_norms)
        return values

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        rows, columns, numbers, x_units, y_units, *norms = ctx.saved_tensors
        x_norms, y_norms = norms or (None, None)
        x_grad = y_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _weighted_sums(numbers[: len(x_units)], rows, columns, y_units, grad)
            _across(x_grad, x_units, x_norms)
        if ctx.needs_input_grad[1]:
            y_grad = _weighted_sums(numbers[: len(y_units)], columns, rows, x_units, grad)
            _across(y_grad, y_units, y_norms)
        return x_grad, y_grad, None, None, None, None


def _weighted_sums(items: Tensor, owners: Tensor, others: Tensor, vectors: Tensor, weights: Tensor) -> Tensor:
    """Return for each of N items the weighted sum of the vectors of its pairs, (N, D).

    Args:
        items: 0 to N - 1.
        owners, others: (M,), the item of each pair, and the place of the other one in ``vectors``.
        vectors, weights: (C, D) and (M,).
    """
    owners, order = owners.sort(stable=True)
    starts = torch.searchsorted(owners, items)
    return embedding_bag(others[order], vectors, starts, mode="sum", per_sample_weights=weights[order])


def _across(gradient: Tensor, units: Tensor, norms: Tensor | None) -> Tensor:
    """Turn the gradient of unit vectors into that of the vectors, in place."""
    if norms is None:
        return gradient
    return gradient.addcmul_(units, (gradient * units).sum(dim=1, keepdim=True), value=-1).div_(norms)


def _norms(vectors: Tensor) -> Tensor:
    """Return the norm of each vector, (N, 1); infinity for a zero vector, so that it and its gradient stay zero."""
    return threshold(torch.linalg.vector_norm(vectors, dim=1, keepdim=True), LEAST_NORM, torch.inf)
