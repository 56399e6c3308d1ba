"""Checkpoints: the model at the end of an epoch, and in ``latest.pt`` the state of the training too."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vl_plugins.data.files import write_complete
from vl_plugins.encoders import Vocabulary
from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning.config import Config, parse_config
from vl_plugins.integrations.pytorch_metric_learning.objective import Objective, build_objective
from vl_plugins.integrations.pytorch_metric_learning.two_towers import TwoTowers

__all__ = ["FORMAT", "VERSION", "checkpoint_of", "describe", "load_objective", "load_towers", "write_checkpoint"]

FORMAT, VERSION = "vl_plugins.pytorch_metric_learning", 2


def describe(config: Config, objective: Objective) -> dict[str, Any]:
    """Return model, vocabulary, loss and configuration as the content of a checkpoint, to which others may be added."""
    vocabulary = objective.towers.vocabulary
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": asdict(config),
        "vocabulary": None if vocabulary is None else list(vocabulary.words),
        "models": {name: module.state_dict() for name, module in objective.towers.parts().items()},
        "loss_funcs": {"metric_loss": objective.loss.state_dict()},
    }


def write_checkpoint(file: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint completely or not at all."""
    with write_complete(file) as stream:
        torch.save(dict(content), stream)


def load_objective(config: Config, content: Mapping[str, Any]) -> Objective:
    """Build model and loss of a configuration with the weights and words of a checkpoint."""
    words = content["vocabulary"]
    objective = build_objective(config, None if words is None else Vocabulary(tuple(words)), pretrained=False)
    for name, module in objective.towers.parts().items():
        module.load_state_dict(content["models"][name])
    objective.loss.load_state_dict(content["loss_funcs"]["metric_loss"])
    return objective


def load_towers(
    checkpoint: str | os.PathLike, content: Mapping[str, Any], model: str | None, device: str | torch.device
) -> tuple[TwoTowers, Callable, Callable]:
    """Load ``best.pt`` or ``latest.pt`` of a run in float32; see :func:`vl_plugins.integrations.loading.load_model`."""
    if model is not None:
        raise UserError(f"checkpoint {checkpoint} already specifies its model; drop {model}")
    plain = dict(content["config"])
    if content["version"] == 1:
        plain = _config_of_0_2(plain)
    towers = load_objective(parse_config(plain), content).towers.to(device).eval()
    return towers, towers.image.trunk.image_transform(False), towers.tokenizer


def checkpoint_of(content: Mapping[str, Any], towers: TwoTowers, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint without a training, with other weights of the towers.

    Args:
        content: of the checkpoint of the towers. What its loss has trained stays, but for the similarity of sets.
        towers: the model.
        weights: all tensors of the towers.
    """
    models = {}
    for part in towers.parts():
        prefix = part.replace("_", ".", 1) + "."  # of "image_trunk", "image.trunk."
        models[part] = _without_prefix(weights, prefix)
    loss = dict(content["loss_funcs"]["metric_loss"])
    for name, tensor in _without_prefix(weights, "similarity.").items():
        loss[f"distance.{name}"] = tensor
    settings = {name: content[name] for name in ("format", "version", "config", "vocabulary")}
    return {**settings, "models": models, "loss_funcs": {"metric_loss": loss}}


def _without_prefix(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _config_of_0_2(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of version 0.2 with the keys of this one, without those of the training."""
    data = {"train": plain["data"]["train"], "inputs": plain["data"]["inputs"]}
    config = {"one_set": plain.get("trainer") == "MetricLossOnly", "data": data}
    for name in ("image", "text", "dim", "head", "loss", "reducer", "distance", "seed"):
        config[name] = plain[name]
    return config
