"""Saved open_clip models, with or without heads. Use :func:`vl_plugins.integrations.checkpoints.load_model`."""

import logging
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vl_plugins.errors import UserError, user_errors
from vl_plugins.integrations.key_values import literal
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, check_pretrained, has_schema
from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file
from vl_plugins.retrieval.features import describe_similarity, recorded_similarity

__all__ = ["OTHER_FORMATS", "load_open_clip", "made_with", "read_checkpoint"]

# Files of other libraries, which open_clip reads.
OTHER_FORMATS = (".npy", ".npz", ".safetensors")

# Options of the trainer that make a model, but for its weights.
FORCED = ("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length")
PREPROCESSING = ("image_mean", "image_std", "image_interpolation", "image_resize_mode")
MODEL_OPTIONS = ("model", "model_config", "pretrained", "siglip", "head", "head_kwargs", *FORCED, *PREPROCESSING)

# Version 0.2 wrote into the weights of a model with heads what it is made of, and these options, of which one value is
# left.
FORMER = "_extra_state"
FORMER_OPTIONS = {"slots": "learned", "update": "residual", "attention": "slots", "global_feature": True}


def made_with(args: Namespace, loss: Any) -> dict[str, Any]:
    """Return what a checkpoint has to hold so that :func:`load_open_clip` can make its model."""
    similarity = describe_similarity(loss.loss.distance, parameters=False) if args.head == "set" else {}
    return {name: getattr(args, name) for name in MODEL_OPTIONS} | similarity


def read_checkpoint(file: str | Path, flag: str) -> dict[str, Any]:
    """Return the content of a checkpoint, or a file of weights, of ``torch.save``, and run no code in it.

    Raises:
        UserError: the file, which ``flag`` names, cannot be read, or holds no weights.
    """
    try:
        content = read_torch_file(file, mmap=zipfile.is_zipfile(file))
    except UnreadableFileError as error:
        raise UserError(f"{flag} {file}: {error}") from error
    weights = _weights(f"{flag} {file}", content)
    return {**content, "state_dict": weights} if "state_dict" in content else weights


def _weights(what: str, content: Any) -> dict[str, Any]:
    """Return the weights in the content of a file; those of version 0.2 get their names of today."""
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    if not isinstance(weights, Mapping) or not any(isinstance(weight, Tensor) for weight in weights.values()):
        raise UserError(f"{what}: it holds no weights by name")
    if not any(str(name).endswith(FORMER) for name in weights):
        return dict(weights)
    kept = {name: weight for name, weight in weights.items() if not name.endswith(FORMER)}
    return {re.sub(r"^(module\.)?clip\.", r"\1", name): weight for name, weight in kept.items()}


def load_open_clip(
    checkpoint: str | Path,
    content: Any,
    model: str | None,
    *,
    model_config: str | Path | None,
    device: str | torch.device,
    precision: str,
) -> tuple[nn.Module, Callable, Callable]:
    """Load an open_clip model as :func:`vl_plugins.integrations.checkpoints.load_model` does.

    Args:
        content: of the checkpoint's file; None if it is not a file of ``torch.save``.
    """
    made_to = {"device": device, "precision": precision}
    with user_errors(f"checkpoint {checkpoint}"):
        if Path(checkpoint).is_file():
            return _load_file(Path(checkpoint), content, model, model_config, **made_to)
        # A pretrained tag, or the weights of a model of the hub or a folder.
        tag = None if has_schema(str(checkpoint)) and model in (None, str(checkpoint)) else str(checkpoint)
        name = str(checkpoint) if tag is None else model
        if name is None:
            raise UserError(f"checkpoint {checkpoint}: no such file")
        if model_config is not None:
            add_model_config(model_config)
        check_model(name)
        check_pretrained(name, tag, "checkpoint")
        loaded, preprocess = open_clip.create_model_from_pretrained(name, tag, **made_to)
        return loaded.eval(), preprocess, open_clip.get_tokenizer(name)


def _load_file(file: Path, content: Any, model: str | None, model_config: str | Path | None, **made_to: Any) -> Any:
    if file.suffix == ".safetensors":
        content = load_file(file)
    # open_clip converts big_vision's arrays.
    weights = {} if file.suffix in (".npz", ".npy") else _weights(f"checkpoint {file}", content)
    weights = {name.removeprefix("module."): weight for name, weight in weights.items()}
    recorded = _recorded(file, content)
    if config := model_config or recorded.get("model_config"):
        add_model_config(config)
    name = _model_name(file, model, recorded)
    options = {option: recorded.get(option) for option in (*FORCED, "init_logit_bias")}
    if recorded.get("siglip"):
        options["init_logit_bias"] = -10  # as open_clip's trainer; what counts is that there is one
    preprocessing = open_clip.get_pretrained_cfg(name, recorded.get("pretrained") or "")
    options |= {o: recorded.get(o) or preprocessing.get(o.removeprefix("image_")) for o in PREPROCESSING}
    options = {option: value for option, value in options.items() if value is not None}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # open_clip warns of random weights, which the file replaces
    try:
        loaded, _, preprocess = open_clip.create_model_and_transforms(
            name, load_weights=False, pretrained_text=False, **made_to, **options
        )
    finally:
        logging.disable(level)
    with user_errors(f"checkpoint {file} does not fit model {name}"):
        if recorded.get("head") is None:
            open_clip.load_checkpoint(loaded, str(file))
        else:
            similarity = recorded.get("similarity")
            if similarity is not None:
                similarity = recorded_similarity(similarity, recorded["similarity_kwargs"])
            head_kwargs = {n: value for n, value in recorded["head_kwargs"].items() if FORMER_OPTIONS.get(n) != value}
            loaded = add_heads(loaded, recorded["head"], head_kwargs, similarity)
            # Numbers of sharded models are (1,), others ().
            numbers = {n: weights[n].reshape(p.shape) for n, p in loaded.named_parameters() if p.numel() == 1}
            loaded.load_state_dict(weights | numbers)
        for key, tensor in loaded.state_dict().items():
            if key in weights and tensor.numel() != weights[key].numel():  # open_clip has resized it
                raise ValueError(
                    f"{key} is {tuple(weights[key].shape)} in the file and {tuple(tensor.shape)} in the model"
                )
    return loaded.eval(), preprocess, open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))


def _recorded(file: Path, content: Any) -> dict[str, Any]:
    """Return what the model of a checkpoint is made of: as the file says, or else the ``params.txt`` of its run."""
    if content is not None:
        weights = content.get("state_dict", content)
        args = content.get("args") or weights.get(FORMER) or weights.get(f"module.{FORMER}")
        if isinstance(args, Mapping):
            return dict(args)
    params = file.absolute().parent.parent / "params.txt"
    if not params.is_file():
        return {}
    pairs = [line.partition(": ") for line in params.read_text(encoding="utf-8", errors="replace").splitlines()]
    # Names are sorted, and the first one counts: the second line of a note may look like an option.
    return {name: literal(value) for name, separator, value in reversed(pairs) if separator} | {"head": None}


def _model_name(file: Path, given: str | None, recorded: Mapping[str, Any]) -> str:
    name = recorded.get("model", given)
    if name is None:
        raise UserError(f"checkpoint {file} does not specify its model: name the model")
    if given not in (None, name):
        raise UserError(f"checkpoint {file} is of model {name}, not {given}")
    if has_schema(name) and given is None:
        raise UserError(f"checkpoint {file} is of model {name}: name that model if you trust it")
    check_model(name)
    return name
