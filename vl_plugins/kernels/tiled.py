"""Log-sum-exps over negatives in plain torch, tile by tile: the backends ``dense`` and ``tiled``."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.kernels.tiles import slices, tile_shape
from vl_plugins.kernels.vectors import Comparison, add_pair_gradients, pair_similarities, precise

__all__ = ["Kept", "Tile", "compared_tiles", "log_sum_exp_gradients", "log_sum_exps"]

# exp(-x) of x up to here, its sums and its inverse are far from the limits of float32.
SAFE_EXPONENT = 60

# Elements of a tile that are multiplied at a time by what they are to be multiplied with.
WEIGHTS = 2**16


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass.

    Attributes:
        rows: (A,), log-sum-exps, in the type of :func:`~vl_plugins.kernels.vectors.precise`.
        columns: (C,), or None.
        positives: (M,), the similarities of the pairs of equal labels.
        shifts: of each tile the similarity whose exponential is 1, or None where each row and column has its own.
        tiles: (A, C), of each tile the exponentials or, without a shift, the similarities; None to compute them again.
    """

    rows: Tensor
    columns: Tensor | None
    positives: Tensor
    shifts: list[float | None]
    tiles: Tensor | None


class Tile(NamedTuple):
    rows: slice
    columns: slice
    similarities: Tensor  # (a, c)
    equal_labels: Tensor | tuple[Tensor, Tensor]  # index of the pairs that are not negative: (a, c) bool, or (m,) each
    pairs: Tensor | None  # (m,), which of all pairs of equal labels these are, where that is known


def log_sum_exps(comparison: Comparison, scale: float | Tensor, *, symmetric: bool, keep: bool) -> Kept:
    """Return the log-sum-exps of ``scale`` times the similarities of negative pairs, of each row and each column.

    -inf where there are no negatives.

    Args:
        comparison: of the vectors.
        scale: a number, or 0-D on the device of the vectors.
        symmetric: of the columns too.
        keep: hold all tiles for the backward pass, A x C elements, instead of computing them again.
    """
    x = comparison.x
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = {"dtype": precise(x.device, dtype), "device": x.device}
    rows = torch.full((len(x),), -torch.inf, **sums)
    columns = torch.full((len(comparison.y),), -torch.inf, **sums) if symmetric else None
    all_tiles = torch.empty(len(x), len(comparison.y), dtype=dtype, device=x.device) if keep else None
    in_tiles = _pairs_are_known(comparison)
    positives = torch.empty(len(comparison.rows), **sums)
    if not in_tiles:
        positives.copy_(pair_similarities(comparison))
    shifts = []
    for tile in compared_tiles(comparison, all_tiles):
        similarities = tile.similarities
        if in_tiles and len(tile.pairs):
            positives[tile.pairs] = similarities[tile.equal_labels].to(positives.dtype)
        shift = _common_shift(tile, scale)
        shifts.append(shift)
        if shift is not None:
            exponentials = _exponentials(tile, scale, shift)
            _add(rows[tile.rows], exponentials.sum(dim=1), scale * shift)
            if symmetric:
                _add(columns[tile.columns], exponentials.sum(dim=0), scale * shift)
            continue
        similarities[tile.equal_labels] = -torch.inf
        for totals, part, dim in ((rows, tile.rows, 1), (columns, tile.columns, 0)):
            if totals is not None:
                # Not -inf, which minus itself is NaN.
                largest = similarities.amax(dim=dim).clamp_(min=torch.finfo(dtype).min)
                exponentials = (similarities - largest.unsqueeze(dim)).mul_(scale).exp_()
                _add(totals[part], exponentials.sum(dim=dim), scale * largest.to(totals.dtype))
    return Kept(rows, columns, positives, shifts, all_tiles)


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

    Args:
        comparison, scale: as they were given to :func:`log_sum_exps`.
        kept: what that returned; its tiles are overwritten.
        of_rows: (A,), gradients by ``kept.rows``, in its type.
        of_columns: (C,), by ``kept.columns``; None without these.
        of_positives: (M,), by ``kept.positives``.
        x_gradient: float32 or float64, or None.
        y_gradient: likewise.
    """
    if 0 in (len(comparison.x), len(comparison.y)):
        for gradient in (x_gradient, y_gradient):
            if gradient is not None:
                gradient.zero_()
        return
    sides = [(kept.rows, of_rows * scale)]
    if kept.columns is not None:
        sides.append((kept.columns, of_columns * scale))
    is_kept = kept.tiles is not None
    in_tiles = _pairs_are_known(comparison)
    factors = comparison.x_factors, comparison.y_factors
    if in_tiles and factors[0] is not None:
        of_positives = of_positives * factors[0][comparison.rows] * factors[1][comparison.columns]
    for tile, shift in zip(compared_tiles(comparison, kept.tiles, computed=is_kept), kept.shifts, strict=True):
        _weigh(tile, scale, shift, sides, is_kept, factors)
        weights = tile.similarities
        if in_tiles and len(tile.pairs):
            weights[tile.equal_labels] = of_positives[tile.pairs].to(weights.dtype)
        if not is_kept:
            _add_products(comparison, tile.rows, tile.columns, weights, x_gradient, y_gradient)
    if is_kept:
        _add_products(comparison, slice(None), slice(None), kept.tiles, x_gradient, y_gradient)
    if not in_tiles:
        add_pair_gradients(comparison, of_positives, x_gradient, y_gradient)


def _pairs_are_known(comparison: Comparison) -> bool:
    """Return whether one may ask the device which pairs are in a tile, without waiting for it."""
    return comparison.x.device.type == "cpu"


def compared_tiles(comparison: Comparison, memory: Tensor | None, *, computed: bool = False) -> Iterator[Tile]:
    """Compute tile by tile, in their place of ``memory`` (A, C) where it is given; or take what is ``computed`` there.

    Without ``memory`` a tile is to be used before the next one is asked for.
    """
    x, y, x_factors, y_factors, x_labels, y_labels, *equal = comparison
    dtype = torch.promote_types(x.dtype, torch.float32)
    height, width = tile_shape((len(x), len(y)), x.device)
    scratch = None if memory is not None else x.new_empty(min(height, len(x)) * min(width, len(y)), dtype=dtype)
    for rows in slices(len(x), height):
        vectors = x[rows].to(dtype)
        if x_factors is not None:
            vectors = vectors * x_factors[rows, None]
        if _pairs_are_known(comparison):
            start, stop = torch.searchsorted(equal[0], torch.tensor([rows.start, rows.stop])).tolist()
        for columns in slices(len(y), width):
            if memory is None:
                shape = rows.stop - rows.start, columns.stop - columns.start
                similarities = scratch[: shape[0] * shape[1]].view(shape)
            else:
                similarities = memory[rows, columns]
            if not computed:
                torch.mm(vectors, y[columns].to(dtype).T, out=similarities)
                if y_factors is not None:
                    similarities *= y_factors[columns]
            if _pairs_are_known(comparison):
                of_rows = equal[1][start:stop]
                pairs = torch.where((of_rows >= columns.start) & (of_rows < columns.stop))[0] + start
                index = equal[0][pairs] - rows.start, equal[1][pairs] - columns.start
                yield Tile(rows, columns, similarities, index, pairs)
            else:
                yield Tile(rows, columns, similarities, x_labels[rows, None] == y_labels[columns], None)


def _common_shift(tile: Tile, scale: float) -> float | None:
    """Return the largest similarity of negatives, if one exponential serves both directions; positives are filled.

    One shift for all is exact where none of the exponentials is near underflow. To know that, the device has to be
    asked, which on an accelerator would cost more than a second exponential.
    """
    similarities = tile.similarities
    if similarities.device.type != "cpu":
        return None
    least = similarities.amin()
    similarities[tile.equal_labels] = least
    largest = similarities.amax().item()
    return largest if scale * (largest - least.item()) <= SAFE_EXPONENT else None


def _exponentials(tile: Tile, scale: float, shift: float) -> Tensor:
    """Overwrite the similarities by their exponentials, 0 for pairs that are not negative."""
    exponentials = tile.similarities.sub_(shift).mul_(scale).exp_()
    exponentials[tile.equal_labels] = 0
    return exponentials


def _add(totals: Tensor, sums: Tensor, shift: float | Tensor) -> None:
    torch.logaddexp(totals, sums.to(totals.dtype).log_().add_(shift), out=totals)


def _weigh(
    tile: Tile,
    scale: float | Tensor,
    shift: float | None,
    sides: list[tuple[Tensor, Tensor]],
    is_kept: bool,
    factors: tuple[Tensor | None, Tensor | None],
) -> None:
    """Overwrite the tile by the gradients by its similarities, times the factors of its rows and columns."""
    similarities = tile.similarities
    dtype = similarities.dtype
    parts = tile.rows, tile.columns
    shapes = (-1, 1), (1, -1)
    if shift is None:
        if not is_kept:
            similarities[tile.equal_labels] = -torch.inf
        weights = 0
        for (totals, upstream), part, shape in zip(sides, parts, shapes, strict=False):
            # Also where there are no negatives: -inf minus itself is NaN.
            reference = totals[part].clamp(min=torch.finfo(dtype).min) / scale
            softmax = (similarities - reference.to(dtype).view(shape)).mul_(scale).exp_()
            weights = softmax.mul_(upstream[part].to(dtype).view(shape)) + weights
        for of_side, part, shape in zip(factors, parts, shapes, strict=True):
            weights = weights if of_side is None else weights.mul_(of_side[part].view(shape))
        similarities.copy_(weights)
        return
    if not is_kept:
        _exponentials(tile, scale, shift)
    # exp(scale * shift - r) times the upstream gradient of a row, plus that of a column, times the factors of both: a
    # product of two thin matrices.
    thin = []
    for (totals, upstream), part in zip(sides, parts, strict=False):
        # Clamped for rows whose negatives are all in other tiles: infinity times 0 is NaN.
        inverses = (scale * shift - totals[part]).clamp_(max=SAFE_EXPONENT).exp_()
        thin.append((upstream[part] * inverses).to(dtype))
    ones = [similarities.new_ones(size) for size in similarities.shape]
    if len(thin) == 1:
        left, right = thin[0][:, None], ones[1][None]
    else:
        left, right = torch.stack([thin[0], ones[0]], dim=1), torch.stack([ones[1], thin[1]])
    if factors[0] is not None:
        left, right = left * factors[0][tile.rows, None], right * factors[1][tile.columns]
    for rows in slices(len(similarities), max(1, WEIGHTS // similarities.shape[1])):
        similarities[rows] *= left[rows] @ right


def _add_products(
    comparison: Comparison,
    rows: slice,
    columns: slice,
    weights: Tensor,
    x_gradient: Tensor | None,
    y_gradient: Tensor | None,
) -> None:
    """Add what a tile contributes; what is there before the first tile of a row or column is not read."""
    if x_gradient is not None:
        of_columns = comparison.y[columns].to(weights.dtype)
        x_gradient[rows].addmm_(weights, of_columns, beta=int(bool(columns.start)))
    if y_gradient is not None:
        of_rows = comparison.x[rows].to(weights.dtype)
        y_gradient[columns].addmm_(weights.T, of_rows, beta=int(bool(rows.start)))
