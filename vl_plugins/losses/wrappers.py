"""Wrappers of pytorch-metric-learning that take the losses of this package, and of one's own, too."""

from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor

from vl_plugins.numerics import full_precision

__all__ = ["CrossBatchMemory", "SelfSupervisedLoss"]


class CrossBatchMemory(losses.CrossBatchMemory):
    """Compares a batch with a queue of the latest embeddings, including its own; the queue has no gradient.

    Called as ``loss(embeddings, labels, indices_tuple=None, enqueue_mask=None)``, see pytorch-metric-learning. Here any
    loss will do, an item is never compared with its own copy in the queue, ``indices_tuple`` is of the batch alone,
    everything is computed in float32 at least, and the queue's place is part of ``state_dict``. Batches are anchors, so
    ``symmetric`` of the loss has no effect.

    Reference:
        Wang et al. 2020, Cross-Batch Memory for Embedding Learning.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> loss = CrossBatchMemory(UnifiedLoss(), embedding_size=2, memory_size=4)
    >>> labels = torch.tensor([0, 1])
    >>> loss(torch.eye(2), labels), loss(torch.eye(2).flip(0), labels)
    (tensor(0.), tensor(1.2000))
    """

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        pass

    def forward(self, embeddings: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (embeddings,) = full_precision(embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            return super().forward(embeddings, labels, *args, **kwargs)

    def create_indices_tuple(self, *arguments: Any) -> tuple[Tensor, ...]:
        *batch_and_queue, given, do_remove_self_comparisons = arguments
        own = self.curr_batch_idx
        if given is not None:  # the base class takes the place in the batch for the place in the queue
            anchors, positives, *negative_anchors, negatives = given
            given = anchors, own[positives], *negative_anchors, own[negatives]
        # The base class's way to remove own copies keeps some of them.
        indices = super().create_indices_tuple(*batch_and_queue, given, False)
        if not do_remove_self_comparisons:
            return indices
        others = indices[1] != own[indices[0]]
        kept = 3 if len(indices) == 3 else 2
        return *(index[others] for index in indices[:kept]), *indices[kept:]

    def get_extra_state(self) -> tuple[int, bool]:
        return self.queue_idx, self.has_been_filled

    def set_extra_state(self, state: tuple[int, bool]) -> None:
        self.queue_idx, self.has_been_filled = state


class SelfSupervisedLoss(losses.SelfSupervisedLoss):
    """Takes pairs of embeddings instead of labels, see pytorch-metric-learning; takes any loss."""

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        pass
