"""Losses, miners, reducers and distances from plain data, as in a YAML file."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vl_plugins.registry import create_component, create_loss, list_components, list_losses
from vl_plugins.utils.errors import UserError, unknown_name

__all__ = [
    "Specification",
    "build_component",
    "build_loss",
    "build_miner",
    "build_reducer",
    "naming",
    "split_specification",
]

Specification = str | Mapping[str, Any]
"""A name, or ``{"name": NAME, OPTION: VALUE, ...}``."""

# What an option of a loss, miner or reducer is, where it is itself given by a specification.
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
        specification: the name of one of :func:`vl_plugins.list_losses`, those of installed packages included, or the
            class name of any loss of pytorch-metric-learning or of :mod:`vl_plugins.losses`; or a mapping of ``name``
            and options. Options that are themselves a loss, distance, reducer, miner or regularizer, such as ``loss``
            of ``CrossBatchMemory`` or ``losses`` of ``MultipleLosses``, are given by specifications.
        options: more options, such as a ``reducer``; one that the specification has too is an error.

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
    """Return a new loss, distance, miner, reducer or regularizer, whatever ``kind`` says; see :func:`build_loss`."""
    name, own = split_specification(kind, specification)
    twice = sorted(own.keys() & options.keys())
    if twice:
        raise UserError(f"{twice[0]} of {kind} {name!r} is given twice: among its options and by itself")
    own = {option: _resolve(option, value) for option, value in own.items()} | options
    if kind == "loss" and name in list_losses():
        return create_loss(name, **own)
    if kind == "loss" and name not in list_components("loss"):
        raise unknown_name("loss", name, [*list_losses(), *list_components("loss")])
    return create_component(kind, name, **own)


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Let a ``ValueError``, of an option out of its range, be one of the user's that names the part.

    Raises:
        UserError: for a ``ValueError``.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{part}: {error}") from error


def split_specification(kind: str, specification: Specification) -> tuple[str, dict[str, Any]]:
    """Return name and options.

    Raises:
        UserError: it is neither a name nor a mapping with one.
    """
    if isinstance(specification, str):
        return specification, {}
    if not isinstance(specification, Mapping) or not isinstance(specification.get("name"), str):
        raise UserError(
            f"{kind} must be a name or a mapping such as {{name: NAME, option: value}}, got {specification!r}"
        )
    return specification["name"], {key: value for key, value in specification.items() if key != "name"}


def _resolve(option: str, value: Any) -> Any:
    kind = KIND_OF_OPTION.get(option)
    # `smooth_chamfer` resolves the name of its base itself, and takes the options of the base along with its own.
    if kind and (isinstance(value, Mapping) or (isinstance(value, str) and option != "base")):
        return build_component(kind, value)
    kind = KIND_OF_OPTIONS.get(option)
    if kind and isinstance(value, Mapping):
        return {key: build_component(kind, item) for key, item in value.items()}
    if kind and isinstance(value, Sequence) and not isinstance(value, str):
        return [build_component(kind, item) for item in value]
    return value
