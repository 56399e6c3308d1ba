"""Applies pytorch-metric-learning's reducers to the losses of pairs.

This module adds three things. With nothing to compare, the loss is 0, and embeddings and parameters get gradients of 0
rather than none, because DistributedDataParallel waits for all of them. NaN in any embedding makes the loss NaN, even
if a reducer drops the pairs that have it, or no pair has it. And the mean over the pairs of one process becomes its
share of the mean over the pairs of all processes.
"""

from typing import Any

import torch
from pytorch_metric_learning.reducers import ClassWeightedReducer, MeanReducer, PerAnchorReducer
from torch import Tensor, distributed

from vl_plugins.losses.batch import Batch
from vl_plugins.losses.matrix import PairLosses

__all__ = ["reduced", "share_of_mean"]


def reduced(loss: Any, pairs: PairLosses, compared: Batch | Tensor, numbers: list[Any], shows_nan: bool = False) -> Any:
    """Return what the reducer of a loss makes of the losses of pairs, plus the regularization.

    Args:
        loss: a :class:`~vl_plugins.losses.PairLoss`.
        pairs: the losses.
        compared: the batch of all processes, or the matrix.
        numbers: of the call; tensors may have gradients.
        shows_nan: NaN in any of the embeddings is NaN in the losses already.
    """
    is_mean = type(loss.reducer) is MeanReducer
    embeddings, labels = compared, None
    if isinstance(compared, Batch):
        embeddings, labels = compared.embeddings, compared.labels
    if not is_mean:
        _check_reducer(loss.reducer, compared, labels)
    values, count = pairs.values, pairs.values.shape[0]
    if pairs.unpaired is not None and count > 0:
        values = values + pairs.unpaired / count
    kind = "pos_pair" if len(pairs.indices) == 2 else "triplet"
    info = {"losses": values, "indices": pairs.indices, "reduction_type": kind, "divisor": count}
    if count == 0:
        info = loss.zero_loss()
    loss_dict = {"loss": info}
    if loss.embedding_regularizer is not None:
        loss_dict["embedding_reg_loss"] = loss.zero_loss() | {"losses": _regularization(loss, compared)}
    result = loss.reducer(loss_dict, embeddings, labels)
    if not isinstance(result, Tensor):
        return result  # DoNothingReducer returns the dict
    if is_mean and count > 0 and shows_nan:
        return result
    # Add 0 times the embeddings, so that NaN shows, and so that they have gradients. A mean of a pair or more has
    # gradients already, so there they are constants.
    sides = compared.sides() if isinstance(compared, Batch) else [compared]
    sources: list[Any] = [*sides, values, *numbers]
    if is_mean and count > 0:
        sources = [side.detach() for side in sides]
    if count == 0:  # or parameters, as of a distance, have no gradients
        sources += [parameter for parameter in loss.parameters() if parameter.requires_grad]
    for source in sources:
        if isinstance(source, Tensor):
            result = result + (0 * source).sum()  # not 0 times the sum, which may overflow
    return result


def _check_reducer(reducer: Any, compared: Batch | Tensor, labels: Tensor | None) -> None:
    """Raise ``ValueError`` for a reducer of pytorch-metric-learning that cannot reduce these pairs."""
    if labels is None and isinstance(reducer, ClassWeightedReducer):
        raise ValueError("ClassWeightedReducer needs labels, which are the classes that it weights")
    if isinstance(reducer, PerAnchorReducer):  # which has as many columns as rows
        shape = compared.shape
        if shape[1] > shape[0]:
            raise ValueError(
                f"PerAnchorReducer needs at least as many images as captions, got {shape[0]} and {shape[1]}"
            )


def share_of_mean(processes: Any, losses: list[PairLosses]) -> PairLosses:
    """Return the losses of own rows and own columns, scaled so that their mean is W S / N.

    W is the number of processes, S the sum of the losses, and N the number of pairs of all. A pair counts once in N,
    though it has a loss in each direction. See :mod:`vl_plugins.distributed`.
    """
    tensors = []
    for of_direction in losses:
        tensors.append(of_direction.values)
        if of_direction.unpaired is not None:
            tensors.append(of_direction.unpaired.reshape(1))
    values = torch.cat(tensors)
    totals = torch.full((2,), len(losses[0].values), dtype=torch.float64, device=values.device)  # exact
    totals[1] = 1  # pairs, and processes
    distributed.all_reduce(totals, group=processes.group)
    all_pairs, size = totals
    # Without a pair in any process, the loss is 0, whatever unpaired rows add.
    share = torch.where(all_pairs > 0, len(values) * size / all_pairs.clamp(min=1), 0)
    values = values * share
    places = torch.arange(len(values), device=values.device)
    return PairLosses(values, (places, places))


def _regularization(loss: Any, batch: Any) -> Tensor:
    sides: list[Tensor | None] = [batch.embeddings]
    if getattr(loss.embedding_regularizer, "takes_ref_emb", False):
        sides.append(None if batch.one_set else batch.ref_emb)
    term: Tensor = loss.embedding_regularizer(*sides) * loss.embedding_reg_weight
    return term
