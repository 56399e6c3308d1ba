"""Checkpoints of either host, loaded for evaluation and for use as a library."""

import contextlib
import importlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from vl_plugins.errors import MALFORMED_CONTENT, UserError, one_of, reason, require, user_errors, warn_of_input

__all__ = [
    "AUTOCAST",
    "BEST",
    "INPUTS",
    "OTHER_FORMATS",
    "PRECISIONS",
    "checkpoint_of_run",
    "is_of_pml",
    "load_content",
    "load_model",
    "read_content",
    "read_torch_file",
]

BEST = "best.pt"  # of a run of either trainer

# Files of other libraries, which open_clip reads.
OTHER_FORMATS = (".npy", ".npz", ".safetensors")

# open_clip's ``--precision``: types of autocast, and types of a model and its images.
AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}
INPUTS = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "pure_fp16": torch.float16}
PRECISIONS = (*AUTOCAST, *INPUTS, "fp32")


def load_model(
    checkpoint: str | Path,
    model: str | None = None,
    *,
    model_config: str | Path | None = None,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
) -> tuple[nn.Module, Callable, Callable]:
    """Load what open_clip's trainer, our launcher or the trainer for pytorch-metric-learning saved.

    A checkpoint with heads, or of the trainer for pytorch-metric-learning, specifies its model. For others of a
    training run, the model and the options that it was built with are read from the run's ``params.txt``.

    Args:
        checkpoint: a file that a trainer wrote, or the folder of its run, see :func:`find_checkpoint`; a file of
            weights, a pretrained tag of ``model``, or a model with its own weights: ``hf-hub:ORG/NAME``,
            ``local-dir:FOLDER``.
        model: name of an open_clip model, or one of ``configs/models``; needed where the checkpoint specifies none. The
            name of a model of the hub or a folder must always be given: its tokenizer can run code.
        model_config: a model configuration file or a folder of them, for models that open_clip does not know; by
            default that of the run's ``params.txt``.
        device: where to put the model.
        precision: as open_clip's ``--precision``.

    Returns:
        The model in evaluation mode, with ``encode_image`` and ``encode_text``; the transform of images for evaluation,
        or of arrays of features; and the tokenizer, from n texts to token ids (n, L).

    Raises:
        UserError: an unknown model, tag or precision, a file that is missing, cannot be read or does not fit the model,
            or weights that did not arrive in the model.
        MissingExtraError: the checkpoint needs open_clip, which is not installed.
    """
    one_of("precision", precision, PRECISIONS)  # open_clip takes any other for fp32
    checkpoint = find_checkpoint(checkpoint)
    content = read_content(checkpoint)
    return load_content(checkpoint, content, model, model_config=model_config, device=device, precision=precision)


def read_content(checkpoint: str | Path) -> Any:
    """Return what ``torch.save`` wrote into a checkpoint; None of a tag, a model of the hub and other formats."""
    file = Path(checkpoint)
    if not file.is_file() or file.suffix in OTHER_FORMATS:
        return None
    with user_errors(f"checkpoint {checkpoint}", *MALFORMED_CONTENT):
        return read_torch_file(file)


def load_content(
    checkpoint: str | Path,
    content: Any,
    model: str | None = None,
    *,
    model_config: str | Path | None = None,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
) -> tuple[nn.Module, Callable, Callable]:
    """Load a checkpoint, whose content :func:`read_content` has returned, as :func:`load_model` does."""
    with user_errors(f"checkpoint {checkpoint}", *MALFORMED_CONTENT):
        if is_of_pml(content):
            host = importlib.import_module("vl_plugins.integrations.pytorch_metric_learning.checkpoints")
            towers, transform, tokenizer = host.load_towers(checkpoint, content, model, device)
            return towers.to(dtype=INPUTS.get(precision)), transform, tokenizer
        require("open_clip", extra="open-clip")
        host = importlib.import_module("vl_plugins.integrations.open_clip.checkpoints")
        model, transform, tokenizer = host.load_open_clip(checkpoint, content, model, model_config, device, precision)
        return model, transform, tokenizer


def is_of_pml(content: Any) -> bool:
    """Return whether a checkpoint's content is of the trainer for pytorch-metric-learning."""
    return isinstance(content, Mapping) and content.get("format") == "vl_plugins.pytorch_metric_learning"


def find_checkpoint(checkpoint: str | Path) -> str | Path:
    """Return :func:`checkpoint_of_run` of a folder, and warn if it is the best one; other names stay as they are."""
    if not Path(checkpoint).is_dir():
        return checkpoint
    file = checkpoint_of_run(checkpoint)
    if file.name == BEST and file.is_file():
        warn_of_input(f"{checkpoint}: its best checkpoint is taken, {file}; for another one, name the file")
    return file


def checkpoint_of_run(run: str | Path) -> Path:
    """Return the checkpoint in the folder of a run that stands for it: the best one, or else the newest."""
    folder = Path(run)
    # epoch_9, epoch_10, epoch_latest
    epochs = sorted(folder.glob("checkpoints/epoch_*.pt"), key=lambda file: (len(file.name), file.name))
    newest_first = [*reversed(epochs), folder / "latest.pt"]
    for file in (folder / "checkpoints" / BEST, folder / BEST, *newest_first):
        if file.is_file():
            return file
    return folder / BEST


def read_torch_file(file: str | os.PathLike) -> Any:
    """Read tensors, numbers, text and containers of them on the CPU; no code of the file is run.

    Numbers of numpy count as numbers where torch knows them as safe, from version 2.6 on.

    Raises:
        UserError: the file is damaged, of another format, or holds other objects. The message names their type.
        OSError: it cannot be opened.
    """
    with user_errors(f"{file}: it is damaged", Exception):
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            _check_sums(file)
    try:
        with _numpy_numbers():
            # With mmap, tensors stay in the file until they are used. torch 2.2 cannot map a Path.
            return torch.load(os.fspath(file), map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError:
        raise
    except Exception as error:
        raise UserError(_refusal(file, error)) from error


def _check_sums(file: str | os.PathLike) -> None:
    """Compare the checksums of a zip archive, which torch does not."""
    with zipfile.ZipFile(file) as archive:
        # With `set_crc32_options(False)` torch writes none, all 0.
        if any(member.CRC for member in archive.infolist()) and archive.testzip() is not None:
            raise zipfile.BadZipFile("a checksum is wrong")


def _numpy_numbers() -> Any:
    """Let ``torch.load`` make numbers of numpy, which early trainers saved beside the weights: plain data, no code."""
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):  # before 2.6, torch cannot name types
        return contextlib.nullcontext()
    multiarray = getattr(numpy, "_core", None) or numpy.core
    scalar_types = [type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefd"]
    # Files name the module as numpy before 2 called it, or as it is called now.
    scalar = multiarray.multiarray.scalar
    named = [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]
    return torch.serialization.safe_globals([*named, numpy.dtype, *scalar_types])


def _refusal(file: str | os.PathLike, error: Exception) -> str:
    """Return why ``torch.load`` refused a file: the type that could run code, or the damage."""
    type_name = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|GLOBAL) ([\w.]+)", str(error))
    if type_name is None:
        detail = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
        text = reason(error) if detail is None else detail[1].strip()
        return f"{file}: it is damaged, or holds more than tensors, numbers and text: {text}"
    return (
        f"{file}: it holds more than tensors, numbers and text, namely {type_name[1]}, which could run code. "
        "If you trust the file, clean it in Python: content = torch.load(FILE, weights_only=False), then "
        "torch.save(content['state_dict'], NEW_FILE)"
    )
