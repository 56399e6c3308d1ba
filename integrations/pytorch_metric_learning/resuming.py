"""The state of a training in ``latest.pt``: read by the first process, sent to the others, and checked."""

from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.loading import read_torch_file
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import FORMAT, VERSION

__all__ = ["in_first_process", "read_state"]

KEYS = ("config", "epoch", "history", "loss_funcs", "models", "optimizer", "scaler", "vocabulary")


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


def read_state(folder: Path, file: Path, resume: bool) -> dict[str, Any] | None:
    """Return the content of ``latest.pt``, None for a new run.

    Raises:
        UserError: there is an earlier run that must not be continued, or the file is damaged or of another version.
    """
    if not file.exists():
        return None
    if not resume:
        raise UserError(f"{folder} holds an earlier run; give another folder with --out, or --resume")
    state = read_torch_file(file)
    if not isinstance(state, dict) or (state.get("format"), state.get("version")) != (FORMAT, VERSION):
        raise UserError(f"{file} is not of this version; one of 0.2 can be evaluated, but not resumed: use a new --out")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise UserError(f"{file} is damaged: it has no {', '.join(missing)}")
    with user_errors(f"{file} is damaged", *MALFORMED_CONTENT):
        if not _is_history(state["history"]) or not isinstance(state["config"], Mapping):
            raise UserError(f"{file} is damaged: its history is not one of epochs 1, 2, ...")
    return state


def _is_history(history: Any) -> bool:
    """True for a list of the metrics of epochs 1, 2, ..."""
    for epoch, metrics in enumerate(history, 1):
        if metrics["epoch"] != epoch or not all(isinstance(value, Real) for value in metrics.values()):
            return False
    return isinstance(history, list) and len(history) > 0
