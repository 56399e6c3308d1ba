"""Log-sum-exps over negatives on a CUDA GPU: the backend ``triton``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.kernels.comparison import EmbeddingPair, LogSumExps, PairLabels
from vl_plugins.kernels.triton_tiles import (
    LEAST,
    LOG2_E,
    Blocks,
    block_sizes,
    half_gain,
    launch,
    negatives_of_tile,
    partials_bytes,
    row_arguments,
    row_slices,
    tile_position,
    vector_gradients,
)

__all__ = ["gradients", "log_sum_exps"]


def log_sum_exps(pair: EmbeddingPair, scale: float | Tensor, labels: PairLabels, *, symmetric: bool) -> LogSumExps:
    """Return the log-sum-exps of ``scale`` times the similarities of negative pairs, of each row and each column.

    Every tile has its own largest similarity of each row and column, so that nothing underflows; these and the sums
    are all that is written. Nothing is kept for the gradients but the results.
    """
    x, y = pair.embeddings, pair.ref_emb
    row_lse = torch.full((len(x),), -torch.inf, device=x.device)
    column_lse = torch.full((len(y),), -torch.inf, device=x.device) if symmetric else None
    if len(x) and len(y):
        blocks = block_sizes(x.shape[1], x.dtype)
        for part in row_slices(len(x), partials_bytes(len(y), blocks), blocks.rows):
            row_lse[part], columns = _log_sum_exps_of_part(pair, scale, labels, part, blocks, symmetric)
            if symmetric:
                torch.logaddexp(column_lse, columns, out=column_lse)
    positives = pair.similarities_of_pairs(labels.rows, labels.columns)
    # One block without a shift: whether all is finite has not been seen.
    return LogSumExps(positives, row_lse, column_lse, [(None, None)])


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
    """Return the gradients by both sides of embeddings, as if their norms were constant.

    The gradients by the similarities of some rows are written in the type of the embeddings and multiplied by them;
    then those of the next rows.
    """
    x, y = pair.embeddings, pair.ref_emb
    grad, ref_grad = (
        torch.zeros_like(side, dtype=torch.float32) if need else None for side, need in zip((x, y), needed, strict=True)
    )
    if len(x) and len(y):
        _add_gradients(pair, scale, labels, sums, row_weights, column_weights, grad, ref_grad)
    pair.add_gradients_of_pairs(labels.rows, labels.columns, positive_grad, grad, ref_grad)
    return grad, ref_grad


def _add_gradients(pair, scale, labels, sums, row_weights, column_weights, grad, ref_grad) -> None:
    x, y = pair.embeddings, pair.ref_emb
    sides = [(sums.row_lse, row_weights)] + ([] if column_weights is None else [(sums.column_lse, column_weights)])
    gain = None
    if x.dtype == torch.float16:
        bound = sum(weights.abs().max() for _, weights in sides)
        if pair.inverse_norms is not None:
            bound = bound * pair.inverse_norms.max() * pair.ref_inverse_norms.max()
        gain = half_gain(bound)
    # For each side the similarity whose exponential is 1, and the gradient where it is that.
    sides = [
        ((lse / scale).clamp(min=LEAST.value), weights if gain is None else weights * gain) for lse, weights in sides
    ]
    column_arguments = sides[1] if len(sides) == 2 else (None, None)
    blocks = block_sizes(x.shape[1], x.dtype)
    # Room for whole tiles, which are faster to write.
    stride = triton.cdiv(len(y), blocks.columns) * blocks.columns
    parts = list(row_slices(len(x), stride * x.element_size(), blocks.rows))
    workspace = x.new_empty(triton.cdiv(parts[0].stop, blocks.rows) * blocks.rows, stride)

    def similarity_gradients(part: slice) -> Tensor:
        counts = part.stop - part.start, len(y)
        arguments = *row_arguments(pair, labels.labels, labels.ref_labels, part), *(side[part] for side in sides[0])
        launch(_write_gradients, blocks, counts, *arguments, *column_arguments, _rate(scale, x), workspace, stride,
               x.shape[1])  # fmt: skip
        return workspace[: counts[0], : counts[1]]

    vector_gradients(x, y, parts, similarity_gradients, gain, grad, ref_grad)


def _log_sum_exps_of_part(
    pair: EmbeddingPair, scale: float | Tensor, labels: PairLabels, part: slice, blocks: Blocks, symmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the log-sum-exps of some rows, (a,), and those of the columns over these rows, (C,) or None."""
    x = pair.embeddings
    counts = part.stop - part.start, len(pair.ref_emb)
    # Of each tile the largest similarity and the sum, of its rows and of its columns.
    row_partials = x.new_empty(2, triton.cdiv(counts[1], blocks.columns), counts[0], dtype=torch.float32)
    column_partials = None
    if symmetric:
        column_partials = x.new_empty(2, triton.cdiv(counts[0], blocks.rows), counts[1], dtype=torch.float32)
    arguments = row_arguments(pair, labels.labels, labels.ref_labels, part)
    launch(_sum_tiles, blocks, counts, *arguments, _rate(scale, x), row_partials, column_partials, x.shape[1])
    return tuple(None if partials is None else _merged(partials, scale) for partials in (row_partials, column_partials))


def _rate(scale: float | Tensor, like: Tensor) -> Tensor:
    """Return the scale for exponentials of base 2, 0-D, where the vectors are."""
    return torch.full((), LOG2_E, device=like.device) * scale


def _merged(partials: Tensor, scale: float | Tensor) -> Tensor:
    """Return the log-sum-exps (N,) of the maxima and sums of N rows or columns in T tiles, (2, T, N)."""
    maxima, sums = partials
    largest = maxima.amax(0)
    totals = sums.mul_(maxima.sub_(largest).mul_(scale).exp_()).sum(0)
    return totals.log_().add_(scale * largest)


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
    tile_gradients = exponentials * tl.load(row_coefficients + rows)[:, None]
    if column_references is not None:
        exponentials = tl.exp2((similarities - tl.load(column_references + columns)[None, :]) * rate)
        tile_gradients += exponentials * tl.load(column_coefficients + columns)[None, :]
    if x_factors is not None:
        tile_gradients *= tl.load(x_factors + rows)[:, None] * tl.load(y_factors + columns)[None, :]
    at = gradients + all_rows.to(tl.int64)[:, None] * stride + all_columns[None, :]
    tl.store(at, tile_gradients.to(gradients.dtype.element_ty))
