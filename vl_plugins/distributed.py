"""A loss of the batches of all processes, and the processes that ``torchrun`` has started."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from vl_plugins.losses.base import PairLoss
from vl_plugins.negatives import label_pairs

__all__ = ["DistributedLoss", "all_gather_rows", "process_device", "start_processes"]


class DistributedLoss(nn.Module):
    """The loss of the joined batch of all processes, called in each of them with its own embeddings and labels.

    ``loss(images, labels, ref_emb=texts, ref_labels=labels)`` gives, after DistributedDataParallel has averaged the
    gradients, those of one process with the whole batch. Labels are ids in the whole job. Batches may differ in size;
    every pair counts the same. With one process it is the loss itself.

    Args:
        loss: a loss of pytorch-metric-learning.
        local_rows: compare only this process's anchors with all candidates, where the processes' losses average to that
            of the whole batch: for means of a :class:`~vl_plugins.losses.base.PairLoss` whose pairs are independent of each
            other. Any other loss is computed of the whole batch in each process.
        with_grad: send gradients of gathered embeddings back to their process. Otherwise only own embeddings have one,
            as in open_clip without ``--gather-with-grad``.
    """

    def __init__(self, loss: nn.Module, local_rows: bool = True, with_grad: bool = True):
        super().__init__()
        self.loss, self.local_rows, self.with_grad = loss, local_rows, with_grad

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        miner: nn.Module | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the loss; its mean over the processes is that of the joined batch.

        Args:
            embeddings, labels, ref_emb, ref_labels: of this process; two sets or one.
            miner: of pytorch-metric-learning, called on the joined batch.
            options: others of the loss's call, such as ``scale``.
        """
        sides = [(embeddings, labels)] if ref_emb is None else [(embeddings, labels), (ref_emb, ref_labels)]
        joined = [_joined(*side, with_grad=self.with_grad) for side in sides]
        has_rows = isinstance(self.loss, PairLoss) and self.loss.has_independent_pairs
        if self.local_rows and has_rows and ref_emb is not None and miner is None and _world_size() > 1:
            return self._loss_of_own_rows(sides, joined, **options)
        flat = [tensor for side in joined for tensor in side]
        indices = None if miner is None else miner(*flat)
        return self.loss(flat[0], flat[1], indices, *flat[2:], **options)

    def _loss_of_own_rows(self, sides: list, joined: list, **options: Any) -> Tensor:
        pairs = len(label_pairs(joined[0][1], joined[1][1])[0])
        total = 0
        for direction in (1, -1) if self.loss.symmetric else (1,):
            (own, own_labels), _ = sides[::direction]
            _, (candidates, candidate_labels) = joined[::direction]
            own_pairs = len(label_pairs(own_labels, candidate_labels)[0])
            mean = self.loss(own, own_labels, None, candidates, candidate_labels, symmetric=False, **options)
            total = total + mean * (own_pairs * _world_size() / max(1, pairs))
        return total


def all_gather_rows(rows: Tensor, *, with_grad: bool = False) -> Tensor:
    """Return the rows of all processes, in the order of their ranks; their numbers may differ.

    Args:
        rows: (n, ...), of this process.
        with_grad: gradients are summed over all processes, which have to run the backward pass together. Otherwise a
            process's own rows have their gradient.
    """
    if _world_size() == 1:
        return rows
    counts = torch.zeros(_world_size(), dtype=torch.long, device=rows.device)
    counts[distributed.get_rank()] = len(rows)
    distributed.all_reduce(counts)
    return _AllGatherRows.apply(rows, counts.tolist(), with_grad)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], with_grad: bool) -> Tensor:
        ctx.counts, ctx.with_grad = counts, with_grad
        padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.with_grad:
            grad = grad.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(grad)
        return grad.split(ctx.counts)[distributed.get_rank()], None, None


def _joined(embeddings: Tensor, labels: Tensor, *, with_grad: bool) -> tuple[Tensor, Tensor]:
    return all_gather_rows(embeddings, with_grad=with_grad), all_gather_rows(labels.to(embeddings.device))


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def start_processes() -> tuple[int, int]:
    """Initialize the process group if ``torchrun`` has started several processes; return rank and their number."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not distributed.is_initialized():
        # gloo gathers embeddings in CPU memory: on the GPU, all of them may not fit beside a model.
        distributed.init_process_group("gloo")
    return distributed.get_rank(), distributed.get_world_size()


def process_device(device: str | None = None) -> str:
    """Return where this process computes: ``device``, or a GPU of its own where there is one."""
    if device is not None or not torch.cuda.is_available():
        return device or "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
