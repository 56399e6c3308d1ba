"""What the Triton kernels share: tiles of similarities, their sizes, and products of the matrices that they write."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vl_plugins.kernels.comparison import EmbeddingPair

__all__ = [
    "LEAST",
    "LOG2_E",
    "SUPPORTED_TYPES",
    "Blocks",
    "block_sizes",
    "half_gain",
    "launch",
    "negatives_of_tile",
    "partials_bytes",
    "products_of_tile",
    "row_arguments",
    "row_slices",
    "tile_position",
    "vector_gradients",
]

# The types whose products the kernels sum up in float32.
SUPPORTED_TYPES = (torch.float32, torch.float16, torch.bfloat16)

# What kernels write for other steps, at a time. Larger parts are no faster.
WORKSPACE_BYTES = 2**29

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


def row_slices(count: int, bytes_per_row: float, step: int) -> Iterator[slice]:
    """Cut ``range(count)`` into even slices, multiples of ``step``, which take at most ``WORKSPACE_BYTES`` if possible.

    >>> list(row_slices(100, 2**29 / 40, step=16))
    [slice(0, 32, None), slice(32, 64, None), slice(64, 96, None), slice(96, 100, None)]
    """
    most = max(1, int(WORKSPACE_BYTES / bytes_per_row) // step)
    steps = -(-count // step)
    parts = max(1, -(-steps // most))
    height = -(-steps // parts) * step
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


def partials_bytes(column_count: int, blocks: Blocks) -> float:
    """Return how much memory two numbers of each row and column of each tile take per row of the whole."""
    return 8 * column_count * (1 / blocks.rows + 1 / blocks.columns)


def row_arguments(pair: EmbeddingPair, labels: Tensor, ref_labels: Tensor, rows: slice) -> tuple:
    """Return what kernels read of both sides, of some rows, with labels of one type."""
    return (
        pair.embeddings[rows],
        pair.ref_emb,
        None if pair.inverse_norms is None else pair.inverse_norms[rows],
        pair.ref_inverse_norms,
        labels[rows].long(),
        ref_labels.long(),
    )


def half_gain(bound: Tensor) -> Tensor:
    """Return by what numbers of at most ``bound`` are multiplied so that float16 holds them and much smaller ones too.

    Args:
        bound: 0-D, >= 0.
    """
    return 2.0**14 / torch.where(bound > 0, bound, 1)


def vector_gradients(
    x: Tensor,
    y: Tensor,
    parts: Iterable[slice],
    gradients_of: Callable[[slice], Tensor],
    gain: Tensor | None,
    x_gradient: Tensor | None,
    y_gradient: Tensor | None,
) -> None:
    """Write the gradients by vectors to two tensors (A, D) and (C, D), from those by their dot products.

    Args:
        x: (A, D).
        y: (C, D), of the same type.
        parts: of the rows of x, in order.
        gradients_of: returns for a part of the rows the gradients by the dot products (a, C), in the type of the
            vectors; their memory may be that of the part before.
        gain: by what these have been multiplied; None for 1.
        x_gradient, y_gradient: float32, or None.
    """
    partial_product = None
    for part in parts:
        by_products = gradients_of(part)
        if x_gradient is not None:
            _product_into(x_gradient[part], by_products, y)
        if y_gradient is not None and part.start == 0:
            _product_into(y_gradient, by_products.T, x[part])
        elif y_gradient is not None:
            # Not addmm, which in some versions of torch cannot add float32 to a product of half the precision.
            partial_product = torch.empty_like(y_gradient) if partial_product is None else partial_product
            _product_into(partial_product, by_products.T, x[part])
            y_gradient += partial_product
    for gradient in (x_gradient, y_gradient):
        if gradient is not None and gain is not None:
            gradient /= gain


def _product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write the matrix product of two matrices of one type to ``out``, float32, without rounding it in between."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        # Before torch 2.8 a product has the type of its factors: too coarse, and that of float16 could overflow.
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def launch(kernel, blocks: Blocks, counts: tuple[int, int], *arguments, **constants) -> None:
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
def tile_position(row_blocks, column_blocks):
    """Return which block of rows and of columns this program computes."""
    program = tl.program_id(0)
    return tl.swizzle2d(program // column_blocks, program % column_blocks, row_blocks, column_blocks, GROUP)


@triton.jit
def products_of_tile(
    x,
    y,
    rows,
    columns,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the dot products (ROWS, COLUMNS), float32, of listed vectors of x and y, which all exist."""
    steps = tl.arange(0, DEPTH)
    # There may be more than 2^31 elements.
    x_at = x + rows.to(tl.int64)[:, None] * width + steps[None, :]
    y_at = y + columns.to(tl.int64)[:, None] * width + steps[None, :]
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        inside = (steps < width - start)[None, :]
        of_x = tl.load(x_at + start, mask=inside, other=0.0)
        of_y = tl.load(y_at + start, mask=inside, other=0.0)
        products = tl.dot(of_x, of_y.T, products, input_precision=PRECISION)
    return products


@triton.jit
def negatives_of_tile(
    x,
    y,
    x_factors,
    y_factors,
    x_labels,
    y_labels,
    rows,
    columns,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the similarities (ROWS, COLUMNS), -inf for pairs of equal labels; all rows and columns exist."""
    similarities = products_of_tile(x, y, rows, columns, width, ROWS, COLUMNS, DEPTH, PRECISION)
    if x_factors is not None:
        similarities *= tl.load(x_factors + rows)[:, None] * tl.load(y_factors + columns)[None, :]
    equal = tl.load(x_labels + rows)[:, None] == tl.load(y_labels + columns)[None, :]
    return tl.where(equal, float("-inf"), similarities)
