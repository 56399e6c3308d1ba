"""Losses, distances, reducers, miners and regularizers by class name: those of pytorch-metric-learning and ours."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from vl_plugins.options import construct, constructor_options
from vl_plugins.utils.errors import UserError, unknown_name

__all__ = ["create_component", "list_components", "resolve_components"]

BASE_CLASSES = {
    "distance": "BaseDistance",
    "loss": "BaseMetricLossFunction",
    "miner": "BaseMiner",
    "reducer": "BaseReducer",
    "regularizer": "BaseRegularizer",
}

# By name, so that this module imports neither torch nor pytorch-metric-learning.
OWN_PACKAGES = {
    "distance": ("vl_plugins.distances",),
    # The wrappers take the place of those of pytorch-metric-learning that they are derived from.
    "loss": ("vl_plugins.losses", "vl_plugins.losses.wrappers"),
    "miner": ("vl_plugins.miners",),
    "regularizer": ("vl_plugins.regularizers",),
}

# Containers and wrappers of losses, and what losses are made from; class names in the package of the kind.
MORE_CLASSES = {"loss": ("BaseLossWrapper", "MultipleLosses")}
ABSTRACT_CLASSES = {"loss": ("BaseLossWrapper", "GenericPairLoss", "PairLoss")}

# Names of similarities in papers and on command lines.
SHORT_NAMES = {
    "distance": {
        "chamfer": "ChamferSimilarity",
        "match_probability": "MatchProbability",
        "mil": "MILSimilarity",
        "smooth_chamfer": "SmoothChamferSimilarity",
    }
}

KIND_OF_OPTION = {
    "distance": "distance",
    "embedding_regularizer": "regularizer",
    "reducer": "reducer",
}

# Options of pytorch-metric-learning that are numbers or None, their default.
OPTIONAL_NUMBERS = ("high", "low")


def create_component(kind: str, name: str, /, **options: Any) -> Any:
    """Return a new component for pytorch-metric-learning, one of its own or one of ours.

    Args:
        kind: ``"distance"``, ``"loss"``, ``"miner"``, ``"reducer"`` or ``"regularizer"``.
        name: its class name, as in ``list_components(kind)``, or for a set similarity its short name: ``chamfer``,
            ``match_probability``, ``mil`` or ``smooth_chamfer``.
        options: what its constructor takes. A distance, reducer or embedding regularizer may be given by class name.

    Raises:
        UserError: an unknown kind, name or option, or an option of a wrong type.
        ValueError: an option out of its range.

    >>> create_component("miner", "BatchHardMiner", distance="CosineSimilarity").distance
    CosineSimilarity()
    """
    classes = _component_classes(kind)
    short_names = SHORT_NAMES.get(kind, {})
    name = short_names.get(name, name)
    if name not in classes:
        raise unknown_name(kind, name, [*short_names, *classes])
    options = resolve_components(options)
    component = construct(kind, name, classes[name], options)
    if classes[name].__module__.startswith("pytorch_metric_learning."):  # ours look at their options themselves
        _check_types(kind, name, classes[name], options)
    return component


def list_components(kind: str) -> tuple[str, ...]:
    """Return the class names of a kind, sorted.

    >>> list_components("distance")[:3]
    ('ChamferSimilarity', 'CosineSimilarity', 'DotProductSimilarity')
    """
    return tuple(sorted(_component_classes(kind)))


def resolve_components(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with every component that is given by its class name created."""
    return {
        option: create_component(KIND_OF_OPTION[option], value)
        if option in KIND_OF_OPTION and isinstance(value, str)
        else value
        for option, value in options.items()
    }


def _check_types(kind: str, name: str, component_class: type, options: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for plain data of a wrong type, on which pytorch-metric-learning would fail later."""
    defaults = constructor_options(component_class, options)
    for option, value in options.items():
        default = defaults[option]
        takes_none = option in OPTIONAL_NUMBERS
        if (takes_none or isinstance(default, (int, float))) and (
            isinstance(value, (str, list, tuple, dict)) or (value is None and not takes_none)
        ):
            wanted = "true or false" if isinstance(default, bool) else "a number"
            raise UserError(f"{option} of {kind} {name!r} must be {wanted}, got {value!r} (default: {default!r})")
        if option in KIND_OF_OPTION and isinstance(value, (int, float, list, tuple, dict)):
            raise UserError(
                f"{option} of {kind} {name!r} must be the name of a {KIND_OF_OPTION[option]}, got {value!r}"
            )


def _component_classes(kind: str) -> dict[str, type]:
    if kind not in BASE_CLASSES:
        raise unknown_name("kind of component", kind, BASE_CLASSES)
    host = importlib.import_module(f"pytorch_metric_learning.{_plural(kind)}")
    base_class = getattr(host, BASE_CLASSES[kind])
    classes = base_class, *(getattr(host, name) for name in MORE_CLASSES.get(kind, ()))
    excluded = BASE_CLASSES[kind], *ABSTRACT_CLASSES.get(kind, ())
    packages = [host, *map(importlib.import_module, OWN_PACKAGES.get(kind, ()))]
    return {
        name: value
        for package in packages
        for name, value in vars(package).items()
        if inspect.isclass(value) and issubclass(value, classes) and name not in excluded
    }


def _plural(kind: str) -> str:
    return "losses" if kind == "loss" else f"{kind}s"
