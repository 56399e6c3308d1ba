"""Wrappers of pytorch-metric-learning that take the losses of this package, and give right values with them."""

from collections.abc import Callable

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.miners import BatchEasyHardMiner
from pytorch_metric_learning.utils import distributed, loss_and_miner_utils
from torch import Tensor

from vl_plugins.functional.precision import full_precision
from vl_plugins.losses.base import IndicesTuple, PairLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.utils.checks import tensor_or_none

__all__ = ["CrossBatchMemory", "DistributedLossWrapper", "DistributedMinerWrapper", "SelfSupervisedLoss"]


class _TakesPairLosses:
    """Adds the losses of this package, and those derived from its ``PairLoss``, to a wrapper's list of names."""

    @classmethod
    def supported_losses(cls) -> list[str]:
        ours = {SmoothChamferLoss, *_subclasses(SmoothChamferLoss), *_subclasses(PairLoss)}
        return [*super().supported_losses(), *sorted({loss.__name__ for loss in ours})]

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        supported = cls.supported_losses()
        if loss_name not in supported:
            raise ValueError(f"{cls.__name__} does not take a {loss_name}; it takes {', '.join(supported)}")


class CrossBatchMemory(_TakesPairLosses, losses.CrossBatchMemory):
    """Compares a batch with a queue of the latest embeddings, its own included; those in the queue have no gradient.

    ``pytorch_metric_learning.losses.CrossBatchMemory`` for the losses of this package too, and its arguments. Called as
    ``loss(embeddings, labels, indices_tuple=None, enqueue_mask=None)``. The embeddings of the batch are the anchors, so
    ``symmetric`` of a loss has no effect, and an item is never compared with its own copy in the queue. Embeddings are
    kept and compared in float32 at least, also under autocast.

    - A ``miner`` chooses among the batch and the queue; without one all pairs count.
    - ``indices_tuple`` are pairs or triplets of the batch, such as ``miner(embeddings, labels)``. They are added to the
      others.
    - With ``enqueue_mask``, (B,) bool, those embeddings go into the queue and only the others are compared with it: for
      keys of a momentum encoder, or the other modality.

    Args:
        loss: a loss of this package or one derived from its ``PairLoss``, or one that the base class takes.
        embedding_size: D.
        memory_size: length of the queue.
        miner: a miner of pytorch-metric-learning, or None.

    Raises:
        ValueError: another loss, tensors of wrong shapes, more embeddings than the queue holds, a miner that chooses
            the easiest positive, which would be the anchor's own copy, or a ``DistributedMinerWrapper``.

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
        if embeddings.shape != (len(labels), self.embedding_size):
            raise ValueError(
                f"embeddings must have the shape {(len(labels), self.embedding_size)}, got {tuple(embeddings.shape)}"
            )
        queued = len(embeddings)
        if enqueue_mask is not None:
            if enqueue_mask.shape != labels.shape or enqueue_mask.dtype != torch.bool:
                raise ValueError(
                    f"enqueue_mask must be a bool tensor of shape {tuple(labels.shape)}, "
                    f"got {enqueue_mask.dtype} of shape {tuple(enqueue_mask.shape)}"
                )
            queued = int(enqueue_mask.sum())
        if queued > self.memory_size:
            raise ValueError(f"memory_size must be at least the number of embeddings, {queued}, got {self.memory_size}")
        (embeddings,) = full_precision(embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            return super().forward(embeddings, labels, indices_tuple, enqueue_mask)

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        if batch_size > 0:  # of none, the base class takes an empty queue for a full one
            super().add_to_memory(embeddings, labels, batch_size)
        else:
            self.curr_batch_idx = torch.zeros(0, dtype=torch.long, device=labels.device)

    def create_indices_tuple(
        self,
        embeddings: Tensor,
        labels: Tensor,
        E_mem: Tensor,
        L_mem: Tensor,
        input_indices_tuple: IndicesTuple | None,
        do_remove_self_comparisons: bool,
    ) -> IndicesTuple:
        own_copies = self.curr_batch_idx
        if input_indices_tuple is not None:
            anchors_at = {3: (0,), 4: (0, 2)}[len(input_indices_tuple)]
            # The base class would look them up at the start of the queue, wherever the batch is.
            input_indices_tuple = tuple(
                index if position in anchors_at else own_copies[index]
                for position, index in enumerate(input_indices_tuple)
            )
        if isinstance(self.miner, distributed.DistributedMinerWrapper):
            raise ValueError(
                "the miner of a CrossBatchMemory looks into its own queue: give it the miner itself, and for several "
                "processes wrap the CrossBatchMemory in a DistributedLossWrapper"
            )
        if (
            do_remove_self_comparisons
            and isinstance(self.miner, BatchEasyHardMiner)
            and self.miner.pos_strategy == BatchEasyHardMiner.EASY
        ):
            raise ValueError(
                f"{type(self.miner).__name__} with pos_strategy='easy' would choose each embedding's own copy in the "
                "queue as its positive: choose another pos_strategy, or queue other embeddings with enqueue_mask"
            )
        # What the base class does for the last argument overlooks a batch of one, and fails for none.
        indices = super().create_indices_tuple(embeddings, labels, E_mem, L_mem, input_indices_tuple, False)
        if not do_remove_self_comparisons:
            return indices
        anchors, positives, *negatives = indices
        others = positives != own_copies[anchors]
        if len(negatives) == 1:
            negatives = [negatives[0][others]]
        return anchors[others], positives[others], *negatives

    def get_extra_state(self) -> dict[str, int | bool]:
        return {"queue_idx": self.queue_idx, "has_been_filled": self.has_been_filled}

    def set_extra_state(self, state: dict[str, int | bool]) -> None:
        self.queue_idx, self.has_been_filled = state["queue_idx"], state["has_been_filled"]


class SelfSupervisedLoss(_TakesPairLosses, losses.SelfSupervisedLoss):
    """Compares embeddings and their counterparts without labels: ``loss(embeddings, ref_emb)``, row i with row i.

    ``pytorch_metric_learning.losses.SelfSupervisedLoss`` for the losses of this package too.

    Args:
        loss: a loss of this package or one derived from its ``PairLoss``, or one that the base class takes.
        symmetric: both are one set of 2 B embeddings, and the negatives of an anchor are those of its own kind too, as
            in SimCLR. Otherwise the negatives are among ``ref_emb`` only, as in CLIP: a loss of this package then adds
            the other direction unless *its* option ``symmetric`` is False.

    Raises:
        ValueError: another loss, or embeddings of two shapes.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> [SelfSupervisedLoss(UnifiedLoss(), symmetric)(image_embeddings, text_embeddings) for symmetric in (True, False)]
    [tensor(1.2000), tensor(2.4000)]
    """

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        if ref_emb.shape != embeddings.shape:
            raise ValueError(
                f"ref_emb must have the shape of embeddings, {tuple(embeddings.shape)}, got {tuple(ref_emb.shape)}"
            )
        return super().forward(embeddings, ref_emb)


class DistributedLossWrapper(distributed.DistributedLossWrapper):
    """Compares the embeddings of all processes.

    ``pytorch_metric_learning.utils.distributed.DistributedLossWrapper``, whose ``efficient=True`` takes ``ref_emb`` for
    the embeddings themselves and leaves out each pair (i, i): of images and their captions, all positive pairs. Here
    they count.

    With ``efficient=True`` the process's own embeddings are the anchors and those of all processes the candidates: one
    direction, image to text; gradients reach the own embeddings only. ``efficient=False`` is exact: each process
    computes the loss of the whole batch, both directions, and the gradients that DistributedDataParallel averages are
    those of one process with the whole batch.

    Args:
        loss: a loss, or a :class:`CrossBatchMemory` (not with ``efficient``).
        efficient: see above.
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
        labels: Tensor | None,
        indices_tuple: IndicesTuple | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        world_size: int,
    ) -> Tensor:
        if self.efficient and ref_emb is not None and indices_tuple is None and world_size > 1:
            ref_labels = ref_labels.to(ref_emb.device)
            all_labels = torch.cat([ref_labels, distributed.all_gather(ref_labels)])
            indices_tuple = loss_and_miner_utils.get_all_pairs_indices(labels.to(emb.device), all_labels)
        return super().forward_regular_loss(emb, labels, indices_tuple, ref_emb, ref_labels, world_size)


class DistributedMinerWrapper(distributed.DistributedMinerWrapper):
    """Mines among the embeddings of all processes, for a :class:`DistributedLossWrapper` with the same ``efficient``.

    ``pytorch_metric_learning.utils.distributed.DistributedMinerWrapper``, whose ``efficient=True`` takes ``ref_emb``
    for the embeddings themselves and drops each pair (i, i): of images and their captions, all positive pairs. Here
    they are mined.

    Called in each process as ``miner(embeddings, labels, ref_emb=None, ref_labels=None)`` with batches of one size.
    With ``efficient=True`` the process's own embeddings are the anchors, and the others are indices of all references,
    the process's own first. With ``efficient=False`` each process mines in the whole batch.

    Args:
        miner: a miner of pytorch-metric-learning.
        efficient: see above.

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


def check_miner(miner: Callable | None) -> None:
    """Raise ``ValueError`` for a miner that would leave out each image's own caption."""
    if (
        isinstance(miner, distributed.DistributedMinerWrapper)
        and not isinstance(miner, DistributedMinerWrapper)
        and miner.efficient
    ):
        raise ValueError(
            "pytorch-metric-learning's DistributedMinerWrapper(efficient=True) drops each pair (i, i) of ref_emb: use "
            "vl_plugins.losses.wrappers.DistributedMinerWrapper"
        )


def _subclasses(base: type) -> set[type]:
    direct = set(base.__subclasses__())
    return direct.union(*(_subclasses(subclass) for subclass in direct))
