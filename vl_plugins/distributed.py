"""A loss of the batches of all processes, and how they leave."""

import time
from typing import Any

import torch
from torch import Tensor, distributed, nn

from vl_plugins.distances import check_widths
from vl_plugins.negatives import label_pairs
from vl_plugins.numerics import as_labels, eager, full_precision

__all__ = ["DistributedLoss", "all_gather_rows", "stop_processes", "world_size"]

CHECKED_CALLS = 3
SECONDS_FOR_THREADS = 0.2


class DistributedLoss(nn.Module):
    """The loss of the joined batch of all processes, called in each of them with its own embeddings and labels.

    After DistributedDataParallel has averaged the gradients, they are those of one process with the whole batch. Each
    process may have another number of rows; every pair counts the same. A loss whose pairs are independent
    (:attr:`PairLoss.has_independent_pairs <vl_plugins.losses.PairLoss.has_independent_pairs>`) compares only a
    process's own rows with all candidates; any other loss is computed of the whole batch in each process. With one
    process it is the loss itself.

    Args:
        loss: a loss of this package or of pytorch-metric-learning.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> DistributedLoss(UnifiedLoss())(torch.eye(3), ref_emb=torch.eye(3).roll(1, dims=0))
    tensor(2.4000)
    """

    def __init__(self, loss: nn.Module):
        super().__init__()
        self.loss = loss
        self.calls = 0

    @eager
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        miner: nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """Return the loss; its mean over the processes is that of the joined batch.

        Args:
            embeddings, ref_emb: (B, D) and (k B, D) of this process; or one set, with labels.
            labels, ref_labels: ids in the whole job, equal for what belongs together: tensors, numpy arrays or lists of
                integers. Without ``ref_labels``, rows k i to k i + k - 1 of ``ref_emb`` belong to row i of the
                embeddings; without labels too, to no other.
            miner: of pytorch-metric-learning, called on the joined batch.
            options: others of the loss's call, such as ``scale``. Those with rows, such as ``slots``, are gathered too.

        Raises:
            ValueError: embeddings of unequal widths; texts that are no multiple of the images; labels that are NaN, of
                another type or length; or labels that are 0 to B - 1 in each of several processes and would join
                strangers. Only the first calls are checked for this.
        """
        if ref_emb is not None:
            check_widths(getattr(self.loss, "distance", None), embeddings, ref_emb)
        has_ids = labels is not None
        labels, ref_labels = _pair_labels(embeddings, labels, ref_emb, ref_labels)
        if has_ids and self.calls < CHECKED_CALLS and world_size() > 1:
            self.calls += 1
            _check_ids(labels)
        embeddings, *others = full_precision(embeddings, *([] if ref_emb is None else [ref_emb]))
        own = (embeddings, labels) if ref_emb is None else (embeddings, labels, *others, ref_labels)
        rows = {name: value for name, value in options.items() if isinstance(value, Tensor) and value.ndim > 1}
        gathered = all_gather_rows(*own, *rows.values())
        joined, options = gathered[: len(own)], options | dict(zip(rows, gathered[len(own) :], strict=True))
        has_rows = getattr(self.loss, "has_independent_pairs", False)
        if world_size() > 1 and has_rows and miner is None and ref_emb is not None:
            return self._loss_of_own_rows(own, joined, **options)
        indices = None if miner is None else miner(*joined)
        return self.loss(*joined[:2], indices, *joined[2:], **options)

    def _loss_of_own_rows(
        self, own: tuple[Any, ...], joined: tuple[Any, ...], symmetric: bool | None = None, **options: Any
    ) -> Tensor:
        total, all_pairs = joined[0].new_zeros(()), len(label_pairs(joined[1], joined[3])[0])
        both = self.loss.symmetric if symmetric is None else symmetric
        for anchors, candidates in ((0, 2), (2, 0)) if both else ((0, 2),):
            (x, labels), (y, ref_labels) = own[anchors : anchors + 2], joined[candidates : candidates + 2]
            own_pairs = len(label_pairs(labels, ref_labels)[0])
            mean = self.loss(x, labels, None, y, ref_labels, symmetric=False, **options)
            total = total + mean * (own_pairs * world_size() / max(1, all_pairs))
        return total


def all_gather_rows(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the rows of all processes, in the order of their ranks; each may have another number of them.

    The gradients of all processes are summed and sent back to where the rows come from: all processes have to run the
    backward pass together.

    Args:
        tensors: (n, ...), of this process; None stays None.
    """
    size = world_size()
    given = [tensor for tensor in tensors if tensor is not None]
    if size == 1 or not given:
        return tensors
    counts = torch.zeros(size, len(given), dtype=torch.long, device=given[0].device)
    counts[distributed.get_rank()] = torch.tensor([len(tensor) for tensor in given])
    distributed.all_reduce(counts)
    rows = iter(zip(given, counts.T.tolist(), strict=True))
    return tuple(None if tensor is None else _AllGatherRows.apply(*next(rows)) for tensor in tensors)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gathered embeddings have no derivatives (create_graph=True)")
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad)
        return grad.split(ctx.counts)[distributed.get_rank()], None


def _pair_labels(embeddings: Tensor, labels: Any, ref_emb: Tensor | None, ref_labels: Any) -> tuple[Tensor, Any]:
    """Return the labels of both sides; those that are not given follow from the order of the rows."""
    if labels is None:
        if ref_emb is None or ref_labels is not None:
            raise ValueError("labels must be given with one set of embeddings, and with ref_labels")
        rank = distributed.get_rank() if world_size() > 1 else 0
        labels = torch.arange(len(embeddings), device=embeddings.device) + rank * 2**32  # those of no other process
    labels = as_labels("labels", labels, embeddings)
    if ref_emb is None:
        if ref_labels is not None:
            raise ValueError("ref_labels must be None without ref_emb")
        return labels, None
    if ref_labels is None:
        ref_labels = labels.repeat_interleave(len(ref_emb) // max(1, len(embeddings)))
    # A copy: for pytorch-metric-learning, one object with both names means one set.
    return labels, as_labels("ref_labels", ref_labels, ref_emb).clone()


def _check_ids(labels: Tensor) -> None:
    """Raise ``ValueError`` if the labels are 0 to B - 1 in every process."""
    are_places = torch.equal(labels, torch.arange(len(labels), dtype=labels.dtype, device=labels.device))
    flag = torch.tensor(int(are_places), device=labels.device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    if flag:
        raise ValueError(
            "labels are 0 to B - 1 in every process, so images of different processes would be positives of each "
            "other: give ids of the whole job, or no labels where row i belongs to row i"
        )


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def stop_processes() -> None:
    """Destroy the process group if there is one.

    gloo's threads free what they have sent only later, and need the GIL for that. Before pytorch/pytorch#154976 (June
    2025), destroying the group waited for these threads while it held the GIL: a deadlock. So they get time to finish.
    """
    if distributed.is_initialized():
        time.sleep(SECONDS_FOR_THREADS)
        distributed.destroy_process_group()
