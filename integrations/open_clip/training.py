"""What open_clip's trainer does not hand on between the functions that the launcher replaces."""

import contextlib
import functools
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vl_plugins.utils.errors import UserError

__all__ = ["RememberingLoader", "Training"]


class RememberingLoader:
    """A loader for the trainer, which remembers which images the last batches were of.

    Args:
        loader: of (images, texts, labels (B,), keys), see :func:`vl_plugins.data.reader.training_pipeline`.
        num_batches: of an epoch, in this process.
        num_samples: of an epoch, in all processes.
        remembered: how many batches make a training step.
        as_batch: makes what the trainer takes of a pair (images, texts).
    """

    def __init__(
        self,
        loader: DataLoader,
        num_batches: int,
        num_samples: int,
        remembered: int,
        as_batch: Callable[[tuple[Tensor, Tensor]], Any] = tuple,
    ):
        self.loader = loader
        self.num_batches = num_batches
        self.num_samples = num_samples
        self.as_batch = as_batch
        self._last: deque[tuple[Tensor, list[str]]] = deque(maxlen=remembered)

    def __iter__(self) -> Iterator[Any]:
        self._last.clear()
        for images, texts, labels, keys in self.loader:
            self._last.append((labels, keys))
            yield self.as_batch((images, texts))

    def image_ids(self) -> Tensor:
        """Return the labels of the images of the step, (B,), in the order of the batches."""
        return torch.cat([labels for labels, _ in self._last])

    def keys(self) -> list[str]:
        """Return the keys of the images of the step."""
        return [key for _, keys in self._last for key in keys]


@dataclass
class Training:
    """What is known of a training while it runs.

    Attributes:
        repeats: each epoch begins its random numbers anew, so that a resumed training is the same.
        continues: it goes on where an earlier run of its name was.
        looks_at_epochs: ``after_epoch`` is called.
        args: all options, in the trainer's own object; it puts the file in the place of ``--resume latest``.
        steps_before: of training, that the model has been through when it starts or goes on.
        loader: of the training split, where our reader reads it.
        saved: what the checkpoint that it starts from holds beside what open_clip keeps.
        beside: what its checkpoints will hold so: functions by name.
        before_step: is called with the optimizer before each of its steps.
        after_epoch: is called with the last batch of an epoch after its last step, before anything is saved.
        model: is trained; without the wrappers of several processes.
        validation_error: what stopped the validation of the last epoch.
    """

    repeats: bool = False
    continues: bool = False
    looks_at_epochs: bool = False
    args: Namespace | None = None
    steps_before: int = 0
    loader: RememberingLoader | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)
    beside: dict[str, Callable[[], Any]] = field(default_factory=dict)
    before_step: Callable[[torch.optim.Optimizer], None] | None = None
    after_epoch: Callable[[Any], None] | None = None
    model: torch.nn.Module | None = None
    validation_error: UserError | None = None

    def check_validation(self) -> None:
        """Raise what stopped the validation of the last epoch; its checkpoint has been written since."""
        if self.validation_error is not None:
            raise self.validation_error

    def image_ids(self) -> Tensor | None:
        """Return numbers of the images of the step, (B,); None where open_clip's reader does not tell."""
        return None if self.loader is None else self.loader.image_ids()

    def batch_keys(self) -> list[str] | None:
        """Return the keys of the images of the step; None where open_clip's reader does not tell."""
        return None if self.loader is None else self.loader.keys()

    def kept_beside(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold beside what open_clip keeps."""
        return {name: state() for name, state in self.beside.items()}

    @contextlib.contextmanager
    def steps_watched(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Call ``before_step`` with the optimizer before each of its steps.

        Not by a hook of torch's: torch.compile turns those off in some versions.
        """
        step = optimizer.step

        @functools.wraps(step)
        def watched(*args, **kwargs):
            if self.before_step is not None:
                self.before_step(optimizer)
            return step(*args, **kwargs)

        optimizer.step = watched
        try:
            yield
        finally:
            del optimizer.step  # that of its class again
