"""What is particular to open_clip 4.x: model and loss are one task, made before the data, and a batch is a mapping.

It offers the same functions as :mod:`vl_plugins.integrations.open_clip.host_3`; ``host.adapter()`` chooses.
"""

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.utils.errors import UserError

__all__ = [
    "CHECKED",
    "REFUSED_WITH_HEADS",
    "as_batch",
    "evaluates_together",
    "optimizer_of",
    "other_than_pairs",
    "pair_of",
    "plain_model",
    "with_loss",
]

# As in host_3.
CHECKED: Mapping[str, Mapping[str, tuple]] = MappingProxyType(
    {
        "open_clip_train.main": {
            "create_model_and_transforms": ("model_name", ...),
            "parse_args": ("args",),
            "create_task": ("args", "model", "dist_model", "naflex_data_config"),
            "get_data": ("args", "preprocess_fns", "epoch", "tokenizer", ...),
            "evaluate": ("task", "data", "epoch", "args", "tb_writer", "tokenizer"),
            "get_latest_checkpoint": ("path", "remote"),
            "train_one_epoch": ("state", ...),
        },
        "open_clip.task": {"CLIPTask": ("model", "loss", ...)},
        "open_clip_train.file_utils": {"pt_load": ("file_path", "map_location")},
    }
)

# A full checkpoint under FSDP takes every entry of the state for a tensor, but heads describe themselves in theirs; and
# the loss would find the parameters of a learned similarity sharded.
REFUSED_WITH_HEADS = ("distill_model", "use_bnb_linear", "fsdp")

# Entries of a model's configuration.
OF_OTHER_MODELS = ("audio_cfg", "audio_naflex_cfg", "genlap_cfg", "genlip_cfg", "multimodal_cfg")


def with_loss(
    make_loss: Callable[[Namespace], nn.Module] | None,
    guard: Callable[[nn.Module, Namespace], nn.Module],
    continue_with: Callable[[nn.Module], None],
    get_data: Callable,
    of_host: Any,
) -> dict[str, Callable]:
    """Return the replacements, by name in ``open_clip_train.main``, that train with another loss.

    Args:
        make_loss: makes the loss from open_clip's options; None for that of the trainer.
        guard: puts something before the loss, made or the trainer's.
        continue_with: is given the loss that was made, once it is known where the training stands.
        get_data: what takes the place of the trainer's; afterwards that is known.
        of_host: has the trainer's own functions.
    """
    made = []

    def create_task(args: Namespace, model: nn.Module, dist_model=None, naflex_data_config=None) -> nn.Module:
        if make_loss is None:
            task = of_host.create_task(args, model=model, dist_model=dist_model, naflex_data_config=naflex_data_config)
        else:
            made.append(make_loss(args))
            if args.fsdp:
                made[-1].register_forward_pre_hook(_check_scale_is_whole, with_kwargs=True)
            task = importlib.import_module("open_clip.task").CLIPTask(model, loss=made[-1])
        task.loss = guard(task.loss, args)
        if args.torchcompile:
            # Compiled with the task, it would be compiled anew whenever one of its counters changes.
            task.loss.forward = torch.compiler.disable(task.loss.forward)
        return task

    def get_data_and_continue(args: Namespace, *rest, **options) -> dict[str, Any]:
        data = get_data(args, *rest, **options)
        for loss in made:
            continue_with(loss)
        return data

    return {"create_task": create_task, "get_data": get_data_and_continue}


def _check_scale_is_whole(loss: nn.Module, args: tuple, outputs: Mapping[str, Tensor]) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(outputs["logit_scale"], DTensor):
        raise UserError(
            "--fsdp: the model's logit scale reaches the loss sharded, which open_clip's losses do not take either: "
            "add --fsdp-no-reshard-after-forward"
        )


def optimizer_of(*of_epoch: Any) -> Any:
    """Return the optimizer of what the trainer gives ``train_one_epoch``."""
    return of_epoch[0].optimizer


def as_batch(pair: tuple[Tensor, Tensor]) -> Any:
    """Return images and texts as the trainer takes them."""
    images, texts = pair
    return {"image": images, "text": texts}


def pair_of(batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return images and texts of a batch of the trainer; None for other data."""
    pair = batch.get("image"), batch.get("text")
    return pair if all(isinstance(part, Tensor) for part in pair) else None


def plain_model(evaluated: nn.Module) -> nn.Module:
    """Return the model in what the trainer evaluates, out of its task and every wrapper."""
    return evaluated.get_trainable_module()


def evaluates_together(args: Namespace) -> bool:
    """Return whether a model can only be run by all processes at once."""
    return args.fsdp and args.distributed


def other_than_pairs(options: Namespace) -> str | None:
    """Name the option or model that trains on something else than pictures and captions; None if none does."""
    if options.use_naflex:
        return "--use-naflex"
    if options.dataset_type.endswith("-audio"):
        return f"--dataset-type {options.dataset_type}"
    if ":" in options.model:  # described elsewhere
        return None
    config = importlib.import_module("open_clip").get_model_config(options.model) or {}
    if any(entry in config for entry in OF_OTHER_MODELS):
        return f"--model {options.model}"
    return None
