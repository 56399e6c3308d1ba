"""Runs ``open_clip_train.main.main`` with the loss, the readers and the validation that the flags ask for.

``open_clip_train.main`` has no plugin point. It imports the functions that it calls by name, so these names are
replaced in that module while ``main`` runs.
"""

import functools
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import open_clip
import torch
from open_clip_train import file_utils
from open_clip_train import main as trainer
from open_clip_train.distributed import world_info_from_env
from webdataset import autodecode

from vl_plugins.data.sampler import parse_captions_per_image
from vl_plugins.errors import UserError, first_line, user_errors
from vl_plugins.integrations.open_clip import data, validation
from vl_plugins.integrations.open_clip.checkpoints import OTHER_FORMATS, made_with, read_checkpoint
from vl_plugins.integrations.open_clip.flags import KINDS, flag
from vl_plugins.integrations.open_clip.heads import add_heads, check_head
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss, describe
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, check_pretrained

__all__ = ["train"]

# Options of open_clip that a loss or a head of ours excludes. Sets are no vectors that a classifier can take.
WITHOUT = {
    "loss": ("siglip", "distill_model", "horovod", "use_naflex"),
    "head": ("torchscript", "trace", "use_bnb_linear", "distill_model"),
    "head set": ("imagenet_val", "imagenet_v2"),
}
# Entries in the configurations of models that do not only compare images with captions.
OTHER_MODELS = ("audio_cfg", "audio_naflex_cfg", "genlap_cfg", "genlip_cfg", "multimodal_cfg")
# Extensions of files in shards that webdataset would unpickle.
PICKLES = ("pickle", "pyd", "pth")


def train(args: Namespace) -> int:
    """Train, or evaluate without ``--train-data``.

    Args:
        args: of :func:`~vl_plugins.integrations.open_clip.flags.parse_args`.

    Returns:
        The exit status.

    Raises:
        UserError: something is wrong with the flags or a file; or validation data could not be read in the end.
    """
    _check(args)
    steps, loss = data.Steps(args.accum_freq), None
    if args.loss is not None:
        with user_errors(f"--loss {args.loss}"):
            loss = build_loss(args, steps)
    splits = data.read_splits(args)
    if args.head == "set" and args.val_data and "val_data" not in splits:
        raise UserError(
            f"--val-data {args.val_data}: open_clip's validation compares single vectors; with --head set give shards "
            "of `vl-plugins shards`"
        )
    if "train_data" in splits:
        args.captions_per_image = args.captions_per_image or "random"  # for params.txt
    errors: list[UserError] = []
    with ExitStack() as border:
        border.enter_context(user_errors(f"--resume {args.resume}" if args.resume else "open_clip"))
        host_train = trainer.train_one_epoch

        def train_one_epoch(*given: Any, **options: Any) -> Any:
            border.close()  # from the first step on, an exception is a bug
            return host_train(*given, **options)

        replacements: dict[str, Callable] = {
            "parse_args": lambda argv: args,
            "create_model_and_transforms": functools.partial(_create_model, args=args, loss=loss),
            "get_data": functools.partial(data.get_data, host_get_data=trainer.get_data, splits=splits, steps=steps),
            "evaluate": functools.partial(validation.evaluate, host_evaluate=trainer.evaluate, errors=errors),
            "train_one_epoch": train_one_epoch,
        }
        if loss is not None:
            replacements |= _with_loss(loss, args)
        with mock.patch.multiple(trainer, **replacements), _files(args, loss), _data_parallel_on_cpu():
            status = trainer.main([])
    if errors:
        raise errors[-1]
    return 2 if status else 0


def _check(args: Namespace) -> None:
    """Raise ``UserError`` for flags that do not go together, before anything is read or written."""
    sources = (args.train_data, args.val_data, args.imagenet_val, args.imagenet_v2)
    if not any(sources) and not args.dataset_type.startswith("synthetic"):
        raise UserError("there is nothing to do: give --train-data or --val-data, or --help for all options")
    if args.resume == "latest" and args.name is None:
        raise UserError("--resume latest continues an earlier run: give its --name")
    if args.model_config is not None:
        add_model_config(args.model_config)
    for model in filter(None, (args.model, args.distill_model)):
        config = check_model(model)
    check_pretrained(args.model, args.pretrained)
    for kind in KINDS:
        if getattr(args, f"{kind}_kwargs") and getattr(args, kind) is None:
            raise UserError(f"--{kind}-kwargs needs --{kind}")
    captions = parse_captions_per_image(args.captions_per_image or "random")
    needs_loss = {kind: getattr(args, kind) for kind in ("miner", "reducer", "distance")}
    needs_loss |= {"captions-per-image": captions not in ("random", "first", 1) and captions}
    needs_loss |= {"head": args.head == "set" and "set"}
    for name, value in needs_loss.items():
        if value and args.loss is None:
            raise UserError(f"--{name} {value} needs --loss, such as smooth_chamfer for sets")
    kinds = {"loss": args.loss, "head": args.head, "head set": args.head == "set"}
    for kind in (kind for kind, given in kinds.items() if given):
        for name in WITHOUT[kind]:
            if getattr(args, name, None):
                raise UserError(f"--{kind} does not support {flag(name)}: remove one of them")
    other = next((entry for entry in OTHER_MODELS if entry in config), None)
    if other and (args.loss or args.head):
        raise UserError(f"--model {args.model} does more than compare images with texts ({other}): train it without "
                        "--loss and --head")
    # The loss uses the logit scale and a learned similarity after the model's forward pass.
    if args.loss and getattr(args, "fsdp", False) and not args.fsdp_no_reshard_after_forward:
        raise UserError("--loss with --fsdp needs whole parameters: add --fsdp-no-reshard-after-forward")
    if args.head:
        check_head(args.head, args.head_kwargs)


def _with_loss(loss: TwoTowerLoss, args: Namespace) -> dict[str, Callable]:
    """Return the replacement that trains with a loss: in 3.x of ``create_loss``, in 4.x of ``create_task``."""

    def announce() -> TwoTowerLoss:  # the trainer's log is open by then
        logging.info(f"Training with the loss of vl_plugins: {describe(args)}")
        if world_info_from_env()[2] > 1:
            compared = "its own images and texts with those" if loss.compares_own_rows else "the images and texts"
            logging.info(f"Each process compares {compared} of all processes; gradients are exact with any flags")
        return loss

    if not hasattr(trainer, "create_task"):
        return {"create_loss": lambda args: announce()}
    from open_clip.task import CLIPTask

    return {"create_task": lambda args, model, **options: CLIPTask(model, loss=announce())}


def _create_model(*given: Any, args: Namespace, loss: TwoTowerLoss | None, **options: Any) -> tuple[Any, ...]:
    """Return what open_clip makes, with heads on the model if ``--head`` asks for them."""
    model_name, pretrained = given
    weights: Any = {}
    if pretrained and Path(pretrained).is_file() and Path(pretrained).suffix not in OTHER_FORMATS:
        content = read_checkpoint(pretrained, "--pretrained")
        weights = content.get("state_dict", content)
    has_heads = any("image_head." in str(name) for name in weights)
    with user_errors(f"--pretrained {pretrained}" if pretrained else f"--model {model_name}"):
        use = None if has_heads and args.head else pretrained
        model, *transforms = open_clip.create_model_and_transforms(model_name, use, **options)
        if args.head:
            similarity = loss.loss.distance if loss is not None and args.head == "set" else None  # type: ignore[union-attr]
            model = add_heads(model, args.head, args.head_kwargs, similarity)
            sets = f", sets compared by {type(similarity).__name__}" if similarity else ""
            logging.info(f"Both towers end in the head {args.head} {args.head_kwargs}{sets}")
            if has_heads:
                model.load_state_dict({name.removeprefix("module."): weight for name, weight in weights.items()})
    return model, *transforms


@contextmanager
def _files(args: Namespace, loss: TwoTowerLoss | None) -> Iterator[None]:
    """Let the trainer write complete checkpoints only, which hold what made the model, and unpickle nothing."""
    save, host_load = torch.save, file_utils.pt_load

    def save_completely(content: Any, file: Any, *more: Any, **options: Any) -> None:
        if not isinstance(file, (str, os.PathLike)):
            return save(content, file, *more, **options)
        if isinstance(content, dict) and "epoch" in content and (args.loss or args.head):
            content = {**content, "args": made_with(args, loss)}
        file = Path(file)
        partial = file.parent / ".partial" / file.name  # the name is in the file, too
        try:
            partial.parent.mkdir(exist_ok=True)
            save(content, partial, *more, **options)
            os.replace(partial, file)
            partial.parent.rmdir()
        except (OSError, RuntimeError) as error:
            raise UserError(f"cannot write {file}: {first_line(error)}; is the disk full?") from error

    def load(file: str, map_location: Any = None) -> Any:
        return host_load(file, map_location) if "://" in file else read_checkpoint(file, "--resume")

    def refuse(content: bytes) -> Any:
        raise UserError("a pickle in a shard is not read: it could run code")

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "save", save_completely))
        for module in (file_utils, trainer):  # of 4.x, of 3.x
            if hasattr(module, "pt_load"):
                patches.enter_context(mock.patch.object(module, "pt_load", load))
        patches.enter_context(mock.patch.dict(autodecode.decoders, dict.fromkeys(PICKLES, refuse)))
        yield


@contextmanager
def _data_parallel_on_cpu() -> Iterator[None]:
    """Let ``DistributedDataParallel(model, device_ids=[device])``, as open_clip writes it, accept the CPU as device."""
    host = torch.nn.parallel.DistributedDataParallel

    class DistributedDataParallel(host):  # type: ignore[misc, valid-type]
        def __init__(self, module: Any, device_ids: Any = None, **options: Any):
            on_cpu = device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids)
            super().__init__(module, device_ids=None if on_cpu else device_ids, **options)

    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", DistributedDataParallel):
        yield
