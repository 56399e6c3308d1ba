"""Losses, distances, miners, reducers and regularizers by name, and the options of their constructors.

A loss is an entry point of the group ``vl_plugins.losses``, in this distribution as in others::

    [project.entry-points."vl_plugins.losses"]
    my_loss = "my_package.losses:MyLoss"

``MyLoss`` is a pytorch-metric-learning loss; ``vl-plugins losses`` also prints its ``equation`` and ``paper``.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vl_plugins.utils.errors import UserError, did_you_mean, unknown_name

REQUIRED = inspect.Parameter.empty  # the default of an option that has none

# By name: importing the packages, pytorch-metric-learning's and ours, takes seconds.
PACKAGES = {
    "distance": ("pytorch_metric_learning.distances", "vl_plugins.distances"),
    "loss": ("pytorch_metric_learning.losses", "vl_plugins.losses", "vl_plugins.losses.wrappers"),
    "miner": ("pytorch_metric_learning.miners", "vl_plugins.miners"),
    "reducer": ("pytorch_metric_learning.reducers",),
    "regularizer": ("pytorch_metric_learning.regularizers", "vl_plugins.regularizers"),
}
SHORT_NAMES = {
    "chamfer": "ChamferSimilarity",
    "match_probability": "MatchProbability",
    "mil": "MILSimilarity",
    "smooth_chamfer": "SmoothChamferSimilarity",
}
KIND_OF_OPTION = {"distance": "distance", "embedding_regularizer": "regularizer", "reducer": "reducer"}


def list_losses() -> tuple[str, ...]:
    """Return the names of all losses, sorted, also of those that cannot be loaded."""
    return tuple(sorted(entry_points(group="vl_plugins.losses").names))


def find_loss(name: str) -> EntryPoint:
    """Return the entry point of a loss; raise ``UserError`` unless exactly one distribution has it."""
    providers = sorted(entry_points(group="vl_plugins.losses", name=name), key=lambda provider: provider.dist.name)  # type: ignore[union-attr]
    if not providers:
        raise unknown_name("loss", name, list_losses())
    if len(providers) > 1:
        claimants = " and ".join(f"{provider.dist.name} ({provider.value})" for provider in providers)  # type: ignore[union-attr]
        raise UserError(f"loss {name!r} is provided by {claimants}; uninstall all but one of them")
    return providers[0]


def load_loss(name: str) -> Callable:
    """Return the class of a loss; raise ``UserError`` as :func:`find_loss`, or if the class cannot be imported."""
    provider = find_loss(name)
    try:
        loss = provider.load()
        if not callable(loss):
            raise TypeError(f"a {type(loss).__name__} is not a class")
    except Exception as error:  # anything may go wrong in another distribution's module
        raise UserError(
            f"loss {name!r} of the installed distribution {provider.dist.name} cannot be loaded from "  # type: ignore[union-attr]
            f"{provider.value!r}: {type(error).__name__}: {error}"
        ) from error
    return loss


def loss_options(name: str, /, **given: Any) -> dict[str, Any]:
    """Return the options of a loss with their defaults, see :func:`constructor_options`.

    >>> "scale" in loss_options("smooth_chamfer"), "scale" in loss_options("smooth_chamfer", base="vlc")
    (False, True)
    """
    return constructor_options(load_loss(name), given)


def create_loss(name: str, /, **options: Any) -> Any:
    """Return a new loss, a pytorch-metric-learning ``BaseMetricLossFunction``.

    Args:
        name: one of :func:`list_losses`.
        options: see :func:`loss_options`; a distance, reducer or embedding regularizer may be a class name.

    Raises:
        UserError: an unknown name or option, or a loss that cannot be loaded.
        ValueError: an option out of its range.

    >>> create_loss("unified", margin=0.1, reducer="AvgNonZeroReducer").reducer
    AvgNonZeroReducer()
    """
    return construct("loss", name, load_loss(name), resolve_components(options))


def create_component(kind: str, name: str, /, **options: Any) -> Any:
    """Return a new distance, loss, miner, reducer or regularizer of pytorch-metric-learning or of this package.

    Args:
        kind: ``"distance"``, ``"loss"``, ``"miner"``, ``"reducer"`` or ``"regularizer"``.
        name: one of ``list_components(kind)``; for a set similarity also its short name, such as ``smooth_chamfer``.
        options: as in :func:`create_loss`.

    Raises:
        UserError: an unknown kind, name or option.
        ValueError: an option out of its range.

    >>> create_component("miner", "BatchHardMiner", distance="CosineSimilarity").distance
    CosineSimilarity()
    """
    classes = _component_classes(kind)
    known = classes | {short: classes[name] for short, name in SHORT_NAMES.items() if name in classes}
    if name not in known:
        raise unknown_name(kind, name, known)
    options = resolve_components(options)
    component = construct(kind, name, known[name], options)
    defaults = constructor_options(known[name], options)
    for option, value in options.items():  # pytorch-metric-learning would fail at the first batch
        expects_number = isinstance(defaults[option], (int, float)) or option in ("high", "low")
        if expects_number and isinstance(value, (str, list, tuple, dict)):
            raise UserError(f"{option} of {kind} {name!r} must be a number, got {value!r}")
    return component


def list_components(kind: str) -> tuple[str, ...]:
    """Return the class names of a kind of component, sorted."""
    return tuple(sorted(_component_classes(kind)))


def _component_classes(kind: str) -> dict[str, type]:
    if kind not in PACKAGES:
        raise unknown_name("kind of component", kind, PACKAGES)
    host, *ours = map(importlib.import_module, PACKAGES[kind])
    # MultipleLosses is derived from none.
    base_classes = tuple(value for name, value in vars(host).items() if name.startswith(("Base", "MultipleLosses")))
    return {
        name: value
        for package in (host, *ours)  # ours replace those of the same name
        for name, value in vars(package).items()
        if inspect.isclass(value) and issubclass(value, base_classes)
        if not name.startswith("Base") and name not in ("GenericPairLoss", "PairLoss")
    }


def resolve_components(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with a new component in place of each class name."""
    named = [option for option in KIND_OF_OPTION if isinstance(options.get(option), str)]
    return {**options, **{option: create_component(KIND_OF_OPTION[option], options[option]) for option in named}}


def constructor_options(factory: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keyword options of a class or function with their defaults, :data:`REQUIRED` for those without one.

    The ``**kwargs`` of a constructor stand for the options of the next base class. A class that passes some of them to
    something else adds these by a class method ``forwarded_options(given)``; they may depend on the ``given`` options.

    >>> class Base:
    ...     def __init__(self, reducer=None): ...
    >>> class Loss(Base):
    ...     def __init__(self, margin=0.2, **kwargs): ...
    >>> constructor_options(Loss)
    {'margin': 0.2, 'reducer': None}
    """
    options: dict[str, Any] = {}
    bases = factory.__mro__[:-1] if inspect.isclass(factory) else ()
    for owner in [base for base in bases if "__init__" in vars(base)] or [factory]:
        parameters = inspect.signature(owner).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                options.setdefault(parameter.name, parameter.default)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
        if bases and "forwarded_options" in vars(owner):
            for name, default in factory.forwarded_options(given or {}).items():
                options.setdefault(name, default)
    return options


def construct(kind: str, name: str, factory: Callable, options: Mapping[str, Any]) -> Any:
    """Return ``factory(**options)``; errors name the ``kind`` and ``name`` that the user gave.

    Raises:
        UserError: an unknown option, or arguments that the constructor rejects.
        ValueError: from the constructor.
    """
    known = constructor_options(factory, options)
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise UserError(f"unknown option {option!r} of {kind} {name!r}{hint}; options: {format_options(known)}")
    try:
        return factory(**options)
    except (AssertionError, TypeError) as error:  # how pytorch-metric-learning rejects most arguments
        reason = str(error) or type(error).__name__
        raise UserError(f"invalid arguments for {kind} {name!r}: {reason}; options: {format_options(known)}") from error


def format_options(options: Mapping[str, Any]) -> str:
    """Return options as they are passed; without a default, the name alone.

    >>> format_options({"weights": REQUIRED, "margin": 0.2})
    'weights, margin=0.2'
    """
    return ", ".join(name if value is REQUIRED else f"{name}={value!r}" for name, value in options.items())
