"""Runs ``open_clip_train.main.main`` with the loss, the readers and the validation that the flags ask for.

``open_clip_train.main`` has no plugin point. It imports the functions that it calls by name, so these names are
replaced in that module while ``main`` runs.
"""

import logging
import os
from argparse import Namespace
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import open_clip
import torch
from open_clip_train import file_utils
from open_clip_train import main as trainer
from PIL import Image
from webdataset import autodecode

from vl_plugins.errors import UserError, user_errors
from vl_plugins.integrations.loading import OTHER_FORMATS, through_first_step
from vl_plugins.integrations.open_clip import data, validation
from vl_plugins.integrations.open_clip.checkpoints import load_weights, made_with, read_checkpoint
from vl_plugins.integrations.open_clip.flags import KINDS, flag
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.models import add_model_config, check_model
from vl_plugins.integrations.open_clip.pictures import image_opener

if hasattr(trainer, "create_task"):
    from open_clip.task import CLIPTask

__all__ = ["train"]

# Options of open_clip that a loss or a head of ours would silently undo; a classifier takes no sets.
EXCLUDED = {
    "loss": ("siglip", "distill_model", "horovod", "use_naflex"),
    "head": ("torchscript", "trace", "use_bnb_linear", "distill_model"),
    "head set": ("imagenet_val", "imagenet_v2"),
}
# Files in shards that webdataset would unpickle, which could run code; here they stay bytes.
PICKLES = ("pickle", "pyd")

save, pt_load = torch.save, file_utils.pt_load


def train(args: Namespace) -> int:
    """Train, or evaluate without ``--train-data``.

    Args:
        args: of :func:`~vl_plugins.integrations.open_clip.flags.parse_args`.

    Returns:
        The exit status.

    Raises:
        UserError: something is wrong with the flags or a file.
    """
    _check(args)
    steps, loss = data.Steps(args.accum_freq), None
    if args.loss is not None:
        with user_errors(f"--loss {args.loss}"):
            loss = build_loss(args, steps)
    splits = data.read_splits(args)
    with through_first_step(f"--resume {args.resume}" if args.resume else "open_clip"), ExitStack() as patches:
        replaced: dict[str, Any] = {
            "parse_args": lambda argv: args,
            "create_model_and_transforms": partial(_create_model, args=args, loss=loss),
            "get_data": partial(data.get_data, host_get_data=trainer.get_data, splits=splits, steps=steps),
            "evaluate": partial(validation.evaluate, host_evaluate=trainer.evaluate),
        }
        if hasattr(trainer, "pt_load"):  # in 3.x
            replaced["pt_load"] = _load
        if loss is not None and hasattr(trainer, "create_task"):  # in 4.x
            replaced["create_task"] = lambda args, model, **options: CLIPTask(model, loss=loss)
        elif loss is not None:
            replaced["create_loss"] = lambda args: loss
        patches.enter_context(mock.patch.multiple(trainer, **replaced))
        patches.enter_context(mock.patch.object(file_utils, "pt_load", _load))
        patches.enter_context(mock.patch.object(torch, "save", partial(_save, args=args, loss=loss)))
        patches.enter_context(mock.patch.object(torch.nn.parallel, "DistributedDataParallel", _DataParallel))
        patches.enter_context(mock.patch.object(Image, "open", image_opener(args.max_image_pixels)))
        patches.enter_context(mock.patch.dict(autodecode.decoders, dict.fromkeys(PICKLES, bytes)))
        return 2 if trainer.main([]) else 0


def _check(args: Namespace) -> None:
    """Raise ``UserError`` for flags that do not go together, before anything is written."""
    if args.model_config is not None:
        add_model_config(args.model_config)
    for model in filter(None, (args.distill_model, args.model)):
        check_model(model)
    for kind in ("miner", "reducer", "distance", "head"):
        if args.loss is None and getattr(args, kind) not in (None, "linear"):
            raise UserError(f"--{kind} {getattr(args, kind)} needs --loss, such as unified, or smooth_chamfer for sets")
    for kind in KINDS:
        if getattr(args, f"{kind}_kwargs") and getattr(args, kind) is None:
            raise UserError(f"--{kind}-kwargs needs --{kind}")
    for kind, given in (("loss", args.loss), ("head", args.head), ("head set", args.head == "set")):
        for name in EXCLUDED[kind] if given else ():
            if getattr(args, name, None):
                raise UserError(f"--{kind} does not support {flag(name)}: remove one of them")
    # The loss uses a learned similarity after the model's forward pass.
    if args.loss and getattr(args, "fsdp", False) and not args.fsdp_no_reshard_after_forward:
        raise UserError("--loss with --fsdp needs whole parameters: add --fsdp-no-reshard-after-forward")


def _create_model(name: str, pretrained: str | None, *, args: Namespace, loss: Any, **options: Any) -> tuple[Any, ...]:
    """Return what open_clip makes, with heads on the model if ``--head`` asks for them."""
    if loss is not None:
        compared = "its own images and texts with those" if loss.compares_own_rows else "the images and texts"
        logging.info(f"Training with the loss of vl_plugins: {args.loss}; a process compares {compared} of all")
    with user_errors(f"--pretrained {pretrained}" if pretrained else f"--model {name}"):
        file = Path(pretrained or "")
        content = read_checkpoint(file) if file.is_file() and file.suffix not in OTHER_FORMATS else {}
        has_heads = args.head and any("image_head." in key for key in content.get("state_dict", content))
        model, *transforms = open_clip.create_model_and_transforms(name, None if has_heads else pretrained, **options)
        if args.head:
            similarity = loss.loss.distance if args.head == "set" else None
            model = add_heads(model, args.head, args.head_kwargs, similarity)
        if has_heads:
            load_weights(model, file, content)
    return model, *transforms


def _save(obj: Any, f: Any, *given: Any, args: Namespace, loss: Any, **options: Any) -> None:
    """Save a file completely or not at all, in place of ``torch.save``; a checkpoint says what made the model."""
    if not isinstance(f, (str, os.PathLike)):
        save(obj, f, *given, **options)
        return
    if isinstance(obj, dict) and "epoch" in obj and (args.loss or args.head):
        obj = {**obj, "args": made_with(args, loss)}
    partial_file = Path(f).parent / ".partial" / Path(f).name  # torch writes the name into the file
    with user_errors(f"cannot write {f}"):  # torch raises a RuntimeError if the disk is full
        partial_file.parent.mkdir(exist_ok=True)
        save(obj, partial_file, *given, **options)
        os.replace(partial_file, f)
        with suppress(OSError):  # a killed process left another file
            partial_file.parent.rmdir()


def _load(file: str, map_location: Any = "cpu") -> Any:
    """Read the checkpoint of ``--resume``, in place of open_clip's ``pt_load``."""
    return pt_load(file, map_location) if "://" in file else read_checkpoint(file)


class _DataParallel(torch.nn.parallel.DistributedDataParallel):
    """``DistributedDataParallel(model, device_ids=[device])``, as open_clip writes it, with the CPU as device too."""

    def __init__(self, module: Any, device_ids: Any = None, **options: Any):
        on_cpu = device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids)
        super().__init__(module, device_ids=None if on_cpu else device_ids, **options)
