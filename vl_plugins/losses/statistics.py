"""What a loss records of each call with ``collect_stats=True``, for pytorch-metric-learning's record keeper.

All are 0-D tensors on the device, for the anchors' direction, computed without gradients and without synchronizing:

- ``mean_positive``: the mean similarity of the positive pairs.
- ``mean_negative``: the mean of what they are compared with, the hardest negative or the soft maximum.
- ``active_pairs``: the share of pairs whose negative, plus the margin if the loss has one, exceeds the positive.
- ``scale_in_use``: the inverse temperature, 1 for a loss without one; the mean of those of the pairs.
- ``known_positives_left_out``: the share of all pairs that are no negatives because of their ids.

They are NaN in a call with a miner's choice, which records none. In several processes each one records its own.
"""

from typing import Any

import torch
from torch import Tensor

from vl_plugins import engine
from vl_plugins.losses.batch import Direction
from vl_plugins.losses.paths import hardest, numbers_of_negatives, similarities_of, soft_maximum

__all__ = ["STATISTICS", "forget_statistics", "record_statistics"]

STATISTICS = ("mean_positive", "mean_negative", "active_pairs", "scale_in_use", "known_positives_left_out")


def forget_statistics(loss: Any) -> None:
    """Set the statistics of a loss to NaN, where a call computes none."""
    if getattr(loss, "collect_stats", False):
        for name in STATISTICS:
            if hasattr(loss, name):
                setattr(loss, name, torch.tensor(torch.nan))


@torch.no_grad()
def record_statistics(loss: Any, direction: Direction, numbers: dict[str, Any]) -> None:
    """Set the statistics of a call as attributes of the loss."""
    positive, negative = _compared(loss, direction, numbers)
    has_negative = negative > -torch.inf
    numbers_of_pairs = numbers | direction.pair_numbers
    margin = numbers_of_pairs.get("margin", getattr(loss, "margin_in_use", 0.0))
    is_active = (margin + negative > positive) & has_negative
    count = has_negative.sum().clamp(min=1)
    loss.mean_positive = positive.sum() / max(1, len(positive))
    loss.mean_negative = negative.masked_fill(~has_negative, 0).sum() / count
    loss.active_pairs = is_active.sum() / max(1, len(positive))
    scale = numbers_of_pairs.get("scale", 1.0)
    loss.scale_in_use = scale.detach().mean() if isinstance(scale, Tensor) else positive.new_full((), scale)
    loss.known_positives_left_out = _left_out(direction)


def _compared(loss: Any, direction: Direction, numbers: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the similarities of the positive pairs and of their anchors' negatives, (M,) each."""
    positives, of_negatives = direction.positives, type(loss).of_negatives
    x, y, excluded = direction.anchors, direction.candidates, direction.excluded
    options: dict[str, Any] = {"normalize": getattr(loss.distance, "normalize_embeddings", True), "anchor_columns": 0}
    if len(positives.rows) == 0:
        return x.new_zeros(0), x.new_zeros(0)
    if loss.is_plain() and of_negatives is hardest:
        maxima = engine.maxima(x, y, positives, excluded, **options)
    elif loss.is_plain() and of_negatives is soft_maximum:
        maxima = engine.soft_maxima(x, y, positives, excluded, numbers["scale"], tiled=True, **options)
    else:
        similarities = similarities_of(loss, direction)
        of_rows = numbers_of_negatives(loss, similarities, direction.masks()[1], numbers)
        return similarities[positives.rows, positives.columns], of_rows[positives.rows]
    return maxima.positive, maxima.of_rows[positives.rows]


def _left_out(direction: Direction) -> Tensor:
    """Return the share of all pairs that are neither positive nor negative because they share an id."""
    by_ids = [excluded for excluded in direction.excluded if not excluded.are_copies]
    if not by_ids:
        return direction.anchors.new_zeros(())
    positive, negative = direction.masks()
    is_left_out = ~(positive | negative)
    for excluded in direction.excluded:
        if excluded.are_copies:
            is_left_out &= ~excluded.mask(direction.shape)
    return is_left_out.sum() / max(1, is_left_out.numel())
