"""Loss and miner of a configuration."""

from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import nn

from vl_plugins.distances.sets import SetDistance
from vl_plugins.integrations.pytorch_metric_learning.builders import (
    build_component,
    build_loss,
    naming,
    split_specification,
)
from vl_plugins.integrations.pytorch_metric_learning.config import Config
from vl_plugins.utils.errors import UserError

__all__ = ["loss_from_config", "miner_from_config"]


def loss_from_config(config: Config) -> nn.Module:
    """Return the loss of a configuration with its reducer and distance. Sets are compared by smooth-Chamfer by default.

    Raises:
        UserError: an unknown name or option, an option out of its range, or a distance that does not compare sets where
            the model makes them.
    """
    options = {}
    for kind in ("reducer", "distance"):
        if getattr(config, kind) is not None:
            with naming(kind):
                options[kind] = build_component(kind, getattr(config, kind))
    with naming("loss"):
        loss = build_loss(config.loss, **options)
        if config.head is None:
            return loss
        named = "distance" in {**options, **split_specification("loss", config.loss)[1]}
        if not named and isinstance(loss, BaseMetricLossFunction) and not _compares_sets(loss):
            loss = build_loss(config.loss, **options, distance=build_component("distance", "smooth_chamfer"))
    if not _compares_sets(loss):
        raise UserError(
            f"head {config.head!r} makes sets, which {type(loss).__name__} does not compare; "
            "give distance smooth_chamfer, chamfer, mil or match_probability"
        )
    return loss


def miner_from_config(config: Config, loss: nn.Module) -> nn.Module | None:
    """Return the miner of a configuration, or None. By default it compares sets as the loss does."""
    if config.miner is None:
        return None
    _, own = split_specification("miner", config.miner)
    distance = {"distance": loss.distance} if config.head is not None and "distance" not in own else {}
    with naming("miner"):
        return build_component("miner", config.miner, **distance)


def _compares_sets(loss: nn.Module) -> bool:
    return isinstance(getattr(loss, "distance", None), SetDistance)
