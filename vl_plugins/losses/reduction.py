"""Applies pytorch-metric-learning's reducers to the losses of pairs.

This module adds three things. With nothing to compare, the loss is 0, and embeddings and parameters get gradients of 0
rather than none, because DistributedDataParallel waits for all of them. NaN in any embedding makes the loss NaN, even
if a reducer drops the pairs that have it, or no pair has it. And the mean over the pairs of one process becomes its
share of the mean over the pairs of all processes.
"""

from typing import Any

import torch
from pytorch_metric_learning.reducers import MeanReducer, PerAnchorReducer
from torch import Tensor

from vl_plugins.losses.batch import Batch
from vl_plugins.losses.paths import PairLosses

__all__ = ["reduced"]


def reduced(
    loss: Any, losses: list[PairLosses], batch: Batch | None, inputs: list[Tensor], numbers: dict[str, Any]
) -> Any:
    """Return what the reducer of a loss makes of the losses of pairs, plus the regularization.

    Args:
        loss: a :class:`~vl_plugins.losses.PairLoss`.
        losses: of each direction that was computed on its own.
        batch: None for a matrix of similarities.
        inputs: the embeddings, or the matrix.
        numbers: of the call, which may have gradients.
    """
    if isinstance(loss.reducer, PerAnchorReducer):
        _check_fits_a_square(inputs, batch)
    has_pairs = all(len(of_direction.values) > 0 for of_direction in losses)
    pairs = losses[0]
    if batch is not None and not batch.is_whole:
        pairs = _share_of_mean(loss, losses)
    loss_dict = {"loss": _of_pairs(loss, pairs)}
    labels = None
    if batch is not None:
        labels = batch.rows.labels
        if loss.embedding_regularizer is not None:
            loss_dict["embedding_reg_loss"] = loss.zero_loss() | {"losses": _regularization(loss, batch)}
    result = loss.reducer(loss_dict, inputs[0], labels)
    if not isinstance(result, Tensor):
        return result  # DoNothingReducer returns the dict
    if type(loss.reducer) is MeanReducer and has_pairs:
        # Where every embedding is compared by cosine, NaN or infinity in one is NaN in the mean already.
        if batch is not None and batch.compares_all_by_place and getattr(loss.distance, "normalize_embeddings", False):
            return result
        return _in_graph_of(result, [values.detach() for values in inputs])
    sources = [*inputs, pairs.values, *numbers.values()]
    if batch is not None:
        sources += batch.columns.numbers.values()
    if not has_pairs:  # or parameters, as of a distance, have no gradients
        sources += [parameter for parameter in loss.parameters() if parameter.requires_grad]
    return _in_graph_of(result, sources)


def _check_fits_a_square(inputs: list[Tensor], batch: Batch | None) -> None:
    """Raise ``ValueError`` for more candidates than anchors: the reducer has as many columns as rows."""
    rows, columns = inputs[0].shape[:2]
    if batch is not None:
        rows, columns = len(batch.all_rows), len(batch.all_columns)
    if columns > rows:
        raise ValueError(f"PerAnchorReducer needs at least as many images as captions, got {rows} and {columns}")


def _of_pairs(loss: Any, pairs: PairLosses) -> dict[str, Any]:
    """Return losses and indices in pytorch-metric-learning's form."""
    if len(pairs.values) == 0:
        zero: dict[str, Any] = loss.zero_loss()
        return zero
    kind = "pos_pair" if len(pairs.indices) == 2 else "triplet"
    return {"losses": pairs.values, "indices": pairs.indices, "reduction_type": kind, "divisor": len(pairs.values)}


def _share_of_mean(loss: Any, losses: list[PairLosses]) -> PairLosses:
    """Return the losses of own rows and own columns, scaled so that their mean is W S / N.

    W is the number of processes, S the sum of the losses, and N the number of pairs of all. A pair counts once in N,
    though it has a loss in each direction. See :mod:`vl_plugins.distributed`.
    """
    values = torch.cat([of_direction.values for of_direction in losses])
    own_pairs = torch.full((), len(losses[0].values), dtype=torch.float64, device=values.device)  # exact
    all_pairs = loss.processes.sum(own_pairs)
    values = values * (len(values) * loss.processes.size / all_pairs.clamp(min=1))
    places = torch.arange(len(values), device=values.device)
    return PairLosses(values, (places, places))


def _regularization(loss: Any, batch: Batch) -> Tensor:
    sides: list[Tensor | None] = [batch.rows.embeddings]
    if getattr(loss.embedding_regularizer, "takes_ref_emb", False):
        sides.append(None if batch.one_set else batch.columns.embeddings)
    term: Tensor = loss.embedding_regularizer(*sides) * loss.embedding_reg_weight
    return term


def _in_graph_of(result: Tensor, sources: list[Any]) -> Tensor:
    """Return the loss plus 0 times the sources: equal, but with gradients for all of them, or NaN."""
    sums = [source.sum() for source in sources if isinstance(source, Tensor)]
    return result.add(sum(sums[1:], start=sums[0]), alpha=0)
