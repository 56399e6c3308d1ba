"""Checkpoints: the whole state of a training at the end of an epoch, or a model alone."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from vl_plugins.data.files import write_complete
from vl_plugins.encoders.vocabulary import Vocabulary
from vl_plugins.errors import UserError, first_line
from vl_plugins.integrations.pytorch_metric_learning.config import REMOVED_DATA_KEYS, Config, parse_config
from vl_plugins.integrations.pytorch_metric_learning.models import TwoTowers, build_towers
from vl_plugins.integrations.pytorch_metric_learning.parts import loss_from_config
from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file
from vl_plugins.registry import check_registered

__all__ = ["load_state_dicts", "load_towers", "read_checkpoint", "state_dicts", "write_checkpoint"]

FORMAT = "vl_plugins.pytorch_metric_learning"
VERSION = 1

Parts = Mapping[str, Any] | nn.ModuleDict


def write_checkpoint(
    file: str | os.PathLike, config: Config, vocabulary: Vocabulary | None, states: Mapping[str, Any]
) -> None:
    """Write a file that appears complete or not at all.

    Args:
        file: its path.
        config: of the training.
        vocabulary: of the text tower, if it has one.
        states: tensors, numbers, strings and containers of them, by name.

    Raises:
        UserError: the file cannot be written; an earlier one stays.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": dataclasses.asdict(config),
        "vocabulary": None if vocabulary is None else list(vocabulary.words),
        **states,
    }
    with write_complete(file) as stream:
        torch.save(content, stream)


def read_checkpoint(file: str | os.PathLike) -> dict[str, Any]:
    """Read what :func:`write_checkpoint` wrote; ``config`` and ``vocabulary`` are objects again.

    Raises:
        UserError: the file is missing, damaged or something else.
    """
    try:
        content = read_torch_file(file)
    except UnreadableFileError as error:
        raise UserError(f"checkpoint {file}: {error}") from error
    return _parsed(file, content)


def load_towers(
    checkpoint: str | os.PathLike, content: Mapping[str, Any], model: str | None, device: str | torch.device
) -> tuple[TwoTowers, Callable, Callable]:
    """Load a model that was trained from a configuration, in float32.

    Args:
        checkpoint: ``best.pt`` or ``latest.pt`` of a run.
        content: of the file.
        model: None; its configuration specifies the model.
        device: where to put the model.

    Returns:
        The model in evaluation mode, the transform of images or features for evaluation, and the tokenizer.

    Raises:
        UserError: a ``model`` is given, or the content is damaged or does not fit its configuration.
    """
    content = _parsed(checkpoint, content)
    if model is not None:
        raise UserError(f"checkpoint {checkpoint} already specifies its model; drop {model}")
    config = content["config"]
    towers = build_towers(config, content["vocabulary"], pretrained=False)
    try:
        load_state_dicts(towers.parts, content["models"])
        if config.head is not None:  # the distance of its loss belongs to the model
            check_registered(config.loss)
            loss = loss_from_config(config)
            loss.load_state_dict(content["loss_funcs"]["metric_loss"])
            towers.compare_sets_by(loss.distance)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"checkpoint {checkpoint} does not fit its own configuration: {first_line(error)}") from error
    return towers.to(device).eval(), towers.image_transform(False), towers.tokenizer


def _parsed(file: str | os.PathLike, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file} is not a checkpoint of {FORMAT}")
    if content.get("version") != VERSION:
        raise UserError(f"checkpoint {file} is not of version {VERSION}: {content.get('version')!r}")
    try:
        config = parse_config(_without_removed_keys(content["config"]))
        vocabulary = content["vocabulary"]
        vocabulary = None if vocabulary is None else Vocabulary(tuple(vocabulary))
    except (AttributeError, KeyError, TypeError, UserError) as error:
        raise UserError(f"checkpoint {file}: its description is damaged ({first_line(error)})") from error
    return {**content, "config": config, "vocabulary": vocabulary}


def _without_removed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of version 0.1 or later as this version knows it."""
    data = {key: value for key, value in config["data"].items() if key not in REMOVED_DATA_KEYS}
    return {key: value for key, value in config.items() if key != "accuracy"} | {"data": data}


def state_dicts(parts: Parts) -> dict[str, Any]:
    """Return the ``state_dict`` of each part."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_state_dicts(parts: Parts, states: Mapping[str, Any]) -> None:
    """Put back the ``state_dict`` of each part.

    Raises:
        KeyError: a part has no state.
        RuntimeError: a state is of another part.
    """
    for name, part in parts.items():
        part.load_state_dict(states[name])
