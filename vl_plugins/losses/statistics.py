"""What a loss records of each call with ``collect_stats=True``, for pytorch-metric-learning's record keeper.

All are 0-D tensors on the device, for the anchors' direction, computed without gradients and without synchronizing:

- ``mean_positive``: the mean similarity of the positive pairs.
- ``mean_negative``: the mean of what they are compared with, the hardest negative or the soft maximum.
- ``active_pairs``: the share of pairs whose negative, plus the margin if the loss has one, exceeds the positive.
- ``scale_in_use``: the inverse temperature, 1 for a loss without one; the mean of those of the pairs.
- ``known_positives_left_out``: the share of all pairs that are no negatives because of their ids.

They are NaN in a call with a miner's choice, which records none. In several processes each one records its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins import engine
from vl_plugins.engine import Comparison
from vl_plugins.losses.matrix import Call, hardest, matrix_of, summary_of_negatives

__all__ = ["STATISTICS", "collected_statistics", "forget_statistics", "latest_statistics", "record_statistics"]

STATISTICS = ("mean_positive", "mean_negative", "active_pairs", "scale_in_use", "known_positives_left_out")


@contextlib.contextmanager
def collected_statistics(loss: nn.Module) -> Iterator[None]:
    """Let a loss record the statistics of its calls in the block, as with ``collect_stats=True``."""
    former = {}
    losses: Any = loss.modules()
    for module in losses:
        if hasattr(module, "has_statistics"):
            former[module] = module.collect_stats
            module.collect_stats = True
    try:
        yield
    finally:
        for module, was_collecting in former.items():
            module.collect_stats = was_collecting


def forget_statistics(loss: Any) -> None:
    """Set the statistics of a loss to NaN, where a call computes none."""
    loss.has_statistics = False
    if getattr(loss, "collect_stats", False):
        for name in STATISTICS:
            if hasattr(loss, name):
                setattr(loss, name, torch.tensor(torch.nan))


def latest_statistics(loss: nn.Module) -> dict[str, Tensor]:
    """Return the statistics of the latest call of a loss, or of the part that it called; {} if it recorded none.

    Which names there are does not depend on the embeddings, so it is the same in all processes.
    """
    for module in loss.modules():
        if getattr(module, "has_statistics", False):
            return {name: getattr(module, name) for name in STATISTICS}
    return {}


@torch.no_grad()
def record_statistics(loss: Any, comparison: Comparison, call: Call) -> None:
    """Set the statistics of a call as attributes of the loss."""
    positive, negative = _compared(loss, comparison, call)
    has_negative = negative > -torch.inf
    numbers = call.numbers | comparison.numbers
    is_active = (numbers.get("margin", loss.margin_in_use) + negative > positive) & has_negative
    pairs = max(1, len(positive))
    scale = numbers.get("scale", 1.0)
    loss.has_statistics = True
    loss.mean_positive = positive.sum() / pairs
    loss.mean_negative = negative.masked_fill(~has_negative, 0).sum() / has_negative.sum().clamp(min=1)
    loss.active_pairs = is_active.sum() / pairs
    loss.scale_in_use = torch.as_tensor(scale, dtype=positive.dtype, device=positive.device).mean()
    loss.known_positives_left_out = positive.new_zeros(())
    if comparison.known_positives is not None:
        _, negative_mask = comparison.masks()
        copies = 0 if comparison.copies is None else len(comparison.copies)
        left_out = negative_mask.numel() - len(positive) - copies - negative_mask.sum()
        loss.known_positives_left_out = left_out / max(1, negative_mask.numel())


def _compared(loss: Any, comparison: Comparison, call: Call) -> tuple[Tensor, Tensor]:
    """Return the similarities of the positive pairs and of their anchors' negatives, (M,) each."""
    pairs, x, y = comparison.positives, comparison.anchors, comparison.candidates
    comparison = comparison._replace(anchor_columns=0)
    if len(pairs.rows) == 0:
        return x.new_zeros(0), x.new_zeros(0)
    if loss.is_plain() and not loss.has_own_negatives:
        scale = None if type(loss).of_negatives is hardest else call.numbers["scale"]
        maxima = engine.maxima(comparison, scale, loss.distance.normalize_embeddings, call.dtype, tiled=True)
        return maxima.positive, maxima.of_pairs(comparison)
    similarities = matrix_of(loss, x, y, call.dtype)
    summary = summary_of_negatives(loss, similarities, comparison.masks()[1], call.numbers)
    return similarities[pairs.rows, pairs.columns], summary[pairs.rows]
