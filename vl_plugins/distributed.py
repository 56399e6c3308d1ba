"""Losses of a batch that is split over W processes, each with its own rows.

Each direction of a pair is computed once, in the process that has the anchor: image to text where the image is, text to
image where the caption is. The candidates are the gathered rows of all processes.

- Value: process r returns W S_r / N, where S_r is the sum over its own anchors, and N the number of positive pairs in
  all processes (in :mod:`vl_plugins.losses.reduction`). The mean over the processes is the loss of the joined batch.
- Gradient: an anchor gets its gradient in its own process. A candidate gets gradients in each process that compares it;
  the backward pass of the gather sums them and returns them to the process that has the row, which alone sends them
  into its model. So a process has, for its own rows, W times the gradient of the joined batch, and
  DistributedDataParallel's mean over the processes divides by W.

If a process cannot compute its share from its own rows, as with most reducers and losses of pytorch-metric-learning, it
computes the loss of the joined batch. The gather then sums W equal gradients, and the mean is again correct.

The outermost loss gathers, and what it calls does not.
"""

import contextlib
import ctypes
import time
from collections.abc import Iterator
from contextvars import ContextVar
from numbers import Real
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad

from vl_plugins.distances import VECTOR_DISTANCES
from vl_plugins.numerics import SHAPES, check_loss, checked_rows, eager, full_precision_call, with_labels

__all__ = [
    "DistributedLoss",
    "GathersAcrossDevices",
    "Processes",
    "all_gather_rows",
    "all_rows",
    "first_label",
    "gathering",
    "gathers",
    "joined_call",
    "learned_numbers",
    "processes_of",
    "stop_processes",
    "world_size",
]

SECONDS_FOR_THREADS = 0.2
MESSAGE = 64  # integers of the first message, which has the same length in all processes

_has_gathered: ContextVar[bool] = ContextVar("has_gathered", default=False)


def world_size(group: Any = None) -> int:
    """Return the number of processes of a group, by default of all, and 1 without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(group)


class Processes:
    """The processes that share a batch.

    Args:
        group: False or None for this process alone; True for all processes, if there is a process group; or a
            ``ProcessGroup``.
        global_labels: labels are not checked for being 0 to B - 1 in every process.
    """

    def __init__(self, group: Any = False, global_labels: bool = False):
        classes = getattr(distributed, "ProcessGroup", ())  # torch may be built without them
        if not (group is None or isinstance(group, (bool, classes))):
            raise ValueError(f"gather_across_devices must be True, False or a ProcessGroup, got {group!r}")
        self.is_alone = group is False or group is None
        self.group: Any = None if isinstance(group, bool) else group
        self.global_labels = global_labels

    def __deepcopy__(self, memo: Any) -> "Processes":
        return self  # a copy of a loss is in the same group

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                "a loss with a ProcessGroup cannot be saved: save loss.state_dict(), or set loss.gather_across_devices "
                "to False before"
            )
        return self.__dict__

    @property
    def size(self) -> int:
        """The number of processes whose rows a call gathers; 1 within a loss that has gathered them."""
        if self.is_alone or _has_gathered.get() or not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.size == 1 else distributed.get_rank(self.group)

    def gather_rows(
        self,
        tensors: dict[str, Any],
        equal: dict[str, Any] | None = None,
        settings: tuple[str, ...] = (),
        uses_all: bool = False,
    ) -> tuple[dict[str, Any], dict[str, list[int]], int]:
        """Return the rows of all processes in rank order, how many each process has, and the rank; the first by name.

        Synchronizes the GPU once, to read the numbers of rows. The gradients of all processes are summed and sent back
        to the process that has the row, so all processes must run the backward pass together.

        Args:
            tensors: (n, ...) by name, or None; n may differ between processes, and so may M of ids (n, M).
            equal: numbers by name, or 0-D tensors, that must be equal in all processes.
            settings: words that must be equal too.
            uses_all: each process compares all rows with all, so a tensor that one process does not use, none uses. It
                then has no gradient, which DistributedDataParallel detects; otherwise it has a gradient of 0.

        Raises:
            ValueError: for ``copies``, which are places of one process; in all processes, for tensors of other names,
                types or widths than those of another process, for a number or a setting that differs, or for labels
                that are 0 to n - 1 in each process.
        """
        if tensors.get("copies") is not None:
            raise ValueError("copies are places of one process: create the loss without gather_across_devices")
        present = {}
        for name, value in tensors.items():
            if value is not None:
                present[name] = value
        facts = self._exchange(present, equal or {}, settings)
        counts: dict[str, list[int]] = {}
        padded = []
        for name, value in present.items():
            counts[name], has_gradient, number_of_ids = next(facts), max(next(facts)), max(next(facts))
            if number_of_ids > 0:
                value = pad(value, (0, number_of_ids - value.shape[1]), value=-1)
            if has_gradient and not value.requires_grad:
                value = value.detach().requires_grad_()  # or this process would not take part in the backward pass
            padded.append(value)
        joined: list[Tensor] = []
        if uses_all:  # apart, so that what is not used has no backward pass
            for name, rows in zip(present, padded, strict=True):
                joined += _Gather.apply(self, [counts[name]], rows)
        else:
            joined += _Gather.apply(self, list(counts.values()), *padded)
        rank = distributed.get_rank(self.group)
        return dict.fromkeys(tensors) | dict(zip(present, joined, strict=True)), counts, rank

    def _exchange(
        self, tensors: dict[str, Tensor], equal: dict[str, Any], settings: tuple[str, ...]
    ) -> Iterator[list[int]]:
        """Yield of each tensor three facts, of each process: how many rows it has, whether a gradient, and M of ids.

        Synchronizes the GPU once.
        """
        facts: list[int] = []
        described = []
        for name, value in tensors.items():
            width, number_of_ids = value.shape[1:].numel(), 0
            if value.ndim == 2 and not value.is_floating_point():  # lists of ids, whose length may differ
                width, number_of_ids = 0, width
            described.append(f"{name} {value.dtype} {width}")
            facts += [value.shape[0], int(value.requires_grad), number_of_ids]
        description = ", ".join([*described, *equal, *settings])
        device = next(iter(tensors.values())).device
        are_places = -1  # says nothing: no labels, or no rows
        if "labels" in tensors and tensors["labels"].shape[0] > 0:
            labels = tensors["labels"]
            places = torch.arange(labels.shape[0], device=device)
            are_places = (labels == places).all() & (labels.shape[0] > 1)
        words = [torch.tensor([crc32(description.encode()), *facts], device=device)]
        words.append(torch.as_tensor(are_places, device=device).long().reshape(1))
        for value in equal.values():
            number = torch.as_tensor(value, dtype=torch.float64, device=device)
            words.append(number.detach().reshape(1).view(torch.int64))
        of_processes = self._exchange_words(torch.cat(words)).T.tolist()
        if len(set(of_processes[0])) > 1:
            raise ValueError(
                f"the processes give different arguments; this one gives {description}: give the same in all"
            )
        numbers = of_processes[2 + len(facts) :]
        if 1 in of_processes[1 + len(facts)]:
            self._check_labels(of_processes[1 + len(facts)])
        for name, of_number in zip(equal, numbers, strict=True):
            if len(set(of_number)) > 1:
                values = torch.tensor(of_number).view(torch.float64).tolist()
                raise ValueError(
                    f"{name} has another value in each process, {values}: a learned number belongs to the model, or to "
                    "DistributedDataParallel(loss), which keep it equal"
                )
        return iter(of_processes[1 : 1 + len(facts)])

    def _exchange_words(self, words: Tensor) -> Tensor:
        """Return the integers of all processes, a row for each.

        All first exchange MESSAGE integers. The first of them is a checksum of the arguments: only where it is equal do
        all processes have as many words, and exchange the rest.
        """
        length, group = words.shape[0], self.group
        joined = words.new_zeros(distributed.get_world_size(group), max(length, MESSAGE))
        joined[distributed.get_rank(group), :length] = words
        first = joined[:, :MESSAGE].contiguous()
        distributed.all_reduce(first, group=group)
        if length <= MESSAGE or len(set(first[:, 0].tolist())) > 1:
            return first[:, :length]
        further = joined[:, MESSAGE:].contiguous()
        distributed.all_reduce(further, group=group)
        return torch.cat([first, further], dim=1)

    def _check_labels(self, are_places: list[int]) -> None:
        """Raise ``ValueError`` for labels that number the rows of each process anew."""
        with_rows = [flag for flag in are_places if flag >= 0]
        if len(with_rows) > 1 and all(with_rows) and not self.global_labels:
            raise ValueError(
                "labels are 0 to B - 1 in every process, so images of different processes would be positives of each "
                "other: give ids of the whole job, or no labels where row i belongs to row i. If equal labels do mean "
                "the same in all processes, as classes do, say so: global_labels=True"
            )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, counts: list[list[int]], *tensors: Tensor) -> Any:
        ctx.processes, ctx.counts = processes, counts
        gathered, integers = [], []
        for rows, of_processes in zip(tensors, counts, strict=True):
            size = max(of_processes)
            padded = torch.cat([rows, rows.new_zeros(size - rows.shape[0], *rows.shape[1:])])
            blocks = list(padded.new_empty(len(of_processes), *padded.shape).unbind())
            distributed.all_gather(blocks, padded, group=processes.group)
            for number, count in enumerate(of_processes):
                blocks[number] = blocks[number][:count]
            joined = torch.cat(blocks)
            gathered.append(joined)
            if not joined.is_floating_point():
                integers.append(joined)
        ctx.mark_non_differentiable(*integers)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gathered embeddings have no derivatives (create_graph=True)")
        own: list[Any] = []
        group = ctx.processes.group
        rank = distributed.get_rank(group)
        for grad, counts, is_needed in zip(grads, ctx.counts, ctx.needs_input_grad[2:], strict=True):
            own.append(None)
            if is_needed:  # a row gets its gradients in all processes
                total = grad.clone(memory_format=torch.contiguous_format)
                distributed.all_reduce(total, group=group)
                own[-1] = total.split(counts)[rank]
        return None, None, *own


class GathersAcrossDevices:
    """Gives a loss the attributes :attr:`gather_across_devices` and :attr:`global_labels`, which may be set."""

    processes: Processes

    @property
    def gather_across_devices(self) -> Any:
        """False; True for all processes; or a ``ProcessGroup``. It may be set between calls."""
        if self.processes.is_alone:
            return False
        return True if self.processes.group is None else self.processes.group

    @gather_across_devices.setter
    def gather_across_devices(self, group: Any) -> None:
        self.processes = Processes(group, self.global_labels)

    @property
    def global_labels(self) -> bool:
        """Whether labels mean the same in all processes, also where they are 0 to B - 1 in each."""
        return self.processes.global_labels

    @global_labels.setter
    def global_labels(self, are_global: bool) -> None:
        self.processes = Processes(self.gather_across_devices, are_global)


ALONE = Processes()


def processes_of(loss: nn.Module) -> Processes:
    """Return the processes whose rows a loss, or a part of it, gathers."""
    for module in loss.modules():
        processes = getattr(module, "processes", ALONE)
        if isinstance(processes, Processes) and not processes.is_alone:
            return processes
    return ALONE


def gathers(loss: nn.Module) -> bool:
    """Return whether a loss, or a part of it, compares the rows of all processes."""
    return not processes_of(loss).is_alone


def gathering(loss: Any, group: Any = True) -> Any:
    """Return a loss that compares the rows of all processes of a group: the loss itself, or a ``DistributedLoss``."""
    if not hasattr(loss, "gather_across_devices"):
        return DistributedLoss(loss, group)
    loss.gather_across_devices = group
    return loss


@contextlib.contextmanager
def all_rows() -> Iterator[None]:
    """Let losses that are called here not gather, because they get the rows of all processes."""
    token = _has_gathered.set(True)
    try:
        yield
    finally:
        _has_gathered.reset(token)


def all_gather_rows(*tensors: Tensor | None, group: Any = True) -> tuple[Any, ...]:
    """Return the rows of all processes, see :meth:`Processes.gather_rows`; the number of rows may differ.

    Args:
        tensors: (n, ...), of this process; None stays None.
        group: True for all processes, or a ``ProcessGroup``.
    """
    processes = Processes(group)
    if processes.size == 1 or all(tensor is None for tensor in tensors):
        return tensors
    by_name = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
    gathered, *_ = processes.gather_rows(by_name)
    return tuple(gathered.values())


class DistributedLoss(GathersAcrossDevices, nn.Module):
    """Wraps any loss: every process computes it on the joined batch of all processes.

    Use it for losses of pytorch-metric-learning, and for miners. Losses of this package have ``gather_across_devices``
    instead, with which each process compares only its own rows if it can. After DistributedDataParallel has averaged
    the gradients, they equal those of one process with the whole batch. The number of rows may differ between
    processes. With one process, it is the loss itself.

    Args:
        loss: a loss of this package or of pytorch-metric-learning. One that gathers itself does not do so here.
        group: True for all processes, or a ``ProcessGroup``.
        global_labels: see :class:`~vl_plugins.losses.PairLoss`.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> DistributedLoss(UnifiedLoss())(torch.eye(3), ref_emb=torch.eye(3).roll(1, dims=0))
    tensor(2.4000)
    """

    def __init__(self, loss: nn.Module, group: Any = True, global_labels: bool = False):
        super().__init__()
        check_loss(loss)
        self.loss = loss
        self.processes = Processes(group, global_labels)

    @eager
    def forward(
        self,
        embeddings: Tensor,
        labels: Any = None,
        indices_tuple: Any = None,
        ref_emb: Any = None,
        ref_labels: Any = None,
        miner: nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """Return the loss; its mean over the processes is that of the joined batch.

        Args:
            embeddings, ref_emb: (B, D) and (k B, D) of this process; or one set, with labels. ``ref_emb`` may be the
                third argument and ``ref_labels`` the fourth.
            labels, ref_labels: ids across all processes, equal for what belongs together: tensors, numpy arrays or
                lists of integers. Without ``ref_labels``, rows k i to k i + k - 1 of ``ref_emb`` belong to row i of the
                embeddings; without ``labels`` too, they belong to no other row.
            indices_tuple: must be None: its pairs would be from one process. It is the third argument, as in the losses
                of pytorch-metric-learning.
            miner: a miner of pytorch-metric-learning, called on the joined batch.
            options: further arguments of the loss, such as ``scale``. Those with rows, such as ``slots``, are gathered.

        Raises:
            ValueError: embeddings of unequal widths; a number of texts that is not a multiple of the number of images;
                labels that are NaN, of the wrong type or length, or 0 to B - 1 in each of several processes, which
                would make unrelated rows positives.
        """
        if isinstance(indices_tuple, Tensor):  # the order until 0.3: ref_emb, ref_labels, miner
            if isinstance(ref_labels, nn.Module) and miner is None:
                ref_labels, miner = None, ref_labels
            if ref_emb is not None and ref_labels is not None:
                raise ValueError("ref_emb or ref_labels is given twice; give them by name")
            indices_tuple, ref_emb, ref_labels = None, indices_tuple, ref_emb if ref_labels is None else ref_labels
        if indices_tuple is not None:
            raise ValueError("indices_tuple would be of this process only: give the miner as miner=")
        sides = {"embeddings": embeddings, "labels": labels, "ref_emb": ref_emb, "ref_labels": ref_labels}
        with full_precision_call(embeddings=embeddings, ref_emb=ref_emb):
            call = joined_call(self.loss, self.processes, sides | options)
            embeddings, labels, ref_emb, ref_labels = (call.pop(name) for name in sides)
            refs = () if ref_emb is None else (ref_emb, ref_labels)
            indices = None
            if miner is not None:
                indices = miner(embeddings, labels, *refs)
            with all_rows():
                return self.loss(embeddings, labels, indices, *refs, **call)


def learned_numbers(loss: nn.Module) -> dict[str, Any]:
    """Return the parameters of one element, such as a scale, which have to be equal in all processes."""
    numbers = {}
    for name, value in loss.named_parameters():
        if value.numel() == 1:
            numbers[name] = value
    return numbers


def joined_call(
    loss: nn.Module, processes: Processes, call: dict[str, Any], needs_labels: bool = True
) -> dict[str, Any]:
    """Return the checked arguments of a call with the rows of all processes.

    Args:
        loss: which will be called.
        processes: that share the batch.
        needs_labels: False if a miner says what belongs together.
        call: by the names of :class:`~vl_plugins.losses.PairLoss`, and others. Labels that are not given follow from
            the order of the rows.
    """
    rows, options, numbers = {}, {}, {}
    for name, value in call.items():
        if name in SHAPES or name == "confidence":
            rows[name] = value
        else:
            options[name] = value
    vectors = isinstance(getattr(loss, "distance", None), VECTOR_DISTANCES)
    rows = checked_rows(rows, vectors)
    if needs_labels:
        rows = with_labels(rows, first_label(processes.rank))
    call = options | rows
    if processes.size == 1:
        return call
    settings = [f"symmetric={call.get('symmetric')}"]
    for module in loss.modules():
        if hasattr(module, "is_warming_up"):  # a warm-up may have ended in one process only
            settings.append("in a warm-up" if module.is_warming_up else "after a warm-up")
    tensors = {}
    for name, value in call.items():
        if isinstance(value, (list, tuple, np.ndarray)):
            value = torch.as_tensor(value, device=call["embeddings"].device)
        is_one_number = isinstance(value, Tensor) and (value.ndim == 0 or name in ("scale", "bias"))
        if is_one_number or (isinstance(value, Real) and not isinstance(value, bool)):
            numbers[name] = value
        elif value is None or isinstance(value, Tensor):
            tensors[name] = value
    equal = learned_numbers(loss) | numbers
    gathered, *_ = processes.gather_rows(tensors, equal, tuple(settings), uses_all=True)
    return call | gathered


def first_label(rank: int) -> int:
    """Return the label of a process's first row, if labels follow from positions; each process has its own range."""
    return rank * 2**32


def stop_processes() -> None:
    """Destroy the process group if there is one.

    gloo's threads free what they have sent only later, and need the GIL for that, so they get time to do so. Before
    torch 2.8 (pytorch/pytorch#154976), the destructor of a group waits for these threads while it holds the GIL: on a
    busy machine a deadlock. There the groups are destroyed for torch, but a reference that nobody drops keeps them in
    memory until the process ends.
    """
    if not distributed.is_initialized():
        return
    time.sleep(SECONDS_FOR_THREADS)
    if torch.__version__ < "2.8":
        for group in distributed.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    distributed.destroy_process_group()
