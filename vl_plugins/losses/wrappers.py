"""Wrappers of pytorch-metric-learning that also take the losses of this package, and your own."""

import math
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.miners import BatchEasyHardMiner
from torch import Tensor

from vl_plugins.distributed import first_label, gathering, gathers, processes_of
from vl_plugins.losses.base import PairLoss
from vl_plugins.numerics import NO_ID, check_loss, checked_rows, fill_at, full_precision_call

__all__ = ["CrossBatchMemory", "SelfSupervisedLoss"]


# What is saved of a queue.
QUEUE = ("embedding_memory", "label_memory", "id_memory")
# Arguments that a call of a loss takes, but a call of a queue does not.
REFUSED = ("negatives", "negative_ids", "confidence", "symmetric", "copies", "ref_emb", "ref_labels")


class CrossBatchMemory(losses.CrossBatchMemory):
    """Compares a batch with a queue of the latest embeddings, including its own; the queue has no gradient.

    Called as ``loss(embeddings, labels, indices_tuple=None, enqueue_mask=None)``. The batch's embeddings are the
    anchors, so ``symmetric`` of the loss has no effect. An item is never compared with its own copy in the queue.
    Everything is computed in float32 at least, and the position in the queue is part of ``state_dict``.

    - A ``miner`` chooses pairs of the batch and the queue; without one, all pairs count.
    - ``indices_tuple`` has more pairs or triplets, of the batch only, such as ``miner(embeddings, labels)``.
    - With ``enqueue_mask``, (B,) bool, only the selected embeddings enter the queue, and only the others are compared
      with it. The selected ones may come from a momentum encoder or the other modality.

    Args:
        loss: any loss.
        embedding_size: D.
        memory_size: length of the queue.
        miner: a miner of pytorch-metric-learning, or None.

    Raises:
        ValueError: embeddings of another width than ``embedding_size``; labels that are NaN, of another type or length;
            a mask of another shape; more embeddings to queue than ``memory_size``; or a miner of the easiest positive,
            the anchor's own copy.

    Reference:
        Wang et al. 2020, Cross-Batch Memory for Embedding Learning.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> loss = CrossBatchMemory(UnifiedLoss(), embedding_size=2, memory_size=4)
    >>> labels = torch.tensor([0, 1])
    >>> loss(torch.eye(2), labels), loss(torch.eye(2).flip(0), labels)
    (tensor(0.), tensor(1.2000))
    """

    embedding_memory: Tensor
    label_memory: Tensor
    id_memory: Tensor  # ids of the contents, -1 where none was given

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Take any loss, where pytorch-metric-learning takes its own only."""

    def __init__(self, loss: Any, embedding_size: int, memory_size: int = 1024, miner: Any = None, **kwargs: Any):
        check_loss(loss)
        super().__init__(loss, embedding_size, memory_size, miner, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gather_across_devices":
            raise AttributeError("the queue of CrossBatchMemory is that of one process: it cannot gather")
        super().__setattr__(name, value)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        enqueue_mask: Tensor | None = None,
        *,
        ref_ids: Any = None,
        **numbers: Any,
    ) -> Any:
        """Return the loss of a batch, and put it into the queue.

        Args:
            embeddings, labels: (B, D) and (B,).
            indices_tuple, enqueue_mask: see above.
            ref_ids: (B,), ids of the contents of the embeddings, see :meth:`~vl_plugins.losses.PairLoss.forward`. The
                queue keeps them.
            numbers: others of the loss's call, such as ``scale``.
        """
        if gathers(self):
            raise ValueError("the queue is that of one process: create the loss without gather_across_devices")
        for name, value in numbers.items():
            is_of_candidates = name != "matching_ids" and math.prod(np.shape(value)) > 1
            if name in REFUSED or is_of_candidates:
                raise ValueError(f"CrossBatchMemory takes no {name}: the embeddings in its queue are the candidates")
        by_labels = self.miner is None and indices_tuple is None and isinstance(self.loss, PairLoss)
        if not by_labels and (ref_ids is not None or numbers):
            names = ", ".join(numbers) or "ref_ids"
            kind = type(self.loss).__name__
            raise ValueError(f"{names} cannot be given with a miner or its pairs, nor with a queue for {kind}")
        matching_ids = numbers.pop("matching_ids", None)
        call = {"embeddings": embeddings, "labels": labels, "ref_ids": ref_ids, "matching_ids": matching_ids}
        with full_precision_call(embeddings=embeddings):
            rows = self._checked_rows(call, enqueue_mask)
            if by_labels:
                return self._loss_by_labels(rows, enqueue_mask, numbers)
            return super().forward(rows["embeddings"], rows["labels"], indices_tuple, enqueue_mask)

    def _checked_rows(self, call: dict[str, Any], enqueue_mask: Any) -> dict[str, Any]:
        """Return the rows of a call; raise ``ValueError`` before anything is queued."""
        rows = checked_rows(call)
        embeddings = rows["embeddings"]
        if rows["labels"] is None:
            raise ValueError("labels must be given with the embeddings: they say what belongs together in the queue")
        if embeddings.shape[1] != self.embedding_size:
            raise ValueError(f"embeddings must be (B, {self.embedding_size}), got {tuple(embeddings.shape)}")
        if rows["matching_ids"] is not None and rows["ref_ids"] is None and not self.has_ids:
            raise ValueError("matching_ids need ref_ids, the ids of the embeddings")
        queued = len(embeddings)
        if enqueue_mask is not None:
            if enqueue_mask.dtype != torch.bool or enqueue_mask.shape != embeddings.shape[:1]:
                shapes = tuple(embeddings.shape[:1]), tuple(enqueue_mask.shape)
                raise ValueError(f"enqueue_mask must be torch.bool {shapes[0]}, got {enqueue_mask.dtype} {shapes[1]}")
            queued = int(enqueue_mask.sum())
        if queued > self.memory_size:
            raise ValueError(f"memory_size must be at least the number of embeddings, {queued}, got {self.memory_size}")
        return rows

    def _loss_by_labels(self, rows: dict[str, Any], enqueue_mask: Tensor | None, numbers: dict[str, Any]) -> Any:
        """Compare the batch with the queue by labels, without a list of all their pairs."""
        self.reset_stats()
        self.loss.check_numbers(numbers)
        anchors = queued = rows
        if enqueue_mask is not None:
            anchors, queued = rows_at(~enqueue_mask, rows), rows_at(enqueue_mask, rows)
            if anchors["ref_ids"] is not None:  # those of the anchors are in no queue
                own_ids = anchors["ref_ids"][:, None]
                if anchors["matching_ids"] is not None:
                    own_ids = torch.cat([anchors["matching_ids"], own_ids], dim=1)
                anchors["matching_ids"] = own_ids
        queue, queue_labels, queue_ids = self._queue_with(queued["embeddings"], queued["labels"], queued["ref_ids"])
        return self.loss(
            anchors["embeddings"],
            anchors["labels"],
            ref_emb=queue,
            ref_labels=queue_labels,
            ref_ids=queue_ids,
            matching_ids=anchors["matching_ids"],
            symmetric=False,
            copies=self.curr_batch_idx if enqueue_mask is None else None,
            **numbers,
        )

    def _queue_with(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        """Put embeddings into the queue, and return copies of it, which the next call will not change."""
        self.embedding_memory = self.embedding_memory.to(embeddings)
        self.label_memory = self.label_memory.to(labels.device, labels.dtype)
        self.add_to_memory(embeddings, labels, len(labels))
        length = self.queue_idx
        if self.has_been_filled:
            length = self.memory_size
        if ids is not None:
            self.id_memory[self.curr_batch_idx] = ids
            self.has_ids = True
        queue_ids = self.id_memory[:length].clone() if self.has_ids else None
        return self.embedding_memory[:length].clone(), self.label_memory[:length].clone(), queue_ids

    def reset_queue(self) -> None:
        # Not buffers, which DistributedDataParallel would copy from the first process to all others. Each process has
        # its own queue.
        self.embedding_memory = torch.zeros(self.memory_size, self.embedding_size)
        self.label_memory = torch.zeros(self.memory_size, dtype=torch.long)
        self.id_memory = torch.full((self.memory_size,), NO_ID)
        self.curr_batch_idx = torch.zeros(0, dtype=torch.long)
        self.queue_idx, self.has_been_filled, self.has_ids = 0, False, False

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        self.id_memory = self.id_memory.to(labels.device)
        if batch_size > 0:
            super().add_to_memory(embeddings, labels, batch_size)
            fill_at(self.id_memory, (self.curr_batch_idx,), NO_ID)
        else:  # the base class would take an empty queue for a full one
            self.curr_batch_idx = torch.zeros(0, dtype=torch.long, device=labels.device)

    def create_indices_tuple(self, *arguments: Any) -> tuple[Tensor, ...]:
        *batch_and_queue, indices_tuple, do_remove_self_comparisons = arguments
        is_easy = isinstance(self.miner, BatchEasyHardMiner) and self.miner.pos_strategy == BatchEasyHardMiner.EASY
        if is_easy and do_remove_self_comparisons:
            raise ValueError("pos_strategy='easy' would choose each embedding's own copy in the queue: choose another")
        own = self.curr_batch_idx
        if indices_tuple is not None:  # the base class takes the index in the batch for the index in the queue
            anchors, positives, *negative_anchors, negatives = indices_tuple
            indices_tuple = anchors, own[positives], *negative_anchors, own[negatives]
        # The base class removes own copies too, but not those of a batch of one, and fails for an empty batch.
        indices: tuple[Tensor, ...] = super().create_indices_tuple(*batch_and_queue, indices_tuple, False)
        if not do_remove_self_comparisons:
            return indices
        anchors, positives, *negatives_of_pairs = indices
        is_other = positives != own[anchors]
        if len(indices) == 3:
            return anchors[is_other], positives[is_other], indices[2][is_other]
        return anchors[is_other], positives[is_other], *negatives_of_pairs

    def get_extra_state(self) -> dict[str, Any]:
        return {"queue_idx": self.queue_idx, "has_been_filled": self.has_been_filled, "has_ids": self.has_ids}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.queue_idx, self.has_been_filled = state["queue_idx"], state["has_been_filled"]
        self.has_ids = state.get("has_ids", False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name in QUEUE:
            destination[prefix + name] = getattr(self, name)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.id_memory = torch.full_like(self.id_memory, NO_ID)  # until version 0.3 there was none
        for name in QUEUE:
            if prefix + name in state_dict:
                setattr(self, name, state_dict.pop(prefix + name).clone())
        super()._load_from_state_dict(state_dict, prefix, *args)


def rows_at(mask: Tensor, rows: dict[str, Any]) -> dict[str, Any]:
    """Return some of the rows of a call."""
    selected = {}
    for name, value in rows.items():
        selected[name] = None if value is None else value[mask]
    return selected


class SelfSupervisedLoss(losses.SelfSupervisedLoss):
    """Takes pairs of embeddings instead of labels: ``loss(embeddings, ref_emb)``, where row i belongs to row i.

    Args:
        loss: any loss.
        symmetric: take all 2 B embeddings as one set, so that negatives are of both kinds, as in SimCLR. Otherwise
            negatives are among ``ref_emb`` only, as in CLIP; a loss of this package then adds the other direction,
            unless its own ``symmetric`` is False.

    Raises:
        ValueError: in a call, embeddings of unequal shapes.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> SelfSupervisedLoss(UnifiedLoss(), symmetric=False)(torch.eye(3), torch.eye(3).roll(1, dims=0))
    tensor(2.4000)
    """

    check_loss_support = CrossBatchMemory.check_loss_support
    loss: Any

    def __init__(self, loss: Any, symmetric: bool = True, **kwargs: Any):
        check_loss(loss)
        super().__init__(loss, symmetric, **kwargs)

    @property
    def gather_across_devices(self) -> Any:
        """That of the loss, see :class:`~vl_plugins.losses.PairLoss`."""
        return getattr(self.loss, "gather_across_devices", False)

    @gather_across_devices.setter
    def gather_across_devices(self, group: Any) -> None:
        self.loss = gathering(self.loss, group)

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Any:
        if embeddings.shape != ref_emb.shape:
            shapes = f"{tuple(embeddings.shape)} and {tuple(ref_emb.shape)}"
            raise ValueError(f"embeddings and ref_emb must have the same shape, got {shapes}")
        # The base class's labels would be the same in every process.
        labels = torch.arange(len(embeddings), device=embeddings.device) + first_label(processes_of(self.loss).rank)
        if self.symmetric:
            return self.loss(torch.cat([embeddings, ref_emb]), torch.cat([labels, labels]))
        return self.loss(embeddings, labels, ref_emb=ref_emb, ref_labels=labels.clone())
