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
"""

import time
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad

from vl_plugins.distances import check_widths
from vl_plugins.numerics import (
    as_ids,
    as_labels,
    as_ref_labels,
    check_loss,
    check_tensors,
    eager,
    full_precision,
    labels_of_one_set,
)

__all__ = [
    "DistributedLoss",
    "GathersAcrossDevices",
    "Processes",
    "all_gather_rows",
    "first_label",
    "gathering",
    "gathers",
    "joined_call",
    "learned_numbers",
    "settings_of",
    "stop_processes",
    "world_size",
]

SECONDS_FOR_THREADS = 0.2
ABSENT = -1  # the number of rows of a tensor that is not given
MESSAGE = 256  # integers that each process sends about its call, more than any call needs


def world_size(group: Any = None) -> int:
    """Return the number of processes of a group, by default of all, and 1 without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(group)


def _process_group() -> Any:
    """Return the class of process groups, or an empty tuple if torch was built without them."""
    return getattr(distributed, "ProcessGroup", ())


class GatheredRows(NamedTuple):
    """The rows of all processes.

    Attributes:
        tensors: by name; None for what no process has.
        counts: by name, the number of rows of each process.
    """

    tensors: dict[str, Any]
    counts: dict[str, list[int]]


class Description(NamedTuple):
    """What a process tells the others about a tensor."""

    rows: int  # ABSENT if it has none
    width: int
    type_number: int
    has_gradient: int
    are_places: int  # of labels

    @classmethod
    def of(cls, value: Tensor | None, are_places: bool) -> "Description":
        if value is None:
            return cls(ABSENT, 0, 0, 0, 0)
        type_number = crc32(str(value.dtype).encode())
        return cls(len(value), value.shape[1:].numel(), type_number, int(value.requires_grad), int(are_places))


class Processes:
    """The processes that share a batch.

    Args:
        group: False or None for this process alone; True for all processes, if there is a process group; or a
            ``ProcessGroup``.
    """

    def __init__(self, group: Any = False):
        if not (group is None or isinstance(group, (bool, _process_group()))):
            raise ValueError(f"gather_across_devices must be True, False or a ProcessGroup, got {group!r}")
        self.is_alone = group is False or group is None
        self.group: Any = None if isinstance(group, bool) else group
        self.has_checked_labels = False

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
        return 1 if self.is_alone else world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.size == 1 else distributed.get_rank(self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes, without a gradient."""
        total = values.detach().clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=self.group)
        return total

    def gather_rows(
        self,
        tensors: dict[str, Tensor | None],
        learned: dict[str, Tensor] | None = None,
        settings: tuple[str, ...] = (),
        uses_all: bool = False,
    ) -> GatheredRows:
        """Return the rows of all processes in rank order; the number of rows may differ between processes.

        Synchronizes the GPU once, to read the numbers of rows. The gradients of all processes are summed and sent back
        to the process that has the row, so all processes must run the backward pass together.

        Args:
            tensors: (n, ...) by name, the same names in all processes; integers (n, M) may differ in M.
            learned: 0-D tensors by name that must be equal in all processes.
            settings: words that must be equal too.
            uses_all: each process compares all rows with all, so a tensor that one process does not use, none uses. It
                then has no gradient, which DistributedDataParallel detects; otherwise it has a gradient of 0.

        Raises:
            ValueError: in all processes, a tensor that only some of them have, vectors of unequal widths, tensors of
                unequal types, labels that are 0 to n - 1 in each of several processes, a learned number or a setting
                that differs.
        """
        learned = learned or {}
        descriptions, numbers = self._exchange(tensors, learned, settings)
        self._check(tensors, descriptions, learned, numbers)
        counts: dict[str, list[int]] = {}
        padded = []
        for name, value in tensors.items():
            if value is None:
                continue
            of_processes = descriptions[name]
            counts[name] = [description.rows for description in of_processes]
            if _is_list_of_ids(value):
                longest = max(description.width for description in of_processes)
                value = pad(value, (0, longest - value.shape[1]), value=-1)
            if any(description.has_gradient for description in of_processes) and not value.requires_grad:
                value = value.detach().requires_grad_()  # or this process would not take part in the backward pass
            padded.append(value)
        if uses_all:  # apart, so that what is not used has no backward pass
            gathered = [_Gather.apply(self, [counts[name]], rows)[0] for name, rows in zip(counts, padded, strict=True)]
        else:
            gathered = _Gather.apply(self, list(counts.values()), *padded)
        joined: dict[str, Any] = dict.fromkeys(tensors)
        joined.update(zip(counts, gathered, strict=True))
        return GatheredRows(joined, counts)

    def _exchange(
        self, tensors: dict[str, Tensor | None], learned: dict[str, Tensor], settings: tuple[str, ...]
    ) -> tuple[dict[str, list[Description]], list[dict[str, int]]]:
        """Return each process's descriptions of its tensors, and its learned numbers; synchronizes the GPU once.

        Raises:
            ValueError: in all processes, if their names differ.
        """
        names = ", ".join([*tensors, *learned, *settings])
        words = [crc32(names.encode())]
        for name, value in tensors.items():
            are_places = False
            if name == "labels" and value is not None and not self.has_checked_labels:
                are_places = _are_places(value)
            words += Description.of(value, are_places)
        device = next(value.device for value in tensors.values() if value is not None)
        messages = torch.zeros(self.size, MESSAGE, dtype=torch.int64)  # of one length, whatever a process has
        messages[self.rank, : len(words)] = torch.tensor(words)
        messages = messages.to(device)
        if learned:
            values = torch.stack([number.detach().reshape(()).double() for number in learned.values()])
            messages[self.rank, len(words) : len(words) + len(values)] = values.to(device).view(torch.int64)
        lists = self.sum(messages).tolist()
        if len({checksum for checksum, *_ in lists}) > 1:
            raise ValueError(f"the processes give different arguments; this one gives {names}: give the same in all")
        descriptions: dict[str, list[Description]] = {name: [] for name in tensors}
        numbers = []
        for _, *words in lists:  # of a process: a description of each tensor, then the learned numbers
            for name in tensors:
                description, words = Description(*words[: len(Description._fields)]), words[len(Description._fields) :]
                descriptions[name].append(description)
            numbers.append(dict(zip(learned, words, strict=False)))
        return descriptions, numbers

    def _check(self, tensors: Any, descriptions: dict[str, list[Description]], learned: Any, numbers: Any) -> None:
        """Raise ``ValueError`` in every process for what does not fit together."""
        for name, value in tensors.items():
            of_processes = descriptions[name]
            rows = [description.rows for description in of_processes]
            if min(rows) == ABSENT < max(rows):
                without = rows.index(ABSENT)
                raise ValueError(
                    f"{name} is given in some processes, and not in process {without}: give it in all or none"
                )
            if len({description.type_number for description in of_processes}) > 1:
                raise ValueError(f"{name} must have the same type in all processes; this one gives {value.dtype}")
            widths = {description.width for description in of_processes}
            if len(widths) > 1 and value is not None and not _is_list_of_ids(value):
                raise ValueError(f"{name} must have the same width in all processes, got {sorted(widths)}")
        for name in learned:
            if len({own[name] for own in numbers}) > 1:
                raise ValueError(
                    f"{name} is learned, and has another value in each process: wrap the loss in "
                    "DistributedDataParallel, or put it into the model"
                )
        if self.has_checked_labels or tensors.get("labels") is None:
            return
        self.has_checked_labels = True
        # More than one process with rows, or nothing can be joined.
        with_rows = [description for description in descriptions["labels"] if description.rows > 0]
        if len(with_rows) > 1 and all(description.are_places for description in with_rows):
            raise ValueError(
                "labels are 0 to B - 1 in every process, so images of different processes would be positives of each "
                "other: give ids of the whole job, or no labels where row i belongs to row i. Only if equal labels do "
                "mean the same in all processes, as classes do, number them from 1"
            )


def _are_places(labels: Tensor) -> bool:
    """Return whether labels are 0 to n - 1, once or repeated in the same order; synchronizes the GPU.

    Labels look like this if each process numbers its own rows, also with two views of each row: 0 1 2 0 1 2. Class
    labels come in a different order, or some classes occur more often.
    """
    if len(labels) == 0:
        return True
    number = int(labels.max()) + 1
    is_one_class = number == 1  # also of a single row, which says nothing
    if number < 1 or len(labels) % number != 0 or is_one_class:
        return False
    places, views = torch.arange(number, dtype=labels.dtype, device=labels.device), len(labels) // number
    return torch.equal(labels, places.repeat(views)) or torch.equal(labels, places.repeat_interleave(views))


def _is_list_of_ids(value: Tensor) -> bool:
    return value.ndim == 2 and not value.is_floating_point()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, counts: list[list[int]], *tensors: Tensor) -> Any:
        ctx.processes, ctx.counts = processes, counts
        gathered, integers = [], []
        for rows, of_processes in zip(tensors, counts, strict=True):
            padding = rows.new_zeros(max(of_processes) - len(rows), *rows.shape[1:])
            padded = torch.cat([rows, padding])
            blocks = [torch.empty_like(padded) for _ in of_processes]
            distributed.all_gather(blocks, padded, group=processes.group)
            joined = torch.cat([block[:count] for block, count in zip(blocks, of_processes, strict=True)])
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
        for grad, counts, is_needed in zip(grads, ctx.counts, ctx.needs_input_grad[2:], strict=True):
            own.append(None)
            if is_needed:  # a row gets its gradients in all processes
                own[-1] = ctx.processes.sum(grad).split(counts)[ctx.processes.rank]
        return None, None, *own


class GathersAcrossDevices:
    """Gives a loss the attribute :attr:`gather_across_devices`."""

    processes: Processes

    @property
    def gather_across_devices(self) -> Any:
        """False; True for all processes; or a ``ProcessGroup``. It may be set between calls."""
        if self.processes.is_alone:
            return False
        return True if self.processes.group is None else self.processes.group

    @gather_across_devices.setter
    def gather_across_devices(self, group: Any) -> None:
        self.processes = Processes(group)


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
    return tuple(processes.gather_rows(by_name).tensors.values())


class DistributedLoss(GathersAcrossDevices, nn.Module):
    """Wraps any loss: every process computes it on the joined batch of all processes.

    Use it for losses of pytorch-metric-learning, and for miners. Losses of this package have ``gather_across_devices``
    instead, with which each process compares only its own rows if it can. After DistributedDataParallel has averaged
    the gradients, they equal those of one process with the whole batch. The number of rows may differ between
    processes. With one process, it is the loss itself.

    Args:
        loss: a loss of this package or of pytorch-metric-learning.
        group: True for all processes, or a ``ProcessGroup``.

    Raises:
        ValueError: the loss has ``gather_across_devices`` itself.

    >>> from vl_plugins.losses import UnifiedLoss
    >>> DistributedLoss(UnifiedLoss())(torch.eye(3), ref_emb=torch.eye(3).roll(1, dims=0))
    tensor(2.4000)
    """

    def __init__(self, loss: nn.Module, group: Any = True):
        super().__init__()
        check_loss(loss)
        self.loss = loss
        self._check_gathering()
        self.gather_across_devices = group

    def _check_gathering(self) -> None:
        if gathers(self.loss):
            raise ValueError("the loss gathers by itself: create it without gather_across_devices")

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
        self._check_gathering()
        if isinstance(indices_tuple, Tensor):  # the order until 0.3: ref_emb, ref_labels, miner
            if isinstance(ref_labels, nn.Module) and miner is None:
                ref_labels, miner = None, ref_labels
            if ref_emb is not None and ref_labels is not None:
                raise ValueError("ref_emb or ref_labels is given twice; give them by name")
            indices_tuple, ref_emb, ref_labels = None, indices_tuple, ref_emb if ref_labels is None else ref_labels
        if indices_tuple is not None:
            raise ValueError("indices_tuple would be of this process only: give the miner as miner=")
        check_tensors(embeddings=embeddings)
        if ref_emb is not None:
            check_tensors(ref_emb=ref_emb)
            check_widths(getattr(self.loss, "distance", None), embeddings, ref_emb)
        sides = {"embeddings": embeddings, "labels": labels, "ref_emb": ref_emb, "ref_labels": ref_labels}
        settings = settings_of(self.loss, options.get("symmetric"))
        call = joined_call(self.processes, sides | options, learned_numbers(self.loss), settings)
        embeddings, labels, ref_emb, ref_labels = (call.pop(name) for name in sides)
        refs = () if ref_emb is None else (ref_emb, ref_labels)
        indices = None if miner is None else miner(embeddings, labels, *refs)
        return self.loss(embeddings, labels, indices, *refs, **call)


def gathers(loss: nn.Module) -> bool:
    """Return whether a loss, or a part of it, compares the rows of all processes."""
    processes = [getattr(module, "processes", None) for module in loss.modules()]
    return any(isinstance(of_module, Processes) and not of_module.is_alone for of_module in processes)


def gathering(loss: Any, group: Any = True) -> Any:
    """Return a loss that compares the rows of all processes of a group: the loss itself, or a ``DistributedLoss``."""
    if not hasattr(loss, "gather_across_devices"):
        return DistributedLoss(loss, group)
    loss.gather_across_devices = group
    return loss


def learned_numbers(loss: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of one element, such as a scale, which have to be equal in all processes."""
    return {name: value for name, value in loss.named_parameters() if value.numel() == 1}


def settings_of(loss: nn.Module, symmetric: Any = None) -> tuple[str, ...]:
    """Return the settings of a call, in words, which have to be equal in all processes."""
    settings = [f"symmetric={symmetric}"]
    for module in loss.modules():
        if hasattr(module, "is_warming_up"):
            settings.append("in a warm-up" if module.is_warming_up else "after a warm-up")
    return tuple(settings)


def joined_call(
    processes: Processes, call: dict[str, Any], learned: dict[str, Tensor], settings: tuple[str, ...]
) -> dict[str, Any]:
    """Return the arguments of a call with the rows of all processes.

    Args:
        processes: that share the batch.
        call: ``embeddings``, ``labels``, ``ref_emb``, ``ref_labels`` and others by name. Embeddings become float32 at
            least, and labels that are not given follow from the order of the rows. ``ref_emb`` becomes None where it
            is the embeddings, because gathered rows are copies.
        learned: numbers that must be equal in all processes.
        settings: words that must be equal too.
    """
    if processes.size > 1 and call.get("copies") is not None:
        raise ValueError("copies are places of one process: create the loss without gather_across_devices")
    embeddings, ref_emb = call["embeddings"], call["ref_emb"]
    if ref_emb is embeddings:
        ref_emb = None
    labels, ref_labels = pair_labels(embeddings, call["labels"], ref_emb, call["ref_labels"], processes.rank)
    call = call | {"labels": labels, "ref_emb": ref_emb, "ref_labels": ref_labels}
    if ref_emb is None:
        (call["embeddings"],) = full_precision(embeddings)
    else:
        call["embeddings"], call["ref_emb"] = full_precision(embeddings, ref_emb)
    if processes.size == 1:
        return call
    return call | processes.gather_rows(options_with_rows(call), learned, settings, uses_all=True).tensors


def options_with_rows(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that have a row for each item; None where the call gives none.

    A scale or a bias may be a tensor (1,), which has no rows. Any other tensor is assumed to have rows, even with
    length 1, because a process may have only one row.
    """
    embeddings, negatives = call["embeddings"], call.get("negatives")
    candidates = embeddings if call["ref_emb"] is None else call["ref_emb"]
    items_of_ids = {"ref_ids": candidates, "matching_ids": embeddings, "negative_ids": negatives}
    rows = {}
    for name, value in call.items():
        items = items_of_ids.get(name)
        if items is not None:
            value = as_ids(name, value, items, dimensions=2 if name == "matching_ids" else 1)
        elif isinstance(value, (list, tuple, np.ndarray)):
            value = torch.as_tensor(value, device=embeddings.device)
        is_tensor = isinstance(value, Tensor) and value.ndim > 0 and name not in ("scale", "bias")
        if value is None or is_tensor:
            rows[name] = value
    return rows


def pair_labels(
    embeddings: Tensor, labels: Any, ref_emb: Tensor | None, ref_labels: Any, rank: int = 0
) -> tuple[Tensor, Any]:
    """Return the labels of both sides; those that are not given follow from the order of the rows."""
    if labels is None:
        if ref_emb is None or ref_labels is not None:
            raise ValueError("labels must be given with one set of embeddings, and with ref_labels")
        labels = torch.arange(len(embeddings), device=embeddings.device) + first_label(rank)
    labels = as_labels("labels", labels, embeddings)
    if ref_emb is None:
        labels_of_one_set(labels, ref_labels, embeddings)  # which are checked
        return labels, None
    if ref_labels is None:
        check_multiple(embeddings, ref_emb)
        ref_labels = labels.repeat_interleave(len(ref_emb) // max(1, len(embeddings)))
    return labels, as_ref_labels(ref_labels, ref_emb)


def check_multiple(embeddings: Tensor, ref_emb: Tensor) -> None:
    """Raise ``ValueError`` if the rows of ``ref_emb`` cannot be assigned to the embeddings by position."""
    if len(ref_emb) != len(ref_emb) // max(1, len(embeddings)) * len(embeddings):
        raise ValueError(
            "without ref_labels, rows k i to k i + k - 1 of ref_emb belong to row i of the embeddings: "
            f"{len(ref_emb)} is not a multiple of {len(embeddings)}"
        )


def first_label(rank: int) -> int:
    """Return the label of a process's first row, if labels follow from positions; each process has its own range."""
    return rank * 2**32


def stop_processes() -> None:
    """Destroy the process group if there is one.

    gloo's threads free what they have sent only later, and need the GIL for that. Before pytorch/pytorch#154976 (June
    2025), destroying the group waited for these threads while it held the GIL: a deadlock. So they get time to finish.
    """
    if distributed.is_initialized():
        time.sleep(SECONDS_FOR_THREADS)
        distributed.destroy_process_group()
