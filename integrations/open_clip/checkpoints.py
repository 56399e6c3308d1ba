"""Saved open_clip models, with or without heads. Use :func:`vl_plugins.integrations.checkpoints.load_model`."""

import logging
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vl_plugins.errors import UserError, first_line, user_errors
from vl_plugins.integrations.key_values import literal
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, check_pretrained, has_schema
from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file
from vl_plugins.retrieval.features import describe_similarity, recorded_similarity

__all__ = ["OTHER_FORMATS", "load_open_clip", "made_with", "read_checkpoint"]

# Files of other libraries, which open_clip reads.
OTHER_FORMATS = (".npy", ".npz", ".safetensors")

# Options of the trainer that make a model, but for its weights.
MODEL_OPTIONS = ("model", "model_config", "pretrained", "siglip", "force_quick_gelu", "force_custom_text")
MODEL_OPTIONS += ("force_image_size", "force_context_length", "head", "head_kwargs")
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")
# Options of heads that version 0.2 wrote into checkpoints; of their values only these are left.
FORMER = {"slots": "learned", "update": "residual", "attention": "slots", "global_feature": True}
# Key of version 0.2, in the weights of a model with heads: what the model is made of.
FORMER_KEY = "_extra_state"

Loaded = tuple[nn.Module, Callable, Callable]


def made_with(args: Namespace, loss: Any) -> dict[str, Any]:
    """Return what a checkpoint has to hold so that :func:`load_open_clip` can make its model."""
    options = {name: getattr(args, name) for name in (*MODEL_OPTIONS, *(f"image_{name}" for name in PREPROCESSING))}
    return options | (describe_similarity(loss.loss.distance, parameters=False) if args.head == "set" else {})


def read_checkpoint(file: str | Path, flag: str) -> dict[str, Any]:
    """Return the content of a checkpoint or a file of weights; weights of version 0.2 get their names of today.

    Args:
        file: of ``torch.save``.
        flag: that names it, for errors.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        content = read_torch_file(file, mmap=True)
    except UnreadableFileError as error:
        raise UserError(f"{flag} {file}: {error}") from error
    weights = check_weights(f"{flag} {file}", content)
    return {**content, "state_dict": weights} if "state_dict" in content else weights


def check_weights(what: str, content: Any) -> dict[str, Any]:
    """Return the weights by name in the content of a file, under their names of today."""
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise UserError(f"{what}: expected weights by name, found {type(weights).__name__}")
    if not weights:
        raise UserError(f"{what}: it holds no weights")
    if not any(re.fullmatch(rf"(module\.)?{FORMER_KEY}", name) for name in weights):
        return dict(weights)
    names = {name: re.sub(r"^(module\.)?clip\.", r"\1", name) for name in weights if not name.endswith(FORMER_KEY)}
    return {names[name]: weights[name] for name in names}


def load_open_clip(
    checkpoint: str | Path,
    content: Any,
    model: str | None,
    *,
    model_config: str | Path | None,
    device: str | torch.device,
    precision: str,
) -> Loaded:
    """Load an open_clip model as :func:`vl_plugins.integrations.checkpoints.load_model` does.

    Args:
        content: of the checkpoint's file; None if it is not a file of ``torch.save``.
    """
    file = Path(checkpoint)
    recorded = _recorded(file, content) if file.is_file() else {}
    model_config = model_config or recorded.get("model_config")
    if model_config is not None:
        add_model_config(str(model_config))
    if not file.is_file():
        return _load_published(str(checkpoint), model, device, precision)
    what = f"checkpoint {checkpoint}"
    if file.suffix in OTHER_FORMATS:  # open_clip converts big_vision's arrays
        with user_errors(what):
            content = load_file(file) if file.suffix == ".safetensors" else None
    weights = {} if content is None else check_weights(what, content)
    weights = {name.removeprefix("module."): weight for name, weight in weights.items()}
    name = _model_name(checkpoint, model, recorded)
    options = _options(name, recorded)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # open_clip warns of random weights, which the file replaces
    try:
        with user_errors(f"model {name} cannot be built"):
            loaded, _, preprocess = open_clip.create_model_and_transforms(
                name, load_weights=False, pretrained_text=False, precision=precision, device=device, **options
            )
    finally:
        logging.disable(level)
    with user_errors(f"checkpoint {checkpoint} does not fit model {name}"):
        head = recorded.get("head")
        if head is None:
            open_clip.load_checkpoint(loaded, str(checkpoint))
        else:
            similarity = recorded.get("similarity")
            if similarity is not None:
                similarity = recorded_similarity(similarity, recorded["similarity_kwargs"])
            loaded = add_heads(loaded, head, recorded["head_kwargs"], similarity)
            shapes = {name: parameter.shape for name, parameter in loaded.named_parameters()}
            # Sharded numbers are (1,), others ().
            fitting = {n: w.reshape(shapes[n]) if n in shapes and w.numel() == 1 else w for n, w in weights.items()}
            loaded.load_state_dict(fitting)
        _compare(loaded, weights)
    context_length = options.get("force_context_length")
    return loaded.eval(), preprocess, open_clip.get_tokenizer(name, context_length=context_length)


def _load_published(checkpoint: str, model: str | None, device: str | torch.device, precision: str) -> Loaded:
    """Load a pretrained tag, or the weights of a model of the hub or a folder."""
    tag = None if has_schema(checkpoint) and model in (None, checkpoint) else checkpoint
    if tag is None:
        model = checkpoint
    elif model is None:
        raise UserError(f"checkpoint {checkpoint}: no such file")
    check_model(model)
    check_pretrained(model, tag, "checkpoint")
    try:
        loaded, preprocess = open_clip.create_model_from_pretrained(model, tag, precision=precision, device=device)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be loaded: {first_line(error)}") from error
    return loaded.eval(), preprocess, open_clip.get_tokenizer(model)


def _recorded(file: Path, content: Any) -> dict[str, Any]:
    """Return the options of the run that wrote a checkpoint: in the file, or from the run's ``params.txt``."""
    found = content if isinstance(content, Mapping) else {}
    weights = found.get("state_dict", found)
    args = found.get("args")
    if args is None and isinstance(weights, Mapping):
        args = weights.get(FORMER_KEY, weights.get(f"module.{FORMER_KEY}"))
    if isinstance(args, Mapping):
        options = args.get("head_kwargs")
        kept = {n: v for n, v in options.items() if FORMER.get(n) != v} if isinstance(options, Mapping) else options
        return {**args, "head_kwargs": kept}
    if args is not None:
        raise UserError(f"checkpoint {file}: the description of its model is damaged")
    params = file.absolute().parent.parent / "params.txt"
    if not params.is_file():
        return {}
    lines = params.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = [line.partition(": ") for line in lines]
    # Names are sorted, and the first one counts: the second line of a note may look like an option.
    return {name: literal(value) for name, separator, value in reversed(pairs) if separator} | {"head": None}


def _model_name(checkpoint: str | Path, given: str | None, recorded: Mapping[str, Any]) -> str:
    name = str(recorded["model"]) if "model" in recorded else given
    if name is None:
        raise UserError(f"checkpoint {checkpoint} does not specify its model: name the model")
    if given not in (None, name):
        raise UserError(f"checkpoint {checkpoint} is of model {name}, not {given}")
    if has_schema(name) and given is None:
        raise UserError(f"checkpoint {checkpoint} is of model {name}: name that model if you trust it")
    check_model(name)
    return name


def _options(model: str, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``create_model_and_transforms`` in training that do not follow from the weights."""
    options = {name: value for name, value in recorded.items() if name.startswith("force_") and name in MODEL_OPTIONS}
    if recorded.get("siglip"):
        options["init_logit_bias"] = -10  # as open_clip's trainer; what counts is that there is one
    elif recorded.get("init_logit_bias") is not None:  # as version 0.2 wrote it
        options["init_logit_bias"] = recorded["init_logit_bias"]
    preprocessing = open_clip.get_pretrained_cfg(model, recorded.get("pretrained") or "")
    options |= {f"image_{name}": recorded.get(f"image_{name}") or preprocessing.get(name) for name in PREPROCESSING}
    return {name: value for name, value in options.items() if value is not None}


def _compare(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Compare a model with the file; weights under other names were converted by open_clip, all or none.

    Raises:
        ValueError: a weight differs, such as one that open_clip resized.
    """
    for name, tensor in model.state_dict().items():
        saved = weights.get(name)
        if not isinstance(saved, Tensor):
            continue
        if tensor.squeeze().shape != saved.squeeze().shape:  # logit scales are (), or (1,) for some loaders
            raise ValueError(f"{name} is {tuple(saved.shape)} in the file and {tuple(tensor.shape)} in the model")
        loaded, expected = tensor.squeeze().cpu(), saved.squeeze().to(tensor.dtype)
        if not ((loaded == expected) | (loaded.isnan() & expected.isnan())).all():
            raise ValueError(f"{name} of the model is not that of the file")
