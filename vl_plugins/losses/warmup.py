"""One loss in the first steps of training, then another one."""

from typing import Any

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils.module_with_records import ModuleWithRecords
from torch import Tensor

from vl_plugins.distributed import gathering, gathers
from vl_plugins.errors import number
from vl_plugins.losses.statistics import forget_statistics
from vl_plugins.numerics import eager

__all__ = ["Warmup"]

# Attributes taken from the loss after the warm-up, and attributes taken from the loss of the next call.
OF_THEN = frozenset(["distance", "reducer", "embedding_regularizer", "scale"])
OF_CALL = frozenset(["symmetric", "known_positives"])


class Warmup(BaseMetricLossFunction):
    """Calls one loss in the first steps of training, and another one afterwards and outside of training.

    Early in training the hardest negative is often wrong for most pairs, and the model can collapse: all embeddings
    become the same, and a triplet loss stays at 2 * margin. Counting all negatives for the first epoch or so helps.
    ``create_loss("triplet_hn", warmup_steps=1000)`` is ``Warmup(TripletSHLoss(), TripletHNLoss(), steps=1000)``.

    Args:
        first, then: losses, of this package or of pytorch-metric-learning.
        steps: number of steps with ``first``.

    Attributes:
        step: number of steps so far, part of ``state_dict``. Each call in training mode with gradients adds 1; a
            trainer that calls the loss several times in a step sets it before each call. Keep the loss outside of
            ``torch.utils.checkpoint``, which calls it twice.

    >>> from vl_plugins.losses import TripletHNLoss, TripletSHLoss
    >>> loss = Warmup(TripletSHLoss(), TripletHNLoss(), steps=1)
    >>> images, texts = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> loss(images, ref_emb=texts), loss(images, ref_emb=texts)
    (tensor(2.8000), tensor(2.4000))
    """

    def __init__(self, first: BaseMetricLossFunction, then: BaseMetricLossFunction, steps: int):
        for loss in (first, then):
            if not isinstance(loss, BaseMetricLossFunction):
                raise TypeError(f"Warmup takes two losses, got {loss!r}; create_loss makes one by its name")
        # Not the base class's: distance, reducer and embedding regularizer are those of the losses.
        ModuleWithRecords.__init__(self, then.collect_stats)
        if gathers(first) != gathers(then):
            raise ValueError(
                "gather_across_devices is given to one loss of the warm-up only: give it to both, or set "
                "Warmup(...).gather_across_devices"
            )
        self.first, self.then = first, then
        self.steps = number("steps", steps, least=0, kind=int)
        self.step = 0
        self.add_to_recordable_attributes(name="steps")

    def __getattr__(self, name: str) -> Any:
        if name in OF_THEN:
            return getattr(self.then, name)
        if name in OF_CALL:
            return getattr(self.loss, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_THEN | OF_CALL | {"margin"}:
            raise AttributeError(f"{name} belongs to the losses of a warm-up: set that of loss.first and loss.then")
        super().__setattr__(name, value)

    @property
    def loss(self) -> Any:
        """The loss of the next call."""
        return self.first if self.is_warming_up else self.then

    @property
    def compares_own_rows(self) -> bool:
        """True if several processes need to compare their own rows only, see :class:`~vl_plugins.losses.PairLoss`."""
        return all(getattr(loss, "compares_own_rows", False) for loss in (self.first, self.then))

    @property
    def is_warming_up(self) -> bool:
        return self._counts() and self.step < self.steps

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers of a call that either loss takes, see :class:`~vl_plugins.losses.PairLoss`."""
        names = [*getattr(self.first, "numbers", ()), *getattr(self.then, "numbers", ())]
        return tuple(dict.fromkeys(names))

    @eager
    def forward(
        self,
        embeddings: Tensor,
        labels: Any = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Any = None,
        **options: Any,
    ) -> Any:
        if ref_labels is labels and isinstance(labels, Tensor) and ref_emb is not None and ref_emb is not embeddings:
            ref_labels = labels.clone()  # for pytorch-metric-learning, one object with both names means one set
        sides = embeddings, labels, indices_tuple, ref_emb, ref_labels
        return self._counted(self.loss(*sides, **self._options_of_call(options)))

    @eager
    def from_similarities(self, *arguments: Any, **options: Any) -> Any:
        """Return the loss of a matrix, see :meth:`vl_plugins.losses.PairLoss.from_similarities`."""
        return self._counted(self.loss.from_similarities(*arguments, **self._options_of_call(options)))

    def _counted(self, value: Any) -> Any:
        """Count a step; return the loss with gradients of 0 for the parameters of the loss that was not called.

        DistributedDataParallel waits for the gradients of all.
        """
        idle = self.then if self.is_warming_up else self.first
        forget_statistics(idle)
        self.step += self._counts()
        if not isinstance(value, Tensor):
            return value  # of a DoNothingReducer
        for parameter in idle.parameters():
            if parameter.requires_grad:
                value = value + (0 * parameter).sum()
        return value

    @property
    def gather_across_devices(self) -> Any:
        """That of both losses, see :class:`~vl_plugins.losses.PairLoss`."""
        return getattr(self.then, "gather_across_devices", False)

    @gather_across_devices.setter
    def gather_across_devices(self, group: Any) -> None:
        self.first, self.then = gathering(self.first, group), gathering(self.then, group)

    def _options_of_call(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that the loss of this call takes: one of the two may have a scale, the other none."""
        self.check_numbers(options)  # of both losses now, not in the call after the warm-up
        own = getattr(self.loss, "numbers", ())
        options_of_loss = {}
        for name, value in options.items():
            if name in own or name not in self.numbers:
                options_of_loss[name] = value
        return options_of_loss

    def check_numbers(self, numbers: dict[str, Any]) -> None:
        """Raise ``ValueError`` for numbers that a call of either loss would refuse."""
        for loss in (self.first, self.then):
            own = {name: value for name, value in numbers.items() if name in getattr(loss, "numbers", ())}
            if own:
                loss.check_numbers(own)

    def _counts(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.step)

    def set_extra_state(self, state: Tensor) -> None:
        self.step = int(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "training_calls" in state_dict:  # until version 0.2
            state_dict[prefix + "_extra_state"] = state_dict.pop(prefix + "training_calls")
        # Until version 0.3 the parameters were those of one loss, which had the warm-up. A subclass may have its own.
        own = {"_extra_state", *self._parameters, *self._buffers}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if name not in own and name.partition(".")[0] not in self._modules:
                value = state_dict.pop(key)
                state_dict |= {f"{prefix}first.{name}": value, f"{prefix}then.{name}": value}
        super()._load_from_state_dict(state_dict, prefix, *args)
