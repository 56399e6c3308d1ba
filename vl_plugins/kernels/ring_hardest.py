"""Similarities of positive pairs and of the hardest negatives of all processes, differentiable."""

from dataclasses import replace

import torch
from torch import Tensor

from vl_plugins.distributed import Ring
from vl_plugins.functional.goal import NegativeStatistics, Objective
from vl_plugins.functional.norms import inverse_norms
from vl_plugins.kernels.arrangement import Arrangement, Block, RingComparison, pairs_by_owner
from vl_plugins.kernels.mining import merged_statistics, negative_statistics
from vl_plugins.kernels.ring_log_sum_exp import NO_SECOND_DERIVATIVES
from vl_plugins.kernels.vectors import add_pair_gradients, finish_gradient, pair_similarities, precise

__all__ = ["ring_search"]


def ring_search(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    arrangement: Arrangement,
    objective: Objective | None,
    ring: Ring,
    *,
    symmetric: bool,
    normalize: bool,
    backend: str,
) -> tuple[Tensor, NegativeStatistics, NegativeStatistics | None, Tensor | None]:
    """Return similarities of the own positive pairs, and the statistics of the negatives of anchors.

    Of equally hard negatives it is the first among those of all processes. Similarities of positives and hardest
    negatives are differentiable: the gradients that a process gets are those of the sum of all processes' losses by its
    vectors.

    Args:
        x: (A, D), floating point, of this process.
        y: (C, D), of the same type.
        x_labels: (A,), integers.
        arrangement: of the labels of all processes.
        objective: what else the statistics have to tell beside the hardest.
        ring: of the processes.
        symmetric: columns are anchors too.
        normalize: cosines, otherwise dot products.
        backend: tiled or triton.

    Returns:
        The similarities (M,), the statistics of the own rows (A,), those of all columns (N,) or None, and, where the
        objective compares pairs with others, the similarities of the positive pairs of all processes.
    """
    is_relative = objective is not None and objective.is_relative
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        comparison = RingComparison.of(x, y, x_labels, arrangement, ring, normalize=normalize)
        dtype = torch.promote_types(x.dtype, torch.float32)
        positives = torch.empty(len(arrangement.rows), dtype=dtype, device=x.device)
        all_positives, options = None, {}
        if is_relative:
            for block in comparison.blocks():
                positives[block.pairs] = pair_similarities(block.comparison)
            number = torch.tensor([len(positives)], device=x.device)
            all_positives = ring.join(positives, ring.gather(number).flatten().tolist())
            options = {"kind": objective.pair_weight, "beta": objective.beta}
            # Without any positives nobody asks for the statistics.
            options["floor"] = objective.floor(all_positives.min() if len(all_positives) else positives.new_zeros(()))
        of_rows, of_columns = None, []
        for block in comparison.blocks():
            if not is_relative:
                positives[block.pairs] = pair_similarities(block.comparison)
            rows, columns = negative_statistics(block.comparison, symmetric=symmetric, backend=backend, **options)
            rows = rows._replace(index=rows.index + block.columns.start)
            kind = options.get("kind"), options.get("beta")
            of_rows = rows if of_rows is None else merged_statistics(of_rows, rows, *kind)
            of_columns.append((block.columns.start, columns))
        pairs = [(arrangement.rows, arrangement.columns), (_range(len(x), x), of_rows.index)]
        if symmetric:
            # From here on in the order of all columns.
            parts = zip(*(columns for _, columns in sorted(of_columns, key=lambda part: part[0])), strict=True)
            of_columns = NegativeStatistics(*(None if part[0] is None else torch.cat(part) for part in parts))
            own = arrangement.rows_of(ring.rank)
            of_columns = _of_all_rows(of_columns, own.start, sum(arrangement.row_counts), ring, *kind)
            owned = torch.where((of_columns.index >= own.start) & (of_columns.index < own.stop))[0]
            pairs.append((of_columns.index[owned] - own.start, owned))
        else:
            of_columns, owned = None, None
        rows, columns = (torch.cat(part) for part in zip(*pairs, strict=True))
        parts = pairs_by_owner(columns, arrangement.column_counts)
        comparison = replace(comparison, rows=rows, columns=columns, parts=parts)
    hardest_of_columns = None if of_columns is None else of_columns.hardest
    positives, of_rows_hardest, hardest_of_columns = _RingSimilarities.apply(
        x, y, positives, of_rows.hardest, hardest_of_columns, owned, comparison
    )
    of_rows = of_rows._replace(hardest=of_rows_hardest)
    of_columns = of_columns._replace(hardest=hardest_of_columns) if symmetric else None
    return positives, of_rows, of_columns, all_positives


def _of_all_rows(
    of_own: NegativeStatistics, first_row: int, row_count: int, ring: Ring, kind: str | None, beta: float | None
) -> NegativeStatistics:
    """Return the statistics of columns over the rows of all processes.

    Args:
        of_own: of the columns of all processes over the rows of this one.
        first_row: of these, among the rows of all.
        row_count: of all.
        ring: of the processes.
        kind, beta: see :func:`~vl_plugins.kernels.mining.negative_statistics`.
    """
    hardest = ring.max(of_own.hardest)
    own_index = of_own.index + first_row
    index = ring.min(torch.where(of_own.hardest == hardest, own_index, row_count))
    merged = NegativeStatistics(hardest, index)
    if kind is None:
        return merged
    total = of_own.total.to(precise(hardest.device, hardest.dtype))
    if kind == "sig_ms":
        # The term of a hardest negative is 1 where it is chosen, and is left out of the total.
        decline = (beta * (of_own.hardest - hardest)).exp()
        of_others = ((total + 1) * decline).masked_fill(of_own.chosen == 0, 0)
        total = torch.where(own_index == index, total, of_others)
    return merged._replace(chosen=ring.sum(of_own.chosen), total=ring.sum(total).to(hardest.dtype))


def _range(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, device=like.device)


class _RingSimilarities(torch.autograd.Function):
    """Similarities of three kinds of pairs as functions of the vectors; of the last, the owned ones are in the list."""

    @staticmethod
    def forward(ctx, x, y, positives, of_rows, of_columns, owned, comparison):
        ctx.save_for_backward(x, y)
        ctx.owned, ctx.comparison = owned, comparison
        return positives.clone(), of_rows.clone(), None if of_columns is None else of_columns.clone()

    @staticmethod
    def backward(ctx, of_positives, of_rows, of_columns):
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVES)
        _ = ctx.saved_tensors  # raises if the vectors have been written to
        comparison = ctx.comparison
        upstream = [of_positives, of_rows]
        if ctx.owned is not None:
            upstream.append(comparison.ring.sum(of_columns)[ctx.owned])
        upstream = torch.cat(upstream)
        needs_x, needs_y = ctx.needs_input_grad[:2]

        def add(block: Block, x_gradient: Tensor | None, y_gradient: Tensor | None) -> None:
            add_pair_gradients(block.comparison, upstream[block.pairs], x_gradient, y_gradient)

        with torch.autocast(upstream.device.type, enabled=False):
            x_gradient, y_gradient = comparison.gradients(add, of_x=needs_x, of_y=needs_y)
            if needs_x:
                x_gradient = finish_gradient(x_gradient, comparison.x, comparison.x_factors)
            if needs_y:
                y_factors = None if comparison.x_factors is None else inverse_norms(comparison.y)
                y_gradient = finish_gradient(y_gradient, comparison.y, y_factors)
        return x_gradient, y_gradient, None, None, None, None, None
