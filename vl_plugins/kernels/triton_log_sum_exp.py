"""Log-sum-exps over negatives on a CUDA GPU: the backend ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.kernels import tiled
from vl_plugins.kernels.tiled import Kept
from vl_plugins.kernels.triton_tiles import (
    LEAST,
    LOG2_E,
    SUPPORTED_TYPES,
    Blocks,
    block_sizes,
    half_gain,
    launch,
    negatives_of_tile,
    partials_bytes,
    row_slices,
    tile_position,
    vector_gradients,
    with_rows,
)
from vl_plugins.kernels.vectors import Comparison, add_pair_gradients, pair_similarities

__all__ = ["log_sum_exp_gradients", "log_sum_exps"]


def log_sum_exps(comparison: Comparison, scale: float | Tensor, *, symmetric: bool, keep: bool) -> Kept:
    """Return the log-sum-exps of ``scale`` times the similarities of negative pairs, of each row and each column.

    Every tile has its own largest similarity of each row and column, so that nothing underflows; these and the sums
    are all that is written. Nothing is kept for the gradients but the results.

    Args:
        comparison, scale, symmetric, keep: see :func:`vl_plugins.kernels.tiled.log_sum_exps`, which takes over for
            float64.
    """
    x, y, *_ = comparison
    if x.dtype not in SUPPORTED_TYPES:
        return tiled.log_sum_exps(comparison, scale, symmetric=symmetric, keep=False)
    numbers = {"dtype": torch.float64, "device": x.device}
    rows = torch.full((len(x),), -torch.inf, **numbers)
    columns = torch.full((len(y),), -torch.inf, **numbers) if symmetric else None
    if len(x) and len(y):
        blocks = block_sizes(x.shape[1], x.dtype)
        for part in row_slices(len(x), partials_bytes(len(y), blocks), blocks.rows):
            rows[part], of_columns = _of_part(with_rows(comparison, part), scale, blocks, symmetric)
            if symmetric:
                torch.logaddexp(columns, of_columns, out=columns)
    positives = pair_similarities(comparison).to(torch.float64)
    return Kept(rows=rows, columns=columns, positives=positives, shifts=[], tiles=None)


def log_sum_exp_gradients(
    comparison: Comparison,
    scale: float | Tensor,
    kept: Kept,
    of_rows: Tensor,
    of_columns: Tensor | None,
    of_positives: Tensor,
    x_gradient: Tensor | None,
    y_gradient: Tensor | None,
) -> None:
    """Write the gradients by the vectors, as if their norms were constant, to two tensors (A, D) and (C, D).

    The gradients by the similarities of some rows are written in the type of the vectors and multiplied by them; then
    those of the next rows.

    Args:
        comparison, scale, kept, of_rows, of_columns, of_positives, x_gradient, y_gradient: see
            :func:`vl_plugins.kernels.tiled.log_sum_exp_gradients`.
    """
    x, y, x_factors, y_factors, *_ = comparison
    if x.dtype not in SUPPORTED_TYPES or 0 in (len(x), len(y)):
        tiled.log_sum_exp_gradients(comparison, scale, kept, of_rows, of_columns, of_positives, x_gradient, y_gradient)
        return
    sides = [(kept.rows, of_rows * scale)]
    if of_columns is not None:
        sides.append((kept.columns, of_columns * scale))
    gain = None
    if x.dtype == torch.float16:
        bound = sum(coefficients.abs().max() for _, coefficients in sides)
        if x_factors is not None:
            bound = bound * x_factors.max() * y_factors.max()
        gain = half_gain(bound)
    # Of each side the similarity whose exponential is 1, and the gradient where it is that.
    sides = [
        ((sums / scale).clamp(min=LEAST.value).float(), (coefficients if gain is None else coefficients * gain).float())
        for sums, coefficients in sides
    ]
    blocks = block_sizes(x.shape[1], x.dtype)
    # Room for whole tiles, which are faster to write.
    stride = triton.cdiv(len(y), blocks.columns) * blocks.columns
    parts = list(row_slices(len(x), stride * x.element_size(), blocks.rows))
    workspace = x.new_empty(triton.cdiv(parts[0].stop, blocks.rows) * blocks.rows, stride)

    def gradients_of(part: slice) -> Tensor:
        row_numbers = [numbers[part] for numbers in sides[0]]
        column_numbers = sides[1] if len(sides) == 2 else (None, None)
        counts = part.stop - part.start, len(y)
        arguments = *with_rows(comparison, part)[:6], *row_numbers, *column_numbers, _rate(scale, x)
        launch(_write_gradients, blocks, counts, *arguments, workspace, stride, x.shape[1])
        return workspace[: counts[0], : counts[1]]

    vector_gradients(x, y, parts, gradients_of, gain, x_gradient, y_gradient)
    add_pair_gradients(comparison, of_positives, x_gradient, y_gradient)


def _of_part(
    comparison: Comparison, scale: float | Tensor, blocks: Blocks, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the log-sum-exps of the rows, (A,), and those of the columns over these rows, (C,) or None."""
    x, y, *_ = comparison
    counts = len(x), len(y)
    # Of each tile the largest similarity and the sum, of its rows and of its columns.
    row_partials = x.new_empty(2, triton.cdiv(counts[1], blocks.columns), counts[0], dtype=torch.float32)
    column_partials = None
    if symmetric:
        column_partials = x.new_empty(2, triton.cdiv(counts[0], blocks.rows), counts[1], dtype=torch.float32)
    launch(_sum_tiles, blocks, counts, *comparison[:6], _rate(scale, x), row_partials, column_partials, x.shape[1])
    return tuple(None if partials is None else _merged(partials, scale) for partials in (row_partials, column_partials))


def _rate(scale: float | Tensor, like: Tensor) -> Tensor:
    """Return the scale for exponentials of base 2, 0-D, where the vectors are."""
    return (torch.full((), LOG2_E, dtype=torch.float64, device=like.device) * scale).float()


def _merged(partials: Tensor, scale: float | Tensor) -> Tensor:
    """Return the log-sum-exps (N,), float64, of the maxima and sums of N rows or columns in T tiles, (2, T, N)."""
    maxima, sums = partials
    largest = maxima.amax(0)
    totals = sums.mul_(maxima.sub_(largest).mul_(scale).exp_()).sum(0, dtype=torch.float64)
    return totals.log_().add_(scale * largest.double())


@triton.jit(do_not_specialize=["row_count", "column_count"])
def _sum_tiles(
    x,
    y,
    x_factors,
    y_factors,
    x_labels,
    y_labels,
    rate,
    row_partials,
    column_partials,
    width,
    row_count,
    column_count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the maxima and sums of a tile's rows, (2, column blocks, A), and columns, (2, row blocks, C)."""
    row_blocks, column_blocks = tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS)
    row_block, column_block = tile_position(row_blocks, column_blocks)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    row_exists, column_exists = rows < row_count, columns < column_count
    similarities = negatives_of_tile(
        x, y, x_factors, y_factors, x_labels, y_labels,
        tl.minimum(rows, row_count - 1), tl.minimum(columns, column_count - 1), width, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip
    similarities = tl.where(row_exists[:, None] & column_exists[None, :], similarities, float("-inf"))
    rate = tl.load(rate)

    largest = tl.maximum(tl.max(similarities, 1), LEAST)
    sums = tl.sum(tl.exp2((similarities - largest[:, None]) * rate), 1)
    at = row_partials + column_block.to(tl.int64) * row_count + rows
    tl.store(at, largest, mask=row_exists)
    tl.store(at + column_blocks.to(tl.int64) * row_count, sums, mask=row_exists)
    if column_partials is not None:
        largest = tl.maximum(tl.max(similarities, 0), LEAST)
        sums = tl.sum(tl.exp2((similarities - largest[None, :]) * rate), 0)
        at = column_partials + row_block.to(tl.int64) * column_count + columns
        tl.store(at, largest, mask=column_exists)
        tl.store(at + row_blocks.to(tl.int64) * column_count, sums, mask=column_exists)


@triton.jit(do_not_specialize=["row_count", "column_count"])
def _write_gradients(
    x,
    y,
    x_factors,
    y_factors,
    x_labels,
    y_labels,
    row_references,
    row_coefficients,
    column_references,
    column_coefficients,
    rate,
    gradients,
    stride,
    width,
    row_count,
    column_count,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients by the dot products of a tile; those beyond the last row and column are meaningless."""
    row_block, column_block = tile_position(tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS))
    all_rows = row_block * ROWS + tl.arange(0, ROWS)
    all_columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns = tl.minimum(all_rows, row_count - 1), tl.minimum(all_columns, column_count - 1)
    similarities = negatives_of_tile(
        x, y, x_factors, y_factors, x_labels, y_labels, rows, columns, width, ROWS, COLUMNS, DEPTH, PRECISION
    )
    rate = tl.load(rate)

    exponentials = tl.exp2((similarities - tl.load(row_references + rows)[:, None]) * rate)
    of_tile = exponentials * tl.load(row_coefficients + rows)[:, None]
    if column_references is not None:
        exponentials = tl.exp2((similarities - tl.load(column_references + columns)[None, :]) * rate)
        of_tile += exponentials * tl.load(column_coefficients + columns)[None, :]
    if x_factors is not None:
        of_tile *= tl.load(x_factors + rows)[:, None] * tl.load(y_factors + columns)[None, :]
    at = gradients + all_rows.to(tl.int64)[:, None] * stride + all_columns[None, :]
    tl.store(at, of_tile.to(gradients.dtype.element_ty))
