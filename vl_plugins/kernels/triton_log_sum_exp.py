"""Log-sum-exps over negatives on a CUDA GPU: the backend ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.kernels.comparison import Block, EmbeddingPair, LogSumExps, PairLabels
from vl_plugins.kernels.triton_tiles import (
    LEAST,
    LOG2_E,
    block_sizes,
    gradients_from_products,
    launch,
    negatives_of_tile,
    side_arguments,
    tile_position,
)

__all__ = ["gradients", "log_sum_exps"]


def log_sum_exps(pair: EmbeddingPair, scale: float | Tensor, labels: PairLabels, *, symmetric: bool) -> LogSumExps:
    """Return the log-sum-exps of ``scale`` times the similarities of negative pairs, of each row and each column.

    Every tile has its own largest similarity of each row and column, so that nothing underflows; these and the sums
    are all that is written. Nothing is kept for the gradients but the results.
    """
    x, y = pair.embeddings, pair.ref_emb
    blocks = block_sizes(x.shape[1], x.dtype)
    # Of each tile the largest similarity and the sum, of its rows and of its columns.
    row_partials = x.new_empty(2, triton.cdiv(len(y), blocks.columns), len(x), dtype=torch.float32)
    column_partials = None
    if symmetric:
        column_partials = x.new_empty(2, triton.cdiv(len(x), blocks.rows), len(y), dtype=torch.float32)
    if len(x) and len(y):
        arguments = *side_arguments(pair, labels), _rate(scale, x)
        launch(_sum_tiles, blocks, (len(x), len(y)), *arguments, row_partials, column_partials, x.shape[1])
    column_lse = None if column_partials is None else _merged(column_partials, scale)
    positives = pair.similarities_of_pairs(labels.rows, labels.columns)
    # One block without a shift: whether all is finite has not been seen.
    block = Block(slice(len(x)), labels.rows, labels.columns, labels.same_set)
    return LogSumExps(positives, _merged(row_partials, scale), column_lse, [(block, None)])


def gradients(
    pair: EmbeddingPair,
    scale: float | Tensor,
    labels: PairLabels,
    sums: LogSumExps,
    row_weights: Tensor,
    column_weights: Tensor | None,
    positive_grad: Tensor,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients by both sides of embeddings, as if their norms were constant."""
    x, y = pair.embeddings, pair.ref_emb
    # For each side the similarity whose exponential is 1, and the gradient where it is that.
    references = (sums.row_lse / scale).clamp(min=LEAST.value)
    column_arguments = None, None
    if column_weights is not None and sums.column_lse is not None:
        column_arguments = (sums.column_lse / scale).clamp(min=LEAST.value), column_weights
    blocks = block_sizes(x.shape[1], x.dtype)

    def write(part: slice, workspace: Tensor) -> None:
        sides = side_arguments(pair, labels, part)
        arguments = *sides, references[part], row_weights[part], *column_arguments, _rate(scale, x)
        counts = part.stop - part.start, len(y)
        launch(_write_gradients, blocks, counts, *arguments, workspace, workspace.stride(0), x.shape[1])

    grads = gradients_from_products(x, y, write, blocks, needed)
    pair.add_gradients_of_pairs(labels.rows, labels.columns, positive_grad, *grads)
    return grads[0], grads[1]


def _rate(scale: float | Tensor, like: Tensor) -> Tensor:
    """Return the scale for exponentials of base 2, 0-D, where the vectors are."""
    return torch.full((), LOG2_E, device=like.device) * scale


def _merged(partials: Tensor, scale: float | Tensor) -> Tensor:
    """Return the log-sum-exps (N,) of the maxima and sums of N rows or columns in T tiles, (2, T, N)."""
    maxima, sums = partials
    if len(maxima) == 0:
        return maxima.new_full(maxima.shape[1:], -torch.inf)
    largest = maxima.amax(0)
    totals = sums.mul_(maxima.sub_(largest).mul_(scale).exp_()).sum(0)
    return totals.log_().add_(scale * largest)


@triton.jit(do_not_specialize=["row_count", "column_count"])  # type: ignore[untyped-decorator]
def _sum_tiles(  # type: ignore[no-untyped-def]
    x, y, x_factors, y_factors, x_labels, y_labels, rate, row_partials, column_partials, width, row_count, column_count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["row_count", "column_count"])  # type: ignore[untyped-decorator]
def _write_gradients(  # type: ignore[no-untyped-def]
    x, y, x_factors, y_factors, x_labels, y_labels, row_references, row_weights, column_references, column_weights,
    rate, gradients, stride, width, row_count, column_count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    tile_gradients = exponentials * tl.load(row_weights + rows)[:, None]
    if column_references is not None:
        exponentials = tl.exp2((similarities - tl.load(column_references + columns)[None, :]) * rate)
        tile_gradients += exponentials * tl.load(column_weights + columns)[None, :]
    if x_factors is not None:
        tile_gradients *= tl.load(x_factors + rows)[:, None] * tl.load(y_factors + columns)[None, :]
    at = gradients + all_rows.to(tl.int64)[:, None] * stride + all_columns[None, :]
    tl.store(at, tile_gradients.to(gradients.dtype.element_ty))
