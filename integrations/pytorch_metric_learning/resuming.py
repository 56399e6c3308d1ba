"""The state of a training in ``latest.pt``: read by the first process, sent to the others, and checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.loading import read_torch_file
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import FORMAT, VERSION, write_checkpoint

__all__ = ["State", "in_first_process", "read_state"]

KEYS = ("config", "epoch", "history", "loss_funcs", "models", "optimizer", "scaler", "vocabulary")


@dataclass
class State:
    """A training between two epochs.

    Attributes:
        epoch: number of complete epochs.
        optimizer: state of the optimizer of the last epoch; None before the first one.
        scaler: state of the scaler of gradients; None without one.
        history: metrics of each epoch; those of epoch 0 are of a validation before the first step.
        model: what :func:`~vl_plugins.integrations.pytorch_metric_learning.checkpoints.describe` returns.
    """

    epoch: int = 0
    optimizer: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        """Write ``latest.pt``."""
        training = {"epoch": self.epoch, "optimizer": self.optimizer, "scaler": self.scaler, "history": self.history}
        write_checkpoint(file, self.model | training)

    @classmethod
    def load(cls, file: Path) -> "State":
        """Read ``latest.pt``.

        Raises:
            UserError: the file is damaged, or of another version.
        """
        content = read_torch_file(file)
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise UserError(
                f"{file} is not of this version; one of 0.2 can be evaluated, but not resumed: use a new --out"
            )
        missing = [key for key in KEYS if key not in content]
        if missing:
            raise UserError(f"{file} is damaged: it has no {', '.join(missing)}")
        epoch, history = content["epoch"], content["history"]
        with user_errors(f"{file} is damaged", *MALFORMED_CONTENT):
            if not _is_history(history, epoch) or not isinstance(content["config"], Mapping):
                raise UserError(f"{file} is damaged: its history is not one of epochs 1, 2, ...")
        return cls(epoch, content["optimizer"], content["scaler"], history, content)


def in_first_process(accelerator: Accelerator, read: Callable[[], Any]) -> Any:
    """Return in all processes what ``read()`` returns in the first one; an error there is raised in all.

    Only the first process writes, perhaps to a disk of its own, so the files of another process may be missing or old.
    The others get the whole content, because DistributedDataParallel would send the weights only, not the words of the
    text encoder, the state of the optimizer, or the step of a loss with a warm-up.

    Raises:
        UserError: in the other processes, with the message of any error of the first one.
    """
    content, error = None, None
    if accelerator.is_main_process:
        try:
            content = read()
        except Exception as caught:  # whatever it is, the others must not wait for the content
            error = caught
    message = None if error is None else str(error)
    sent = [content, message]
    broadcast_object_list(sent)
    content, message = sent
    if error is not None:
        raise error
    if message is not None:
        raise UserError(message)
    return content


def read_state(folder: Path, file: Path, resume: bool) -> State | None:
    """Return the state in ``latest.pt``, None for a new run.

    Raises:
        UserError: there is an earlier run that must not be continued, or :meth:`State.load` raises it.
    """
    if not file.exists():
        return None
    if not resume:
        raise UserError(f"{folder} holds an earlier run; give another folder with --out, or --resume")
    return State.load(file)


def _is_history(history: Any, last: int) -> bool:
    """Return whether this is a list of the metrics of epochs 1, 2, ..., ``last``, or of 0, 1, ..., ``last``."""
    epochs = []
    for metrics in history:
        epochs.append(metrics["epoch"])
        if not all(isinstance(value, Real) for value in metrics.values()):
            return False
    first = last + 1 - len(epochs)
    return isinstance(history, list) and last > 0 and first in (0, 1) and epochs == list(range(first, last + 1))
