"""Runs ``open_clip_train.main.main`` with the loss, the readers and the validation that the flags ask for.

``open_clip_train.main`` has no plugin point. It imports the functions that it calls by name, so these names are
replaced in that module while ``main`` runs.
"""

import logging
import math
import os
import shlex
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
from open_clip_train.distributed import is_master
from PIL import Image
from webdataset import autodecode

from vl_plugins.data.randomness import generators_kept
from vl_plugins.errors import MALFORMED_CONTENT, user_errors
from vl_plugins.integrations.loading import OTHER_FORMATS
from vl_plugins.integrations.open_clip import data, host, validation
from vl_plugins.integrations.open_clip.best import BestCheckpoint
from vl_plugins.integrations.open_clip.checkpoints import LOGIT_BIAS, load_weights, made_with, read_checkpoint
from vl_plugins.integrations.open_clip.checks import check_classes, check_flags, check_parameters
from vl_plugins.integrations.open_clip.flags import DEFAULT_METRIC
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.host import Replacement
from vl_plugins.integrations.open_clip.loss import LEARNED, build_loss
from vl_plugins.integrations.open_clip.mistakes import (
    mistakes_of_captions,
    mistakes_of_images,
    mistakes_of_settings,
)
from vl_plugins.integrations.open_clip.models import has_schema
from vl_plugins.integrations.open_clip.pictures import image_opener
from vl_plugins.integrations.open_clip.rates import OWN_RATES, split_groups
from vl_plugins.integrations.open_clip.resume import (
    ResumedRun,
    check_fits,
    describe_settings,
    has_settings,
    load_optimizer,
    read_resumed_run,
    settings_of,
)
from vl_plugins.integrations.open_clip.steps import Steps
from vl_plugins.integrations.open_clip.trained_loss import attach_loss, joined_checkpoint, separated_checkpoint

__all__ = ["train"]

# Files in shards that webdataset would unpickle, which could run code; here they stay bytes.
PICKLES = ("pickle", "pyd")

LOGIT_SCALE = 10.0  # with which SigLIP starts, as open_clip's --siglip does (Zhai et al. 2023)

pt_load = file_utils.pt_load


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
    if args.patience is not None and args.save_best is None:
        args.save_best = DEFAULT_METRIC
    if args.loss and "://" in (args.resume or ""):
        notes.append(
            f"--resume {args.resume}: of a URL, the loss and the reader of the run are not compared with yours"
        )
    if args.allow_duplicate_captions:
        notes.append(
            "--allow-duplicate-captions has no effect: a caption of several images of a batch is a negative of none"
        )
    if args.loss and args.local_loss:
        notes.append("--local-loss has no effect: each process compares its own rows where the loss allows it")
    check_flags(args)
    launch = _Launch(args, resumed, notes)
    with ExitStack() as patches:
        for replacement in launch.replacements():
            patches.enter_context(mock.patch.object(*replacement))
        patches.enter_context(mock.patch.dict(autodecode.decoders, dict.fromkeys(PICKLES, bytes)))
        if trainer.main([]):
            return 2
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch."):  # whose compiler logs a summary at exit, even an empty one
            logging.getLogger(name).setLevel(logging.WARNING)
    if args.train_data and getattr(args, "save_logs", False):
        launch.log_end()
    return 0


class _Launch:
    """The replacements of open_clip's functions during one call of its ``main``.

    Args:
        args: the launcher's options.
        resumed: the run that goes on, if any.
        notes: lines for the log.
    """

    def __init__(self, args: Namespace, resumed: ResumedRun | None, notes: Sequence[str]):
        self.args, self.resumed, self.notes = args, resumed, notes
        self.steps = Steps(args.accum_freq)
        self.loss: Any = None
        self.model: Any = None
        if args.loss is not None:
            with user_errors(f"--loss {args.loss}"), torch.random.fork_rng(devices=[]):
                torch.manual_seed(args.seed)  # so that its parameters begin as --seed says, in every process
                self.loss = build_loss(args, self.steps)
            self.loss.has_scaler = host.has_scaler(args)
            for number in self.loss.model_numbers:  # for the log and the checkpoint, also where it is the default
                args.loss_kwargs = {**args.loss_kwargs, number: LEARNED}
        check_parameters(args, self.loss)
        self.splits = data.read_splits(args)
        check_classes(args, self.splits)
        self.host_get_data = trainer.get_data
        self.host_evaluate = trainer.evaluate
        self.best: BestCheckpoint | None = None
        if args.save_best is not None and args.train_data:
            self.best = BestCheckpoint(args, self.add_entries, write_checkpoint)
        self.tokenizer: Any = None
        self.is_validated = False
        self.training_steps = 0  # known with the data

    @property
    def continues(self) -> bool:
        """Whether the training goes on from an epoch of another run."""
        if self.resumed is None:
            return "://" in (self.args.resume or "")
        return "epoch" in self.resumed.content

    def get_data(self, *given: Any, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
        """Return the data of both readers."""
        self.tokenizer = tokenizer
        if self.loss is not None:
            options["look_at_start"] = self.log_mistakes
        options |= {"tokenizer": tokenizer, "host_get_data": self.host_get_data}
        leaves_out = self.loss is not None and not self.loss.one_set
        options |= {"splits": self.splits, "steps": self.steps, "leaves_out_equal_captions": leaves_out}
        splits = data.get_data(*given, **options)
        if "train" in splits:
            self.training_steps = splits["train"].dataloader.num_batches // self.args.accum_freq * self.args.epochs
        return splits

    def log_mistakes(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        """Log what is certainly wrong with a training, by its flags and its first batch."""
        if not is_master(self.args):
            return
        lines = [
            *mistakes_of_settings(self.args, self.training_steps, self.model),
            *mistakes_of_captions(texts, self.tokenizer, self.args),
            *mistakes_of_images(images, self.model.visual.preprocess_cfg["mean"], self.args),
        ]
        for line in lines:
            logging.warning(line)

    def validate_and_train(self, train_one_epoch: Callable, model: Any, data: Any, *given: Any, **options: Any) -> None:
        """Train an epoch, and before the first one validate, as epoch 0."""
        if not self.is_validated:
            self.is_validated = True
            with generators_kept():  # so that the training is as it is without
                writer = options.get("tb_writer")
                trainer.evaluate(host.evaluated(model), data, 0, self.args, tb_writer=writer, tokenizer=self.tokenizer)
        train_one_epoch(model, data, *given, **options)

    def evaluate(self, model: Any, data: Any, epoch: int, args: Namespace, **options: Any) -> dict[str, float]:
        """Evaluate an epoch, and compare it with those before."""
        metrics = validation.evaluate(model, data, epoch, args, host_evaluate=self.host_evaluate, **options)
        if self.best is not None:
            self.best.compare(metrics, epoch, model)
        return metrics

    def replacements(self) -> list[Replacement]:
        """Return what is replaced while the trainer runs."""
        args = self.args

        def load_optimizer_state(optimizer: Any, state_dict: Any) -> None:
            load_optimizer(optimizer, state_dict, subject=f"--resume {args.resume}")

        replacements = [
            Replacement(trainer, "parse_args", lambda argv: args),
            Replacement(trainer, "create_model_and_transforms", self.create_model),
            Replacement(trainer, "get_data", self.get_data),
            Replacement(trainer, "evaluate", self.evaluate),
            Replacement(trainer, "get_latest_checkpoint", host.latest_checkpoint),
            host.epochs_replacement(args),
            *host.reading_replacements(self.load),
            host.saving_replacement(self.save),
            host.data_parallel(),
            Replacement(torch.optim.Optimizer, "load_state_dict", load_optimizer_state),
            Replacement(Image, "open", image_opener(args.max_image_pixels)),
        ]
        if args.validate_first and not self.continues:
            train_one_epoch = partial(self.validate_and_train, trainer.train_one_epoch)
            replacements.append(Replacement(trainer, "train_one_epoch", train_one_epoch))
        if self.loss is not None:
            replacements.append(host.loss_replacement(self.loss))
        if any(getattr(args, option) is not None for option in OWN_RATES):
            replacements += host.optimizer_replacements(self.split_groups)
        return replacements

    def log_end(self) -> None:
        """Log how to evaluate what was trained, and which epoch is the best."""
        run = shlex.quote(os.path.join(self.args.logs, self.args.name))
        epoch = "last" if self.best is None else "best"
        logging.info(f"To evaluate the {epoch} epoch: vl-plugins evaluate --checkpoint {run} --shards TEST_SHARDS")
        if self.best is not None:
            logging.info(self.best.last_line())

    def split_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parts of the model their rates."""
        split_groups(optimizer, self.model, self.args)

    def create_model(self, name: str, pretrained: str | None, **options: Any) -> tuple[Any, ...]:
        """Return what open_clip makes, with the heads of ``--head`` and the loss's parameters as parts of the model."""
        args, loss = self.args, self.loss
        is_teacher = self.model is not None  # of a distillation
        if not is_teacher:
            self.log_settings()
        has_bias = loss is not None and "bias" in loss.model_numbers
        if has_bias:
            options |= {"init_logit_scale": math.log(LOGIT_SCALE), "init_logit_bias": LOGIT_BIAS}
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
        if has_bias and (not pretrained or model.logit_bias.item() == 0):  # open_clip fills in 0 for a missing bias
            torch.nn.init.constant_(model.logit_bias, LOGIT_BIAS)
            torch.nn.init.constant_(model.logit_scale, math.log(LOGIT_SCALE))
            logging.info(f"The logit bias of the model starts at {LOGIT_BIAS:g}, and its scale at {LOGIT_SCALE:g}")
        if not is_teacher:
            self.model = model
            if loss is not None:
                self.add_loss_to_model()
        return model, *transforms

    def log_settings(self) -> None:
        """Log what is trained by which settings, and the notes."""
        loss = self.loss
        if loss is not None:
            logging.info(f"Training with the loss of vl_plugins: {self.args.loss}; {describe_settings(self.args)}")
            if self.args.distributed and loss.compares_own_rows:
                logging.info("Each process compares its own images and texts with those of all processes")
            elif self.args.distributed:
                logging.info("Each process compares the images and texts of all processes")
            if loss.one_set:
                logging.info("Images and texts are compared as one set, where equal captions of images are negatives")
        if is_master(self.args):
            for note in self.notes:
                logging.warning(note)

    def add_loss_to_model(self) -> None:
        """Make the loss a part of the model, if it has parameters of its own."""
        self.loss.to(next(self.model.parameters()).device)
        count = attach_loss(self.model, self.loss.loss)
        if count:
            logging.info(f"Training {count:,} parameters of the loss, at the rate of --head-lr if it is given")

    def load(self, file: str, map_location: Any = "cpu") -> Any:
        """Read the checkpoint of ``--resume``, in place of open_clip's ``pt_load``."""
        if "://" in file:
            content = joined_checkpoint(pt_load(file, map_location))
        else:
            is_read = self.resumed is not None and self.resumed.file == file
            content = self.resumed.content if is_read else read_checkpoint(file)  # type: ignore[union-attr]
            content = joined_checkpoint(content)
            check_fits(file, content, self.model, trains=bool(self.args.train_data))
        if self.best is not None and "epoch" in content:
            self.best.resume(content, file)
        return content

    def save(self, obj: Any, f: Any, *given: Any, **options: Any) -> None:
        """Save a file completely or not at all, in place of ``torch.save``.

        A checkpoint also says what made the model, what trained it, and which epoch was the best.
        """
        if not isinstance(f, (str, os.PathLike)):
            torch.save(obj, f, *given, **options)
            return
        if isinstance(obj, dict) and "epoch" in obj:
            obj = self.add_entries(obj)
        write_checkpoint(obj, f, *given, **options)

    def add_entries(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of open_clip with what :meth:`load` needs."""
        checkpoint = separated_checkpoint(checkpoint)
        if has_settings(self.args):
            checkpoint["args"] = made_with(self.args, self.loss) | settings_of(self.args)
        if self.best is not None:
            checkpoint |= self.best.entry
        return checkpoint


def write_checkpoint(checkpoint: Any, f: str | os.PathLike, *given: Any, **options: Any) -> None:
    """Write a file by ``torch.save``, completely or not at all."""
    file = Path(os.path.realpath(f))  # a link stays, and the file that it names is replaced
    partial_file = file.parent / ".partial" / Path(f).name  # the same name, which torch writes into the file
    with user_errors(f"cannot write {f}", RuntimeError):  # torch raises one if the disk is full
        partial_file.parent.mkdir(exist_ok=True)
        torch.save(checkpoint, partial_file, *given, **options)
        os.replace(partial_file, file)
        with suppress(OSError):  # it is not empty if a killed process left a file
            partial_file.parent.rmdir()
