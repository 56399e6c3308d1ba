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

__all__ = ["build_loss_of", "build_miner_of"]


def build_loss_of(config: Config) -> nn.Module:
    """Return the loss of a configuration, with its reducer and distance; of sets by smooth-Chamfer unless it says else.

    Raises:
        UserError: an unknown name or option, an option out of its range, a distance that does not compare sets where
            the model makes them, or a loss for embeddings of another width.
    """
    options = {}
    for kind in ("reducer", "distance"):
        if getattr(config, kind) is not None:
            with naming(kind):
                options[kind] = build_component(kind, getattr(config, kind))
    with naming("loss"):
        loss = build_loss(config.loss, **options)
        if config.head is None:
            _check_width(config)
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


def build_miner_of(config: Config, loss: nn.Module) -> nn.Module | None:
    """Return the miner of a configuration, or None; it compares sets as the loss does unless it says else."""
    if config.miner is None:
        return None
    _, own = split_specification("miner", config.miner)
    of_loss = {"distance": loss.distance} if config.head is not None and "distance" not in own else {}
    with naming("miner"):
        return build_component("miner", config.miner, **of_loss)


def _check_width(config: Config) -> None:
    _, own = split_specification("loss", config.loss)
    for option in ("embedding_size", "descriptors_dim"):
        if own.get(option, config.dim) != config.dim:
            raise UserError(f"loss: {option} is {own[option]!r}, but dim is {config.dim}: give the same")


def _compares_sets(loss: nn.Module) -> bool:
    return isinstance(getattr(loss, "distance", None), SetDistance)
