"""Checkpoints of either host, loaded for evaluation and for use as a library."""

import contextlib
import importlib
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vl_plugins.errors import one_of, require, user_errors

__all__ = ["AUTOCAST", "INPUTS", "OTHER_FORMATS", "PRECISIONS", "load_model", "read_torch_file", "through_first_step"]

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
        checkpoint: a file that a trainer wrote, a file of weights, a pretrained tag of ``model``, or a model with its
            own weights: ``hf-hub:ORG/NAME``, ``local-dir:FOLDER``.
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
    file, content = Path(checkpoint), None
    with user_errors(f"checkpoint {checkpoint}"):
        if file.is_file() and file.suffix not in OTHER_FORMATS:
            content = read_torch_file(file)
        if isinstance(content, Mapping) and content.get("format") == "vl_plugins.pytorch_metric_learning":
            host = importlib.import_module("vl_plugins.integrations.pytorch_metric_learning.checkpoints")
            towers, transform, tokenizer = host.load_towers(checkpoint, content, model, device)
            return towers.to(dtype=INPUTS.get(precision)), transform, tokenizer
        require("open_clip", extra="open-clip")
        host = importlib.import_module("vl_plugins.integrations.open_clip.checkpoints")
        model, transform, tokenizer = host.load_open_clip(checkpoint, content, model, model_config, device, precision)
        return model, transform, tokenizer


def read_torch_file(file: str | os.PathLike) -> Any:
    """Read tensors, numbers, text and containers of them on the CPU; no code of the file is run.

    Raises:
        UserError: the file is damaged, of another format, or holds more than that.
        OSError: it cannot be opened.
    """
    with user_errors(f"{file}: it is damaged, or holds more than tensors and text, which could run code"):
        if is_zip := zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                # torch compares no checksums. With `set_crc32_options(False)` it writes none, all 0.
                if any(member.CRC for member in archive.infolist()) and archive.testzip() is not None:
                    raise zipfile.BadZipFile("a checksum is wrong")
        # With mmap, tensors stay in the file until they are used. torch 2.2 cannot map a Path.
        return torch.load(os.fspath(file), map_location="cpu", weights_only=True, mmap=is_zip)


@contextlib.contextmanager
def through_first_step(what: str) -> Iterator[None]:
    """Do what :func:`user_errors` does through the first step of an optimizer; from then on, an exception is a bug.

    The state of a damaged checkpoint and options of a wrong type may be used only there.
    """
    with contextlib.ExitStack() as border:
        border.enter_context(user_errors(what))
        hook = register_optimizer_step_post_hook(lambda *_: border.close())
        border.callback(hook.remove)
        yield
