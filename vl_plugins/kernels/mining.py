"""Hardest negatives, and what GOAL's relative weights need of the others, tile by tile."""

import torch
from torch import Tensor

from vl_plugins.functional.goal import NegativeStatistics
from vl_plugins.kernels.tiled import compared_tiles
from vl_plugins.kernels.vectors import Comparison, precise

__all__ = ["merged_statistics", "negative_statistics"]


def negative_statistics(
    comparison: Comparison,
    *,
    symmetric: bool,
    kind: str | None = None,
    floor: Tensor | None = None,
    beta: float | None = None,
    backend: str = "tiled",
) -> tuple[NegativeStatistics, NegativeStatistics | None]:
    """Return the statistics of the negatives of each row and, with ``symmetric``, of each column; without autograd.

    Of a row or column with a NaN the numbers may be any, but its index is one of a candidate.

    Args:
        comparison: of the vectors; pairs of different labels are negative.
        symmetric: columns are anchors too.
        kind: ``"lin_ms"`` or ``"sig_ms"`` for ``chosen`` and ``total``, too.
        floor: 0-D, the similarity above which negatives are chosen, for either kind.
        beta: steepness >= 0, for sig_ms.
        backend: ``"triton"`` takes its own kernel where it has one: for no kind.
    """
    if backend == "triton" and kind is None:
        from vl_plugins.kernels.triton_mining import hardest_negatives

        rows, columns = hardest_negatives(comparison, symmetric=symmetric)
        return NegativeStatistics(*rows), NegativeStatistics(*columns) if symmetric else None
    dtype = torch.promote_types(comparison.x.dtype, torch.float32)
    rows = _no_negatives(comparison.x, kind)
    columns = _no_negatives(comparison.y, kind) if symmetric else None
    sides = [(rows, 1)] + ([(columns, 0)] if symmetric else [])
    memory = None
    for tile in compared_tiles(comparison, None):
        similarities = tile.similarities
        if memory is None:  # the first tile is the largest
            memory = [similarities.new_empty(similarities.numel()) for _ in range(1 if kind is None else 2)]
        scratch, *chosen = (part[: similarities.numel()].view_as(similarities) for part in memory)
        # Not -inf, which minus itself and times 0 is NaN.
        similarities[tile.equal_labels] = torch.finfo(dtype).min
        chosen = torch.gt(similarities, floor, out=chosen[0]) if chosen else None
        for running, dim in sides:
            part, others = (tile.rows, tile.columns) if dim == 1 else (tile.columns, tile.rows)
            of_tile = _statistics(similarities, chosen, scratch, dim, others.start, kind, beta)
            of_all = NegativeStatistics(*(None if values is None else values[part] for values in running))
            for values, merged in zip(of_all, merged_statistics(of_all, of_tile, kind, beta), strict=True):
                if values is not None:
                    values.copy_(merged)
    return _finished(rows, dtype), _finished(columns, dtype) if symmetric else None


def _no_negatives(vectors: Tensor, kind: str | None) -> NegativeStatistics:
    """Return the statistics of no negatives, which are merged with those of the tiles."""
    like = {"dtype": precise(vectors.device, torch.float32), "device": vectors.device}
    least = torch.finfo(torch.promote_types(vectors.dtype, torch.float32)).min
    zeros = [torch.zeros(len(vectors), **like) for _ in range(0 if kind is None else 2)]
    return NegativeStatistics(
        torch.full((len(vectors),), least, **like),
        torch.zeros(len(vectors), dtype=torch.long, device=vectors.device),
        *zeros,
    )


def _statistics(
    similarities: Tensor,
    chosen: Tensor | None,
    scratch: Tensor,
    dim: int,
    start: int,
    kind: str | None,
    beta: float | None,
) -> NegativeStatistics:
    """Return the statistics of a tile over ``dim``, whose first candidate is ``start``.

    Args:
        similarities: (a, c), the least number of its type for what is not negative.
        chosen: (a, c), 1 where a negative is chosen, otherwise 0; None for no kind.
        scratch: (a, c), overwritten.
        dim: 1 with the rows as anchors, 0 with the columns.
        start, kind, beta: see above.
    """
    length = similarities.shape[dim]
    hardest = similarities.amax(dim=dim, keepdim=True)
    # On a CPU torch's own maximum with an index takes twice as long. What comes first weighs most.
    weights = torch.arange(length, 0, -1, dtype=similarities.dtype, device=similarities.device)
    torch.eq(similarities, hardest, out=scratch).mul_(weights if dim == 1 else weights[:, None])
    index = (length - scratch.amax(dim=dim, keepdim=True)).long().clamp_(max=length - 1)  # NaN equals nothing
    of_tile = NegativeStatistics(hardest.squeeze(dim), index.squeeze(dim) + start)
    if kind is None:
        return of_tile
    if kind == "lin_ms":
        torch.mul(similarities, chosen, out=scratch)
    else:
        torch.sub(similarities, hardest, out=scratch).mul_(beta).exp_().mul_(chosen).scatter_(dim, index, 0)
    return of_tile._replace(chosen=chosen.sum(dim=dim), total=scratch.sum(dim=dim))


def merged_statistics(
    one: NegativeStatistics, other: NegativeStatistics, kind: str | None, beta: float | None
) -> NegativeStatistics:
    """Return the statistics of two sets of negatives together; of equally hard ones that of the lower index."""
    is_equal = other.hardest == one.hardest
    is_harder = (other.hardest > one.hardest) | (is_equal & (other.index < one.index))
    hardest = torch.where(is_harder, other.hardest, one.hardest)
    merged = NegativeStatistics(hardest, torch.where(is_harder, other.index, one.index))
    if kind is None:
        return merged
    merged = merged._replace(chosen=one.chosen + other.chosen)
    if kind == "lin_ms":
        return merged._replace(total=one.total + other.total)
    # The term of a hardest negative is 1 where it is chosen, and has not been added for the harder one of the two.
    easier = torch.where(is_harder, one.hardest, other.hardest)
    of_easier = torch.where(is_harder, one.total + (one.chosen > 0), other.total + (other.chosen > 0))
    of_harder = torch.where(is_harder, other.total, one.total)
    # Where nothing is chosen, the two may both be -inf, whose difference is NaN.
    of_easier = (of_easier * (beta * (easier - hardest)).exp()).masked_fill(of_easier == 0, 0)
    return merged._replace(total=of_harder + of_easier)


def _finished(statistics: NegativeStatistics, dtype: torch.dtype) -> NegativeStatistics:
    """Return the statistics in the types of those of :mod:`vl_plugins.functional.goal`."""
    hardest, index, chosen, total = statistics
    hardest = hardest.masked_fill(hardest == torch.finfo(dtype).min, -torch.inf).to(dtype)
    if chosen is None:
        return NegativeStatistics(hardest, index)
    return NegativeStatistics(hardest, index, chosen.long(), total.to(dtype))
