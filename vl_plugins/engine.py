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

The three products may be of bfloat16 or float16, added up in float32. A product of two such numbers fits into float32,
so S is exact if the vectors are multiplied as they are, and divided by their norms afterwards. W alone is rounded.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from vl_plugins.errors import reason
from vl_plugins.numerics import HALF, fill_at, full_precision, is_autocast_enabled

__all__ = [
    "LEAST_NORM",
    "MATRIX_BYTES",
    "Comparison",
    "KnownPositives",
    "Maxima",
    "Pairs",
    "UnitVectors",
    "block_rows",
    "label_pairs",
    "matrix_maximum",
    "maxima",
    "numbers_of_pairs",
    "product",
    "similarities_of",
    "unit_vectors",
    "without_autocast",
]

# Similarities of a block: on the CPU they should stay in the cache; elsewhere fewer, larger steps are faster.
CPU_BLOCK = 2**20
DEVICE_BLOCK = 2**24
FEW = 2**16  # up to this many pairs are compared at once
MATRIX_BYTES = 2**30  # a larger matrix is computed twice rather than kept
LEAST_NORM = 1e-12  # as in torch's normalize; here a shorter vector has no gradient, and in a set it is padding
# On a GPU, the element-wise part of blocks of so many similarities is compiled, after so many blocks: compilation
# takes longer than a short run.
COMPILE_ON = ("cuda",)
COMPILE_FROM = 2**24
COMPILE_AFTER = 200
HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # torch 2.8 and later


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


def label_pairs(labels: Tensor, ref_labels: Tensor) -> Pairs:
    """Return all pairs of equal labels, sorted by row, then by column. Synchronizes the GPU.

    Args:
        labels, ref_labels: (A,) and (C,), on one device.
    """
    if labels.shape[0] * ref_labels.shape[0] <= FEW:
        rows, columns = (labels[:, None] == ref_labels).nonzero(as_tuple=True)
        return Pairs(rows, columns)
    # The positives of a row are a range of the sorted columns.
    dtype = torch.promote_types(labels.dtype, ref_labels.dtype)
    sorted_labels, order = ref_labels.to(dtype).sort(stable=True)
    labels = labels.to(dtype)
    first = torch.searchsorted(sorted_labels, labels)
    counts = torch.searchsorted(sorted_labels, labels, right=True) - first
    rows = torch.repeat_interleave(counts)
    rank = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return Pairs(rows, order[first[rows] + rank])


def numbers_of_pairs(numbers: dict[str, Tensor], places: Tensor | slice) -> dict[str, Tensor]:
    """Return the numbers at some places, such as those of columns at the column of each pair."""
    of_pairs = {}
    for name, values in numbers.items():
        of_pairs[name] = values[places]
    return of_pairs


class KnownPositives(NamedTuple):
    """Which rows and columns share an id: rows have several ids each, columns one, or the other way around.

    Attributes:
        items, ids: (L,), an item of the side with several ids, and one of its ids.
        single_ids: (N,), the id of each item of the other side.
        number_of_ids: ids are 0 to this number - 1.
        items_are_rows: whether the side with several ids is the rows.
        first_row: the number of the first row of a block among the items; None for all rows.
    """

    items: Tensor
    ids: Tensor
    single_ids: Tensor
    number_of_ids: int
    items_are_rows: bool
    first_row: int | None = None

    @classmethod
    def of(cls, items: Tensor, ids: Tensor, single_ids: Tensor, items_are_rows: bool) -> "KnownPositives":
        """Number the ids anew; negative ones are equal to none. Synchronizes the GPU."""
        both = torch.cat([ids.clamp(min=-1), torch.where(single_ids < 0, -2, single_ids)])
        values, places = both.unique(return_inverse=True)
        return cls(items, places[: len(ids)], places[len(ids) :], len(values), items_are_rows)

    def of_rows(self, rows: slice) -> "KnownPositives":
        """Return the same for a block of rows."""
        if self.items_are_rows:
            return self._replace(first_row=rows.start)
        return self._replace(single_ids=self.single_ids[rows])

    def mask(self, shape: Sequence[int]) -> Tensor:
        """Return a bool matrix that is True where a row and a column share an id."""
        rows, columns = shape
        if self.items_are_rows:
            # Which ids each row has; those of rows of other blocks go to one more row, which is not read.
            places = self.items
            if self.first_row is not None:
                places = places - self.first_row
                places = torch.where((places >= 0) & (places < rows), places, rows)
            has_id = Pairs(places, self.ids).mask((rows + 1, self.number_of_ids))
            return has_id[:rows, self.single_ids]
        # Rows of one id stand for each other: the mask is made for one of them, and copied to the others.
        representative = self.single_ids.new_full((self.number_of_ids,), rows)
        representative[self.single_ids] = torch.arange(rows, device=self.single_ids.device)
        mask = Pairs(representative[self.ids], self.items).mask((rows + 1, columns))
        return mask[representative[self.single_ids]]


class Comparison(NamedTuple):
    """Anchors, their candidates, and which pairs of them are positive or no negatives.

    Attributes:
        anchors, candidates: (A, D) and (C, D); None in what is kept for a backward pass.
        positives: M pairs.
        anchor_columns: the first so many candidates are also anchors, in the same matrix; 0 for none.
        copies: (A,), a candidate that is each anchor's own copy, with which it is not compared; or None.
        known_positives: further pairs that are no negatives, or None.
        all_have_negatives: whether that is certain of every anchor.
        numbers: (M,) by name, such as the margin of each positive pair.
    """

    anchors: Any
    candidates: Any
    positives: Pairs
    anchor_columns: int = 0
    copies: Tensor | None = None
    known_positives: KnownPositives | None = None
    all_have_negatives: bool = False
    numbers: dict[str, Tensor] = {}  # noqa: RUF012 (nothing is added to it)

    def masks(self) -> tuple[Tensor, Tensor]:
        """Return which pairs are positive and which are negative, (A, C) each."""
        shape = self.anchors.shape[0], self.candidates.shape[0]
        positive_mask = self.positives.mask(shape)
        negative_mask = ~positive_mask
        if self.copies is not None:
            fill_at(negative_mask, (torch.arange(shape[0], device=self.copies.device), self.copies), False)
        if self.known_positives is not None:
            negative_mask &= ~self.known_positives.mask(shape)
        return positive_mask, negative_mask

    def transposed(self) -> tuple["Comparison", Tensor]:
        """Return the columns that are anchors with the rows as candidates, and the order of the pairs."""
        columns, known_positives = self.anchor_columns, self.known_positives
        back, order = self.positives.transposed()
        numbers = numbers_of_pairs(self.numbers, order)
        if known_positives is not None:
            known_positives = known_positives._replace(
                items_are_rows=False, single_ids=known_positives.single_ids[:columns]
            )
        anchors = self.candidates[:columns]
        return Comparison(anchors, self.anchors, back, known_positives=known_positives, numbers=numbers), order

    def blocks(self) -> list[tuple[slice, "Comparison"]]:
        """Return the comparison in blocks of rows, each with the places of its rows.

        Synchronizes the GPU, unless there is only one block or each row has the same number of pairs.
        """
        pairs, total = self.positives, self.anchors.shape[0]
        step = block_rows(self.candidates.shape[0], self.anchors.device)
        if step >= total:
            return [(slice(0, total), self)]
        starts = [*range(0, total, step), total]
        if pairs.per_row is None:
            bounds = torch.searchsorted(pairs.rows, torch.tensor(starts, device=self.anchors.device)).tolist()
        else:
            bounds = [start * pairs.per_row for start in starts]
        blocks = []
        for number, start in enumerate(starts[:-1]):
            rows, places = slice(start, starts[number + 1]), slice(bounds[number], bounds[number + 1])
            block = self._replace(
                anchors=self.anchors[rows],
                positives=Pairs(pairs.rows[places] - start, pairs.columns[places], pairs.per_row),
                numbers=numbers_of_pairs(self.numbers, places),
            )
            if self.copies is not None:
                block = block._replace(copies=self.copies[rows])
            if self.known_positives is not None:
                block = block._replace(known_positives=self.known_positives.of_rows(rows))
            blocks.append((rows, block))
        return blocks

    def take_out(self, similarities: Tensor) -> Tensor:
        """Return the positives' entries of a matrix, and set those of all that are no negatives to -inf."""
        positives = self.positives.rows, self.positives.columns
        of_positives = similarities[positives]
        fill_at(similarities, positives, -torch.inf)
        if self.copies is not None:
            rows = torch.arange(similarities.shape[0], device=similarities.device)
            fill_at(similarities, (rows, self.copies), -torch.inf)
        if self.known_positives is not None:
            similarities.masked_fill_(self.known_positives.mask(similarities.shape), -torch.inf)
        return of_positives


def block_rows(size: int, device: torch.device, least: int = 32) -> int:
    """Return the number of rows in a block, for rows of ``size`` numbers; products of fewer than ``least`` are slow."""
    return max(least, (CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK) // max(1, size))


# Products and similarities


def multiply(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``x @ y``; of bfloat16 and float16 in float32, without rounding the products."""
    if x.dtype not in HALF:
        return torch.mm(x, y, out=out)
    if not (x.is_cuda and HAS_OUT_DTYPE):
        return torch.mm(x.float(), y.float(), out=out)
    products = torch.mm(x, y, out_dtype=torch.float32)
    return products if out is None else out.copy_(products)


class _Product(torch.autograd.Function):
    """``x @ y.mT``, whose gradients are products of the same kind, also where the caller runs them under autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.dtype = dtype
        with torch.autocast(x.device.type, enabled=False):
            if dtype is None:
                return x @ y.mT
            unit = _power_of_two(x)
            return multiply((x / unit).to(dtype), y.to(dtype).mT).mul_(unit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, y = ctx.saved_tensors
        x_grad = y_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = product(grad, y.mT, ctx.dtype)
        if ctx.needs_input_grad[1]:
            y_grad = product(grad.mT, x.mT, ctx.dtype)
        return x_grad, y_grad, None


def product(x: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x @ y.mT`` in the type of ``x``, or of float16 or bfloat16; differentiable any number of times."""
    result: Tensor = _Product.apply(x, y, dtype)
    return result


class _WithoutAutocast(torch.autograd.Function):
    """A function of two tensors, whose gradients are computed in full precision, whatever the caller's autocast."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.function, ctx.is_one = function, x is y
        with torch.enable_grad():
            ctx.leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
            if ctx.is_one:
                ctx.leaves = ctx.leaves[0], ctx.leaves[0]
            ctx.result = function(*ctx.leaves)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, result, is_differentiated = ctx.leaves, ctx.result, torch.is_grad_enabled()
        with torch.autocast(grads[0].device.type, enabled=False):
            if is_differentiated:  # with create_graph=True: again, from tensors that have a graph
                inputs = [side if side.requires_grad else side.detach().requires_grad_() for side in ctx.saved_tensors]
                if ctx.is_one:
                    inputs = [inputs[0], inputs[0]]
                result = ctx.function(*inputs)
            sides = inputs[:1] if ctx.is_one else inputs
            x_grad, *y_grad = torch.autograd.grad(
                result, sides, grads[0], retain_graph=True, create_graph=is_differentiated
            )
        if ctx.is_one:
            return None, x_grad, None
        return None, x_grad, *y_grad


def without_autocast(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return ``function(x, y)``, whose gradients are those of full precision, also in a backward pass under autocast.

    For functions without parameters, such as the distances of pytorch-metric-learning, whose products torch would
    round there.
    """
    result: Tensor = _WithoutAutocast.apply(function, x, y)
    return result


class UnitVectors(torch.autograd.Function):
    """Vectors (..., D) divided by their norms, in fewer steps than torch's ``normalize``, and the norms (..., 1).

    Zero vectors stay zero, with zero gradients. The norms are constants: no gradient passes through them.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        units = vectors / torch.threshold(norms, LEAST_NORM, torch.inf)
        ctx.save_for_backward(vectors, units)
        ctx.mark_non_differentiable(norms)
        ctx.set_materialize_grads(False)
        return units, norms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        grad, _ = grads
        if grad is None:
            return None
        vectors, units = ctx.saved_tensors
        # The norms are computed again, for second derivatives.
        return torch.addcmul(grad, units, (grad * units).sum(-1, keepdim=True), value=-1) / _norms(vectors)


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return the vectors (N, D) with length 1; zero vectors stay zero, with zero gradients."""
    units, _ = UnitVectors.apply(vectors)
    return units


def similarities_of(x: Tensor, y: Tensor, normalize: bool, dtype: torch.dtype | None) -> Tensor:
    """Return the cosines or dot products (A, C) of vectors (A, D) and (C, D); differentiable any number of times.

    Args:
        dtype: of the products, bfloat16 or float16; None for that of the vectors.
    """
    if dtype is None:
        if normalize:
            x, y = unit_vectors(x), unit_vectors(y)
        return product(x, y)
    x, y = _rounded(x, dtype), _rounded(y, dtype)  # before their norms are taken
    products = product(x, y, dtype)
    return products / _norms(x) / _norms(y).T if normalize else products


def _rounded(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors as a half-precision type has them; their gradients are not rounded."""
    constants = vectors.detach()
    return vectors + (constants.to(dtype).to(vectors.dtype) - constants)


def _power_of_two(tensor: Tensor) -> Tensor:
    """Return the power of two above the largest entry, by which float16 neither overflows nor vanishes below 6e-8."""
    if tensor.numel() == 0:
        return tensor.new_ones(())
    largest = tensor.detach().abs().amax().clamp(min=torch.finfo(tensor.dtype).tiny)
    mantissa, _ = torch.frexp(largest)
    return largest / mantissa


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


def _norms(vectors: Tensor) -> Tensor:
    """Return the norm of each vector, (..., 1); infinity for a zero vector, so that it and its gradient stay zero."""
    dtype = torch.float32 if vectors.dtype in HALF else None
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=dtype)
    return torch.threshold(norms, LEAST_NORM, torch.inf)


class _Vectors(NamedTuple):
    """The two sides of a product, as they are multiplied, and the norms by which it is divided; None for none."""

    x: Tensor
    y: Tensor
    x_norms: Tensor | None
    y_norms: Tensor | None

    @classmethod
    def of(cls, x: Tensor, y: Tensor, normalize: bool, dtype: torch.dtype | None) -> "_Vectors":
        if dtype is not None:
            x, y = x.to(dtype), y.to(dtype)
        if not normalize:
            return cls(x, y, None, None)
        return cls(x, y, _norms(x), _norms(y))

    def units(self) -> "_Vectors":
        """Return all vectors divided by their norms, in float32 at least."""
        x, y = full_precision(self.x, self.y)
        if self.x_norms is None or self.y_norms is None:
            return self._replace(x=x, y=y)
        return self._replace(x=x / self.x_norms, y=y / self.y_norms)

    def scaled_similarities(self, rows: slice, scale: float | Tensor) -> Tensor:
        """Return the similarities of a block of rows, times the scale."""
        x = self.x[rows]
        if self.x_norms is None or self.y_norms is None:
            return multiply(x, self.y.T).mul_(scale)
        lengths = self.x_norms[rows] / scale
        if x.dtype in HALF:
            products = multiply(x, self.y.T).div_(lengths)
        else:
            products = (x / lengths) @ self.y.T
        return products.div_(self.y_norms.T)


class Maxima(NamedTuple):
    """What is known of the pairs of a batch.

    Attributes:
        positive: (M,), the similarities of the positive pairs.
        of_anchors: the (soft) maximum of each anchor's negatives, first of the A rows, (A,), then of the columns that
            are anchors too; -inf for an anchor without negatives.
    """

    positive: Tensor
    of_anchors: Tensor

    def of_pairs(self, comparison: Comparison) -> Tensor:
        """Return the maximum of each pair's row, (M,), and then those of its column, (2 M,), if columns are anchors."""
        pairs, anchors = comparison.positives, comparison.anchors.shape[0]
        if comparison.anchor_columns == 0:
            return self.of_anchors[pairs.rows]
        return self.of_anchors[torch.cat([pairs.rows, pairs.columns + anchors])]


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
        device = grads[0].device.type
        if not is_autocast_enabled(device):
            return backward(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return checked


def maxima(
    comparison: Comparison,
    scale: float | Tensor | None,
    normalize: bool,
    dtype: torch.dtype | None,
    tiled: bool,
) -> Maxima:
    """Return the similarities of the positive pairs, and the (soft) maximum of each anchor's negatives.

    The result can be differentiated only once.

    Args:
        comparison: vectors of one type, float32 or float64.
        scale: see :func:`matrix_maximum`; a number, a 0-D tensor, which receives a gradient, or None for the maximum.
        normalize: compare by cosine; otherwise by dot product.
        dtype: of the products, bfloat16 or float16; None for that of the vectors.
        tiled: for a soft maximum, compute each block again for the gradients, instead of keeping the matrix (A, C).
    """
    if scale is None:
        values = _maxima(comparison, normalize, dtype)
    else:
        x, y = comparison.anchors, comparison.candidates
        values = _SoftMaxima.apply(x, y, scale, comparison, normalize, dtype, tiled)
    pairs = comparison.positives.rows.shape[0]
    return Maxima(*values.split_with_sizes([pairs, values.shape[0] - pairs]))


# The soft maximum


class _SoftMaxima(torch.autograd.Function):
    """The similarities of positive pairs, and soft maxima by row and by column, one after the other."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, y, scale, comparison, normalize, dtype, tiled = arguments
        vectors = _Vectors.of(x, y, normalize, dtype)
        matrix: Any = None
        if not tiled:
            matrix = vectors.scaled_similarities(slice(None), scale)
        positive, of_rows = [], []
        of_columns: Any = None
        kept_blocks = []
        for rows, block in comparison.blocks():
            exponents = None  # frees that of the last block
            if matrix is None:
                exponents = vectors.scaled_similarities(rows, scale)
            else:
                exponents = matrix[rows]
            # In place: a matrix that is kept has -inf at all that are no negatives, for the backward pass too.
            positive.append(block.take_out(exponents))
            kept_blocks.append((rows, block._replace(anchors=None, candidates=None)))
            sums = _sums
            if exponents.numel() >= COMPILE_FROM:
                sums = _fused(_sums, exponents.device)
            row_sums, column_sums = sums(exponents, comparison.anchor_columns)
            of_rows.append(row_sums)
            if of_columns is None:
                of_columns = column_sums
            else:
                of_columns = torch.logaddexp(of_columns, column_sums)
        values = torch.cat([*positive, *of_rows, of_columns])
        ctx.save_for_backward(*vectors, values)
        # Without the vectors, which are saved above, and freed after the backward pass.
        ctx.blocks, ctx.all_have_negatives = kept_blocks, comparison.all_have_negatives
        ctx.sizes = comparison.positives.rows.shape[0], x.shape[0], comparison.anchor_columns
        ctx.matrix, ctx.scale = matrix, scale
        return values / scale

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        *sides, values = ctx.saved_tensors
        scale = ctx.scale
        gradient = _Gradient(_Vectors(*sides), ctx.needs_input_grad, grad)
        matrix, ctx.matrix = ctx.matrix, None  # overwritten here; a second backward pass computes it again
        if not ctx.all_have_negatives:  # or -inf minus itself is NaN
            values = values.clamp(min=torch.finfo(values.dtype).min)
        _, row_sums, column_sums = values.split_with_sizes(ctx.sizes)
        positive_grad, row_grad, column_grad = gradient.upstream.split_with_sizes(ctx.sizes)
        first_pair = 0
        for rows, block in ctx.blocks:
            weights = None  # frees those of the last block
            if matrix is None:
                weights = gradient.vectors.scaled_similarities(rows, scale)
                block.take_out(weights)
            else:
                weights = matrix[rows]
            to_weights = _to_weights
            if weights.numel() >= COMPILE_FROM:
                to_weights = _fused(_to_weights, weights.device)
            to_weights(weights, row_sums[rows], column_sums, row_grad[rows], column_grad)
            pairs = block.positives
            last_pair = first_pair + pairs.rows.shape[0]
            weights[pairs.rows, pairs.columns] = positive_grad[first_pair:last_pair]
            first_pair = last_pair
            gradient.add(rows, weights)
        matrix = weights = None  # before more is allocated
        x_grad, y_grad, products = gradient.finished()
        scale_grad = None
        if products is not None:  # through all similarities, less the derivative of 1 / scale
            scale_grad = (products - (values * grad).sum() / scale) / scale
        return x_grad, y_grad, scale_grad, None, None, None, None


def _sums(exponents: Tensor, anchor_columns: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row, and of the first columns."""
    return exponents.logsumexp(dim=1), exponents[:, :anchor_columns].logsumexp(dim=0)


def _to_weights(
    exponents: Tensor, row_sums: Tensor, column_sums: Tensor, row_grad: Tensor, column_grad: Tensor
) -> None:
    """Turn a block of exponents into the gradient of its similarities, still without the positives, in place."""
    anchors = exponents[:, : column_sums.shape[0]]
    by_column = (anchors - column_sums).exp_()
    exponents.sub_(row_sums[:, None]).exp_().mul_(row_grad[:, None])
    anchors.addcmul_(by_column, column_grad)


def _fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function of a large block, compiled where many of them come on a GPU."""
    if device.type not in COMPILE_ON:
        return function
    _large_blocks[function] += 1
    if _large_blocks[function] <= COMPILE_AFTER:
        return function
    return _compiled(function)


_large_blocks: Counter[Callable[..., Any]] = Counter()


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function, or the function itself if torch cannot compile here, as without a C compiler."""
    compiled = torch.compile(function, dynamic=True)
    failures: list[Exception] = []

    def run(*arguments: Any) -> Any:
        if not failures:
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:  # before anything is computed
                failures.append(error)
                warnings.warn(f"the losses are not compiled: {reason(error)}", stacklevel=2)
        return function(*arguments)

    return run


class _Gradient:
    """The gradients of vectors and scale, added up over blocks of the gradient W of their similarities.

    W is divided by the lengths of both vectors, so that it is multiplied with the vectors as they are. What is left of
    the gradient of x is the part orthogonal to x. Only what is needed is computed.

    In half precision W is rounded, and in units of nearly its largest entry: float16 has no numbers below 6e-8.

    Attributes:
        upstream: the gradient of the result, in the unit of W.
    """

    def __init__(self, vectors: _Vectors, needs: Sequence[bool], upstream: Tensor):
        self.vectors, self.upstream = vectors, upstream
        self.needs_x, self.needs_y, self.needs_scale = needs[:3]
        self.unit: Any = None
        if vectors.x.dtype in HALF:
            self.unit = _power_of_two(upstream)
            if vectors.x_norms is not None and vectors.y_norms is not None:
                self.unit = self.unit / (vectors.x_norms.amin() * vectors.y_norms.amin())
            self.upstream = upstream / self.unit
        self.x: Any = None
        self.y: Any = None

    def add(self, rows: slice, weights: Tensor) -> None:
        """Add the gradient of a block of similarities, which is changed."""
        x, y, x_norms, y_norms = self.vectors
        if x_norms is not None and y_norms is not None:
            weights.div_(y_norms.T).div_(x_norms[rows])
        weights = weights.to(x.dtype)
        if self.needs_x or self.needs_scale:
            if weights.shape[0] == x.shape[0]:
                self.x = multiply(weights, y)
            else:
                if self.x is None:
                    self.x = torch.empty_like(x, dtype=self.upstream.dtype)
                multiply(weights, y, out=self.x[rows])
        if self.needs_y and self.y is None:
            self.y = multiply(weights.T, x[rows])
        elif self.needs_y and x.dtype in HALF:
            self.y.add_(multiply(weights.T, x[rows]))
        elif self.needs_y:
            self.y.addmm_(weights.T, x[rows])

    def finished(self) -> tuple[Any, Any, Any]:
        """Return the gradients of both sides, and the sum of all similarities times their gradients; None if unused."""
        x, y, x_norms, y_norms = self.vectors
        products = None
        for gradient in (self.x, self.y):
            if self.unit is not None and gradient is not None:
                gradient.mul_(self.unit)
        if self.needs_scale:
            products = (self.x * x).sum()
        if not self.needs_x:
            self.x = None
        elif x_norms is not None:
            _remove_radial(self.x, x, x_norms)
        if self.needs_y and y_norms is not None:
            _remove_radial(self.y, y, y_norms)
        return self.x, self.y, products


def _remove_radial(gradient: Tensor, vectors: Tensor, norms: Tensor) -> None:
    """Leave of a gradient the part that is orthogonal to vectors, in place and without a copy of their units."""
    vectors = vectors.to(gradient.dtype)
    along = (gradient * vectors).sum(dim=1, keepdim=True).div_(norms.square())
    gradient.addcmul_(vectors, along, value=-1)


def _to_tangent(gradient: Tensor, units: Tensor) -> Tensor:
    """Leave of a gradient the part that is orthogonal to unit vectors, in place."""
    return gradient.addcmul_(units, (gradient * units).sum(dim=1, keepdim=True), value=-1)


# The maximum


def _maxima(comparison: Comparison, normalize: bool, dtype: torch.dtype | None) -> Tensor:
    """Return the similarities of the positive pairs, then the maximum similarity of each anchor's negatives.

    No matrix is kept. If several negatives tie, only one receives a gradient.
    """
    x, y = comparison.anchors, comparison.candidates
    rows, columns = x.shape[0], comparison.anchor_columns
    positive, of_rows, row_places = [], [], []
    of_columns = _ColumnMaxima()
    with torch.no_grad():
        vectors = _Vectors.of(x, y, normalize, dtype)
        units = vectors.units()
        for rows_of_block, block in comparison.blocks():
            if dtype is None:
                products = units.x[rows_of_block] @ units.y.T
            else:
                products = vectors.scaled_similarities(rows_of_block, 1.0)
            positive.append(block.take_out(products))
            values, places = products.max(dim=1)
            of_rows.append(values)
            row_places.append(places)
            if columns > 0:
                of_columns.add(products[:, :columns], rows_of_block.start)
        # The pairs whose similarities are returned: the positive ones, and each anchor with its hardest negative.
        numbers = torch.arange(max(rows, y.shape[0]), device=x.device)
        pair_rows = [comparison.positives.rows, numbers[:rows]]
        pair_columns = [comparison.positives.columns, *row_places]
        similarities = [*positive, *of_rows]
        if columns > 0:
            pair_rows.append(of_columns.places)
            pair_columns.append(numbers[:columns])
            similarities.append(of_columns.values)
        pairs = Pairs(torch.cat(pair_rows), torch.cat(pair_columns))
    result: Tensor = _PairSimilarities.apply(x, y, units, pairs, numbers, torch.cat(similarities))
    return result


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


class _PairSimilarities(torch.autograd.Function):
    """Known similarities of M pairs, whose gradient does not copy the vectors of each pair."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _, _, units, pairs, numbers, values = arguments
        ctx.save_for_backward(pairs.rows, pairs.columns, numbers, *units)
        return values

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        rows, columns, numbers, x_units, y_units, x_norms, y_norms = ctx.saved_tensors
        x_grad = y_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _weighted_sums(numbers[: x_units.shape[0]], rows, columns, y_units, grad)
            if x_norms is not None:
                _to_tangent(x_grad, x_units).div_(x_norms)
        if ctx.needs_input_grad[1]:
            y_grad = _weighted_sums(numbers[: y_units.shape[0]], columns, rows, x_units, grad)
            if y_norms is not None:
                _to_tangent(y_grad, y_units).div_(y_norms)
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
