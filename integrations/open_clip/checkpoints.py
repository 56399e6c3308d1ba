"""Saved open_clip models, with or without heads. Use :func:`vl_plugins.integrations.checkpoints.load_model`."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vl_plugins.errors import UserError, first_line
from vl_plugins.integrations.key_values import literal
from vl_plugins.integrations.open_clip.heads import ARCHITECTURE, PREPROCESSING, CLIPWithHeads
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, check_pretrained, get_tokenizer
from vl_plugins.integrations.open_clip.names import has_schema
from vl_plugins.retrieval.features import recorded_similarity

__all__ = ["load_open_clip"]

# Key of CLIPWithHeads.get_extra_state in a state dict.
HEAD = "_extra_state"

Loaded = tuple[nn.Module, Callable, Callable]


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
    is_file = Path(checkpoint).is_file()
    recorded = _read_params(Path(checkpoint)) if is_file else {}
    model_config = model_config or recorded.get("model_config")
    if model_config is not None:
        add_model_config(str(model_config))
    if not is_file:
        return _load_published(str(checkpoint), model, device, precision)
    weights = _weights(Path(checkpoint), content)
    head = weights.get(HEAD)
    if not isinstance(head, Mapping | None):
        raise UserError(f"checkpoint {checkpoint}: the description of its head is damaged")
    recorded |= head or {}
    name = _model_name(checkpoint, model, recorded)
    options = _recorded_options(name, recorded)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # open_clip warns of random weights, which the file replaces
    try:
        loaded, _, preprocess = open_clip.create_model_and_transforms(
            name, load_weights=False, pretrained_text=False, precision=precision, device=device, **options
        )
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"model {name} cannot be built: {first_line(error)}") from error
    finally:
        logging.disable(level)
    try:
        if head is None:
            open_clip.load_checkpoint(loaded, str(checkpoint))
        else:
            similarity = head["similarity"]
            if similarity is not None:
                similarity = recorded_similarity(similarity, head["similarity_kwargs"])
            loaded = CLIPWithHeads(loaded, name, options, head["head"], head["head_kwargs"], similarity)
            loaded.load_state_dict(weights)
        _check_weights(loaded, weights)
    # open_clip asserts that the widths of position embeddings agree, and looks into whatever a file holds.
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"checkpoint {checkpoint} does not fit model {name}: {first_line(error)}") from error
    return loaded.eval(), preprocess, get_tokenizer(name, options.get("force_context_length"))


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
    return loaded.eval(), preprocess, get_tokenizer(model)


def _read_params(checkpoint: Path) -> dict[str, Any]:
    """Return the options of the run that wrote a checkpoint, from its ``params.txt``; none if there is none."""
    file = checkpoint.absolute().parent.parent / "params.txt"
    if not file.is_file():
        return {}
    pairs = (line.partition(": ") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {name: literal(value) for name, separator, value in pairs if separator}


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


def _recorded_options(model: str, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``create_model_and_transforms`` in training that do not follow from the weights."""
    options = {name: recorded.get(name) for name in ARCHITECTURE}
    if recorded.get("siglip"):
        options["init_logit_bias"] = -10  # as open_clip's trainer; what counts is that there is one
    preprocessing = open_clip.get_pretrained_cfg(model, recorded.get("pretrained") or "")
    options |= {f"image_{name}": recorded.get(f"image_{name}") or preprocessing.get(name) for name in PREPROCESSING}
    return {name: value for name, value in options.items() if value is not None}


def _check_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Compare a model with the file; weights under other names were converted by open_clip, all or none.

    Raises:
        RuntimeError: a weight differs, such as one that open_clip resized.
    """
    for name, tensor in model.state_dict().items():
        saved = weights.get(name)
        if not isinstance(tensor, Tensor) or not isinstance(saved, Tensor):
            continue
        if tensor.squeeze().shape != saved.squeeze().shape:  # logit scales are (), or (1,) for some loaders
            raise RuntimeError(f"{name} is {tuple(saved.shape)} in the file and {tuple(tensor.shape)} in the model")
        loaded, expected = tensor.squeeze().cpu(), saved.squeeze().to(tensor.dtype)
        if not ((loaded == expected) | (loaded.isnan() & expected.isnan())).all():
            raise RuntimeError(f"{name} of the model is not that of the file")


def _weights(checkpoint: Path, content: Any) -> dict[str, Any]:
    """Return a file's weights by the names in the model; nothing for big_vision's arrays, which open_clip converts."""
    if checkpoint.suffix in (".npz", ".npy"):
        return {}
    if checkpoint.suffix == ".safetensors":
        try:
            content = load_file(checkpoint)
        except SafetensorError as error:
            raise UserError(f"checkpoint {checkpoint}: {error}") from error
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise UserError(f"checkpoint {checkpoint} holds a {type(weights).__name__}, expected weights by name")
    if not weights:
        raise UserError(f"checkpoint {checkpoint} holds no weights")
    prefix = "module." if all(name.startswith("module.") for name in weights) else ""
    return {name.removeprefix(prefix): value for name, value in weights.items()}
