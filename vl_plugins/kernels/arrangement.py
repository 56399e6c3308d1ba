"""Which vectors, labels and pairs belong to which of several processes, and their comparison block by block."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.distributed import Ring
from vl_plugins.functional.norms import inverse_norms
from vl_plugins.kernels.pairs import SameTensors, equal_label_pairs
from vl_plugins.kernels.vectors import Comparison

__all__ = ["Arrangement", "Block", "RememberedArrangement", "RingComparison", "arrange", "nan_of_any", "pairs_by_owner"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Arrangement(NamedTuple):
    """Anchors of this process and the candidates of all, those of the first process first.

    Attributes:
        row_counts: the number of anchors of each process.
        column_counts: the number of candidates of each process.
        y_labels: (N,), of all candidates.
        rows: (M,), of the pairs of equal labels the anchor, one of this process.
        columns: (M,), and the candidate, one of all; in the order of rows and then of columns.
        parts: of each process the pairs whose candidates are there, (m,) indices of ``rows`` and ``columns``.
    """

    row_counts: tuple[int, ...]
    column_counts: tuple[int, ...]
    y_labels: Tensor
    rows: Tensor
    columns: Tensor
    parts: tuple[Tensor, ...]

    def rows_of(self, process: int) -> slice:
        """Return where the anchors of a process are among those of all."""
        return _place(process, self.row_counts)

    def columns_of(self, process: int) -> slice:
        """Return where the candidates of a process are among those of all."""
        return _place(process, self.column_counts)


def arrange(ring: Ring, x_labels: Tensor, y_labels: Tensor, known: Arrangement | None = None) -> Arrangement:
    """Gather how many vectors and which labels there are, and find the pairs of equal labels.

    Args:
        ring: of the processes.
        x_labels: (A,), integers, of this process's anchors.
        y_labels: (C,), integers, on the same device, of its candidates.
        known: what this returned for the same labels; if every process has that, no labels are gathered again.
    """
    own = [len(x_labels), len(y_labels), int(known is None)]
    row_counts, column_counts, unknown = ring.gather(torch.tensor(own, device=x_labels.device)).T.tolist()
    if not any(unknown):
        return known
    # In one type, because each process sends as many bytes as the others expect.
    y_labels = ring.join(y_labels.long(), column_counts)
    rows, columns = equal_label_pairs(x_labels, y_labels)
    parts = pairs_by_owner(columns, column_counts)
    return Arrangement(tuple(row_counts), tuple(column_counts), y_labels, rows, columns, parts)


class RememberedArrangement:
    """:func:`arrange`, which gathers no labels while every process has those of its last call."""

    def __init__(self):
        self._is_same = SameTensors()
        self._ring = self._arrangement = None

    def __call__(self, ring: Ring, x_labels: Tensor, y_labels: Tensor) -> Arrangement:
        """Return the arrangement.

        Args:
            ring: of the processes.
            x_labels: (A,), integers.
            y_labels: (C,), integers.
        """
        is_known = self._is_same(x_labels, y_labels) and self._ring is ring
        self._arrangement = arrange(ring, x_labels, y_labels, self._arrangement if is_known else None)
        self._ring = ring
        return self._arrangement


def pairs_by_owner(columns: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return of each process the pairs whose candidates it has, in their order.

    Args:
        columns: (M,), of each pair the candidate among those of all processes; beyond the last one for nobody's.
        counts: the number of candidates of each process.

    >>> pairs_by_owner(torch.tensor([3, 0, 9, 2]), [2, 0, 2])
    (tensor([1]), tensor([], dtype=torch.int64), tensor([0, 3]))
    """
    ends = torch.tensor(list(accumulate(counts)), device=columns.device)
    owners = torch.bucketize(columns, ends, right=True)
    numbers = torch.bincount(owners, minlength=len(counts) + 1).tolist()
    return owners.argsort(stable=True).split(numbers)[: len(counts)]


def nan_of_any(ring: Ring, x: Tensor, y: Tensor, zero: Tensor, *options: Tensor | float | bool) -> Tensor:
    """Return NaN if the ``zero`` of any process is, otherwise 0; without a gradient.

    Args:
        ring: of the processes.
        x: (A, D).
        y: (C, D).
        zero: 0-D, 0 or NaN.
        options: which have to be the same in all processes; of tensors, whether they need a gradient.

    Raises:
        ValueError: the vectors or options are of another kind in another process, which would make the processes wait
            for each other for ever; in all processes.
    """
    with_gradient = torch.is_grad_enabled()
    own = [
        x.shape[1],
        DTYPES.index(x.dtype),
        *(with_gradient and tensor.requires_grad for tensor in (x, y)),
        *(with_gradient and value.requires_grad if isinstance(value, Tensor) else value for value in options),
    ]
    # In one type, because each process sends as many bytes as the others expect.
    own = torch.tensor(own, dtype=torch.float32, device=zero.device)
    gathered = ring.gather(torch.cat([zero.detach().float().view(1), own]))
    if not (gathered[:, 1:] == gathered[0, 1:]).all():
        raise ValueError(
            "all processes of a ring have to give x and y of one width and type, the same of x, y and scale with a "
            "gradient, and the same options: this one differs from another"
        )
    return gathered[:, 0].sum()


class Block(NamedTuple):
    """What a process compares with the candidates of one process.

    Attributes:
        columns: where these are among those of all.
        pairs: (m,), which of all pairs have their candidate there.
        comparison: with these pairs, whose columns count from the first candidate of the block.
    """

    columns: slice
    pairs: Tensor
    comparison: Comparison


@dataclass(frozen=True)
class RingComparison:
    """Anchors of this process, and the candidates of all, which pass by block by block.

    Attributes:
        ring: of the processes.
        arrangement: of the labels.
        x: (A, D), contiguous.
        y: (C, D), likewise, the candidates of this process.
        x_factors: (A,), inverse norms; None for dot products.
        x_labels: (A,).
        rows, columns, parts: pairs, as in the arrangement.
    """

    ring: Ring
    arrangement: Arrangement
    x: Tensor
    y: Tensor
    x_factors: Tensor | None
    x_labels: Tensor
    rows: Tensor
    columns: Tensor
    parts: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, x_labels: Tensor, arrangement: Arrangement, ring: Ring, *, normalize: bool
    ) -> "RingComparison":
        """Prepare a comparison, without autograd; ``normalize`` makes the similarities cosines."""
        x, y = (side.detach().contiguous() for side in (x, y))
        x_factors = inverse_norms(x) if normalize else None
        return cls(ring, arrangement, x, y, x_factors, x_labels, *arrangement[3:])

    def blocks(self) -> Iterator[Block]:
        """Go through the blocks of all processes; each is to be used before the next one is asked for."""
        for owner, vectors in self.ring.travel(self.y, self.arrangement.column_counts):
            yield self._block(owner, vectors)

    def gradients(
        self, add: Callable[[Block, Tensor | None, Tensor | None], None], *, of_x: bool, of_y: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sum up what all processes contribute to the gradients by the own vectors, as if norms were constant.

        What is summed up for the candidates of a process travels behind them and comes home.

        Args:
            add: called with each block, and its gradients (A, D) and (C of the block, D) or None, to which it adds.
            of_x, of_y: which are asked for; ``of_y`` by all processes or by none.
        """
        ring, counts = self.ring, self.arrangement.column_counts
        like = {"dtype": torch.promote_types(self.x.dtype, torch.float32)}
        x_gradient = torch.zeros_like(self.x, **like) if of_x else None
        coming = None
        for owner, vectors in ring.travel(self.y, counts):
            of_block = torch.zeros_like(vectors, **like) if of_y else None
            add(self._block(owner, vectors), x_gradient, of_block)
            if of_y:
                if coming is not None:
                    of_block += coming.wait()
                coming = ring.pass_on(of_block, counts[ring.before(owner)])
        return x_gradient, coming.wait() if of_y else None

    def _block(self, owner: int, vectors: Tensor) -> Block:
        columns, pairs = self.arrangement.columns_of(owner), self.parts[owner]
        y_factors = None if self.x_factors is None else inverse_norms(vectors)
        labels = self.x_labels, self.arrangement.y_labels[columns]
        of_pairs = self.rows[pairs], self.columns[pairs] - columns.start
        return Block(columns, pairs, Comparison(self.x, vectors, self.x_factors, y_factors, *labels, *of_pairs))


def _place(process: int, counts: Sequence[int]) -> slice:
    start = sum(counts[:process])
    return slice(start, start + counts[process])
