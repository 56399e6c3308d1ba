"""The loss and the miner that a configuration or command names."""

from collections.abc import Mapping
from typing import Any

from vl_plugins.distances import OrderSimilarity, SetDistance
from vl_plugins.registry import create, create_loss

__all__ = ["create_loss_and_miner", "create_miner", "takes_one_set"]


def create_loss_and_miner(
    loss: str | Mapping[str, Any], miner: str | Mapping[str, Any] | None = None, sets: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Return the loss and the miner of a configuration, the latter None if none is given.

    Args:
        loss: name, or a mapping of ``name`` and options, as for :func:`~vl_plugins.registry.create_loss`.
        miner: the same, as for :func:`~vl_plugins.registry.create`.
        sets: whether embeddings are sets. They are compared by smooth-Chamfer similarity if no ``distance`` is given,
            and the miner compares them as the loss does.
        options: ``reducer`` and ``distance`` of the loss; None for its own.

    Raises:
        UserError: an unknown name or option, or one that is given twice.
        ValueError: an option out of its range.
    """
    named: dict[str, Any] = {"name": loss} if isinstance(loss, str) else dict(loss)
    options = {name: value for name, value in options.items() if value is not None}
    created = create_loss(named, **options)
    if sets and not isinstance(created.distance, SetDistance) and "distance" not in named | options:
        created = create_loss(named, **options, distance="smooth_chamfer")
    return created, create_miner(miner, created, sets)


def create_miner(miner: str | Mapping[str, Any] | None, loss: Any, sets: bool = False) -> Any:
    """Return the miner of a configuration; of sets and of order embeddings, it compares as the loss does.

    See :func:`create_loss_and_miner`.
    """
    if miner is None:
        return None
    specification: Any = {"name": miner} if isinstance(miner, str) else miner
    if sets or isinstance(getattr(loss, "distance", None), OrderSimilarity):
        specification = {"distance": loss.distance, **specification}
    return create("miner", specification)


def takes_one_set(error: ValueError) -> bool:
    """Return whether a loss of pytorch-metric-learning raised an error because it was called with ``ref_emb``."""
    return "ref_emb is not supported" in str(error)
