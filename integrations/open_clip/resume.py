"""What ``--resume`` continues: the settings of the run, and the state of its training.

The trainer's checkpoints hold weights, optimizer and epoch, but not the loss. Ours hold the loss and the reader, too.
Those of version 0.3 do not; the ``params.txt`` of their run has both.
"""

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from open_clip_train import main as trainer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from vl_plugins import __version__
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.open_clip.checkpoints import read_checkpoint, read_params
from vl_plugins.integrations.open_clip.flags import KINDS, SAMPLE_KEYS, default_options, flag, options_given
from vl_plugins.integrations.open_clip.host import latest_checkpoint
from vl_plugins.integrations.open_clip.rates import OWN_RATES, RATES
from vl_plugins.registry import check_registered, find, options_of

__all__ = [
    "ResumedRun",
    "check_fits",
    "describe_settings",
    "has_settings",
    "load_optimizer",
    "read_resumed_run",
    "settings_of",
]

# What is compared, and how. A run that changes one of these is another experiment.
COMPONENTS = ("loss", "miner", "reducer", "distance", "head")
READER = ("captions_per_image", "shuffle_window", "caption_lines", "caption_fields", *SAMPLE_KEYS)
# These are compared, too, but nothing is wrong if they change.
ENDING = ("save_best", "patience")

# Options of which the log tells only values that are not the default.
SELDOM_SET = ("products", "global_labels", "embedding_reg_weight", "collect_stats", "gather_across_devices")
SELDOM_SET += ("learn_scale", "max_scale")

load_state_dict = Optimizer.load_state_dict


class ResumedRun(NamedTuple):
    """A checkpoint of ``--resume`` and the settings of its run.

    Attributes:
        file: the checkpoint.
        content: of the file.
        settings: of the run, by the launcher's option; None if neither the checkpoint nor a ``params.txt`` has them.
    """

    file: str
    content: Any
    settings: Mapping[str, Any] | None

    def settle(self, args: Namespace) -> list[str]:
        """Let the run's settings stand where the command line is silent; return lines that list all differences.

        Args:
            args: the launcher's options; they are changed.

        Raises:
            UserError: the command line names another loss, miner, reducer, distance or head, without
                ``--allow-other-loss``.
        """
        if "epoch" not in self.content or args.allow_other_loss:
            return []  # weights alone, or a training that is meant to differ
        with user_errors(f"--resume {self.file}: its settings are damaged", *MALFORMED_CONTENT):
            return self._settle(args)

    def _settle(self, args: Namespace) -> list[str]:
        if self.settings is None:
            return [f"--resume {self.file}: its loss is not recorded, so the training goes on as the flags say"]
        lines = []
        adopted = []
        for kind in COMPONENTS:
            if getattr(args, kind) is None and self.settings.get(kind) is not None:
                adopted.append(f"--{kind} {self.settings[kind]}")
            self._settle_component(args, kind)
            lines += self._settle_options(args, kind)
        if adopted:
            lines.append(f"--resume {self.file}: {' '.join(adopted)} of the run, with its options, is used")
        given_options, defaults = options_given(args), default_options()
        for name in (*READER, *RATES, *ENDING):
            recorded = self.settings.get(name, getattr(defaults, name))
            chosen = getattr(args, name)
            if name not in given_options:
                setattr(args, name, recorded)
            elif chosen != recorded:
                lines.append(f"--resume {self.file}: {flag(name)} {chosen} in place of {recorded}")
        for name in RATES:
            if getattr(args, name) is not None and self.settings.get(name) is None:
                raise UserError(
                    f"--resume {self.file}: this run has no {flag(name)}, which splits the groups of the optimizer, so "
                    "it needs a new run"
                )
        version = self.settings.get("version", "0.3")
        is_of_our_reader = self.settings.get("captions_per_image") is not None
        if is_of_our_reader and version.split(".")[:2] != __version__.split(".")[:2]:
            lines.append(f"--resume {self.file}: it is of vl_plugins {version}; images may come in another order now")
        if args.train_data and args.captions_per_image is None and (args.loss or args.head):
            lines.append(
                f"--resume {self.file}: open_clip's reader does not repeat the batches of an interrupted epoch; "
                "--captions-per-image first, random or all does"
            )
        return lines

    def _settle_component(self, args: Namespace, kind: str) -> None:
        recorded, chosen = self.settings.get(kind), getattr(args, kind)  # type: ignore[union-attr]
        if not isinstance(recorded, (str, type(None))):
            raise UserError(f"--resume {self.file}: its --{kind} is {recorded!r}, which is no name")
        if chosen is None:
            check_registered(recorded)  # a file must not name code to import
            setattr(args, kind, recorded)
        elif chosen != recorded:
            trained_with = f"--{kind} {recorded}" if recorded else f"no --{kind}"
            raise UserError(
                f"--resume {self.file}: this run was trained with {trained_with}, not --{kind} {chosen}; to change it, "
                "add --allow-other-loss"
            )

    def _settle_options(self, args: Namespace, kind: str) -> list[str]:
        recorded = self.settings.get(f"{kind}_kwargs") or {}  # type: ignore[union-attr]
        if kind == "loss" and "version" not in self.settings:  # type: ignore[operator]
            recorded = {**_defaults_until_0_3(args.loss, recorded), **recorded}
        chosen = getattr(args, f"{kind}_kwargs")
        changes = []
        for name, value in chosen.items():
            before = recorded.get(name, "the default")
            if value != before:
                changes.append(f"{name}={value} in place of {before}")
        setattr(args, f"{kind}_kwargs", {**recorded, **chosen})
        return [f"--resume {self.file}: --{kind}-kwargs {', '.join(changes)}"] if changes else []


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return the settings that a checkpoint holds for :meth:`ResumedRun.settle`.

    Options of the loss are written out, with the defaults of this version: in a later one they may be others.
    """
    settings: dict[str, Any] = {"version": __version__}
    for kind in KINDS:
        settings |= {kind: getattr(args, kind), f"{kind}_kwargs": getattr(args, f"{kind}_kwargs")}
    settings |= {name: getattr(args, name) for name in (*READER, *RATES, *ENDING)}
    if args.loss is not None:
        settings["loss_kwargs"] = {**_plain_defaults(args.loss), **args.loss_kwargs}
    return settings


def has_settings(args: Namespace) -> bool:
    """Return whether an option is given that a checkpoint must hold; others are as plain open_clip writes them."""
    return any(getattr(args, option) is not None for option in ("loss", "head", "save_best", *OWN_RATES))


def describe_settings(args: Namespace) -> str:
    """Return the options of the loss and the reader that are in force, for the log."""
    defaults = _plain_defaults(args.loss)
    words = []
    for name, value in settings_of(args)["loss_kwargs"].items():
        if name not in SELDOM_SET or value != defaults[name]:
            words.append(f"{name}={value}")
    reader = "read by open_clip"
    if args.captions_per_image is not None:
        reader = f"captions per image: {args.captions_per_image}"
    return f"{' '.join(words)}; {reader}"


def _defaults_until_0_3(loss: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a loss whose default was another one in the launcher of 0.3: its scale."""
    compared = options.get("base", loss)
    defaults = _plain_defaults(compared) if isinstance(compared, str) else {}
    return {"scale": defaults["scale"]} if "scale" in defaults else {}


def _plain_defaults(loss: str) -> dict[str, Any]:
    """Return the defaults of a loss that a checkpoint can hold: numbers and text."""
    defaults = {}
    for name, value in options_of(find("loss", loss, imports=True)).items():
        if isinstance(value, (bool, int, float, str)):
            defaults[name] = value
    return defaults


def read_resumed_run(args: Namespace) -> ResumedRun | None:
    """Return the run that ``--resume`` continues; None if there is nothing to continue, or for a URL or a folder.

    It is read before open_clip writes the ``params.txt`` of this run over that of the former one.

    Raises:
        UserError: the file is damaged, or no checkpoint.
        OSError: it cannot be opened.
    """
    file = args.resume
    if file == "latest" and args.remote_sync is None and args.name is not None:
        folder = os.path.join(args.logs, args.name, "checkpoints")
        if args.save_most_recent:
            latest = os.path.join(folder, trainer.LATEST_CHECKPOINT_NAME)
            file = latest if os.path.exists(latest) else None
        else:
            file = latest_checkpoint(folder)
    if file in (None, "latest") or "://" in file or os.path.isdir(file):  # a folder is a sharded checkpoint of 4.x
        return None
    with user_errors(f"--resume {file}: it holds no weights", *MALFORMED_CONTENT):
        content = read_checkpoint(file)
    if not isinstance(content, Mapping):
        raise UserError(f"--resume {file}: it holds no weights")
    recorded = content.get("args")
    if isinstance(recorded, Mapping) and "version" in recorded:
        return ResumedRun(file, content, recorded)
    params = read_params(file)
    return ResumedRun(file, content, params or None)


def check_fits(run_file: str, content: Any, model: nn.Module, *, trains: bool = False) -> None:
    """Raise ``UserError`` if a checkpoint of ``--resume`` does not fit the model, or a training cannot continue it."""
    epoch = content.get("epoch", 0)
    if not isinstance(epoch, int) or epoch < 0:
        raise UserError(f"--resume {run_file}: its epoch must be a number, got {epoch!r}")
    weights = content.get("state_dict", content)
    if not isinstance(weights, Mapping) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise UserError(f"--resume {run_file}: it holds no weights")
    weights, expected = _plain_names(weights), _plain_names(model.state_dict())
    for name in sorted(weights.keys() ^ expected.keys()):
        if name.startswith("trained_loss."):
            raise UserError(
                f"--resume {run_file}: its loss has other trained parameters: start a new run with --pretrained"
            )
        place = "the model has no such weight" if name in weights else "the file has no such weight"
        raise UserError(f"--resume {run_file}: it is of another model: {name}: {place}")
    for name, weight in expected.items():
        if weights[name].shape != weight.shape and not weights[name].numel() == weight.numel() == 1:  # of FSDP (1,)
            sizes = f"{tuple(weights[name].shape)} in the file, {tuple(weight.shape)} in the model"
            raise UserError(f"--resume {run_file}: it is of another model: size mismatch of {name}: {sizes}")
    if trains and "epoch" in content and "optimizer" not in content:
        raise UserError(
            f"--resume {run_file}: it has no state of an optimizer, as best.pt has none: resume an epoch's checkpoint, "
            "or start a new run from these weights by --pretrained"
        )


def _plain_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without what data parallelism and ``torch.compile`` put into their names."""
    plain = {}
    for name, weight in weights.items():
        plain[name.removeprefix("module.").replace("_orig_mod.", "")] = weight
    return plain


def load_optimizer(optimizer: Optimizer, state: Any, *, subject: str) -> None:
    """Do what ``optimizer.load_state_dict(state)`` does, and check what only the first step would use.

    Raises:
        UserError: the state is damaged, or of another optimizer or model.
    """
    with user_errors(f"{subject}: the state of the optimizer does not fit", *MALFORMED_CONTENT):
        options = [dict(group) for group in optimizer.param_groups]
        load_state_dict(optimizer, state)
        for before, group in zip(options, optimizer.param_groups, strict=True):
            if "lr_scale" in before:  # of the flags, which may be others than those of the run
                group["lr_scale"], group["lr"] = before["lr_scale"], before["lr"]
            for name, value in before.items():
                if name != "params" and not _alike(group[name], value):
                    raise ValueError(f"{name} is {group[name]!r}")
            if not isinstance(optimizer, AdamW):  # others factor their averages
                continue
            names = set()
            for parameter in group["params"]:
                state_of_parameter = optimizer.state[parameter]
                _check_state(state_of_parameter, parameter)
                if state_of_parameter:  # a parameter that got no gradient has none
                    names.add(tuple(sorted(state_of_parameter)))
            if len(names) > 1:
                raise ValueError("parameters have different entries")


def _alike(value: Any, example: Any) -> bool:
    """Return whether an option of an optimizer has the type that it must have; a number may be a tensor of one."""
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(example, Tensor) and example.ndim == 0:
        example = example.item()
    if isinstance(example, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(example) and all(map(_alike, value, example))
    if isinstance(example, (int, float)) and not isinstance(example, bool):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(example)


def _check_state(state: Mapping[str, Any], parameter: Tensor) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            if value.ndim and value.shape != parameter.shape:
                raise ValueError(f"{name} is {tuple(value.shape)}, expected {tuple(parameter.shape)}")
            if value.layout is not torch.strided or not value.is_floating_point():
                raise ValueError(f"{name} is a tensor of {value.dtype}")
        elif not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {value!r}")
