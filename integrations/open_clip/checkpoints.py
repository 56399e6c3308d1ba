"""Saved models, with or without heads, for use outside of the launcher."""

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip import get_input_dtype
from open_clip.transform import PreprocessCfg, image_transform_v2
from pytorch_metric_learning.distances import BaseDistance
from torch import nn

from vl_plugins.components import create_component
from vl_plugins.errors import UserError, first_line
from vl_plugins.integrations.open_clip import host
from vl_plugins.integrations.open_clip.heads import CLIPWithHeads, head_settings
from vl_plugins.integrations.open_clip.models import check_model
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import is_checkpoint
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import load_model as load_towers
from vl_plugins.torch_files import UnreadableFileError, read_torch_file

__all__ = ["add_heads", "load_model"]

DESCRIPTION = "_extra_state"

# Options of open_clip's create_model that change what the weights mean; they are not in a checkpoint of open_clip.
ARCHITECTURE = (
    "force_quick_gelu",
    "force_custom_text",
    "force_image_size",
    "force_context_length",
    "init_logit_bias",
)


def add_heads(
    clip: nn.Module,
    model: str,
    created_with: Mapping[str, Any],
    head: str,
    head_kwargs: Mapping[str, Any],
    similarity: BaseDistance | None = None,
) -> CLIPWithHeads:
    """Put heads on a model and write into it what :func:`load_model` will need.

    Args:
        clip: what open_clip's ``create_model_and_transforms`` made.
        model: the name it was made by.
        created_with: the options it was made with.
        head: ``"linear"`` or ``"set"``.
        head_kwargs: options of the head.
        similarity: the distance by which sets are compared.
    """
    description = {
        "model": model,
        "model_kwargs": {
            name: value for name in ARCHITECTURE if (value := created_with.get(name)) is not None and value is not False
        },
        "preprocess": dict(clip.visual.preprocess_cfg),
    }
    return CLIPWithHeads(clip, head, head_settings(head, head_kwargs), similarity, description)


def load_model(
    checkpoint: str | Path,
    model: str | None = None,
    *,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
) -> tuple[nn.Module, Callable, Callable]:
    """Load what open_clip's trainer or the launcher saved, or what was trained by pytorch-metric-learning.

    A checkpoint of a model with heads says itself which model it is, with which head and similarity, and so does one of
    :mod:`vl_plugins.integrations.pytorch_metric_learning`.

    Args:
        checkpoint: a file that the trainer wrote, a file of weights, or a pretrained tag of open_clip.
        model: name of an open_clip model, or one of ``configs/models``; needed only for a model without heads.
        device: where to put the model.
        precision: as open_clip's ``--precision``.

    Returns:
        The model in evaluation mode, the transform of images for evaluation, and the tokenizer.

    Raises:
        UserError: an unknown model or tag, a file that is not there, cannot be read or does not fit the model.
    """
    saved = _read(checkpoint) if Path(checkpoint).is_file() else {}
    if is_checkpoint(saved):
        if model is not None:
            raise UserError(f"checkpoint {checkpoint} says itself which model it is of: leave out {model}")
        towers, *transforms = load_towers(checkpoint, device=device)
        return towers.to(dtype=get_input_dtype(precision)), *transforms
    weights = _weights(saved)
    description = weights.get(DESCRIPTION)
    try:
        if description is None:
            return _load_without_heads(checkpoint, model, device, precision)
        if model not in (None, description["model"]):
            raise UserError(f"checkpoint {checkpoint} is of model {description['model']}, not {model}")
        return _load_with_heads(weights, description, device, precision)
    # open_clip asserts that the widths of position embeddings agree, and looks into whatever a file holds.
    except (AssertionError, IndexError, RuntimeError, pickle.UnpicklingError) as error:
        name = model or description["model"]
        raise UserError(f"checkpoint {checkpoint} does not fit model {name}: {first_line(error)}") from error


def _load_without_heads(checkpoint, model, device, precision):
    if model is None and Path(checkpoint).is_file():
        raise UserError(f"checkpoint {checkpoint} does not say which model it is of: name the model")
    if model is None:
        raise UserError(f"checkpoint {checkpoint}: no such file")
    check_model(model)
    if checkpoint not in open_clip.list_pretrained_tags_by_model(model) and not Path(checkpoint).is_file():
        raise UserError(f"checkpoint {checkpoint}: no such file, nor a pretrained tag of {model}")
    loaded, _, preprocess = open_clip.create_model_and_transforms(
        model, pretrained=str(checkpoint), precision=precision, device=device
    )
    return loaded.eval(), preprocess, open_clip.get_tokenizer(model)


def _load_with_heads(weights, description, device, precision):
    name = description["model"]
    check_model(name)
    options = dict(description["model_kwargs"])
    options |= {"precision": precision, "device": device, "output_dict": True}
    with host.warnings_unsaid():  # open_clip warns of random weights, in whose place come those of the file
        clip = open_clip.create_model(name, load_weights=False, pretrained_text=False, **options)
    similarity = None
    if description["similarity"] is not None:
        similarity = create_component("distance", description["similarity"], **description["similarity_kwargs"])
    clip.visual.preprocess_cfg = dict(description["preprocess"])
    loaded = add_heads(clip, name, options, description["head"], description["head_kwargs"], similarity)
    loaded.load_state_dict(weights)
    preprocess = image_transform_v2(PreprocessCfg(**description["preprocess"]), is_train=False)
    tokenizer = open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))
    return loaded.eval(), preprocess, tokenizer


def _read(checkpoint: str | Path) -> Any:
    """Read a file of torch; its tensors stay in the file until they are used."""
    try:
        return read_torch_file(checkpoint, mmap=True)
    except UnreadableFileError as error:
        # Files of other formats, such as safetensors, are for open_clip to read; they hold no heads.
        if not _is_cut_off(checkpoint):
            return {}
        raise UserError(f"checkpoint {checkpoint}: {error}") from error


def _is_cut_off(checkpoint: str | Path) -> bool:
    """Return whether a file begins as those of ``torch.save`` do, and has not their end."""
    with open(checkpoint, "rb") as stream:
        return stream.read(2) == b"PK" and not zipfile.is_zipfile(stream)


def _weights(saved: Any) -> dict[str, Any]:
    saved = saved.get("state_dict", saved) if isinstance(saved, dict) else {}
    prefix = "module." if all(name.startswith("module.") for name in saved) else ""
    return {name.removeprefix(prefix): value for name, value in saved.items()}
