"""Similarities of sets of embeddings, from the cosines of all pairs of elements of two sets."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.norms import inverse_norms, unit_vectors
from vl_plugins.functional.precision import full_precision
from vl_plugins.kernels.tiles import slices
from vl_plugins.utils.eager import eager

__all__ = [
    "chamfer_similarity",
    "check_sets",
    "match_probability",
    "mil_similarity",
    "refuse_second_derivatives",
    "smooth_chamfer_similarity",
]

# Cosines that are in memory at once. On the CPU they should stay in its cache; elsewhere fewer, larger steps count.
CPU_TILE = 2**19
DEVICE_TILE = 2**24

# A product of fewer rows is slow.
LEAST_ROWS = 64

# The largest x for which sums of exp(x), exp(-x) and their inverses are far from the limits of float32.
SAFE_EXPONENT = 40


def smooth_chamfer_similarity(
    x: Tensor,
    y: Tensor,
    alpha: float = 16.0,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Smooth-Chamfer similarity of sets (Eq. 6-7).

    With the cosines :math:`c(x, y)` of two sets' elements and :math:`\mathrm{LSE}`, the logarithm of the sum of the
    exponentials:

    .. math:: s = \frac{1}{2 \alpha |X|} \sum_{x \in X} \mathrm{LSE}_{y \in Y} (\alpha c(x, y))
              + \frac{1}{2 \alpha |Y|} \sum_{y \in Y} \mathrm{LSE}_{x \in X} (\alpha c(x, y))

    Its derivative by a cosine (Eq. 8) is the sum of two softmaxes, so that every pair of elements learns, the closest
    ones most:

    .. math:: \frac{\partial s}{\partial c(x', y')} =
              \frac{1}{2 |X|} \frac{e^{\alpha c(x', y')}}{\sum_{y \in Y} e^{\alpha c(x', y)}}
              + \frac{1}{2 |Y|} \frac{e^{\alpha c(x', y')}}{\sum_{x \in X} e^{\alpha c(x, y')}}

    Sets of one element each have their cosine as similarity. :func:`chamfer_similarity` is the limit of a large alpha,
    and less by at most :math:`\log(\max(K_1, K_2)) / \alpha`.

    The cosines are computed tile by tile, and again where the derivatives need them, so that memory beside the inputs,
    their gradients and the result is that of a few tiles. There are no second derivatives.

    Args:
        x: (A, K1, D), sets of elements.
        y: (C, K2, D).
        alpha: inverse temperature, > 0.
        x_mask: (A, K1), bool: the elements that are in the set. All of them if left out.
        y_mask: (C, K2), bool.
        normalize: elements are L2-normalised first; False for unit vectors. A vector of norm below 1e-12 has the cosine
            0 to any other, and no gradient.
        paired: compare each set of x only with the one at its place in y; A and C are equal.

    Returns:
        (A, C), or (A,) if ``paired``, float32 or float64, also under autocast. A set without elements has the
        similarity 0, and no gradient. NaN or infinity in an element gives NaN, unless it is not in its set.

    Raises:
        ValueError: wrong shape, type or device, or alpha out of its range.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> texts = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [1.0, 0.0]]])
    >>> smooth_chamfer_similarity(images, texts)
    tensor([[1.0000, 0.7717]])
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be > 0, got {alpha!r}")
    return _pooled(partial(smooth_chamfer_pooling, alpha=alpha), x, y, x_mask, y_mask, normalize, paired)


def chamfer_similarity(
    x: Tensor,
    y: Tensor,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Chamfer similarity of sets: each element and the closest of the other set.

    .. math:: s = \frac{1}{2 |X|} \sum_{x \in X} \max_{y \in Y} c(x, y)
              + \frac{1}{2 |Y|} \sum_{y \in Y} \max_{x \in X} c(x, y)

    Equally close elements share the gradient.

    Args:
        x, y, x_mask, y_mask, normalize, paired: see :func:`smooth_chamfer_similarity`.

    Returns:
        (A, C) or (A,), as :func:`smooth_chamfer_similarity`.

    Raises:
        ValueError: wrong shape, type or device.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.3.

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> chamfer_similarity(images, torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[0.7500]])
    """
    return _pooled(chamfer_pooling, x, y, x_mask, y_mask, normalize, paired)


def mil_similarity(
    x: Tensor,
    y: Tensor,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Similarity of multiple-instance learning: that of the closest pair of elements.

    .. math:: s = \max_{x \in X, y \in Y} c(x, y)

    Equally close pairs share the gradient.

    Args:
        x, y, x_mask, y_mask, normalize, paired: see :func:`smooth_chamfer_similarity`.

    Returns:
        (A, C) or (A,), as :func:`smooth_chamfer_similarity`.

    Raises:
        ValueError: wrong shape, type or device.

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval (PVSE).

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> mil_similarity(images, torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[1.]])
    """
    return _pooled(mil_pooling, x, y, x_mask, y_mask, normalize, paired)


def match_probability(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor = 1.0,
    shift: float | Tensor = 0.0,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Match probability of sets: the mean probability that two of their elements match, [0, 1].

    .. math:: s = \frac{1}{|X| |Y|} \sum_{x \in X, y \in Y} \sigma(a c(x, y) + b)

    Args:
        x, y, x_mask, y_mask, normalize, paired: see :func:`smooth_chamfer_similarity`.
        scale: a; a number, or a tensor of one element, which receives a gradient.
        shift: b, likewise.

    Returns:
        (A, C) or (A,), as :func:`smooth_chamfer_similarity`.

    Raises:
        ValueError: wrong shape, type or device.

    Reference:
        Chun et al. 2021, Probabilistic Embeddings for Cross-Modal Retrieval (PCME).

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> match_probability(images, torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), scale=2.0)
    tensor([[0.6904]])
    """
    parameters = _one_number("scale", scale), _one_number("shift", shift)
    return _pooled(match_pooling, x, y, x_mask, y_mask, normalize, paired, *parameters)


class Elements(NamedTuple):
    """Which elements the sets of a tile's rows have, (a, K1, 1, 1), or those of its columns, (1, 1, K2, c)."""

    weights: float | Tensor
    """1 / number of elements of the set; 0 for one that is not in the set."""

    absent: Tensor | None = None
    """Bool, those that are not in the set; None where all are."""


# A pooling makes similarities (a, c) of the cosines (a, K1, K2, c) of a tile, and if wanted their derivatives by its
# parameters, (a, c) each; the cosines are overwritten, then by the derivatives. Derived by hand, and in place: autograd
# would keep several such tensors, and to allocate one takes as long as to compute it. The candidates lie side by side
# because a sum over a last dimension of a few elements is slow.


def smooth_chamfer_pooling(
    cosines: Tensor, scratch: Tensor, x: Elements, y: Elements, alpha: float, *, derivatives: bool
) -> tuple[Tensor, ...]:
    logits = _without_absent(cosines.mul_(alpha), x, y)
    # Both sums with the same exponentials, where none can overflow. Other devices would have to wait for the answer.
    if logits.device.type == "cpu" and all(limit.abs() <= SAFE_EXPONENT for limit in logits.aminmax()):
        powers = logits.exp_()
        sums_by_y, sums_by_x = powers.sum(2, keepdim=True), powers.sum(1, keepdim=True)  # (a, K1, 1, c), (a, 1, K2, c)
        values = _mean(sums_by_y.log(), x).add_(_mean(sums_by_x.log(), y)).div_(2 * alpha)
        if derivatives:
            sums_by_y.reciprocal_().mul_(x.weights / 2)
            powers.mul_(torch.add(sums_by_y, sums_by_x.reciprocal_().mul_(y.weights / 2), out=scratch))
        return (values,)
    largest_by_y, largest_by_x = logits.amax(2, keepdim=True), logits.amax(1, keepdim=True)
    by_y = torch.sub(logits, largest_by_y, out=scratch).exp_()
    by_x = logits.sub_(largest_by_x).exp_()
    sums_by_y, sums_by_x = by_y.sum(2, keepdim=True), by_x.sum(1, keepdim=True)
    values = _mean(largest_by_y.add_(sums_by_y.log()), x)
    values.add_(_mean(largest_by_x.add_(sums_by_x.log()), y)).div_(2 * alpha)
    if derivatives:
        by_x.mul_(sums_by_x.reciprocal_().mul_(y.weights / 2))
        by_x.addcmul_(by_y, sums_by_y.reciprocal_().mul_(x.weights / 2))
        _zero_absent(by_x, x, y)
    return (_zero_empty(values, x, y),)


def chamfer_pooling(
    cosines: Tensor, scratch: Tensor, x: Elements, y: Elements, *, derivatives: bool
) -> tuple[Tensor, ...]:
    cosines = _without_absent(cosines, x, y)
    largest_by_y, largest_by_x = cosines.amax(2, keepdim=True), cosines.amax(1, keepdim=True)
    if derivatives:
        by_y = torch.eq(cosines, largest_by_y, out=scratch)
        by_x = cosines.eq_(largest_by_x)
        # Of NaN none is the largest: 0 / 0.
        by_x.mul_(by_x.sum(1, keepdim=True).reciprocal_().mul_(y.weights / 2))
        by_x.addcmul_(by_y, by_y.sum(2, keepdim=True).reciprocal_().mul_(x.weights / 2))
        _zero_absent(by_x, x, y)
    values = _mean(largest_by_y, x).add_(_mean(largest_by_x, y)).div_(2)
    return (_zero_empty(values, x, y),)


def mil_pooling(cosines: Tensor, scratch: Tensor, x: Elements, y: Elements, *, derivatives: bool) -> tuple[Tensor, ...]:
    cosines = _without_absent(cosines, x, y)
    largest = cosines.amax((1, 2), keepdim=True)
    if derivatives:
        are_largest = cosines.eq_(largest)
        are_largest.mul_(are_largest.sum((1, 2), keepdim=True).reciprocal_())
        _zero_absent(are_largest, x, y)
    return (_zero_empty(largest[:, 0, 0], x, y),)


def match_pooling(
    cosines: Tensor, scratch: Tensor, x: Elements, y: Elements, scale: Tensor, shift: Tensor, *, derivatives: bool
) -> tuple[Tensor, ...]:
    values = _mean(torch.mul(cosines, scale, out=scratch).add_(shift).sigmoid_(), x, y)
    if not derivatives:
        return (values,)
    # p (1 - p) by the smaller of both: the difference of numbers near 1 would be inexact.
    by_shift = torch.mul(cosines, scale, out=scratch).add_(shift).abs_().neg_().sigmoid_()
    by_shift.addcmul_(by_shift, by_shift, value=-1)
    by_scale = _mean(cosines.mul_(by_shift), x, y)
    torch.mul(by_shift, scale, out=cosines).mul_(x.weights).mul_(y.weights)
    return values, by_scale, _mean(by_shift, x, y)


def _without_absent(numbers: Tensor, *sets: Elements) -> Tensor:
    for elements in sets:
        if elements.absent is not None:
            # Not -inf, whose differences would be NaN in a set without elements.
            numbers.masked_fill_(elements.absent, torch.finfo(numbers.dtype).min)
    return numbers


def _zero_absent(derivatives: Tensor, *sets: Elements) -> None:
    for elements in sets:
        if elements.absent is not None:
            derivatives.masked_fill_(elements.absent, 0)


def _zero_empty(values: Tensor, x: Elements, y: Elements) -> Tensor:
    if x.absent is not None:
        values.masked_fill_(x.absent.all(1)[:, 0], 0)
    if y.absent is not None:
        values.masked_fill_(y.absent.all(2)[0], 0)
    return values


def _mean(numbers: Tensor, *sets: Elements) -> Tensor:
    """Return the means over the elements of the sets, (a, c)."""
    factor = 1.0
    for elements in sets:
        if isinstance(elements.weights, Tensor):
            numbers = numbers * elements.weights
        else:
            factor *= elements.weights
    return numbers.sum((1, 2)).mul_(factor)


def _pooled(
    pooling: Callable,
    x: Tensor,
    y: Tensor,
    x_mask: Tensor | None,
    y_mask: Tensor | None,
    normalize: bool,
    paired: bool,
    *parameters: float | Tensor,
) -> Tensor:
    check_sets(x, y, x_mask, y_mask, paired)
    x, y = full_precision(x, y)
    # NaN times the weight 0 of an element that is not in its set would be NaN.
    x, y = (
        vectors if mask is None else vectors.masked_fill(~mask[:, :, None], 0)
        for vectors, mask in ((x, x_mask), (y, y_mask))
    )
    parameters = [torch.as_tensor(value, dtype=x.dtype, device=x.device) for value in parameters]
    if not torch.is_grad_enabled():
        x, y, *parameters = (tensor.detach() for tensor in (x, y, *parameters))
    pool = _pool_pairs if paired else _pool_all
    return eager()(pool, pooling, x, y, x_mask, y_mask, normalize, parameters)


def check_sets(x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None, paired: bool) -> None:
    """Raise ``ValueError`` unless shapes, types and devices are those of :func:`smooth_chamfer_similarity`."""
    if x.ndim != 3 or y.ndim != 3 or x.shape[2] != y.shape[2]:
        raise ValueError(
            f"x and y must have the shapes (A, K1, D) and (C, K2, D), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if paired and len(x) != len(y):
        raise ValueError(f"paired x and y must be equally many sets, got {tuple(x.shape)} and {tuple(y.shape)}")
    if x.device != y.device:
        raise ValueError(f"y must be on the device of x, {x.device}, got {y.device}")
    for name, mask, sets in (("x_mask", x_mask, x), ("y_mask", y_mask, y)):
        if mask is None:
            continue
        if mask.dtype != torch.bool or mask.shape != sets.shape[:2]:
            raise ValueError(
                f"{name} must be a bool tensor of shape {tuple(sets.shape[:2])}, "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        if mask.device != sets.device:
            raise ValueError(f"{name} must be on the device of {name[0]}, {sets.device}, got {mask.device}")


def _one_number(name: str, value: float | Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must have one element, got shape {tuple(value.shape)}")
    return value.reshape(())


def _pool_pairs(
    pooling: Callable,
    x: Tensor,
    y: Tensor,
    x_mask: Tensor | None,
    y_mask: Tensor | None,
    normalize: bool,
    parameters: Sequence[Tensor],
) -> Tensor:
    """Return (A,)."""
    if normalize:
        x, y = unit_vectors(x), unit_vectors(y)
    return _PooledPairs.apply(pooling, x, y, x_mask, y_mask, *parameters)


class _PooledPairs(torch.autograd.Function):
    """A pooling of the cosines of each set and the one at its place: a tile of one row, whose columns are the pairs."""

    @staticmethod
    def forward(ctx, pooling, x, y, x_mask, y_mask, *parameters):
        with torch.autocast(x.device.type, enabled=False):
            cosines = torch.einsum("nkd,nld->kln", x, y)[None].contiguous()  # (1, K1, K2, A)
        if cosines.numel() == 0:
            values, by_parameters = x.new_zeros(1, len(x)), []
        else:
            values, *by_parameters = pooling(
                cosines,
                torch.empty_like(cosines),
                _elements(x, x_mask, lambda numbers: numbers.T[None, :, None]),
                _elements(y, y_mask, lambda numbers: numbers.T[None, None]),
                *parameters,
                derivatives=any(ctx.needs_input_grad),
            )
        ctx.save_for_backward(x, y, cosines, *by_parameters)
        ctx.count = len(parameters)
        return values[0]

    @staticmethod
    def backward(ctx, upstream):
        refuse_second_derivatives()
        x, y, derivatives, *by_parameters = ctx.saved_tensors
        weights = derivatives[0] * upstream
        with torch.autocast(x.device.type, enabled=False):
            gradients = torch.einsum("kln,nld->nkd", weights, y), torch.einsum("kln,nkd->nld", weights, x)
        of_parameters = [(upstream * by_parameter).sum() for by_parameter in by_parameters]
        return None, *gradients, None, None, *(of_parameters or [None] * ctx.count)


def _pool_all(
    pooling: Callable,
    x: Tensor,
    y: Tensor,
    x_mask: Tensor | None,
    y_mask: Tensor | None,
    normalize: bool,
    parameters: Sequence[Tensor],
) -> Tensor:
    """Return (A, C)."""
    # All similarities are symmetric. The memory of the second side's gradient is of use, so let it be needed and large.
    if (x.requires_grad, x.numel()) > (y.requires_grad, y.numel()):
        return _PooledCosines.apply(pooling, y, x, y_mask, x_mask, normalize, *parameters).T
    return _PooledCosines.apply(pooling, x, y, x_mask, y_mask, normalize, *parameters)


class _PooledCosines(torch.autograd.Function):
    """A pooling of the cosines of all pairs of sets, tile by tile; if only one of x and y needs a gradient, it is y.

    A tile is computed forwards and, for its derivatives, again backwards, at the cost of a fourth matrix product beside
    three. Not so the tiles of the first rows, as many as there is room for: until backward the memory of y's gradient,
    which is therefore allocated forwards, holds their derivatives; those of some columns are read before the gradient
    of these columns is written. The narrower the vectors, the fewer rows fit, but the cheaper is that product.

    All products are written to memory that is there already, where autocast does not change their type.
    """

    @staticmethod
    def forward(ctx, pooling, x, y, x_mask, y_mask, normalize, *parameters):
        x, y = x.contiguous(), y.contiguous()
        factors = (inverse_norms(x), inverse_norms(y)) if normalize else (None, None)
        saved = x, y, *factors, x_mask, y_mask
        similarities = x.new_zeros(len(x), len(y))
        by_parameters = [torch.zeros_like(similarities) for _ in parameters if any(ctx.needs_input_grad[6:])]
        tiles = _Tiles(*saved)
        y_gradient = torch.empty_like(y) if ctx.needs_input_grad[2] and tiles.first_rows_fit else None
        for tile in tiles:
            lent = tiles.lent(y_gradient, tile)
            values, *of_parameters = pooling(
                *tiles.cosines(tile, lent),
                *tile.elements,
                *parameters,
                derivatives=lent is not None or bool(by_parameters),
            )
            similarities[tile.rows, tile.columns] = values
            for by_parameter, of_tile in zip(by_parameters, of_parameters, strict=False):
                by_parameter[tile.rows, tile.columns] = of_tile
        ctx.save_for_backward(*saved, *parameters, *by_parameters)
        ctx.pooling, ctx.count, ctx.y_gradient = pooling, len(parameters), y_gradient
        return similarities

    @staticmethod
    def backward(ctx, upstream):
        refuse_second_derivatives()  # they would need all that is not kept
        saved, numbers = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        parameters, by_parameters = numbers[: ctx.count], numbers[ctx.count :]
        x, y, *factors_of_sides = saved[:4]
        # Its memory is lent once: after retain_graph=True all tiles are computed again.
        lender, ctx.y_gradient = ctx.y_gradient, None
        x_gradient = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        y_gradient = torch.zeros_like(y) if ctx.needs_input_grad[2] and lender is None else lender
        if y_gradient is not None:
            tiles = _Tiles(*saved)
            for tile in tiles:
                derivatives = tiles.lent(lender, tile)
                if derivatives is None:
                    derivatives, scratch = tiles.cosines(tile)
                    ctx.pooling(derivatives, scratch, *tile.elements, *parameters, derivatives=True)
                tiles.add_gradients(tile, derivatives, upstream, x_gradient, y_gradient)
            for gradient, vectors, factors in zip((x_gradient, y_gradient), (x, y), factors_of_sides, strict=True):
                if gradient is not None and factors is not None:
                    _remove_radial_parts(gradient, vectors, factors, tiles.size // 8)
        of_parameters = [(upstream * by_parameter).sum() for by_parameter in by_parameters]
        return None, x_gradient, y_gradient, None, None, None, *(of_parameters or [None] * ctx.count)


def refuse_second_derivatives() -> None:
    """Raise ``RuntimeError`` in a backward pass with ``create_graph``."""
    # What torch has for it, once_differentiable, lets constants pass whose derivatives would be missed.
    if torch.is_grad_enabled():
        raise RuntimeError("similarities of sets have no second derivatives: leave out create_graph=True")


class _Tile(NamedTuple):
    rows: slice
    columns: slice
    shape: tuple[int, int, int, int]  # a, K1, K2, c
    elements: tuple[Elements, Elements]


class _Tiles:
    """All tiles of x and y, (A, K1, D) and (C, K2, D): of some columns all rows, then of the next columns."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        x_inverse_norms: Tensor | None,
        y_inverse_norms: Tensor | None,
        x_mask: Tensor | None,
        y_mask: Tensor | None,
    ):
        self.x, self.y = x, y
        self.x_inverse_norms, self.y_inverse_norms = x_inverse_norms, y_inverse_norms
        self.x_elements = _elements(x, x_mask, lambda numbers: numbers[:, :, None, None])
        self.y_elements = _elements(y, y_mask, lambda numbers: numbers.T.contiguous()[None, None])
        (rows, k1, width), (columns, k2, _) = x.shape, y.shape
        self.empty = 0 in (rows, k1, k2, columns)
        if self.empty:
            self.first_rows_fit, self.size = False, 0
            return
        most = max(1, (CPU_TILE if x.device.type == "cpu" else DEVICE_TILE) // (k1 * k2))
        self.rows = min(rows, most, max(width // k1, LEAST_ROWS))
        self.columns = min(columns, most // self.rows)
        if self.columns > 16:
            self.columns -= self.columns % 16  # other widths make slower products
        self.size = self.rows * k1 * k2 * self.columns
        self.first_rows_fit = self.rows * k1 <= width
        self.products = x.new_empty(self.size)
        self.memory = None

    def __iter__(self) -> Iterator[_Tile]:
        if self.empty:
            return
        for columns in slices(len(self.y), self.columns):
            y_elements = _part(self.y_elements, 3, columns)
            for rows in slices(len(self.x), self.rows):
                shape = (_length(rows), self.x.shape[1], self.y.shape[1], _length(columns))
                yield _Tile(rows, columns, shape, (_part(self.x_elements, 0, rows), y_elements))

    def lent(self, y_gradient: Tensor | None, tile: _Tile) -> Tensor | None:
        """Return a tensor (a, K1, K2, c) in the memory of the columns' gradient, for a tile of the first rows."""
        if y_gradient is None or tile.rows.start > 0:
            return None
        return _within(y_gradient[tile.columns].view(-1), tile.shape)

    def cosines(self, tile: _Tile, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the cosines (a, K1, K2, c), and scratch memory of that shape."""
        if out is None:
            if self.memory is None:
                self.memory = torch.empty_like(self.products)
            out = _within(self.memory, tile.shape)
        a, k1, k2, c = tile.shape
        products = _within(self.products, (a * k1, c * k2))
        torch.mm(self.x[tile.rows].view(a * k1, -1), self.y[tile.columns].view(c * k2, -1).T, out=products)
        self._divide_by_norms(products, tile)
        out.copy_(products.view(a, k1, c, k2).transpose(2, 3))
        return out, products.view(tile.shape)

    def add_gradients(
        self, tile: _Tile, derivatives: Tensor, upstream: Tensor, x_gradient: Tensor | None, y_gradient: Tensor
    ) -> None:
        """Add the gradients by x and y, before normalization; the first rows overwrite what y's memory held."""
        a, k1, k2, c = tile.shape
        weights = _within(self.products, (a * k1, c * k2))
        upstream = upstream[tile.rows, tile.columns].contiguous()[:, None]  # (a, 1, c)
        for k in range(k2):
            torch.mul(derivatives[:, :, k], upstream, out=weights.view(a, k1, c, k2)[..., k])
        self._divide_by_norms(weights, tile)
        x, y = self.x[tile.rows].view(a * k1, -1), self.y[tile.columns].view(c * k2, -1)
        if x_gradient is not None:
            x_gradient[tile.rows].view_as(x).addmm_(weights, y)
        y_gradient[tile.columns].view_as(y).addmm_(weights.T, x, beta=int(tile.rows.start > 0))

    def _divide_by_norms(self, products: Tensor, tile: _Tile) -> None:
        if self.x_inverse_norms is not None:
            products.mul_(self.x_inverse_norms[tile.rows].view(-1, 1))
            products.mul_(self.y_inverse_norms[tile.columns].view(-1))


def _within(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)


def _length(part: slice) -> int:
    return part.stop - part.start


def _part(elements: Elements, dimension: int, part: slice) -> Elements:
    if elements.absent is None:
        return elements
    return Elements(*(numbers.narrow(dimension, part.start, _length(part)) for numbers in elements))


def _elements(sets: Tensor, mask: Tensor | None, layout: Callable[[Tensor], Tensor]) -> Elements:
    if mask is None:
        return Elements(1 / max(1, sets.shape[1]))
    weights = mask.to(sets.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
    return Elements(layout(weights), layout(~mask))


def _remove_radial_parts(gradient: Tensor, sets: Tensor, inverse_norms: Tensor, most: int) -> None:
    """Subtract in place what would change the lengths of the vectors, a few sets at a time."""
    for part in slices(len(sets), max(1, most // max(1, math.prod(sets.shape[1:])))):
        vectors, of_vectors = sets[part], gradient[part]
        radial = (vectors * of_vectors).sum(2).mul_(inverse_norms[part].square())
        of_vectors.addcmul_(vectors, radial[:, :, None], value=-1)
