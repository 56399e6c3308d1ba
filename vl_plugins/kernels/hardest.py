"""Losses of positive pairs and the hardest negatives of their anchors, of all backends."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vl_plugins.functional.goal import NegativeStatistics, Objective
from vl_plugins.functional.norms import unit_vectors
from vl_plugins.functional.pairs import check_reduction, reduce_pair_losses
from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.kernels.dispatch import choose_backend
from vl_plugins.kernels.mining import negative_statistics
from vl_plugins.kernels.pairs import check_vectors, compare_all, equal_label_pairs, pairs_of_others
from vl_plugins.kernels.vectors import (
    Comparison,
    add_pair_gradients,
    compare,
    differentiable_gradients,
    finish_gradient,
    pair_similarities,
)
from vl_plugins.utils.eager import eager

__all__ = ["hardest_negative_loss", "with_gradient"]


def hardest_negative_loss(
    of_pairs: Callable[..., Tensor],
    of_similarities: Callable[..., Tensor],
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    *,
    objective: Objective | None = None,
    normalize: bool,
    same_set: bool,
    symmetric: bool,
    reduction: str,
    pairs: tuple[Tensor, Tensor] | None,
    backend: str | None,
    name: str,
) -> Tensor:
    """Return a loss of embeddings, see :func:`vl_plugins.kernels.triplet_hn_loss` for all that is not named here.

    Args:
        of_pairs: ``(anchors, positive_similarities, of_negatives) -> losses`` of all positive pairs, (M,) each but for
            ``of_negatives``, those of all anchors.
        of_similarities: the same loss of ``(similarities, positive_mask, negative_mask)``, for ``functional``.
        objective: what else ``of_negatives`` has to tell beside the hardest.
        name: for the log.
    """
    check_vectors(x, y, x_labels, y_labels, same_set)
    check_reduction(reduction)
    backend = eager()(choose_backend, backend, x, y, name=name)
    if backend == "functional":
        similarities, *masks = compare_all(x, y, x_labels, y_labels, normalize=normalize, same_set=same_set)
        return of_similarities(similarities, *masks, symmetric=symmetric, reduction=reduction)

    # First, and so the last in the backward pass, where its gradient is then added in place instead of in a copy.
    zero = sum(zero_or_nan(side) for side in full_precision(x, y))
    pairs = eager()(equal_label_pairs, x_labels, y_labels) if pairs is None else pairs
    rows, columns = pairs_of_others(*pairs) if same_set else pairs
    if len(rows) == 0:
        losses = x.new_zeros(0, dtype=torch.promote_types(x.dtype, torch.float32))
    else:
        comparison = compare(x, y, x_labels, y_labels, pairs, normalize=normalize)
        positives, of_rows, of_columns = eager()(
            _search, x, y, comparison, rows, columns, objective, symmetric, backend
        )
        losses = of_pairs(rows, positives, of_rows)
        if symmetric:
            losses = losses + of_pairs(columns, positives, of_columns)
    return reduce_pair_losses(losses, reduction) + zero


def with_gradient(similarities: Tensor, x: Tensor, y: Tensor, comparison: Comparison) -> Tensor:
    """Return similarities of pairs as a function of the vectors, whose gradient takes memory for that of these.

    Second derivatives take the vectors of each pair, (M, D).

    Args:
        similarities: (M,), of the pairs ``comparison.rows, comparison.columns``.
        x: (A, D).
        y: (C, D).
        comparison: of ``x`` and ``y``.
    """
    return _PairSimilarities.apply(x, y, similarities, comparison)


def _search(
    x: Tensor,
    y: Tensor,
    comparison: Comparison,
    rows: Tensor,
    columns: Tensor,
    objective: Objective | None,
    symmetric: bool,
    backend: str,
) -> tuple[Tensor, NegativeStatistics, NegativeStatistics | None]:
    """Return the similarities of the positive pairs ``rows, columns`` and the statistics of all anchors' negatives.

    Similarities of positives and hardest negatives are differentiable.
    """
    with torch.no_grad():
        positives = pair_similarities(comparison._replace(rows=rows, columns=columns))
        options = {}
        if objective is not None and objective.is_relative:
            floor = objective.floor(positives.min())
            options = {"kind": objective.pair_weight, "floor": floor, "beta": objective.beta}
        of_rows, of_columns = negative_statistics(comparison, symmetric=symmetric, backend=backend, **options)
        # All in one, for one gradient of each side.
        values, rows, columns = [positives, of_rows.hardest], [rows, _range(x)], [columns, of_rows.index]
        if symmetric:
            values, rows, columns = [*values, of_columns.hardest], [*rows, of_columns.index], [*columns, _range(y)]
        comparison = comparison._replace(rows=torch.cat(rows), columns=torch.cat(columns))
        lengths = [len(part) for part in values]
        values = torch.cat(values)
    positives, *hardest = with_gradient(values, x, y, comparison).split(lengths)
    of_rows = of_rows._replace(hardest=hardest[0])
    return positives, of_rows, of_columns._replace(hardest=hardest[1]) if symmetric else None


def _range(vectors: Tensor) -> Tensor:
    return torch.arange(len(vectors), device=vectors.device)


class _PairSimilarities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, similarities, comparison):
        ctx.save_for_backward(x, y, *comparison)
        return similarities.clone()

    @staticmethod
    def backward(ctx, upstream):
        x, y, *comparison = ctx.saved_tensors
        comparison = Comparison(*comparison)
        if torch.is_grad_enabled():
            return *differentiable_gradients(partial(_plain, comparison), (x, y), (upstream,)), None, None
        sides = comparison[:2]
        gradients = [
            torch.zeros_like(side, dtype=torch.promote_types(side.dtype, torch.float32)) if needed else None
            for side, needed in zip(sides, ctx.needs_input_grad, strict=False)
        ]
        with torch.autocast(upstream.device.type, enabled=False):
            add_pair_gradients(comparison, upstream, *gradients)
            gradients = [
                None if gradient is None else finish_gradient(gradient, side, factors)
                for gradient, side, factors in zip(gradients, sides, comparison[2:4], strict=True)
            ]
        return *gradients, None, None


def _plain(comparison: Comparison, x: Tensor, y: Tensor) -> tuple[Tensor]:
    """Compute the similarities of the pairs in plain torch."""
    x, y = full_precision(x, y) if comparison.x_factors is None else (unit_vectors(x), unit_vectors(y))
    return (torch.linalg.vecdot(x[comparison.rows], y[comparison.columns]),)
