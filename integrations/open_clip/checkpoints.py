"""Saved open_clip models, with or without heads. Use :func:`vl_plugins.integrations.loading.load_model`."""

import logging
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import open_clip
import torch
from open_clip.convert import convert_state_dict
from safetensors.torch import load_file
from torch import nn

from vl_plugins.errors import MALFORMED_CONTENT, UserError, check_sizes, user_errors
from vl_plugins.integrations.command_lines import literal
from vl_plugins.integrations.loading import read_torch_file
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, has_schema
from vl_plugins.retrieval.features import describe_similarity, recorded_similarity

__all__ = [
    "LOGIT_BIAS",
    "checkpoint_of",
    "half_types",
    "load_open_clip",
    "load_weights",
    "made_with",
    "read_checkpoint",
    "read_params",
    "settings_of_model",
]

# Options of the trainer that make a model, but for its weights.
FORCED = ("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length")
PREPROCESSING = ("image_mean", "image_std", "image_interpolation", "image_resize_mode")
MODEL_OPTIONS = ("model", "model_config", "pretrained", "siglip", "head", "head_kwargs", *FORCED, *PREPROCESSING)

# What a checkpoint says beside them, where the model has a logit bias, or a similarity of sets.
FURTHER_OPTIONS = ("init_logit_bias", "similarity", "similarity_kwargs")

LOGIT_BIAS = -10.0  # with which SigLIP starts; where the weights of a file replace it, it only says that there is one

# Version 0.2 wrote into the weights of a model with heads what it is made of, and these options, of which one value is
# left.
FORMER = "_extra_state"
FORMER_OPTIONS = {"slots": "learned", "update": "residual", "attention": "slots", "global_feature": True}


def made_with(args: Namespace, loss: Any) -> dict[str, Any]:
    """Return what a checkpoint has to hold so that :func:`load_open_clip` can make its model."""
    options = {name: getattr(args, name) for name in MODEL_OPTIONS}
    if loss is not None and "bias" in loss.model_numbers:
        options["init_logit_bias"] = LOGIT_BIAS
    if args.head == "set":
        options |= describe_similarity(loss.loss.distance, parameters=False)
    return options


def read_checkpoint(file: str | Path) -> Any:
    """Return the content of a checkpoint or file of weights; the weights of version 0.2 get their names of today."""
    return _renamed(read_torch_file(file))


def _renamed(content: Any) -> Any:
    weights = content.get("state_dict", content)
    if not any(name.endswith(FORMER) for name in weights):
        return content
    weights = {re.sub(r"^(module\.)?clip\.", r"\1", name): weight for name, weight in weights.items()}
    return {**content, "state_dict": {name: weight for name, weight in weights.items() if not name.endswith(FORMER)}}


def load_weights(model: nn.Module, file: str | Path, content: Any) -> None:
    """Load the weights of a file into a model, with or without heads; those of another size are an error.

    Args:
        content: of the file; None of one in big_vision's format.
    """
    if content is None:
        open_clip.load_checkpoint(model, str(file))
        return
    weights = {}
    for name, weight in content.get("state_dict", content).items():
        weights[name.removeprefix("module.")] = weight
    # Of files that other programs, or older versions of open_clip, wrote.
    weights = convert_state_dict(model, weights)
    if "positional_embedding" in weights and not hasattr(model, "positional_embedding"):
        weights = open_clip.model.convert_to_custom_text_state_dict(weights)
    weights.pop("text.transformer.embeddings.position_ids", None)
    if "logit_bias" not in weights and getattr(model, "logit_bias", None) is not None:
        weights["logit_bias"] = torch.zeros(())  # as open_clip fills it in
    for name, number in model.named_parameters():
        if number.numel() == 1 and name in weights:  # of sharded models (1,), of others ()
            weights[name] = weights[name].reshape(number.shape)
    model.load_state_dict(weights)


def load_open_clip(
    checkpoint: str | Path,
    content: Any,
    model: str | None,
    model_config: str | Path | None,
    device: str | torch.device,
    precision: str,
) -> tuple[nn.Module, Callable, Callable]:
    """Load an open_clip model as :func:`vl_plugins.integrations.loading.load_model` does.

    Args:
        content: of the checkpoint's file; None if it is not a file of ``torch.save``.
    """
    made_to = {"device": device, "precision": precision}
    if Path(checkpoint).is_file():
        return _load_file(Path(checkpoint), content, model, model_config, **made_to)
    # A model of the hub or a folder with its weights, or a pretrained tag.
    name, tag = (str(checkpoint), None) if has_schema(str(checkpoint)) else (model, str(checkpoint))
    if name is None:
        raise UserError(f"checkpoint {checkpoint}: no such file; a pretrained tag needs --model NAME")
    if model_config is not None:
        add_model_config(model_config)
    check_model(name)
    if tag is not None and not open_clip.is_pretrained_cfg(name, tag):
        raise UserError(f"checkpoint {tag}: no such file, nor a pretrained tag of {name}")
    loaded, preprocess = open_clip.create_model_from_pretrained(name, tag, **made_to)
    return loaded.eval(), preprocess, open_clip.get_tokenizer(name)


def _load_file(file: Path, content: Any, model: str | None, model_config: str | Path | None, **made_to: Any) -> Any:
    if file.suffix == ".safetensors":
        content = load_file(file)
    recorded = _recorded(file, content)
    if config := model_config or recorded.get("model_config"):
        add_model_config(config)
    name = _model_name(file, model, recorded)
    options = {option: recorded.get(option) for option in (*FORCED, "init_logit_bias")}
    if recorded.get("siglip"):
        options["init_logit_bias"] = LOGIT_BIAS
    preprocessing = open_clip.get_pretrained_cfg(name, recorded.get("pretrained") or "")
    options |= {o: recorded.get(o) or preprocessing.get(o.removeprefix("image_")) for o in PREPROCESSING}
    options = {option: value for option, value in options.items() if value is not None}
    check_sizes(f"checkpoint {file}", options)
    with mock.patch.object(logging, "warning"):  # open_clip warns of random weights, which the file replaces
        loaded, _, preprocess = open_clip.create_model_and_transforms(
            name, load_weights=False, pretrained_text=False, **made_to, **options
        )
    with user_errors(f"checkpoint {file} does not fit model {name}", *MALFORMED_CONTENT):
        if recorded.get("head") is not None:
            similarity = recorded.get("similarity")
            if similarity is not None:
                similarity = recorded_similarity(similarity, recorded["similarity_kwargs"])
            head_kwargs = {n: value for n, value in recorded["head_kwargs"].items() if FORMER_OPTIONS.get(n) != value}
            add_heads(loaded, recorded["head"], head_kwargs, similarity)
        load_weights(loaded, file, content and _renamed(content))
    return loaded.eval(), preprocess, open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))


def settings_of_model(
    checkpoint: str | Path, content: Any, model: str | None, model_config: str | Path | None
) -> dict[str, Any]:
    """Return the settings that made the model of a checkpoint, as :func:`made_with` does for a training.

    Args:
        checkpoint, content, model, model_config: as :func:`load_open_clip` has loaded them.
    """
    name = str(checkpoint)
    recorded: dict[str, Any] = {}
    if Path(checkpoint).is_file():
        recorded = _recorded(Path(checkpoint), content)
    elif has_schema(name):
        model = name
    else:
        recorded["pretrained"] = name  # a tag, which has its own mean and deviation of pixels
    settings = {option: recorded.get(option) for option in MODEL_OPTIONS}
    for option in FURTHER_OPTIONS:
        if recorded.get(option) is not None:
            settings[option] = recorded[option]
    if settings["head"] is None:
        settings["head_kwargs"] = {}
    settings["model"] = recorded.get("model", model)
    if model_config is not None:
        settings["model_config"] = str(model_config)
    return settings


def checkpoint_of(settings: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint without a training, which open_clip and :func:`load_open_clip` read.

    Args:
        settings: of :func:`settings_of_model`.
        weights: all tensors of the model.
    """
    return {"state_dict": dict(weights), "args": dict(settings)}


def half_types(checkpoint: str | Path, content: Any) -> dict[str, torch.dtype]:
    """Return the types of the weights that a file has in half precision, by name; {} of a tag or a model of the hub."""
    if Path(checkpoint).suffix == ".safetensors":
        content = load_file(checkpoint)
    if content is None:
        return {}
    types = {}
    for name, weight in _renamed(content).get("state_dict", content).items():
        if weight.dtype in (torch.float16, torch.bfloat16):
            types[name.removeprefix("module.")] = weight.dtype
    return types


def _recorded(file: Path, content: Any) -> dict[str, Any]:
    """Return what the model of a checkpoint is made of: as the file says, or else the ``params.txt`` of its run."""
    if content is not None:
        weights = content.get("state_dict", content)
        args = content.get("args") or weights.get(FORMER) or weights.get(f"module.{FORMER}")
        if isinstance(args, Mapping) and "head" in args:  # other programs write args, too
            return dict(args)
    params = read_params(file)
    return params | {"head": None} if params else {}


def read_params(checkpoint: str | Path) -> dict[str, Any]:
    """Return the options in the ``params.txt`` of the run that a checkpoint belongs to; {} if there is none."""
    file = Path(checkpoint).absolute().parent.parent / "params.txt"
    if not file.is_file():
        return {}
    options: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, separator, value = line.partition(": ")
        if separator:
            # Names are sorted, and the first one counts: the second line of a note may look like an option.
            options.setdefault(name, literal(value))
    return options


def _model_name(file: Path, given: str | None, recorded: Mapping[str, Any]) -> str:
    name = recorded.get("model", given)
    if name is None:
        raise UserError(f"checkpoint {file} does not say which model it is of: give --model NAME")
    if given not in (None, name):
        raise UserError(f"checkpoint {file} is of model {name}, not {given}")
    if has_schema(name) and given is None:
        raise UserError(f"checkpoint {file} is of model {name}: give --model {name} if you trust it")
    check_model(name)
    return name
