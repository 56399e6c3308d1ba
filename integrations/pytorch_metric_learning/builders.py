"""Losses, miners, reducers and distances from plain data, as in a YAML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from vl_plugins.errors import UserError, unknown_name
from vl_plugins.registry import create_component, create_loss, list_components, list_losses

__all__ = ["Specification", "build_component", "build_loss", "build_miner", "build_reducer", "split_specification"]

Specification = str | Mapping[str, Any]
"""A name, or ``{"name": NAME, OPTION: VALUE, ...}``."""

# Options of losses, miners and reducers that are specifications themselves.
KIND_OF_OPTION = {
    "base": "loss",
    "distance": "distance",
    "embedding_regularizer": "regularizer",
    "loss": "loss",
    "miner": "miner",
    "reducer": "reducer",
    "weight_regularizer": "regularizer",
}
KIND_OF_OPTIONS = {"losses": "loss", "miners": "miner", "reducers": "reducer"}


def build_loss(specification: Specification, **options: Any) -> Any:
    """Return a new loss.

    Args:
        specification: one of :func:`vl_plugins.list_losses`, or the class name of a loss of pytorch-metric-learning or
            :mod:`vl_plugins.losses`; or a mapping of ``name`` and options. Options that are a loss, distance, reducer,
            miner or regularizer, such as ``losses`` of ``MultipleLosses``, are specifications too.
        options: more options, such as a ``reducer``, that are not in the specification.

    Raises:
        UserError: an unknown name or option, or options that do not fit.
        ValueError: an option out of its range.

    Example:
        ``build_loss({"name": "unified", "scale": 60, "distance": {"name": "LpDistance", "p": 1}})``
    """
    return build_component("loss", specification, **options)


def build_miner(specification: Specification, **options: Any) -> Any:
    """Return a new miner of pytorch-metric-learning or of :mod:`vl_plugins.miners`; see :func:`build_loss`."""
    return build_component("miner", specification, **options)


def build_reducer(specification: Specification, **options: Any) -> Any:
    """Return a new reducer of pytorch-metric-learning; see :func:`build_loss`."""
    return build_component("reducer", specification, **options)


def build_component(kind: str, specification: Specification, **options: Any) -> Any:
    """Return a new component of a kind of :func:`vl_plugins.registry.create_component`; see :func:`build_loss`."""
    name, own = split_specification(kind, specification)
    twice = sorted(own.keys() & options.keys())
    if twice:
        raise UserError(f"{twice[0]} of {kind} {name!r} is given twice: among its options and as a {twice[0]}")
    own = {option: _resolve(option, value) for option, value in own.items()} | options
    if kind == "loss" and name in list_losses():
        return create_loss(name, **own)
    if kind == "loss" and name not in list_components("loss"):
        raise unknown_name("loss", name, [*list_losses(), *list_components("loss")])
    return create_component(kind, name, **own)


def split_specification(kind: str, specification: Specification) -> tuple[str, dict[str, Any]]:
    """Return name and options; raise ``UserError`` for what is neither a name nor a mapping with one."""
    if isinstance(specification, str):
        return specification, {}
    if not isinstance(specification, Mapping) or not isinstance(specification.get("name"), str):
        raise UserError(
            f"{kind} must be a name or a mapping such as {{name: NAME, option: value}}, got {specification!r}"
        )
    return specification["name"], {key: value for key, value in specification.items() if key != "name"}


def _resolve(option: str, value: Any) -> Any:
    kind = KIND_OF_OPTION.get(option)
    # `smooth_chamfer` resolves the name of its base, and takes the options of the base along with its own.
    if kind and (isinstance(value, Mapping) or (isinstance(value, str) and option != "base")):
        return build_component(kind, value)
    kind = KIND_OF_OPTIONS.get(option)
    if kind and isinstance(value, Mapping):
        return {key: build_component(kind, item) for key, item in value.items()}
    if kind and isinstance(value, Sequence) and not isinstance(value, str):
        return [build_component(kind, item) for item in value]
    return value
