"""Checkpoints: the model at the end of an epoch, and in ``latest.pt`` the state of the training too."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from vl_plugins.encoders import Vocabulary
from vl_plugins.errors import UserError, user_errors
from vl_plugins.integrations.pytorch_metric_learning.config import Config, parse_config
from vl_plugins.integrations.pytorch_metric_learning.objective import Objective, build_objective
from vl_plugins.integrations.pytorch_metric_learning.two_towers import TwoTowers
from vl_plugins.registry import check_registered

__all__ = ["FORMAT", "VERSION", "describe", "load_objective", "load_towers"]

FORMAT, VERSION = "vl_plugins.pytorch_metric_learning", 2


def describe(config: Config, objective: Objective) -> dict[str, Any]:
    """Return model, vocabulary, loss and configuration as the content of a checkpoint, to which others may be added."""
    vocabulary = objective.towers.vocabulary
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": asdict(config),
        "vocabulary": None if vocabulary is None else list(vocabulary.words),
        "models": {name: part.state_dict() for name, part in objective.towers.parts().items()},
        "loss_funcs": {"metric_loss": objective.loss.state_dict()},
    }


def load_objective(objective: Objective, content: Mapping[str, Any]) -> None:
    """Put model and loss of a checkpoint in place."""
    for name, part in objective.towers.parts().items():
        part.load_state_dict(content["models"][name])
    objective.loss.load_state_dict(content["loss_funcs"]["metric_loss"])


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
    if model is not None:
        raise UserError(f"checkpoint {checkpoint} already specifies its model; drop {model}")
    with user_errors(f"checkpoint {checkpoint}"):
        plain = dict(content["config"])
        if content["version"] == 1:
            plain = _config_of_0_2(plain)
        check_registered(plain["loss"])
        config = parse_config(plain)
        vocabulary = None if content["vocabulary"] is None else Vocabulary(tuple(content["vocabulary"]))
        objective = build_objective(config, vocabulary, pretrained=False)
        load_objective(objective, content)
        towers = objective.towers.to(device).eval()
        return towers, towers.image.trunk.image_transform(False), towers.tokenizer


def _config_of_0_2(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of version 0.2 with the keys of this one; those of the training do not matter."""
    one_set = plain.get("trainer") == "MetricLossOnly"
    kept = {name: plain[name] for name in ("image", "text", "dim", "head", "loss", "reducer", "distance", "seed")}
    return {**kept, "one_set": one_set, "data": {name: plain["data"][name] for name in ("train", "inputs")}}
