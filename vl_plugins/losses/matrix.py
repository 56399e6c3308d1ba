"""Losses of positive pairs by a matrix of similarities: the whole matrix, its blocks of rows, or a miner's choice."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vl_plugins.engine import (
    Comparison,
    Pairs,
    matrix_maximum,
    numbers_of_pairs,
    similarities_of,
    unit_vectors,
    without_autocast,
)
from vl_plugins.losses.batch import Batch

__all__ = [
    "Call",
    "PairLosses",
    "hardest",
    "losses_of_blocks",
    "losses_of_hooks",
    "losses_of_indices",
    "losses_of_matrix",
    "losses_of_rows",
    "matrix_of",
    "soft_maximum",
    "summary_of_negatives",
    "without_known",
    "wrong_result",
]

Numbers = dict[str, Any]


class Call(NamedTuple):
    """What a call says of all pairs.

    Attributes:
        numbers: by name, such as the scale: floats or 0-D tensors.
        dtype: of matrix products, bfloat16 or float16; None for that of the embeddings.
    """

    numbers: Numbers
    dtype: torch.dtype | None


class PairLosses(NamedTuple):
    """The losses of positive pairs or triplets.

    Attributes:
        values: (M,).
        indices: of both sides, or of the three, (M,) each.
        unpaired: what rows without a positive pair add to the sum of all losses; None for nothing.
    """

    values: Tensor
    indices: tuple[Tensor, ...]
    unpaired: Tensor | None = None


def hardest(loss: Any, similarities: Tensor, negative_mask: Tensor, **numbers: Any) -> Tensor:
    """Return the similarity of each anchor's hardest negative, (A,); -inf without any."""
    return matrix_maximum(similarities, negative_mask)


def soft_maximum(loss: Any, similarities: Tensor, negative_mask: Tensor, scale: Any, **numbers: Any) -> Tensor:
    """Return ``log(sum(exp(scale * s))) / scale`` of each anchor's negatives, (A,); -inf without any."""
    return matrix_maximum(similarities, negative_mask, scale)


def matrix_of(loss: Any, x: Tensor, y: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the similarities of all pairs, (A, C), larger is closer."""
    if loss.is_plain():
        return similarities_of(x, y, loss.distance.normalize_embeddings, dtype)
    if list(loss.distance.parameters()):
        distances: Tensor = loss.distance(x, y)
    else:
        distances = without_autocast(loss.distance, x, y)
    return distances if loss.distance.is_inverted else -distances


def losses_of_matrix(
    loss: Any,
    similarities: Tensor,
    masks: tuple[Tensor, Tensor],
    pairs: Pairs,
    anchor_columns: int,
    pair_numbers: Numbers,
    call: Call,
) -> PairLosses:
    """Return the losses of the positive pairs, those of both directions added up where columns are anchors too.

    Args:
        loss: a :class:`~vl_plugins.losses.PairLoss`.
        similarities: (A, C).
        masks: of the positive pairs and of the negative ones, (A, C) each.
        pairs: the M places of the positive pairs.
        anchor_columns: the first so many columns are anchors too; 0 for none.
        pair_numbers: (M,) by name.
    """
    indices, numbers = (pairs.rows, pairs.columns), call.numbers
    if pairs.rows.shape[0] == 0 and not loss.counts_unpaired_rows:
        return PairLosses(similarities.new_zeros(0), indices)
    losses, unpaired = losses_of_rows(loss, similarities, *masks, pairs, numbers | pair_numbers)
    if anchor_columns == 0:
        return PairLosses(losses, indices, unpaired)
    similarities, positive_mask, negative_mask = (matrix[:, :anchor_columns].T for matrix in (similarities, *masks))
    turned = similarities, positive_mask, negative_mask
    if not loss.has_matrix_losses:  # hooks take pairs in any order
        back = Pairs(pairs.columns, pairs.rows)
        return PairLosses(losses + losses_of_rows(loss, *turned, back, numbers | pair_numbers)[0], indices)
    back, order = pairs.transposed()
    losses_back, unpaired_back = losses_of_rows(loss, *turned, back, numbers | numbers_of_pairs(pair_numbers, order))
    return PairLosses(losses.index_add(0, order, losses_back), indices, _sum(unpaired, unpaired_back))


def losses_of_rows(
    loss: Any, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, pairs: Pairs, numbers: Numbers
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of the positive pairs with rows as anchors, (M,), and what rows without a positive add."""
    if not loss.has_matrix_losses:
        return losses_of_hooks(loss, similarities, negative_mask, pairs, numbers), None
    if loss.takes_pairs:
        numbers = numbers | {"pairs": (pairs.rows, pairs.columns)}
    losses, unpaired = loss.matrix_losses(similarities, positive_mask, negative_mask, **numbers), None
    if isinstance(losses, tuple):
        losses, unpaired = losses
    if not is_result(losses, pairs.rows.shape[0]):
        raise wrong_result(loss, "matrix_losses", losses, pairs.rows.shape[0])
    return losses, unpaired


def losses_of_hooks(loss: Any, similarities: Tensor, negative_mask: Tensor, pairs: Pairs, numbers: Numbers) -> Tensor:
    """Return the losses of the positive pairs by ``of_negatives`` and ``of_pairs``, without synchronizing the GPU."""
    numbers_of_all = {}
    for name, value in numbers.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            numbers_of_all[name] = value
    negative = summary_of_negatives(loss, similarities, negative_mask, numbers_of_all)
    positive = similarities[pairs.rows, pairs.columns]
    losses: Tensor = loss.losses_of_pairs(positive, negative[pairs.rows], numbers)
    return losses


def summary_of_negatives(loss: Any, similarities: Tensor, negative_mask: Tensor, numbers: Numbers) -> Tensor:
    """Return one number of each anchor's negatives, (A,); -inf for an anchor without any.

    For such an anchor, a custom ``of_negatives`` gets all candidates instead: given none, it might return infinity,
    with a gradient of NaN.
    """
    of_negatives = type(loss).of_negatives
    if of_negatives in (hardest, soft_maximum):
        summary: Tensor = of_negatives(loss, similarities, negative_mask, **numbers)
        return summary
    has_negatives = negative_mask.any(dim=1)
    summary = loss.of_negatives(similarities, negative_mask | ~has_negatives[:, None], **numbers)
    if not is_result(summary, len(has_negatives)):
        raise wrong_result(loss, "of_negatives", summary, len(has_negatives), "number for each anchor")
    return summary.masked_fill(~has_negatives, -torch.inf)


def is_result(result: Any, size: int) -> bool:
    """Return whether a hook returned a number for each of so many pairs or anchors."""
    return isinstance(result, Tensor) and result.shape == (size,) and result.is_floating_point()


def wrong_result(
    loss: Any, hook: str, result: Any, size: int, expected: str = "loss of each positive pair or triplet"
) -> ValueError:
    """Return the error for what a hook returned instead, such as a mean."""
    got = type(result).__name__
    if isinstance(result, Tensor):
        got = f"{tuple(result.shape)} of {result.dtype}"
    return ValueError(f"{hook} of {type(loss).__name__} must return one {expected}, ({size},), got {got}")


def losses_of_blocks(loss: Any, comparison: Comparison, call: Call) -> PairLosses:
    """Return the losses by blocks of rows of the matrix, which are computed again for the gradients."""
    pairs, columns, normalize = comparison.positives, comparison.anchor_columns, loss.distance.normalize_embeddings
    if normalize and call.dtype is None:  # once, not in each block
        normalize = False
        x, y = unit_vectors(comparison.anchors), unit_vectors(comparison.candidates)
        comparison = comparison._replace(anchors=x, candidates=y)
    losses, unpaired = _losses_of_blocks(loss, comparison, call, normalize)
    if columns > 0:
        turned, order = comparison.transposed()
        losses_back, unpaired_back = _losses_of_blocks(loss, turned, call, normalize)
        losses, unpaired = losses.index_add(0, order, losses_back), _sum(unpaired, unpaired_back)
    return PairLosses(losses, (pairs.rows, pairs.columns), unpaired)


def _losses_of_blocks(loss: Any, comparison: Comparison, call: Call, normalize: bool) -> tuple[Tensor, Tensor | None]:
    losses: list[Tensor] = []
    unpaired: Tensor | None = None
    for _, block in comparison.blocks():
        if block.positives.rows.shape[0] > 0 or loss.counts_unpaired_rows:
            # Checkpoint draws the same random numbers again, if a loss draws any.
            losses_of_block, unpaired_of_block = checkpoint(
                _losses_of_block, loss, block, call, normalize, use_reentrant=False
            )
            losses.append(losses_of_block)
            unpaired = _sum(unpaired, unpaired_of_block)
    return torch.cat(losses), unpaired


def _losses_of_block(loss: Any, block: Comparison, call: Call, normalize: bool) -> tuple[Tensor, Tensor | None]:
    similarities = similarities_of(block.anchors, block.candidates, normalize, call.dtype)
    return losses_of_rows(loss, similarities, *block.masks(), block.positives, call.numbers | block.numbers)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


# A miner's choice


def losses_of_indices(loss: Any, batch: Batch, indices_tuple: tuple[Any, ...], both: bool, call: Call) -> PairLosses:
    """Return the losses of a miner's pairs or triplets, without the negatives that are known positives."""
    indices = _checked_indices(indices_tuple, batch.embeddings.device)
    if loss.tiled:
        raise ValueError("tiled=True needs labels, not an indices_tuple")
    if batch.negatives is not None:
        raise ValueError("negatives cannot be given with an indices_tuple, which says what the negatives are")
    similarities = matrix_of(loss, batch.embeddings, batch.ref_emb, call.dtype)
    is_known = None
    if batch.ref_ids is not None:
        is_known = batch.known_mask(Pairs(indices[0], indices[1]))
    if len(indices) == 3 and loss.takes_triplets:
        if both:
            raise ValueError("symmetric=True is not possible with triplets, whose anchors are those of the miner")
        return _losses_of_triplets(loss, similarities, indices, is_known, call.numbers, batch.numbers)
    shape = similarities.shape
    positive_mask = Pairs(indices[0], indices[1]).mask(shape)
    negative_mask = Pairs(indices[0] if len(indices) == 3 else indices[2], indices[-1]).mask(shape)
    if is_known is not None:
        negative_mask &= ~is_known
    pairs = Pairs.of_mask(positive_mask)
    pair_numbers = numbers_of_pairs(batch.numbers, pairs.columns)
    columns = shape[1] if both else 0
    return losses_of_matrix(loss, similarities, (positive_mask, negative_mask), pairs, columns, pair_numbers, call)


def _losses_of_triplets(
    loss: Any,
    similarities: Tensor,
    triplets: Sequence[Tensor],
    is_known: Tensor | None,
    numbers: Numbers,
    caption_numbers: Numbers,
) -> PairLosses:
    """Return the losses of a miner's triplets, each with its own negative."""
    if is_known is not None:
        triplets = without_known(triplets, is_known)
    anchors, positives, negatives = triplets
    losses = similarities.new_zeros(0)
    if len(anchors) > 0:
        numbers = numbers | numbers_of_pairs(caption_numbers, positives)
        losses = loss.triplet_losses(similarities, anchors, positives, negatives, **numbers)
        if not is_result(losses, len(anchors)):
            raise wrong_result(loss, "triplet_losses", losses, len(anchors))
    return PairLosses(losses, (anchors, positives, negatives))


def without_known(indices: Sequence[Tensor], is_known: Tensor) -> tuple[Tensor, ...]:
    """Return pairs or triplets without the negatives that are known positives.

    Args:
        indices: of pairs or triplets, index tensors.
        is_known: (A, C), bool.
    """
    if len(indices) == 3:
        anchors, positives, negatives = indices
        is_negative = ~is_known[anchors, negatives]
        return anchors[is_negative], positives[is_negative], negatives[is_negative]
    anchors, positives, negative_anchors, negatives = indices
    is_negative = ~is_known[negative_anchors, negatives]
    return anchors, positives, negative_anchors[is_negative], negatives[is_negative]


def _checked_indices(indices_tuple: Any, device: torch.device) -> list[Tensor]:
    """Return a miner's indices as tensors; raise ``ValueError`` for something else than pairs or triplets."""
    expected = "indices_tuple must be pairs or triplets, miner(embeddings, labels, ref_emb, ref_labels)"
    if callable(indices_tuple):
        raise ValueError(f"{expected}, not the miner")
    if isinstance(indices_tuple, Tensor):
        raise ValueError("indices_tuple must be a tuple of index tensors; embeddings go to ref_emb=")
    if len(indices_tuple) not in (3, 4):
        raise ValueError(f"{expected}, of 4 or 3 tensors, got {len(indices_tuple)} tensors")
    indices, lengths = [], []
    for places in indices_tuple:
        indices.append(torch.as_tensor(places, device=device))
        lengths.append(len(indices[-1]))
    if lengths[0] != lengths[1] or lengths[-1] != lengths[-2]:
        raise ValueError(f"indices_tuple must have equally many anchors and others, got {lengths}")
    for places in indices:
        if device.type == "cpu" and len(places) > 0 and places.min() < 0:  # elsewhere the host would wait
            raise ValueError(f"indices_tuple must be indices of rows, got {places.min().item()}")
    return indices
