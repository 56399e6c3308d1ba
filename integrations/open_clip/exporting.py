"""Models as folders that plain open_clip opens: ``open_clip.create_model("local-dir:FOLDER")``."""

import json
import os
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from safetensors.torch import save

from vl_plugins.data.files import partial_folder, write_file
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.checkpoints import LOGIT_BIAS
from vl_plugins.integrations.saved_models import SavedModel, check_same_model, read_saved_model

__all__ = ["check_can_be_exported", "check_folder", "export_model"]

ENCODED = "`vl-plugins encode` writes its embeddings, and vl_plugins.integrations.loading.load_model loads it"
CARD = "README.md"
# Of the transform for evaluation; the size of pictures is the model's.
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode", "fill_color", "mode")


def check_folder(folder: str | Path) -> None:
    """Raise ``UserError`` if a model cannot be exported to a folder because something is there."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another name")


def check_can_be_exported(saved: SavedModel) -> None:
    """Raise ``UserError`` for a model that plain open_clip cannot hold, with what can be done instead."""
    if saved.settings is None:
        raise UserError(f"{saved.name} is of the trainer for pytorch-metric-learning, no model of open_clip: {ENCODED}")
    head = saved.settings["head"]
    if head is not None:
        raise UserError(f"{saved.name} has a {head} head, which models of open_clip do not have: {ENCODED}")
    text_tower = open_clip.get_model_config(saved.settings["model"])["text_cfg"].get("hf_model_name")
    if text_tower and os.path.isdir(text_tower):
        raise UserError(
            f"{saved.name}: open_clip reads the configuration of the text tower from {text_tower}, which another "
            "machine does not have: put it on the hub, and name it there as hf_model_name of the model's configuration"
        )


def export_model(saved: SavedModel, folder: str | Path, card: str) -> None:
    """Write a model as a folder that appears complete or not at all, and that open_clip has opened.

    It has the weights (safetensors, in the types of the checkpoint), ``open_clip_config.json`` with the model and the
    transform for evaluation, the files of a tokenizer of Hugging Face, and the card.

    Args:
        saved: a model that :func:`check_can_be_exported` takes.
        folder: is made; an empty one may be there.
        card: text of ``README.md``.

    Raises:
        UserError: something is in the folder, it cannot be written, or open_clip makes another model of it.
    """
    check_folder(folder)
    weights = {name: tensor.contiguous().clone() for name, tensor in saved.weights.items()}
    with partial_folder(folder) as partial:
        write_file(partial / HF_SAFE_WEIGHTS_NAME, save(weights, metadata={"format": "pt"}))
        write_file(partial / HF_CONFIG_NAME, json.dumps(_configuration(saved), indent=2).encode())
        if hasattr(saved.tokenizer, "save_pretrained"):
            saved.tokenizer.save_pretrained(str(partial))
        write_file(partial / CARD, card.encode())
        _check_opened(saved, partial)
        partial.rename(Path(folder).resolve())


def _configuration(saved: SavedModel) -> dict[str, Any]:
    """Return what open_clip makes the model and its transform of."""
    assert saved.settings is not None
    model_config = open_clip.get_model_config(saved.settings["model"])
    if saved.settings["force_quick_gelu"]:
        model_config["quick_gelu"] = True
    if saved.settings["force_custom_text"]:
        model_config["custom_text"] = True
    if saved.settings["force_image_size"] is not None:
        model_config["vision_cfg"]["image_size"] = saved.settings["force_image_size"]
    if saved.settings["force_context_length"] is not None:
        model_config["text_cfg"]["context_length"] = saved.settings["force_context_length"]
    if getattr(saved.model, "logit_bias", None) is not None:
        model_config["init_logit_bias"] = LOGIT_BIAS  # the weights have its value
    preprocessing = {}
    for name in PREPROCESSING:
        if name in saved.model.visual.preprocess_cfg:
            preprocessing[name] = saved.model.visual.preprocess_cfg[name]
    return {"model_cfg": model_config, "preprocess_cfg": preprocessing}


def _check_opened(saved: SavedModel, folder: Path) -> None:
    """Open a folder with open_clip; raise ``UserError`` unless model, transform and tokenizer are the checkpoint's."""
    opened = read_saved_model(f"local-dir:{folder}")
    try:
        check_same_model(saved, opened)
    except UserError as error:
        raise UserError(f"{saved.name} cannot be exported; open_clip makes another model of it: {error}") from error
    weights = saved.model.state_dict()
    for name, tensor in opened.model.state_dict().items():
        if not torch.equal(tensor, weights[name]):
            raise UserError(f"{saved.name} cannot be exported; open_clip reads other weights {name}")
