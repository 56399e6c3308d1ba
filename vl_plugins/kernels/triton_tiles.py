"""What the Triton kernels share: tiles of similarities, their sizes, and products of the matrices that they write."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.kernels.comparison import EmbeddingPair, PairLabels

__all__ = [
    "LEAST",
    "LOG2_E",
    "Blocks",
    "block_sizes",
    "gradients_from_products",
    "launch",
    "negatives_of_tile",
    "products_of_tile",
    "side_arguments",
    "tile_position",
]

WORKSPACE_BYTES = 2**29  # of the gradients that a kernel writes at a time; larger parts are no faster

# The hardware's exponential is that of base 2.
LOG2_E = 1.4426950408889634

# Instead of -inf as the largest of nothing: -inf minus itself is NaN.
LEAST = tl.constexpr(torch.finfo(torch.float32).min)

# Rows of tiles whose vectors stay in the cache of the GPU while all columns pass by.
GROUP = tl.constexpr(8)


class Blocks(NamedTuple):
    """Sizes of a tile, and how it is computed.

    Attributes:
        rows, columns: of the tile.
        depth: elements of the vectors that are multiplied at a time.
        warps: groups of 32 threads that share a tile.
        stages: parts of the vectors that are loaded ahead.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def block_sizes(width: int, dtype: torch.dtype) -> Blocks:
    """Return sizes with which sums stay in registers and vectors fit into the shared memory of every supported GPU.

    Args:
        width: D, of the vectors.
        dtype: of the vectors.

    >>> block_sizes(768, torch.bfloat16)
    Blocks(rows=128, columns=128, depth=64, warps=8, stages=3)
    >>> block_sizes(20, torch.bfloat16).depth
    16
    """
    if dtype.itemsize == 4:
        return Blocks(128, 64, 32, warps=8, stages=2)
    # Vectors that are not aligned are loaded element by element, whose addresses need registers.
    depth = 16 if width % 16 else min(64, max(16, triton.next_power_of_2(width)))
    return Blocks(128, 128, depth, warps=8, stages=3)


def side_arguments(pair: EmbeddingPair, labels: PairLabels, rows: slice = slice(None)) -> tuple[Any, ...]:
    """Return what kernels read of both sides, of some rows and all columns."""
    norms = None, None
    if pair.inverse_norms is not None:
        norms = pair.inverse_norms[0][rows], pair.inverse_norms[1]
    return pair.embeddings[rows], pair.ref_emb, *norms, labels.labels[rows].long(), labels.ref_labels.long()


def gradients_from_products(
    x: Tensor,
    y: Tensor,
    write: Callable[[slice, Tensor], None],
    blocks: Blocks,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients by two sides of vectors, float32, from those by their dot products, some rows at a time.

    Args:
        x: (A, D).
        y: (C, D), of the same type.
        write: writes the gradients by the dot products of some rows, in whole tiles, to a matrix.
        blocks: sizes of a tile, in vectors.
        needed: which sides need a gradient.
    """
    grads = [
        torch.zeros_like(side, dtype=torch.float32) if need else None for side, need in zip((x, y), needed, strict=True)
    ]
    if 0 in (len(x), len(y)):
        return grads
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype  # whose range is too small for gradients
    columns = triton.cdiv(len(y), blocks.columns) * blocks.columns  # room for whole tiles, which are faster to write
    rows = max(1, WORKSPACE_BYTES // (columns * dtype.itemsize * blocks.rows)) * blocks.rows
    rows = min(rows, triton.cdiv(len(x), blocks.rows) * blocks.rows)
    workspace = x.new_empty(rows, columns, dtype=dtype)
    for start in range(0, len(x), rows):
        part = slice(start, min(start + rows, len(x)))
        write(part, workspace)
        weights = workspace[: part.stop - start, : len(y)]
        if grads[0] is not None:
            grads[0][part] = _float32_product(weights, y)
        if grads[1] is not None:
            grads[1] += _float32_product(weights.T, x[part])
    return grads


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product in float32, whatever the types of the matrices."""
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16 and "dtype_out" in torch.ops.aten.mm.overloads():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # before torch 2.8


def launch(kernel: Any, blocks: Blocks, counts: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Start a kernel for all tiles of a matrix of so many rows and columns.

    Args:
        kernel: ``(*arguments, row_count, column_count, ROWS, COLUMNS, DEPTH, PRECISION, **constants)``.
        blocks: of a tile.
        counts: rows and columns of all.
        arguments: tensors first.
        constants: known when the kernel is compiled.
    """
    tiles = triton.cdiv(counts[0], blocks.rows) * triton.cdiv(counts[1], blocks.columns)
    # Triton takes the current device, not that of its arguments.
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(tiles,)](
            *arguments,
            *counts,
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            DEPTH=blocks.depth,
            PRECISION=_precision(),
            **constants,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            enable_fp_fusion=True,  # which newer versions of Triton ask for
        )


def _precision() -> str:
    """Return how products of float32 are computed: as torch is told to."""
    matmul = torch.backends.cuda.matmul
    # Newer versions of torch refuse to answer the older question after the newer setting has been used.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if allowed else "ieee"


@triton.jit
def tile_position(row_blocks, column_blocks):  # type: ignore[no-untyped-def]
    """Return which block of rows and of columns this program computes."""
    program = tl.program_id(0)
    return tl.swizzle2d(program // column_blocks, program % column_blocks, row_blocks, column_blocks, GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def products_of_tile(  # type: ignore[no-untyped-def]
    x, y, rows, columns, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the dot products (ROWS, COLUMNS), float32, of listed vectors of x and y, which all exist."""
    steps = tl.arange(0, DEPTH)
    # There may be more than 2^31 elements.
    x_at = x + rows.to(tl.int64)[:, None] * width + steps[None, :]
    y_at = y + columns.to(tl.int64)[:, None] * width + steps[None, :]
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        inside = (steps < width - start)[None, :]
        x_part = tl.load(x_at + start, mask=inside, other=0.0)
        y_part = tl.load(y_at + start, mask=inside, other=0.0)
        products = tl.dot(x_part, y_part.T, products, input_precision=PRECISION)
    return products


@triton.jit  # type: ignore[untyped-decorator]
def negatives_of_tile(  # type: ignore[no-untyped-def]
    x, y, x_factors, y_factors, x_labels, y_labels, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the similarities (ROWS, COLUMNS), -inf for pairs of equal labels; all rows and columns exist."""
    similarities = products_of_tile(x, y, rows, columns, width, ROWS, COLUMNS, DEPTH, PRECISION)
    if x_factors is not None:
        similarities *= tl.load(x_factors + rows)[:, None] * tl.load(y_factors + columns)[None, :]
    equal = tl.load(x_labels + rows)[:, None] == tl.load(y_labels + columns)[None, :]
    return tl.where(equal, float("-inf"), similarities)
