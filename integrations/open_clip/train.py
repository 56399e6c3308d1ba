"""Runs ``open_clip_train.main.main`` with the loss, the readers and the validation that the flags ask for.

``open_clip_train.main`` has no plugin point. It imports the functions that it calls by name, so these names are
replaced in that module while ``main`` runs.
"""

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import open_clip
import torch
from open_clip_train import file_utils
from open_clip_train import main as trainer
from open_clip_train.distributed import is_master, world_info_from_env
from PIL import Image
from webdataset import autodecode

from vl_plugins.data.randomness import generators_kept
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.loading import OTHER_FORMATS
from vl_plugins.integrations.open_clip import data, validation
from vl_plugins.integrations.open_clip.checkpoints import load_weights, made_with, read_checkpoint
from vl_plugins.integrations.open_clip.flags import EXCLUDED, KINDS, flag
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.loss import LEARNED, build_loss
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, has_schema
from vl_plugins.integrations.open_clip.pictures import image_opener
from vl_plugins.integrations.open_clip.resume import (
    ResumedRun,
    check_fits,
    describe_settings,
    load_optimizer,
    read_resumed_run,
    settings_of,
)

if hasattr(trainer, "create_task"):
    from open_clip.task import CLIPTask

__all__ = ["train"]

# Entries of the configurations of models whose training step returns more than image and text embeddings.
OTHER_OUTPUTS = {
    "multimodal_cfg": "CoCa models",
    "audio_cfg": "CLAP models",
    "genlip_cfg": "GenLIP models",
    "genlap_cfg": "GenLAP models",
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
    resumed = read_resumed_run(args) if args.resume else None
    notes = [] if resumed is None else resumed.settle(args)
    if args.allow_duplicate_captions:
        notes.append(
            "--allow-duplicate-captions has no effect: a caption of several images of a batch is a negative of none"
        )
    _check(args)
    launch = _Launch(args, resumed, notes)
    with ExitStack() as patches:
        for target, names in launch.replacements():
            patches.enter_context(mock.patch.multiple(target, **names))
        patches.enter_context(mock.patch.dict(autodecode.decoders, dict.fromkeys(PICKLES, bytes)))
        return 2 if trainer.main([]) else 0


class _Launch:
    """What stands in for functions of open_clip during one call of its ``main``.

    Args:
        args: the launcher's options.
        resumed: the run that goes on, if any.
        notes: lines for the log.
    """

    def __init__(self, args: Namespace, resumed: ResumedRun | None, notes: Sequence[str]):
        self.args, self.resumed, self.notes = args, resumed, notes
        self.steps = data.Steps(args.accum_freq)
        self.loss: Any = None
        self.model: Any = None
        if args.loss is not None:
            with user_errors(f"--loss {args.loss}"):
                self.loss = build_loss(args, self.steps)
            if self.loss.learned_scale:  # for the log and the checkpoint, also where it is the default
                args.loss_kwargs = {**args.loss_kwargs, "scale": LEARNED}
        self.splits = data.read_splits(args)
        self.host_get_data = trainer.get_data
        self.tokenizer: Any = None
        self.is_validated = False

    def get_data(self, *given: Any, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
        """Return the data of both readers."""
        self.tokenizer = tokenizer
        options |= {"tokenizer": tokenizer, "host_get_data": self.host_get_data}
        return data.get_data(*given, **options, splits=self.splits, steps=self.steps)

    def validate_and_train(self, train_one_epoch: Callable, model: Any, data: Any, *given: Any, **options: Any) -> None:
        """Train an epoch, and before the first one validate, as epoch 0."""
        if not self.is_validated:
            self.is_validated = True
            validated = getattr(model, "task", model)  # of 4.x, which gives the state of the training
            with generators_kept():  # so that the training is as it is without
                writer = options.get("tb_writer")
                trainer.evaluate(validated, data, 0, self.args, tb_writer=writer, tokenizer=self.tokenizer)
        train_one_epoch(model, data, *given, **options)

    def replacements(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the modules and classes whose names are replaced, with what replaces them."""
        args, loss = self.args, self.loss
        names: dict[str, Any] = {
            "parse_args": lambda argv: args,
            "create_model_and_transforms": self.create_model,
            "get_data": self.get_data,
            "evaluate": partial(validation.evaluate, host_evaluate=trainer.evaluate),
        }
        if args.validate_first and self.resumed is None:
            names["train_one_epoch"] = partial(self.validate_and_train, trainer.train_one_epoch)
        if hasattr(trainer, "pt_load"):  # in 3.x
            names["pt_load"] = self.load
        if loss is not None and hasattr(trainer, "create_task"):  # in 4.x
            names["create_task"] = lambda args, model, **options: CLIPTask(model, loss=loss)
        elif loss is not None:
            names["create_loss"] = lambda args: loss

        def load_optimizer_state(optimizer: Any, state: Any) -> None:
            load_optimizer(optimizer, state, subject=f"--resume {args.resume}")

        return [
            (trainer, names),
            (file_utils, {"pt_load": self.load}),
            (torch, {"save": self.save}),
            (torch.optim.Optimizer, {"load_state_dict": load_optimizer_state}),
            (torch.nn.parallel, {"DistributedDataParallel": _DataParallel}),
            (Image, {"open": image_opener(args.max_image_pixels)}),
        ]

    def create_model(self, name: str, pretrained: str | None, **options: Any) -> tuple[Any, ...]:
        """Return what open_clip makes, with heads on the model if ``--head`` asks for them."""
        args, loss = self.args, self.loss
        if loss is not None:
            compared = "its own images and texts with those" if loss.compares_own_rows else "the images and texts"
            logging.info(f"Training with the loss of vl_plugins: {args.loss}; {describe_settings(args)}")
            logging.info(f"Each process compares {compared} of all processes")
        if is_master(args):
            for note in self.notes:
                logging.warning(note)
        subject = f"--pretrained {pretrained}" if pretrained else f"--model {name}"
        if args.aug_cfg:
            subject += f" or --aug-cfg {args.aug_cfg}"
        # Weights of another model, a file that is no checkpoint, or an unknown tag raise a RuntimeError or KeyError,
        # and wrong settings of the augmentation nearly anything.
        expected = MALFORMED_CONTENT if pretrained or has_schema(name) or args.aug_cfg else ()
        with user_errors(subject, *expected):
            file = Path(pretrained or "")
            content = read_checkpoint(file) if file.is_file() and file.suffix not in OTHER_FORMATS else {}
            has_heads = args.head and any("image_head." in key for key in content.get("state_dict", content))
            weights = None if has_heads else pretrained
            model, *transforms = open_clip.create_model_and_transforms(name, weights, **options)
            if args.head:
                similarity = loss.loss.distance if args.head == "set" else None
                model = add_heads(model, args.head, args.head_kwargs, similarity)
            if has_heads:
                load_weights(model, file, content)
        if self.model is None:  # a second one is the teacher of a distillation
            self.model = model
        return model, *transforms

    def load(self, file: str, map_location: Any = "cpu") -> Any:
        """Read the checkpoint of ``--resume``, in place of open_clip's ``pt_load``."""
        if "://" in file:
            return pt_load(file, map_location)
        is_read = self.resumed is not None and self.resumed.file == file
        content = self.resumed.content if is_read else read_checkpoint(file)  # type: ignore[union-attr]
        check_fits(file, content, self.model)
        return content

    def save(self, obj: Any, f: Any, *given: Any, **options: Any) -> None:
        """Save a file completely or not at all, in place of ``torch.save``.

        A checkpoint also says what made the model, and what trained it.
        """
        if not isinstance(f, (str, os.PathLike)):
            save(obj, f, *given, **options)
            return
        if isinstance(obj, dict) and "epoch" in obj and (self.args.loss or self.args.head):
            obj = {**obj, "args": made_with(self.args, self.loss) | settings_of(self.args)}
        file = Path(os.path.realpath(f))  # a link stays, and the file that it names is replaced
        partial_file = file.parent / ".partial" / Path(f).name  # torch writes the name into the file
        with user_errors(f"cannot write {f}", RuntimeError):  # torch raises one if the disk is full
            partial_file.parent.mkdir(exist_ok=True)
            save(obj, partial_file, *given, **options)
            os.replace(partial_file, file)
            with suppress(OSError):  # a killed process left another file
                partial_file.parent.rmdir()


def _check(args: Namespace) -> None:
    """Raise ``UserError`` for flags that do not go together, before anything is written."""
    if args.model_config is not None:
        add_model_config(args.model_config)
    for model in filter(None, (args.distill_model, args.model)):
        check_model(model)
    with user_errors(f"--device {args.device}", RuntimeError):
        torch.device(args.device)
    _check_components(args)
    if args.validate_first and not (args.train_data and args.val_data):
        raise UserError("--validate-first needs --train-data and --val-data")
    if args.loss:
        _check_loss(args)
    elif args.captions_per_image not in (None, "first", "random", "1", 1):
        raise UserError(
            f"--captions-per-image {args.captions_per_image} needs --loss, such as unified: open_clip's own loss "
            "compares each image with one caption"
        )


def _check_components(args: Namespace) -> None:
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


def _check_loss(args: Namespace) -> None:
    # The loss uses a learned similarity after the model's forward pass.
    if getattr(args, "fsdp", False) and not args.fsdp_no_reshard_after_forward:
        raise UserError("--loss with --fsdp needs whole parameters: add --fsdp-no-reshard-after-forward")
    config = open_clip.get_model_config(args.model) or {}
    for entry, models in OTHER_OUTPUTS.items():
        if entry in config:
            raise UserError(
                f"--loss does not support {models} such as {args.model}, which trains with more than image and text "
                "embeddings: remove --loss, or take a model with two towers"
            )
    if args.loss == "smooth_chamfer" and args.head != "set":
        raise UserError("--loss smooth_chamfer compares embedding sets: add --head set, or take another loss")
    _, _, world_size = world_info_from_env()
    if args.train_data and args.batch_size * world_size * args.accum_freq == 1:
        raise UserError(
            f"--loss {args.loss} compares images, and there is only one: raise --batch-size, now 1, or --accum-freq"
        )


class _DataParallel(torch.nn.parallel.DistributedDataParallel):
    """``DistributedDataParallel(model, device_ids=[device])``, as open_clip writes it, with the CPU as device too."""

    def __init__(self, module: Any, device_ids: Any = None, **options: Any):
        on_cpu = device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids)
        super().__init__(module, device_ids=None if on_cpu else device_ids, **options)
