"""Loss, miner, optimizers and learning rate schedulers of a configuration."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from vl_plugins.errors import UserError, one_of, user_errors
from vl_plugins.integrations.cross_modal import check_compares_sets, compares_sets
from vl_plugins.integrations.pytorch_metric_learning.config import Config, StageConfig, split_specification
from vl_plugins.registry import create, create_loss, options_of

__all__ = ["build_optimizers", "build_schedulers", "loss_from_config", "miner_from_config"]

STEPS_BY = ("epoch", "iteration", "plateau")


def loss_from_config(config: Config) -> nn.Module:
    """Return the loss of a configuration with its reducer and distance; sets are compared by smooth-Chamfer by default.

    Raises:
        UserError: an unknown name or option, an option out of its range, or a distance that does not compare sets for a
            model that makes them.
    """
    options = {}
    for kind in ("reducer", "distance"):
        if getattr(config, kind) is not None:
            options[kind] = _create(kind, getattr(config, kind))
    loss = _create("loss", config.loss, **options)
    if config.head is None:
        return loss
    named = "distance" in {**options, **split_specification("loss", config.loss)[1]}
    if not named and isinstance(loss, BaseMetricLossFunction) and not compares_sets(loss):
        loss = _create("loss", config.loss, **options, distance="smooth_chamfer")
    check_compares_sets(loss)
    return loss


def miner_from_config(config: Config, loss: nn.Module) -> nn.Module | None:
    """Return the miner of a configuration, if it has one; by default it compares sets as the loss does."""
    if config.miner is None:
        return None
    _, own = split_specification("miner", config.miner)
    distance = {"distance": loss.distance} if config.head is not None and "distance" not in own else {}
    return _create("miner", config.miner, **distance)


def _create(kind: str, specification: Any, **options: Any) -> Any:
    split_specification(kind, specification)
    with user_errors(kind):
        return (create_loss if kind == "loss" else partial(create, kind))(specification, **options)


def build_optimizers(stage: StageConfig, parts: Mapping[str, nn.Module]) -> dict[str, Optimizer]:
    """Return ``<part>_optimizer`` for each part of the model, and each loss, that has parameters to train.

    Args:
        stage: names the class and its options; ``lr_scale`` multiplies the learning rate of a part.
        parts: models and losses by name.

    Raises:
        UserError: an unknown class or option, an invalid option, or a part with a factor of its learning
            rate that is not trained.
    """
    name, options = split_specification("optimizer", stage.optimizer)
    factory = _class("optimizer", name, torch.optim, Optimizer)
    optimizers = {}
    for part, module in parts.items():
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if trained and part not in stage.freeze:
            lr = options.get("lr", options_of(factory).get("lr"))
            scaled = {"lr": lr * stage.lr_scale.get(part, 1)} if isinstance(lr, float | int) else {}
            with user_errors(f"optimizer {name!r}"):
                optimizers[f"{part}_optimizer"] = factory(trained, **{**options, **scaled})
    idle = [part for part in stage.lr_scale if f"{part}_optimizer" not in optimizers and part not in stage.freeze]
    if idle:
        raise UserError(f"lr_scale has {idle[0]}, which has no parameters to train")
    if not optimizers:
        raise UserError("there is nothing to train: all parts of the model are frozen or have no parameters")
    return optimizers


def build_schedulers(stage: StageConfig, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return ``<part>_scheduler_by_<epoch, iteration or plateau>`` for each optimizer.

    ``ReduceLROnPlateau`` steps by plateau and, by default, expects RSUM to grow.

    Raises:
        UserError: an unknown class or option, or an invalid option.
    """
    if stage.lr_scheduler is None:
        return {}
    name, options = split_specification("lr_scheduler", stage.lr_scheduler)
    factory = _class("lr_scheduler", name, lr_scheduler, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau))
    is_plateau = factory is lr_scheduler.ReduceLROnPlateau
    by = one_of("value of lr_scheduler.by", options.pop("by", "plateau" if is_plateau else "epoch"), STEPS_BY)
    if is_plateau:
        options = {"mode": "max", **options}
    with user_errors(f"lr_scheduler {name!r}"):
        return {
            f"{key.removesuffix('_optimizer')}_scheduler_by_{by}": factory(optimizer, **options)
            for key, optimizer in optimizers.items()
        }


def _class(kind: str, name: str, module: Any, base: type | tuple[type, ...]) -> type:
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and not key.startswith("_")
    }
    return classes[one_of(kind, name, classes)]
