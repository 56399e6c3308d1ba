"""Smooth-Chamfer similarities of sets on a CUDA GPU, pooled where the cosines of their elements are computed."""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.functional.sets import element_weights
from vl_plugins.kernels.comparison import add_normalization_gradient, inverse_norms
from vl_plugins.kernels.triton_tiles import (
    LEAST,
    LOG2_E,
    Blocks,
    block_sizes,
    gradients_from_products,
    launch,
    products_of_tile,
    tile_position,
)

__all__ = ["gradients", "similarities"]

MAX_ELEMENTS = 16  # several sets have to fit into a tile
POOLED = 64  # rows and columns of a tile of cosines; larger ones and their exponentials do not fit into registers


class _Sets(NamedTuple):
    """N sets of K elements, K a power of two, one element after another."""

    vectors: Tensor  # (N * K, D)
    factors: Tensor | None  # (N * K,), inverse norms
    weights: Tensor  # (N, K), float32: 1 / number of elements of the set; 0 for one that is not in the set


def similarities(
    embeddings: Tensor, ref_emb: Tensor, mask: Tensor | None, ref_mask: Tensor | None, alpha: float, normalize: bool
) -> Tensor:
    """Return the similarities (A, C), float32, of sets that are zero where the masks are False.

    Args:
        embeddings: (A, K1, D), float32, float16 or bfloat16; A, K1 and D > 0.
        ref_emb: (C, K2, D), of the same type.
        mask, ref_mask, alpha, normalize: see :func:`vl_plugins.kernels.pairwise_smooth_chamfer`.
    """
    most = max(embeddings.shape[1], ref_emb.shape[1])
    if most > MAX_ELEMENTS:
        raise ValueError(f"backend 'triton' takes sets of at most {MAX_ELEMENTS} elements, got {most}")
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
    x, y = _sets(embeddings, mask, normalize), _sets(ref_emb, ref_mask, normalize)
    blocks, constants = _tiling(x, y)
    k1, k2 = x.weights.shape[1], y.weights.shape[1]

    def write(rows: slice, workspace: Tensor) -> None:
        sets = slice(rows.start // k1, rows.stop // k1)
        part = _Sets(x.vectors[rows], None if x.factors is None else x.factors[rows], x.weights[sets])
        arguments = *part, *y, alpha * LOG2_E, upstream[sets].contiguous(), workspace, workspace.stride(0)
        counts = sets.stop - sets.start, len(y.weights)
        launch(_derive_tile, blocks, counts, *arguments, x.vectors.shape[1], **constants)

    in_vectors = blocks._replace(rows=blocks.rows * k1, columns=blocks.columns * k2)
    grads = gradients_from_products(x.vectors, y.vectors, write, in_vectors, needed[:2])
    for side, grad in zip((x, y), grads, strict=True):
        if grad is not None and side.factors is not None:
            add_normalization_gradient(grad, side.vectors, side.factors)
    return [
        None if grad is None else grad.view(*side.weights.shape, -1)[:, : given.shape[1]].to(given.dtype)
        for side, given, grad in zip((x, y), (embeddings, ref_emb), grads, strict=True)
    ]


def _sets(sets: Tensor, mask: Tensor | None, normalize: bool) -> _Sets:
    missing = triton.next_power_of_2(sets.shape[1]) - sets.shape[1]
    weights = pad(element_weights(sets, mask).float(), (0, missing))
    vectors = pad(sets.detach(), (0, 0, 0, missing)).flatten(0, 1).contiguous()
    return _Sets(vectors, inverse_norms(vectors) if normalize else None, weights)


def _tiling(x: _Sets, y: _Sets) -> tuple[Blocks, dict[str, int]]:
    """Return how many sets a tile compares, and the numbers of elements."""
    constants = {"K1": x.weights.shape[1], "K2": y.weights.shape[1]}
    blocks = block_sizes(x.vectors.shape[1], x.vectors.dtype)
    rows, columns = (POOLED // elements for elements in constants.values())
    warps = 4 if x.vectors.dtype.itemsize == 2 else 8
    return blocks._replace(rows=rows, columns=columns, warps=warps), constants


@triton.jit(do_not_specialize=["row_count", "column_count"])  # type: ignore[untyped-decorator]
def _pool_tile(  # type: ignore[no-untyped-def]
    x, x_factors, x_weights, y, y_factors, y_weights, rate, similarities, width, row_count, column_count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Write the similarities of a tile of sets."""
    row_block, column_block = tile_position(tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS))
    x_at, x_weights = _elements_of_tile(row_block, x_weights, row_count, ROWS, K1)
    y_at, y_weights = _elements_of_tile(column_block, y_weights, column_count, COLUMNS, K2)
    cosines = _cosines_of_tile(
        x, x_factors, x_weights, x_at, y, y_factors, y_weights, y_at, width, ROWS, COLUMNS, DEPTH, PRECISION, K1, K2
    )
    x_weights = tl.reshape(x_weights, (ROWS, K1, 1))
    y_weights = tl.reshape(y_weights, (1, COLUMNS, K2))

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


@triton.jit(do_not_specialize=["row_count", "column_count"])  # type: ignore[untyped-decorator]
def _derive_tile(  # type: ignore[no-untyped-def]
    x, x_factors, x_weights, y, y_factors, y_weights, rate, upstream, gradients, stride, width, row_count, column_count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Write the gradients by the dot products of the elements of a tile of sets, to whole tiles."""
    row_block, column_block = tile_position(tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS))
    x_at, x_weights = _elements_of_tile(row_block, x_weights, row_count, ROWS, K1)
    y_at, y_weights = _elements_of_tile(column_block, y_weights, column_count, COLUMNS, K2)
    cosines = _cosines_of_tile(
        x, x_factors, x_weights, x_at, y, y_factors, y_weights, y_at, width, ROWS, COLUMNS, DEPTH, PRECISION, K1, K2
    )
    rows, columns = row_block * ROWS + tl.arange(0, ROWS), column_block * COLUMNS + tl.arange(0, COLUMNS)
    at = upstream + rows.to(tl.int64)[:, None] * column_count + columns[None, :]
    # Each of the two directions counts half.
    upstream = tl.load(at, mask=(rows < row_count)[:, None] & (columns < column_count)[None, :], other=0.0) / 2

    powers = tl.exp2((cosines - tl.max(cosines, 3)[:, :, :, None]) * rate)
    coefficients = tl.reshape(x_weights, (ROWS, K1, 1)) * upstream[:, None, :] / tl.sum(powers, 3)
    gradient = powers * coefficients[:, :, :, None]
    powers = tl.exp2((cosines - tl.max(cosines, 1)[:, None, :, :]) * rate)
    coefficients = tl.reshape(y_weights, (1, COLUMNS, K2)) * upstream[:, :, None] / tl.sum(powers, 1)
    gradient += powers * coefficients[:, None, :, :]

    gradient = tl.reshape(gradient, (ROWS * K1, COLUMNS * K2))
    if x_factors is not None:
        gradient *= tl.load(x_factors + x_at)[:, None] * tl.load(y_factors + y_at)[None, :]
    # In a set without elements all exponentials are 1.
    gradient = tl.where((x_weights != 0)[:, None] & (y_weights != 0)[None, :], gradient, 0.0)
    to_rows = row_block * (ROWS * K1) + tl.arange(0, ROWS * K1)
    to_columns = column_block * (COLUMNS * K2) + tl.arange(0, COLUMNS * K2)
    at = gradients + to_rows.to(tl.int64)[:, None] * stride + to_columns[None, :]
    tl.store(at, gradient.to(gradients.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _elements_of_tile(block, weights, count, SETS: tl.constexpr, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return for each place of a tile the index of a vector that exists, and its weight, 0 where there is none."""
    at = block * (SETS * ELEMENTS) + tl.arange(0, SETS * ELEMENTS)
    exists = at < count * ELEMENTS
    at = tl.where(exists, at, 0)
    return at, tl.load(weights + at, mask=exists, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _cosines_of_tile(  # type: ignore[no-untyped-def]
    x, x_factors, x_weights, x_at, y, y_factors, y_weights, y_at, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Return the cosines (sets of x, elements, sets of y, elements), the least number for absent elements."""
    cosines = products_of_tile(x, y, x_at, y_at, width, ROWS * K1, COLUMNS * K2, DEPTH, PRECISION)
    if x_factors is not None:
        cosines *= tl.load(x_factors + x_at)[:, None] * tl.load(y_factors + y_at)[None, :]
    cosines = tl.where((x_weights != 0)[:, None] & (y_weights != 0)[None, :], cosines, LEAST)
    return tl.reshape(cosines, (ROWS, K1, COLUMNS, K2))
