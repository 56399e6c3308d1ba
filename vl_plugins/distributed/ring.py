"""Processes in a ring, which pass blocks of vectors on to each other."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed

__all__ = ["Passing", "Ring"]


class Ring:
    """The processes of a group, each of which sends to the next and receives from the one before.

    So every process meets the vectors of all others, and holds no more than two blocks of them at a time. All processes
    of the group have to call each method, in the same order. Nothing here has a gradient.

    Args:
        group: a process group of ``torch.distributed``, of any backend that sends and receives tensors where the
            vectors are (gloo on the CPU, NCCL on GPUs); all processes if left out.

    Attributes:
        group: the same.
    """

    def __init__(self, group: "distributed.ProcessGroup | None" = None):
        self.group = group

    def __deepcopy__(self, memo: dict) -> "Ring":
        return type(self)(self.group)  # a process group cannot be copied

    @property
    def rank(self) -> int:
        """The place of this process, 0 to ``world_size - 1``."""
        return distributed.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return distributed.get_world_size(self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all processes, of the shape that these have in each."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all processes; any number where one of them is NaN."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def min(self, values: Tensor) -> Tensor:
        """Return the elementwise minimum over all processes; any number where one of them is NaN."""
        return self._reduced(values, distributed.ReduceOp.MIN)

    def log_sum_exp(self, values: Tensor) -> Tensor:
        """Return the elementwise log-sum-exp over all processes, -inf where it is that in each, and NaN where in one.

        Args:
            values: floating point, of the same shape in each process.
        """
        # Not -inf, which minus itself is NaN.
        largest = self.max(values).clamp_(min=torch.finfo(values.dtype).min)
        return self.sum((values - largest).exp_()).log_().add_(largest)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all processes, (W, ...), which have the same shape (...) in each."""
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        distributed.all_gather(gathered, values.contiguous(), group=self.group)
        return torch.stack(gathered)

    def join(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the values of all processes one after the other, (sum of the counts, ...).

        Args:
            values: (n, ...), a few numbers for each item.
            counts: n of each process.
        """
        if max(counts) == 0:
            return values
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values
        return torch.cat([part[:count] for part, count in zip(self.gather(padded), counts, strict=True)])

    def before(self, process: int) -> int:
        """Return the one that sends to a process."""
        return (process - 1) % self.world_size

    def pass_on(self, block: Tensor, count: int) -> "Passing":
        """Send a block to the next process and receive that of the one before, while the caller goes on.

        Args:
            block: (n, ...), contiguous; not to be written to before it has arrived.
            count: n of the block to receive, whose other sizes and type are the same.
        """
        if self.world_size == 1:
            return Passing(block, block, [])
        received = block.new_empty(count, *block.shape[1:])
        rank, after = self.rank, (self.rank + 1) % self.world_size
        # In one batch: each on its own, NCCL would wait in every process for the next one to receive. Of nothing there
        # is no message, which both ends know.
        operations = [
            distributed.P2POp(operation, tensor, self._place(process), self.group)
            for operation, tensor, process in (
                (distributed.isend, block, after),
                (distributed.irecv, received, self.before(rank)),
            )
            if tensor.numel()
        ]
        return Passing(block, received, distributed.batch_isend_irecv(operations) if operations else [])

    def travel(self, block: Tensor, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Go through the blocks of all processes, this one's first; the next is on its way while one is used.

        Args:
            block: (n, ...), contiguous, this process's own.
            counts: n of each process.

        Yields:
            Whose block it is, and the block, which is not to be written to.
        """
        owner = self.rank
        for step in range(self.world_size):
            is_last = step == self.world_size - 1
            arriving = None if is_last else self.pass_on(block, counts[self.before(owner)])
            yield owner, block
            if arriving is not None:
                block, owner = arriving.wait(), self.before(owner)

    def _reduced(self, values: Tensor, operation: "distributed.ReduceOp") -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(values, operation, group=self.group)
        return values

    def _place(self, process: int) -> int:
        """Return the rank among all processes."""
        return process if self.group is None else distributed.get_global_rank(self.group, process)


class Passing:
    """A block that is on its way to the next process, while another one comes from the one before."""

    def __init__(self, sent: Tensor, received: Tensor, works: "list[distributed.Work]"):
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """Return the received block when both have arrived; on an accelerator only what comes after waits."""
        for work in self._works:
            work.wait()
        self._sent = None
        return self._received
