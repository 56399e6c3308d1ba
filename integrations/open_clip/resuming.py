"""Checkpoints that survive a kill, and what a resumed training needs beside what open_clip keeps.

open_clip's checkpoint holds the model (heads and a learned similarity included), the optimizer, the gradient scaler and
the number of epochs. The learning rate follows from these. What is missing for the rest of a training to be what it
would have been is put beside them, in the same file: the state of the loss. The order of the data, the captions
and the augmentation of an epoch follow from the seed and the epoch, and so do, from the beginning of each epoch on, all
other random numbers; the settings they depend on are in the file, too, so that a change of them is noticed.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import open_clip
import torch
from torch import Tensor, nn

from vl_plugins.data.storage import Folder, write_file
from vl_plugins.integrations.open_clip.training import Training
from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file
from vl_plugins.utils.errors import UserError

__all__ = [
    "compare_settings",
    "complete_checkpoints",
    "drop_later_results",
    "latest_checkpoint",
    "mend_most_recent",
    "read_checkpoint",
    "restore_loss",
    "state_of_loss",
    "unfit_checkpoint_named",
]

logger = logging.getLogger(__name__)

BESIDE = "vl_plugins"
"""The key of a checkpoint under which is what open_clip does not keep."""

# What the trainer writes; `epoch_latest.pt` is that of --save-most-recent.
OF_EPOCH = re.compile(r"epoch_(\d+)\.pt")
MOST_RECENT = "epoch_latest.pt"

MOST_SHOWN = 200  # characters of a list of weights

# What the order and the number of the batches of an epoch depend on.
SETTINGS = (
    "seed",
    "world_size",
    "batch_size",
    "workers",
    "accum_freq",
    "captions_per_image",
    "same_group",
    "train_num_samples",
)


@contextlib.contextmanager
def complete_checkpoints(training: Training) -> Iterator[None]:
    """Let ``torch.save`` write checkpoints of the trainer that appear complete or not at all, with more in them."""
    host_save = torch.save

    def save(content, file, *args, **kwargs):
        is_checkpoint = isinstance(content, dict) and {"epoch", "state_dict", "optimizer"} <= content.keys()
        if not (is_checkpoint and isinstance(file, (str, os.PathLike))):
            host_save(content, file, *args, **kwargs)
            return
        more = training.kept_beside()
        if more:
            content = {**content, BESIDE: more}
        path = Path(file)
        with Folder(path.parent).write(path.name) as stream:
            host_save(content, stream, *args, **kwargs)

    with mock.patch.object(torch, "save", save):
        yield


@contextlib.contextmanager
def unfit_checkpoint_named(training: Training, *, has_heads: bool) -> Iterator[None]:
    """Name the checkpoint where its weights do not fit the model, or its optimizer state what is trained.

    The parameter groups depend on open_clip's version, and on flags such as ``--lock-image``.

    Raises:
        UserError: torch's ``load_state_dict`` found other weights than the model's, or other groups than those of the
            optimizer, or there is no optimizer state.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict") or not training.args.resume:
            raise
        _, first, *more = str(error).splitlines()
        others = f" and {len(more)} more" if more else ""
        raise UserError(
            f"--resume {training.args.resume}: its weights do not fit --model {training.args.model} with these flags: "
            f"{first.strip()[:MOST_SHOWN]}{others}"
        ) from error
    except (KeyError, ValueError) as error:
        is_missing = isinstance(error, KeyError) and error.args[0] in ("optimizer", "param_groups")
        if not is_missing and not str(error).startswith("loaded state dict"):
            raise
        file = training.args.resume
        # open_clip's --pretrained takes no heads.
        weights = "" if has_heads else f", or begin a new run from its weights: --pretrained {file}"
        raise UserError(
            f"--resume {file}: its optimizer state does not fit the parameters that open_clip {open_clip.__version__} "
            f"trains here; resume it with the open_clip version and flags that wrote it{weights}"
        ) from error


def read_checkpoint(file: str, map_location: Any = None, *, training: Training) -> dict[str, Any]:
    """Stand in for the trainer's ``pt_load``: tensors, numbers and containers only, no code of the file is run.

    ``training`` is told what the file holds beside what open_clip keeps.

    Raises:
        UserError: there is no such file, it is cut off or damaged, or it holds no checkpoint of open_clip's.
    """
    try:
        with fsspec.open(file, "rb") as stream:
            content = read_torch_file(stream, map_location=map_location)
    except FileNotFoundError as error:
        raise UserError(f"--resume {file}: no such file") from error
    except OSError as error:
        raise UserError(f"--resume {file}: it cannot be opened ({error.strerror or error})") from error
    except UnreadableFileError as error:
        before = _one_before(Path(file))
        hint = f"; the one before it is {before}" if before is not None else ""
        raise UserError(f"--resume {file}: {error}{hint}") from error
    problem = _foreign(content)
    if problem is not None:
        raise UserError(f"--resume {file}: {problem}; give a checkpoint of open_clip's trainer, or weights by name")
    training.saved = content.get(BESIDE, {})
    return content


def latest_checkpoint(path: str, remote: bool, *, host_latest: Callable) -> str | None:
    """Stand in for the trainer's ``get_latest_checkpoint``: the last one that can be read; others are named.

    Only what the trainer calls ``epoch_N.pt`` counts, so no file that it was writing when it was killed.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """
    of_host = host_latest(path, remote)
    if remote or (of_host is not None and Path(of_host).is_dir()):  # in parts, as 4.x saves under FSDP
        return of_host
    return _newest_readable(_checkpoints(Path(path)))


def mend_most_recent(folder: str | Path) -> None:
    """Where ``epoch_latest.pt`` is cut off, put the one before it in its place; it stays under another name.

    Raises:
        UserError: it cannot be read, and there is none before it.
    """
    latest = Path(folder) / MOST_RECENT
    if not latest.is_file() or _problem(latest) is None:
        return
    before = _newest_readable([latest, *_checkpoints(latest.parent)])
    shutil.copyfile(latest, latest.with_suffix(".pt.damaged"))  # a kill here, and it is done again
    with open(before, "rb") as source, Folder(latest.parent).write(latest.name) as stream:
        shutil.copyfileobj(source, stream)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of epochs, the last one first."""
    found = [(int(match[1]), file) for file in folder.glob("epoch_*.pt") if (match := OF_EPOCH.fullmatch(file.name))]
    return [file for _, file in sorted(found, reverse=True)]


def _newest_readable(files: list[Path]) -> str | None:
    problems = {}
    for file in files:
        problem = _problem(file)
        if problem is None:
            for damaged, why in problems.items():
                logger.warning(f"checkpoint {damaged}: {why}; going on from the one before it, {file.name}")
            return str(file)
        problems[file] = problem
    if problems:
        each = ", ".join(f"{file.name} ({why})" for file, why in problems.items())
        raise UserError(
            f"--resume latest: no checkpoint in {files[0].parent} can be read: {each}; delete them to begin anew"
        )
    return None


def _problem(file: Path) -> str | None:
    """Say why a checkpoint cannot be read; None if it can. Its tensors are not read."""
    try:
        content = read_torch_file(file, mmap=True)
    except UnreadableFileError as error:
        return str(error)
    return _foreign(content)


def _foreign(content: Any) -> str | None:
    """Say why the trainer cannot take what a file holds: neither a checkpoint of its own nor weights by name."""
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}"
    weights = content
    if "epoch" in content:
        if not isinstance(content["epoch"], int):
            return f"its epoch is a {type(content['epoch']).__name__}"
        weights = content.get("state_dict")
    if not isinstance(weights, Mapping) or not any(isinstance(value, Tensor) for value in weights.values()):
        return "it holds no weights"
    if not all(isinstance(name, str) for name in weights):
        return "its weights have no names"
    return None


def _one_before(file: Path) -> str | None:
    earlier = _checkpoints(file.parent)
    if file in earlier:
        earlier = earlier[earlier.index(file) + 1 :]
    return next((str(each) for each in earlier if each != file and _problem(each) is None), None)


def compare_settings(training: Training, args: Namespace) -> None:
    """Keep what the order of the data depends on, and warn where a training goes on with something else."""
    settings = {name: getattr(args, name, None) for name in SETTINGS}
    training.beside["settings"] = lambda: settings
    before = training.saved.get("settings", {})
    changed = [
        f"{name} {before[name]} -> {value}" for name, value in settings.items() if before.get(name, value) != value
    ]
    if changed and training.continues:
        logger.warning(
            f"--resume latest goes on with other settings than before ({', '.join(changed)}): from here on the batches "
            "are others than without the interruption"
        )


def state_of_loss(loss: nn.Module, description: str) -> dict[str, Any]:
    """Return what of a loss belongs into a checkpoint; without a state that could not be read again safely.

    Args:
        loss: with all its options.
        description: of these; only a loss with the same one takes the state back.
    """
    state = loss.state_dict()
    kept = {name: value for name, value in state.items() if _is_plain(value)}
    if len(kept) < len(state):
        logger.warning(
            f"the checkpoint leaves out {', '.join(sorted(state.keys() - kept.keys()))} of the loss, which is not made "
            "of tensors, numbers and strings"
        )
    return {"description": description, "state": kept}


def restore_loss(loss: nn.Module, description: str, saved: Mapping[str, Any]) -> bool:
    """Put back what :func:`state_of_loss` took; return whether it was of such a loss."""
    if saved.get("description") != description or saved["state"].keys() != loss.state_dict().keys():
        return False
    loss.load_state_dict(saved["state"])
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def drop_later_results(folder: str | Path, epoch: int) -> None:
    """Take from ``results.jsonl`` the epochs after ``epoch``, which the resumed training will go through again."""
    file = Path(folder) / "results.jsonl"
    if not file.is_file():
        return
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if _is_until(line, epoch)]
    if kept != lines:
        write_file(file, "".join(kept).encode())


def _is_until(line: str, epoch: int) -> bool:
    try:
        row = json.loads(line)
    except ValueError:  # cut off by a kill
        return False
    return not isinstance(row, dict) or row.get("epoch", 0) <= epoch
