"""What differs between the trainers of open_clip 3.x and 4.x.

In 3.x the trainer calls a model, and then a loss, and batches are pairs. In 4.x it calls a task, which has both, with
batches that are mappings. Its modules import functions by name, so a replacement is put into the module that calls it.
"""

import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import timm.optim
import torch
from open_clip_train import data as host_data
from open_clip_train import file_utils, scheduler, train
from open_clip_train import main as trainer
from open_clip_train.distributed import world_info_from_env
from torch import Tensor, nn
from torch.optim import Optimizer

from vl_plugins.integrations.loading import BEST

__all__ = [
    "HAS_TASKS",
    "READS_SAMPLE_KEYS",
    "ZERO_SHOT",
    "Replacement",
    "batch_of",
    "data_parallel",
    "epochs_replacement",
    "evaluated",
    "has_scaler",
    "images_of",
    "is_logged",
    "latest_checkpoint",
    "loss_replacement",
    "optimizer_replacements",
    "reading_replacements",
    "saving_replacement",
    "texts_of",
    "trained_model",
    "weights_of",
]

HAS_TASKS = hasattr(trainer, "create_task")
if HAS_TASKS:
    from open_clip.task import CLIPTask

READS_SAMPLE_KEYS = hasattr(host_data, "JsonCaptionExtractor")
"""Whether open_clip's own reader has ``--text-key``, ``--json-text-key`` and ``--image-key``."""

ZERO_SHOT = "zero_shot_eval_all" if hasattr(train, "zero_shot_eval_all") else "zero_shot_eval"
"""The function of ``open_clip_train.train`` that makes the first metrics of a validation."""

host_latest_checkpoint = trainer.get_latest_checkpoint


class Replacement(NamedTuple):
    """A name in a module or class, and what replaces it while the trainer runs."""

    module: Any
    name: str
    value: Any


def batch_of(images: Tensor, texts: Tensor) -> Any:
    """Return a batch as the trainer takes it."""
    return {"image": images, "text": texts} if HAS_TASKS else (images, texts)


def images_of(batch: Any) -> Tensor:
    """Return the pictures of a batch of open_clip's reader."""
    return batch["image"] if isinstance(batch, Mapping) else batch[0]


def texts_of(batch: Any) -> Tensor:
    """Return the token rows of a batch of open_clip's reader."""
    return batch["text"] if isinstance(batch, Mapping) else batch[1]


def evaluated(model: Any) -> Any:
    """Return what the trainer evaluates of what it gives to its training of an epoch: in 4.x the task of a state."""
    return getattr(model, "task", model)


def trained_model(model: Any) -> nn.Module:
    """Return the model in a task or in a wrapper of data parallelism; if a task has averaged weights, those."""
    if hasattr(model, "get_trainable_module"):
        model = model.get_trainable_module()
    return getattr(model, "module", model)


def is_logged(step: int, steps: int, args: Namespace) -> bool:
    """Return whether the trainer reads the losses of a step, which is counted from 0, of the ``steps`` of an epoch."""
    intervals = {args.log_every_n_steps, getattr(args, "log_metric_every_n_steps", args.log_every_n_steps)}
    return step == steps - 1 or any(step % max(1, interval) == 0 for interval in intervals)


def has_scaler(args: Namespace) -> bool:
    """Return whether the trainer scales losses by a GradScaler."""
    _, _, world_size = world_info_from_env()
    if getattr(args, "fsdp", False) and world_size > 1:
        return args.precision in ("amp", "fp16", "pure_fp16")
    has_none_on_cpu = torch.device(args.device).type == "cpu" and torch.__version__ < "2.3"
    return args.precision == "amp" and not has_none_on_cpu


def weights_of(model: Any) -> dict[str, Any]:
    """Return the entries of the trainer's checkpoints for the weights of what it evaluates.

    A sharded model is gathered, for which all processes call this.
    """
    if HAS_TASKS:
        return dict(model.state_dict())
    # A compiled model has other names.
    return {"state_dict": getattr(model, "_orig_mod", model).state_dict()}


def latest_checkpoint(folder: str, remote: bool = False) -> str | None:
    """Return the checkpoint of a folder that ``--resume latest`` continues: never ``best.pt``, which has no optimizer.

    Names of epochs come after ``best.pt``, so the trainer names it only where there is no other.
    """
    file = host_latest_checkpoint(folder, remote=remote)
    is_best = file is not None and os.path.basename(file) == BEST
    return None if is_best else file


def epochs_replacement(args: Namespace) -> Replacement:
    """Let the trainer read ``args.epochs`` before each epoch: a smaller number ends the training as usual."""

    def epochs(start: int, *end: int) -> Iterable[int]:
        if not end:  # it counts something else
            return range(start)
        return itertools.takewhile(lambda epoch: epoch < args.epochs, range(start, *end))

    return Replacement(trainer, "range", epochs)


def loss_replacement(loss: nn.Module) -> Replacement:
    """Let the trainer take a loss in place of its own."""
    if not HAS_TASKS:
        return Replacement(trainer, "create_loss", lambda args: loss)
    return Replacement(trainer, "create_task", lambda args, model, **options: CLIPTask(model, loss=loss))


def reading_replacements(read: Callable[..., Any]) -> list[Replacement]:
    """Let the trainer read the checkpoint of ``--resume`` by ``read(file, map_location)``."""
    replacements = [Replacement(file_utils, "pt_load", read)]
    if hasattr(trainer, "pt_load"):
        replacements.append(Replacement(trainer, "pt_load", read))
    return replacements


def saving_replacement(save: Callable[..., None]) -> Replacement:
    """Let the trainer, and nothing else, save checkpoints by ``save`` in place of ``torch.save``."""
    return Replacement(trainer, "torch", _TorchOfTrainer(save))


class _TorchOfTrainer:
    """The module ``torch`` with another ``save``."""

    def __init__(self, save: Callable[..., None]):
        self.save = save

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def optimizer_replacements(split: Callable[[Optimizer], None]) -> list[Replacement]:
    """Let ``split`` change the groups of each new optimizer, and the schedule respect the ``lr_scale`` of a group.

    The log has the rate of the first group.
    """

    def and_split(create: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
        def create_and_split(*given: Any, **options: Any) -> Optimizer:
            optimizer = create(*given, **options)
            split(optimizer)
            return optimizer

        return create_and_split

    if HAS_TASKS:
        return [
            Replacement(trainer, "create_optimizer", and_split(trainer.create_optimizer)),
            Replacement(train, "get_learning_rate", lambda optimizer: float(optimizer.param_groups[0]["lr"])),
        ]
    return [
        Replacement(trainer, "optim", Namespace(AdamW=and_split(torch.optim.AdamW))),
        Replacement(timm.optim, "create_optimizer_v2", and_split(timm.optim.create_optimizer_v2)),
        Replacement(scheduler, "assign_learning_rate", _assign_learning_rate),
    ]


def _assign_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Multiply the rate by the ``lr_scale`` of each group, as 4.x does; 3.x gives all groups the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def data_parallel() -> Replacement:
    """Let ``DistributedDataParallel(model, device_ids=[device])``, as open_clip writes it, take the CPU, too."""
    return Replacement(torch.nn.parallel, "DistributedDataParallel", _DataParallel)


class _DataParallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module: Any, device_ids: Any = None, **options: Any):
        on_cpu = device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids)
        super().__init__(module, device_ids=None if on_cpu else device_ids, **options)
