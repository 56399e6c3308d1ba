"""Wrappers of pytorch-metric-learning, corrected, and for the losses of this package too."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.miners import BatchEasyHardMiner
from pytorch_metric_learning.utils import distributed, loss_and_miner_utils
from torch import Tensor

from vl_plugins.functional.precision import full_precision
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.pair_batch import IndicesTuple
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.utils.checks import tensor_or_none

__all__ = ["CrossBatchMemory", "DistributedLossWrapper", "DistributedMinerWrapper", "SelfSupervisedLoss"]


class _SupportsPairLosses:
    """Adds the losses of this package and all subclasses of ``PairLoss`` to a wrapper's supported losses."""

    @classmethod
    def supported_losses(cls) -> list[str]:
        ours: set[type[Any]] = {SmoothChamferLoss, *_subclasses(SmoothChamferLoss), *_subclasses(PairLoss)}
        return [*super().supported_losses(), *sorted({loss.__name__ for loss in ours})]  # type: ignore[misc]

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        supported = cls.supported_losses()
        if loss_name not in supported:
            raise ValueError(f"{cls.__name__} does not support {loss_name}; it supports {', '.join(supported)}")


class CrossBatchMemory(_SupportsPairLosses, losses.CrossBatchMemory):
    """Compares a batch with a queue of the latest embeddings, including its own; the queue has no gradient.

    Called as ``loss(embeddings, labels, indices_tuple=None, enqueue_mask=None)``. The batch's embeddings are the
    anchors, so ``symmetric`` of the loss has no effect. An item is never compared with its own copy in the queue.
    Embeddings are stored and compared in float32 or float64, also under autocast.

    - A ``miner`` chooses pairs of the batch and the queue; without one, all pairs count.
    - ``indices_tuple`` has more pairs or triplets, of the batch only, such as ``miner(embeddings, labels)``.
    - With ``enqueue_mask``, (B,) bool, only the selected embeddings enter the queue, and only the others are compared
      with it. The selected ones may come from a momentum encoder or the other modality.

    Args:
        loss: a loss of this package, a subclass of its ``PairLoss``, or one that the base class supports.
        embedding_size: D.
        memory_size: length of the queue.
        miner: a miner of pytorch-metric-learning, or None.

    Raises:
        ValueError: an unsupported loss, wrong shapes, more embeddings than ``memory_size``, a miner of the easiest
            positive, the anchor's own copy, or a ``DistributedMinerWrapper``.

    Reference:
        Wang et al. 2020, Cross-Batch Memory for Embedding Learning.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> loss = CrossBatchMemory(UnifiedLoss(), embedding_size=2, memory_size=4)
    >>> labels = torch.tensor([0, 1])
    >>> loss(torch.eye(2), labels), loss(torch.eye(2).flip(0), labels)
    (tensor(0.), tensor(1.2000))
    """

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: IndicesTuple | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        tensor_or_none("labels", labels)
        expected = len(labels), self.embedding_size
        if embeddings.shape != expected:
            raise ValueError(f"embeddings must have the shape {expected}, got {tuple(embeddings.shape)}")
        if enqueue_mask is not None and (enqueue_mask.shape != labels.shape or enqueue_mask.dtype != torch.bool):
            raise ValueError(
                f"enqueue_mask must be a bool tensor of shape {tuple(labels.shape)}, "
                f"got {enqueue_mask.dtype} of shape {tuple(enqueue_mask.shape)}"
            )
        queued = len(embeddings) if enqueue_mask is None else int(enqueue_mask.sum())
        if queued > self.memory_size:
            raise ValueError(f"memory_size must be at least the number of embeddings, {queued}, got {self.memory_size}")
        (embeddings,) = full_precision(embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            return super().forward(embeddings, labels, indices_tuple, enqueue_mask)

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        if batch_size > 0:
            super().add_to_memory(embeddings, labels, batch_size)
        else:  # the base class would take an empty queue for a full one
            self.curr_batch_idx = torch.zeros(0, dtype=torch.long, device=labels.device)

    def create_indices_tuple(self, *arguments: Any) -> IndicesTuple:
        *batch_and_queue, input_indices_tuple, do_remove_self_comparisons = arguments
        if isinstance(self.miner, distributed.DistributedMinerWrapper):
            raise ValueError(
                "the miner of a CrossBatchMemory mines its own queue: pass the wrapped miner instead, and for several "
                "processes wrap the CrossBatchMemory in a DistributedLossWrapper"
            )
        is_easy = isinstance(self.miner, BatchEasyHardMiner) and self.miner.pos_strategy == BatchEasyHardMiner.EASY
        if is_easy and do_remove_self_comparisons:
            raise ValueError(
                f"{type(self.miner).__name__} with pos_strategy='easy' would choose each embedding's own copy in the "
                "queue: choose another pos_strategy, or enqueue other embeddings with enqueue_mask"
            )
        own_copies = self.curr_batch_idx
        if input_indices_tuple is not None:
            # The base class takes the place in the batch for the place in the queue.
            anchors, positives, *negative_anchors, negatives = input_indices_tuple
            input_indices_tuple = anchors, own_copies[positives], *negative_anchors, own_copies[negatives]
        # How the base class removes self-comparisons ignores a batch of one and fails for an empty one.
        indices = super().create_indices_tuple(*batch_and_queue, input_indices_tuple, False)
        if not do_remove_self_comparisons:
            return indices
        others = indices[1] != own_copies[indices[0]]
        if len(indices) == 3:  # triplets
            return tuple(index[others] for index in indices)
        return indices[0][others], indices[1][others], *indices[2:]

    def get_extra_state(self) -> dict[str, int | bool]:
        return {"queue_idx": self.queue_idx, "has_been_filled": self.has_been_filled}

    def set_extra_state(self, state: dict[str, int | bool]) -> None:
        self.queue_idx, self.has_been_filled = state["queue_idx"], state["has_been_filled"]


class SelfSupervisedLoss(_SupportsPairLosses, losses.SelfSupervisedLoss):
    """Takes pairs of embeddings instead of labels: ``loss(embeddings, ref_emb)``, where row i belongs to row i.

    Args:
        loss: as for :class:`CrossBatchMemory`.
        symmetric: take all 2 B embeddings as one set, so that negatives are of both kinds, as in SimCLR. Otherwise
            negatives are among ``ref_emb`` only, as in CLIP; a loss of this package then adds the other direction,
            unless its own ``symmetric`` is False.

    Raises:
        ValueError: an unsupported loss, or embeddings of different shapes.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> SelfSupervisedLoss(UnifiedLoss(), symmetric=False)(torch.eye(3), torch.eye(3).roll(1, dims=0))
    tensor(2.4000)
    """

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        if ref_emb.shape != embeddings.shape:
            raise ValueError(f"ref_emb must have the shape {tuple(embeddings.shape)}, got {tuple(ref_emb.shape)}")
        return super().forward(embeddings, ref_emb)


class DistributedLossWrapper(distributed.DistributedLossWrapper):
    """Compares the embeddings of all processes.

    With ``efficient``, pytorch-metric-learning's own drops the pairs (i, i) of embeddings and ``ref_emb``: all positive
    pairs of images with one caption each. Here they count.

    Args:
        loss: a loss, or a :class:`CrossBatchMemory` (not with ``efficient``).
        efficient: compare the process's own embeddings with those of all processes, in one direction, image to text;
            only the own embeddings have a gradient. Otherwise each process computes the loss of the whole batch, and
            after DistributedDataParallel has averaged them, gradients are those of one process with the whole batch.
    """

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        tensor_or_none("labels", labels)
        tensor_or_none("ref_labels", ref_labels)
        return super().forward(embeddings, labels, indices_tuple, ref_emb, ref_labels, enqueue_mask)

    def forward_regular_loss(
        self,
        emb: Tensor,
        labels: Tensor,
        indices_tuple: IndicesTuple | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor,
        world_size: int,
    ) -> Tensor:
        if self.efficient and ref_emb is not None and indices_tuple is None and world_size > 1:
            ref_labels = ref_labels.to(ref_emb.device)
            all_labels = torch.cat([ref_labels, distributed.all_gather(ref_labels)])
            indices_tuple = loss_and_miner_utils.get_all_pairs_indices(labels.to(emb.device), all_labels)
        return super().forward_regular_loss(emb, labels, indices_tuple, ref_emb, ref_labels, world_size)


class DistributedMinerWrapper(distributed.DistributedMinerWrapper):
    """Mines among the embeddings of all processes, for a :class:`DistributedLossWrapper` with the same ``efficient``.

    Called in each process as ``miner(embeddings, labels, ref_emb=None, ref_labels=None)``, with equal batch sizes. The
    pairs (i, i) are mined too.

    Args:
        miner: a miner of pytorch-metric-learning.
        efficient: mine for the process's own anchors; other indices are of all references, its own first. Otherwise
            each process mines in the whole batch.

    Raises:
        TypeError: ``miner`` is not a ``BaseMiner``.
    """

    def forward(
        self, emb: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> IndicesTuple:
        tensor_or_none("labels", labels)
        tensor_or_none("ref_labels", ref_labels)
        if not self.efficient or ref_emb is None or torch.distributed.get_world_size() == 1:
            return super().forward(emb, labels, ref_emb, ref_labels)
        all_ref_emb, all_ref_labels, _ = distributed.gather(ref_emb, ref_labels)
        return self.miner(emb, labels, all_ref_emb, all_ref_labels)


def check_miner(miner: Callable[..., Any] | None) -> None:
    """Raise ``ValueError`` for a miner that would drop each image's own caption."""
    theirs, ours = distributed.DistributedMinerWrapper, DistributedMinerWrapper
    if isinstance(miner, theirs) and not isinstance(miner, ours) and miner.efficient:
        raise ValueError(
            "pytorch-metric-learning's DistributedMinerWrapper(efficient=True) drops each pair (i, i) of ref_emb: use "
            "vl_plugins.losses.wrappers.DistributedMinerWrapper"
        )


def _subclasses(base: type[Any]) -> set[type[Any]]:
    return {found for direct in base.__subclasses__() for found in (direct, *_subclasses(direct))}
