"""Ways to compute the losses of positive pairs: from vectors, from a matrix or its blocks, or from a miner's choice.

All give the same values; :func:`losses_of_direction` chooses.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vl_plugins import engine
from vl_plugins.engine import Pairs, cosines, matrix_maximum, unit_vectors
from vl_plugins.losses.batch import Batch, Direction, by_pair, is_one_of_each

__all__ = [
    "PairLosses",
    "check_losses",
    "hardest",
    "losses_of_direction",
    "losses_of_hooks",
    "losses_of_indices",
    "losses_of_masks",
    "numbers_of_negatives",
    "soft_maximum",
]

Numbers = dict[str, Any]


class PairLosses(NamedTuple):
    """The losses of positive pairs or triplets, (M,), and the indices of both sides."""

    values: Tensor
    indices: tuple[Tensor, ...]


def hardest(loss: Any, similarities: Tensor, negative_mask: Tensor, **numbers: Any) -> Tensor:
    """Return the similarity of each anchor's hardest negative, (A,); -inf without any."""
    return matrix_maximum(similarities, negative_mask)


def soft_maximum(loss: Any, similarities: Tensor, negative_mask: Tensor, scale: Any, **numbers: Any) -> Tensor:
    """Return ``log(sum(exp(scale * s))) / scale`` of each anchor's negatives, (A,); -inf without any."""
    return matrix_maximum(similarities, negative_mask, scale)


def losses_of_direction(loss: Any, direction: Direction, numbers: Numbers) -> PairLosses:
    """Return the losses of the positive pairs, those of both directions added up where columns are anchors too.

    Args:
        loss: a :class:`~vl_plugins.losses.PairLoss`.
        direction: what is compared.
        numbers: of the call.
    """
    tiled = _is_tiled(loss, direction)
    positives = direction.positives
    if len(positives.rows) == 0:  # torch has no maximum of nothing
        values = direction.anchors.new_zeros(0)
    elif loss.is_plain() and not loss.needs_matrix:
        values = _losses_of_vectors(loss, direction, numbers, tiled)
    elif tiled:
        values = _losses_in_blocks(loss, direction, numbers)
    else:
        similarities = similarities_of(loss, direction)
        masks = direction.masks()
        options = direction.pair_numbers, direction.anchor_columns
        values = losses_of_masks(loss, similarities, *masks, positives, numbers, *options)
    return PairLosses(values, (positives.rows, positives.columns))


def _is_tiled(loss: Any, direction: Direction) -> bool:
    can_be_tiled = loss.by_row and loss.is_plain()
    if loss.tiled and not can_be_tiled:
        raise ValueError(
            "tiled=True needs a plain CosineSimilarity or DotProductSimilarity, and a loss whose pairs depend on their "
            f"own row only (by_row); got {loss.distance} and {type(loss).__name__}"
        )
    if loss.tiled is not None:
        return bool(loss.tiled)
    rows, columns = direction.shape
    return can_be_tiled and rows * columns * direction.anchors.element_size() > engine.MATRIX_BYTES


def _losses_of_vectors(loss: Any, direction: Direction, numbers: Numbers, tiled: bool) -> Tensor:
    """Return the losses by :mod:`vl_plugins.engine`, both directions from one product."""
    x, y, positives, excluded, anchor_columns, pair_numbers = direction
    options: dict[str, Any] = {"normalize": loss.distance.normalize_embeddings, "anchor_columns": anchor_columns}
    if type(loss).of_negatives is hardest:
        maxima = engine.maxima(x, y, positives, excluded, **options)
    else:
        maxima = engine.soft_maxima(x, y, positives, excluded, numbers["scale"], tiled=tiled, **options)
    positive, negative = maxima.positive, maxima.of_pairs(positives)
    if anchor_columns == 0:
        return loss.losses_of_pairs(positive, negative, numbers | pair_numbers)
    # Apply the formula once, to the pairs of both directions.
    positive = torch.cat([positive, positive])
    pair_numbers = {name: torch.cat([values, values]) for name, values in pair_numbers.items()}
    from_rows, from_columns = loss.losses_of_pairs(positive, negative, numbers | pair_numbers).chunk(2)
    losses: Tensor = from_rows + from_columns
    return losses


def losses_of_masks(
    loss: Any,
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    positives: Pairs,
    numbers: Numbers,
    pair_numbers: Numbers,
    anchor_columns: int,
) -> Tensor:
    """Return the losses of the positive pairs by a matrix.

    Args:
        similarities, positive_mask, negative_mask: (A, C).
        positives: the M places where ``positive_mask`` is True.
        numbers: of the call.
        pair_numbers: (M,) by name.
        anchor_columns: the first so many columns are anchors too; 0 for none.
    """
    if len(positives.rows) == 0:
        return similarities.new_zeros(0)
    numbers_of_pairs = numbers | pair_numbers
    losses = _losses_of_rows(loss, similarities, positive_mask, negative_mask, positives, numbers_of_pairs)
    if anchor_columns == 0:
        return losses
    similarities, positive_mask, negative_mask = (
        matrix[:, :anchor_columns].T for matrix in (similarities, positive_mask, negative_mask)
    )
    if not loss.has_matrix_losses:  # the hooks take pairs in any order
        back = Pairs(positives.columns, positives.rows)
        return losses + losses_of_hooks(loss, similarities, negative_mask, back, numbers_of_pairs)
    back, order = positives.transposed()
    numbers_back = numbers | by_pair(pair_numbers, order)
    losses_back = _losses_of_rows(loss, similarities, positive_mask, negative_mask, back, numbers_back)
    return losses.index_add(0, order, losses_back)


def _losses_of_rows(
    loss: Any, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, positives: Pairs, numbers: Numbers
) -> Tensor:
    if not loss.has_matrix_losses:
        return losses_of_hooks(loss, similarities, negative_mask, positives, numbers)
    losses = loss.matrix_losses(similarities, positive_mask, negative_mask, **numbers)
    check_losses(loss, "matrix_losses", losses, len(positives.rows))
    return losses


def losses_of_hooks(
    loss: Any, similarities: Tensor, negative_mask: Tensor, positives: Pairs, numbers: Numbers
) -> Tensor:
    """Return the losses of the positive pairs by ``of_negatives`` and ``of_pairs``, without synchronizing the GPU."""
    scalars = {name: value for name, value in numbers.items() if not is_one_of_each(value)}
    if len(scalars) < len(numbers):
        _check_numbers_of_negatives(loss, numbers.keys() - scalars.keys())
    negative = numbers_of_negatives(loss, similarities, negative_mask, scalars)
    positive = similarities[positives.rows, positives.columns]
    losses: Tensor = loss.losses_of_pairs(positive, negative[positives.rows], numbers)
    return losses


def _check_numbers_of_negatives(loss: Any, names: set[str]) -> None:
    """Raise ``ValueError`` for a number of each caption that a formula of the anchors' negatives takes by name."""
    for name in names & inspect.signature(type(loss).of_negatives).parameters.keys():
        raise ValueError(f"{name} must be one number in a call of {type(loss).__name__}, whose of_negatives takes it")


def numbers_of_negatives(loss: Any, similarities: Tensor, negative_mask: Tensor, numbers: Numbers) -> Tensor:
    """Return one number of each anchor's negatives, (A,); -inf for an anchor without any.

    For such an anchor, a custom ``of_negatives`` gets all candidates instead: given none, it might return infinity,
    with a gradient of NaN.
    """
    if type(loss).of_negatives in (hardest, soft_maximum):
        of_negatives: Tensor = loss.of_negatives(similarities, negative_mask, **numbers)
        return of_negatives
    has_negatives = negative_mask.any(dim=1)
    of_negatives = loss.of_negatives(similarities, negative_mask | ~has_negatives[:, None], **numbers)
    _check_result(loss, "of_negatives", of_negatives, "one number for each anchor", len(has_negatives))
    return of_negatives.masked_fill(~has_negatives, -torch.inf)


def check_losses(loss: Any, hook: str, losses: Any, pairs: int) -> None:
    """Raise ``ValueError`` for what a hook returns if it is not a loss of each pair, such as a mean."""
    _check_result(loss, hook, losses, "one loss of each positive pair or triplet", pairs)


def _check_result(loss: Any, hook: str, result: Any, expected: str, number: int) -> None:
    if not isinstance(result, Tensor) or result.shape != (number,):
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"{hook} of {type(loss).__name__} must return {expected}, ({number},), got {shape}")
    if not result.is_floating_point():
        raise ValueError(f"{hook} of {type(loss).__name__} must return floating-point numbers, got {result.dtype}")


def _losses_in_blocks(loss: Any, direction: Direction, numbers: Numbers) -> Tensor:
    """Return the losses by blocks of rows of the matrix, which are computed again for the gradients."""
    x, y, positives, excluded, anchor_columns, pair_numbers = direction
    values = _losses_of_blocks(loss, x, y, positives, excluded, numbers, pair_numbers)
    if anchor_columns == 0:
        return values
    back, order = positives.transposed()
    transposed = [of_direction.transposed(anchor_columns) for of_direction in excluded]
    pair_numbers = by_pair(pair_numbers, order)
    columns = y[:anchor_columns]
    return values.index_add(0, order, _losses_of_blocks(loss, columns, x, back, transposed, numbers, pair_numbers))


def _losses_of_blocks(
    loss: Any,
    anchors: Tensor,
    candidates: Tensor,
    positives: Pairs,
    excluded: list[engine.Excluded],
    numbers: Numbers,
    pair_numbers: Numbers,
) -> Tensor:
    if loss.distance.normalize_embeddings:
        anchors, candidates = unit_vectors(anchors), unit_vectors(candidates)
    step = engine.block_rows(len(candidates), anchors.device)
    starts = [*range(0, len(anchors), step), len(anchors)]
    excluded_of_blocks = [pairs.of_blocks(starts) for pairs in excluded]
    losses, done = [], 0
    for number, pairs in enumerate(positives.of_blocks(starts)):
        of_block = [next(of_blocks) for of_blocks in excluded_of_blocks]
        rows_of_block = slice(done, done + len(pairs.rows))
        done = rows_of_block.stop
        if len(pairs.rows) > 0:
            block = anchors[starts[number] : starts[number + 1]]
            numbers_of_block = numbers | {name: values[rows_of_block] for name, values in pair_numbers.items()}
            losses.append(_again(_losses_of_block, loss, block, candidates, pairs, of_block, numbers_of_block))
    return torch.cat(losses)


def _losses_of_block(
    loss: Any, anchors: Tensor, candidates: Tensor, positives: Pairs, excluded: list[engine.Excluded], numbers: Numbers
) -> Tensor:
    direction = Direction(anchors, candidates, positives, excluded, 0, {})
    similarities = anchors @ candidates.T
    return _losses_of_rows(loss, similarities, *direction.masks(), positives, numbers)


def _again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return ``function(*arguments)``, which is called again for the gradients instead of keeping what it computes."""
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False)  # with the same random numbers
    return result


def losses_of_indices(loss: Any, batch: Batch, indices_tuple: tuple[Tensor, ...], numbers: Numbers) -> PairLosses:
    """Return the losses of a miner's pairs or triplets, without the negatives that are known positives."""
    if loss.tiled:
        raise ValueError("tiled=True needs labels, not an indices_tuple")
    if loss.processes.size > 1:
        raise ValueError("indices_tuple would be of this process only: give a DistributedLoss the miner")
    if batch.negatives is not None:
        raise ValueError("negatives cannot be given with an indices_tuple, which says what the negatives are")
    indices_tuple = _checked_indices(indices_tuple, batch)
    positives = Pairs(indices_tuple[0], indices_tuple[1])
    is_known = None
    if batch.columns.ids is not None:
        is_known = batch.known_positives(positives)
    direction = Direction(batch.rows.embeddings, batch.columns.embeddings, positives, [], 0, {})
    similarities = similarities_of(loss, direction)
    if len(indices_tuple) == 3 and loss.takes_triplets:
        return _losses_of_triplets(loss, batch, similarities, indices_tuple, is_known, numbers)
    positive_mask = positives.mask(direction.shape)
    anchors, *_, negatives = indices_tuple
    negative_anchors = anchors if len(indices_tuple) == 3 else indices_tuple[2]
    negative_mask = Pairs(negative_anchors, negatives).mask(direction.shape)
    if is_known is not None:
        negative_mask &= ~is_known
    pairs = Pairs.of_mask(positive_mask)
    pair_numbers = by_pair(batch.columns.numbers, pairs.columns)
    masks = positive_mask, negative_mask
    anchor_columns = len(batch.columns) if batch.both else 0
    values = losses_of_masks(loss, similarities, *masks, pairs, numbers, pair_numbers, anchor_columns)
    return PairLosses(values, (pairs.rows, pairs.columns))


def _losses_of_triplets(
    loss: Any,
    batch: Batch,
    similarities: Tensor,
    triplets: tuple[Tensor, ...],
    is_known: Tensor | None,
    numbers: Numbers,
) -> PairLosses:
    """Return the losses of a miner's triplets, each with its own negative."""
    if batch.both:
        raise ValueError("symmetric=True is not possible with triplets, whose anchors are those of the miner")
    if is_known is not None:
        anchors, _, negatives = triplets
        is_negative = ~is_known[anchors, negatives]
        triplets = tuple(places[is_negative] for places in triplets)
    anchors, positives, _ = triplets
    if len(anchors) == 0:
        return PairLosses(similarities.new_zeros(0), triplets)
    losses = loss.triplet_losses(similarities, *triplets, **numbers, **by_pair(batch.columns.numbers, positives))
    check_losses(loss, "triplet_losses", losses, len(anchors))
    return PairLosses(losses, triplets)


def _checked_indices(indices_tuple: tuple[Any, ...], batch: Batch) -> tuple[Tensor, ...]:
    """Return a miner's indices as tensors; raise ``ValueError`` for pairs or triplets whose parts do not fit."""
    device = batch.rows.embeddings.device
    indices = tuple(torch.as_tensor(places, device=device) for places in indices_tuple)
    lengths = [len(places) for places in indices]
    if len(set(lengths[:2])) > 1 or len(set(lengths[-2:])) > 1:
        raise ValueError(f"indices_tuple must have equally many anchors and others, got {lengths}")
    if device.type == "cpu":  # elsewhere the host would wait
        for places in indices:
            if len(places) > 0 and places.min() < 0:
                raise ValueError(f"indices_tuple must be indices of rows, got {places.min().item()}")
    return indices


def similarities_of(loss: Any, direction: Direction) -> Tensor:
    """Return the similarities of all pairs, (A, C), larger is closer."""
    x, y = direction.anchors, direction.candidates
    if loss.is_plain() and loss.distance.normalize_embeddings:
        return cosines(x, y)  # where zero vectors have finite gradients
    distances: Tensor = loss.distance(x, y)
    return distances if loss.distance.is_inverted else -distances
