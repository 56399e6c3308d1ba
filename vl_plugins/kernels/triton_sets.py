"""Smooth-Chamfer similarities of sets on a CUDA GPU, pooled where the cosines of their elements are computed.

The formulas are those of :func:`vl_plugins.functional.smooth_chamfer_similarity`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.functional.sets import element_weights
from vl_plugins.kernels.comparison import add_normalization_gradient, inverse_norms
from vl_plugins.kernels.triton_tiles import (
    LEAST,
    LOG2_E,
    Blocks,
    block_sizes,
    half_gain,
    launch,
    products_of_tile,
    row_slices,
    tile_position,
    vector_gradients,
)

__all__ = ["gradients", "similarities"]

# Rows and columns of a tile of cosines. Larger ones and their exponentials do not fit into registers.
POOLED = 64


class _Sets(NamedTuple):
    """All elements one after another, and what is known of them."""

    vectors: Tensor  # (N * K, D)
    factors: Tensor | None  # (N * K,), inverse norms
    weights: Tensor  # (N, K), float32: 1 / number of elements of the set; 0 for one that is not in the set


def similarities(
    embeddings: Tensor,
    ref_emb: Tensor,
    mask: Tensor | None,
    ref_mask: Tensor | None,
    alpha: float,
    normalize: bool,
) -> Tensor:
    """Return the similarities (A, C), float32, of sets that are zero where the masks are False.

    Args:
        embeddings: (A, K1, D), float32, float16 or bfloat16; A, K1 and D > 0.
        ref_emb: (C, K2, D), of the same type.
        mask, ref_mask, alpha, normalize: see :func:`vl_plugins.kernels.pairwise_smooth_chamfer`.
    """
    x, y = _sets(embeddings, mask, normalize), _sets(ref_emb, ref_mask, normalize)
    counts = len(embeddings), len(ref_emb)
    values = x.weights.new_empty(counts)
    blocks, constants = _tiling(x, y)
    launch(_pool_tile, blocks, counts, *x, *y, alpha * LOG2_E, values, x.vectors.shape[1], **constants)
    return values


def gradients(
    embeddings: Tensor,
    ref_emb: Tensor,
    mask: Tensor | None,
    ref_mask: Tensor | None,
    alpha: float,
    normalize: bool,
    upstream: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients by both sides, or None for one that is not needed.

    Args:
        embeddings, ref_emb, mask, ref_mask, alpha, normalize: as in :func:`similarities`.
        upstream: (A, C), the gradient by the similarities.
        needed: whether a side's gradient is.
    """
    sides = _sets(embeddings, mask, normalize), _sets(ref_emb, ref_mask, normalize)
    found = [
        torch.empty_like(side.vectors, dtype=torch.float32) if wanted else None
        for side, wanted in zip(sides, needed, strict=False)
    ]
    _write_gradients(*sides, alpha, upstream, *found)
    for gradient, (vectors, factors, _) in zip(found, sides, strict=True):
        if gradient is not None and factors is not None:
            add_normalization_gradient(gradient, vectors, factors)
    return [
        None if gradient is None else gradient.to(sets.dtype).view_as(sets)
        for gradient, sets in zip(found, (embeddings, ref_emb), strict=True)
    ]


def _sets(sets: Tensor, mask: Tensor | None, normalize: bool) -> _Sets:
    vectors = sets.detach().flatten(0, 1).contiguous()
    return _Sets(vectors, inverse_norms(vectors) if normalize else None, element_weights(sets, mask))


def _write_gradients(
    x: _Sets, y: _Sets, alpha: float, upstream: Tensor, x_gradient: Tensor | None, y_gradient: Tensor | None
) -> None:
    """Write the gradients by all vectors, as if their norms were constant."""
    gain = None
    if x.vectors.dtype == torch.float16:
        bound = upstream.abs().max()
        if x.factors is not None:
            bound = bound * x.factors.max() * y.factors.max()
        gain = half_gain(bound)
    # Each of the two directions counts half.
    x, y = (sets._replace(weights=sets.weights * (0.5 if gain is None else gain / 2)) for sets in (x, y))
    blocks, constants = _tiling(x, y)
    (x_count, x_elements), (y_count, y_elements) = x.weights.shape, y.weights.shape
    # Room for whole tiles, which are faster to write.
    stride = triton.cdiv(y_count, blocks.columns) * blocks.columns * y_elements
    set_parts = list(row_slices(x_count, x_elements * stride * x.vectors.element_size(), blocks.rows))
    rows = triton.cdiv(set_parts[0].stop, blocks.rows) * blocks.rows * x_elements
    workspace = x.vectors.new_empty(rows, stride)

    def product_gradients(rows: slice) -> Tensor:
        sets = slice(rows.start // x_elements, rows.stop // x_elements)
        part = _Sets(x.vectors[rows], None if x.factors is None else x.factors[rows], x.weights[sets])
        counts = sets.stop - sets.start, y_count
        arguments = *part, *y, alpha * LOG2_E, upstream[sets].contiguous()
        launch(_derive_tile, blocks, counts, *arguments, workspace, stride, x.vectors.shape[1], **constants)
        return workspace[: counts[0] * x_elements, : y_count * y_elements]

    parts = [slice(part.start * x_elements, part.stop * x_elements) for part in set_parts]
    vector_gradients(x.vectors, y.vectors, parts, product_gradients, gain, x_gradient, y_gradient)


def _tiling(x: _Sets, y: _Sets) -> tuple[Blocks, dict[str, int]]:
    """Return how many sets a tile compares, and how many places an element of the tile has for each set."""
    elements = {"X_ELEMENTS": x.weights.shape[1], "Y_ELEMENTS": y.weights.shape[1]}
    padded = {"X_PLACES": _places(x), "Y_PLACES": _places(y)}
    blocks = block_sizes(x.vectors.shape[1], x.vectors.dtype)
    rows, columns = (POOLED // places for places in padded.values())
    warps = 4 if x.vectors.dtype.itemsize == 2 else 8
    return blocks._replace(rows=rows, columns=columns, warps=warps), elements | padded


def _places(sets: _Sets) -> int:
    return triton.next_power_of_2(sets.weights.shape[1])


@triton.jit(do_not_specialize=["row_count", "column_count"])
def _pool_tile(
    x,
    x_factors,
    x_weights,
    y,
    y_factors,
    y_weights,
    rate,
    similarities,
    width,
    row_count,
    column_count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    X_ELEMENTS: tl.constexpr,
    Y_ELEMENTS: tl.constexpr,
    X_PLACES: tl.constexpr,
    Y_PLACES: tl.constexpr,
):
    """Write the similarities of a tile of sets."""
    row_block, column_block = tile_position(tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS))
    x_at, x_weights = _elements_of_tile(row_block, x_weights, row_count, ROWS, X_ELEMENTS, X_PLACES)
    y_at, y_weights = _elements_of_tile(column_block, y_weights, column_count, COLUMNS, Y_ELEMENTS, Y_PLACES)
    cosines = _cosines_of_tile(
        x, x_factors, x_weights, x_at, y, y_factors, y_weights, y_at, width,
        ROWS, COLUMNS, DEPTH, PRECISION, X_PLACES, Y_PLACES,
    )  # fmt: skip
    x_weights = tl.reshape(x_weights, (ROWS, X_PLACES, 1))
    y_weights = tl.reshape(y_weights, (1, COLUMNS, Y_PLACES))

    largest = tl.max(cosines, 3)
    sums = tl.sum(tl.exp2((cosines - largest[:, :, :, None]) * rate), 3)
    pooled = tl.sum((largest + tl.log2(sums) / rate) * x_weights, 1)
    largest = tl.max(cosines, 1)
    sums = tl.sum(tl.exp2((cosines - largest[:, None, :, :]) * rate), 1)
    pooled += tl.sum((largest + tl.log2(sums) / rate) * y_weights, 2)
    # 0 for sets without elements.
    pooled = tl.where((tl.sum(x_weights, 1) > 0) & (tl.sum(y_weights, 2) > 0), pooled / 2, 0.0)

    rows, columns = row_block * ROWS + tl.arange(0, ROWS), column_block * COLUMNS + tl.arange(0, COLUMNS)
    at = similarities + rows.to(tl.int64)[:, None] * column_count + columns[None, :]
    tl.store(at, pooled, mask=(rows < row_count)[:, None] & (columns < column_count)[None, :])


@triton.jit(do_not_specialize=["row_count", "column_count"])
def _derive_tile(
    x,
    x_factors,
    x_weights,
    y,
    y_factors,
    y_weights,
    rate,
    upstream,
    gradients,
    stride,
    width,
    row_count,
    column_count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    X_ELEMENTS: tl.constexpr,
    Y_ELEMENTS: tl.constexpr,
    X_PLACES: tl.constexpr,
    Y_PLACES: tl.constexpr,
):
    """Write the gradients by the dot products of the elements of a tile of sets, to whole tiles."""
    row_block, column_block = tile_position(tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS))
    x_at, x_weights = _elements_of_tile(row_block, x_weights, row_count, ROWS, X_ELEMENTS, X_PLACES)
    y_at, y_weights = _elements_of_tile(column_block, y_weights, column_count, COLUMNS, Y_ELEMENTS, Y_PLACES)
    cosines = _cosines_of_tile(
        x, x_factors, x_weights, x_at, y, y_factors, y_weights, y_at, width,
        ROWS, COLUMNS, DEPTH, PRECISION, X_PLACES, Y_PLACES,
    )  # fmt: skip
    rows, columns = row_block * ROWS + tl.arange(0, ROWS), column_block * COLUMNS + tl.arange(0, COLUMNS)
    at = upstream + rows.to(tl.int64)[:, None] * column_count + columns[None, :]
    upstream = tl.load(at, mask=(rows < row_count)[:, None] & (columns < column_count)[None, :], other=0.0)

    powers = tl.exp2((cosines - tl.max(cosines, 3)[:, :, :, None]) * rate)
    coefficients = tl.reshape(x_weights, (ROWS, X_PLACES, 1)) * upstream[:, None, :] / tl.sum(powers, 3)
    gradient = powers * coefficients[:, :, :, None]
    powers = tl.exp2((cosines - tl.max(cosines, 1)[:, None, :, :]) * rate)
    coefficients = tl.reshape(y_weights, (1, COLUMNS, Y_PLACES)) * upstream[:, :, None] / tl.sum(powers, 1)
    gradient += powers * coefficients[:, None, :, :]

    gradient = tl.reshape(gradient, (ROWS * X_PLACES, COLUMNS * Y_PLACES))
    if x_factors is not None:
        gradient *= tl.load(x_factors + x_at)[:, None] * tl.load(y_factors + y_at)[None, :]
    # In a set without elements all exponentials are 1.
    gradient = tl.where((x_weights != 0)[:, None] & (y_weights != 0)[None, :], gradient, 0.0)
    to_rows, row_exists = _places_of_tile(row_block, ROWS, X_ELEMENTS, X_PLACES)
    to_columns, column_exists = _places_of_tile(column_block, COLUMNS, Y_ELEMENTS, Y_PLACES)
    tl.store(
        gradients + to_rows.to(tl.int64)[:, None] * stride + to_columns[None, :],
        gradient.to(gradients.dtype.element_ty),
        mask=row_exists[:, None] & column_exists[None, :],
    )


@triton.jit
def _places_of_tile(block, SETS: tl.constexpr, ELEMENTS: tl.constexpr, PLACES: tl.constexpr):
    """Return of each place of a tile the index of its vector, and whether it belongs to an element at all."""
    place = tl.arange(0, SETS * PLACES)
    if ELEMENTS == PLACES:  # which lets the compiler see that they are side by side
        return block * (SETS * PLACES) + place, place >= 0
    return (block * SETS + place // PLACES) * ELEMENTS + place % PLACES, place % PLACES < ELEMENTS


@triton.jit
def _elements_of_tile(block, weights, count, SETS: tl.constexpr, ELEMENTS: tl.constexpr, PLACES: tl.constexpr):
    """Return of each place of a tile the index of a vector that exists, and its weight, 0 where there is none."""
    at, exists = _places_of_tile(block, SETS, ELEMENTS, PLACES)
    exists &= at < count * ELEMENTS
    at = tl.where(exists, at, 0)
    return at, tl.load(weights + at, mask=exists, other=0.0)


@triton.jit
def _cosines_of_tile(
    x,
    x_factors,
    x_weights,
    x_at,
    y,
    y_factors,
    y_weights,
    y_at,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    X_PLACES: tl.constexpr,
    Y_PLACES: tl.constexpr,
):
    """Return the cosines (sets of x, elements, sets of y, elements), the least number for absent elements."""
    cosines = products_of_tile(x, y, x_at, y_at, width, ROWS * X_PLACES, COLUMNS * Y_PLACES, DEPTH, PRECISION)
    if x_factors is not None:
        cosines *= tl.load(x_factors + x_at)[:, None] * tl.load(y_factors + y_at)[None, :]
    cosines = tl.where((x_weights != 0)[:, None] & (y_weights != 0)[None, :], cosines, LEAST)
    return tl.reshape(cosines, (ROWS, X_PLACES, COLUMNS, Y_PLACES))
