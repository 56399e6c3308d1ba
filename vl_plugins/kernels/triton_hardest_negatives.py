"""Hardest negatives on a CUDA GPU: the most similar negative of each row and column, in one product of matrices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.kernels.comparison import EmbeddingPair, PairLabels
from vl_plugins.kernels.triton_tiles import block_sizes, launch, negatives_of_tile, side_arguments, tile_position

__all__ = ["search"]


def search(
    pair: EmbeddingPair, labels: PairLabels, *, symmetric: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return the similarities of positive pairs, and of the hardest negatives with their indices for rows and columns.

    Of equally similar ones it is the first; without negatives -inf. With a NaN the numbers of a row or column may be
    any, but its index is one of a candidate.
    """
    x, y = pair.embeddings, pair.ref_emb
    blocks = block_sizes(x.shape[1], x.dtype)
    rows = _tile_memory(triton.cdiv(len(y), blocks.columns), x)
    columns = _tile_memory(triton.cdiv(len(x), blocks.rows), y) if symmetric else (None, None)
    arguments = *side_arguments(pair, labels), *rows, *columns
    launch(_search_tiles, blocks, (len(x), len(y)), *arguments, x.shape[1])
    positives = pair.similarities_of_pairs(labels.rows, labels.columns)
    return positives, _first_largest(*rows), _first_largest(*columns) if symmetric else None


def _tile_memory(tiles: int, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the values and indices of so many tiles, (T, N)."""
    shape = tiles, len(vectors)
    return vectors.new_empty(shape, dtype=torch.float32), vectors.new_empty(shape, dtype=torch.int32)


def _first_largest(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    largest, tile = values.max(dim=0)
    return largest, index.gather(0, tile[None])[0].long()


@triton.jit(do_not_specialize=["row_count", "column_count"])  # type: ignore[untyped-decorator]
def _search_tiles(  # type: ignore[no-untyped-def]
    x, y, x_factors, y_factors, x_labels, y_labels, row_values, row_index, column_values, column_index,
    width, row_count, column_count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the hardest negatives of a tile's rows, (column blocks, A), and columns, (row blocks, C)."""
    row_block, column_block = tile_position(tl.cdiv(row_count, ROWS), tl.cdiv(column_count, COLUMNS))
    rows, columns = row_block * ROWS + tl.arange(0, ROWS), column_block * COLUMNS + tl.arange(0, COLUMNS)
    row_exists, column_exists = rows < row_count, columns < column_count
    # Beyond the last row and column is that one again, which as a later one never comes first.
    similarities = negatives_of_tile(
        x, y, x_factors, y_factors, x_labels, y_labels,
        tl.minimum(rows, row_count - 1), tl.minimum(columns, column_count - 1), width, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip

    values, index = tl.max(similarities, 1, return_indices=True, return_indices_tie_break_left=True)
    at = column_block.to(tl.int64) * row_count + rows
    tl.store(row_values + at, values, mask=row_exists)
    # Of NaN none is the largest, and the index may be that of any place.
    tl.store(row_index + at, tl.minimum(column_block * COLUMNS + index, column_count - 1), mask=row_exists)
    if column_values is not None:
        values, index = tl.max(similarities, 0, return_indices=True, return_indices_tie_break_left=True)
        at = row_block.to(tl.int64) * column_count + columns
        tl.store(column_values + at, values, mask=column_exists)
        tl.store(column_index + at, tl.minimum(row_block * ROWS + index, row_count - 1), mask=column_exists)
