"""Losses, distances, miners, reducers and regularizers by name.

A loss is an entry point of the group ``vl_plugins.losses``, in this distribution as in others::

    [project.entry-points."vl_plugins.losses"]
    my_loss = "my_package.losses:MyLoss"

``MyLoss`` is a pytorch-metric-learning loss; ``vl-plugins losses`` also prints its ``equation`` and ``paper``.
:func:`create_loss` and ``--loss`` also take ``my_package.losses:MyLoss`` itself. Files do not, because they may be
untrusted: see :func:`check_registered`.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from numbers import Real
from typing import Any

from vl_plugins.errors import UserError, number, one_of, unknown_name, user_errors

__all__ = [
    "check_options",
    "check_registered",
    "create",
    "create_loss",
    "find",
    "format_options",
    "list_losses",
    "losses_with_scale",
    "names",
    "options_of",
    "scale_advice",
    "wrong_option",
]

GROUP = "vl_plugins.losses"

# By name: importing the packages, pytorch-metric-learning's and ours, takes seconds. Ours replace those of one name.
PACKAGES = {
    "distance": ("pytorch_metric_learning.distances", "vl_plugins.distances"),
    "loss": ("pytorch_metric_learning.losses", "vl_plugins.losses"),
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
# What some call a loss of this package.
OTHER_NAMES = dict.fromkeys(["clip", "cliploss", "clip_loss", "contrastive", "info_nce", "infonce"], "vlc")
OTHER_NAMES |= {"sigliploss": "siglip", "dive": "smooth_chamfer"}
OTHER_NAMES |= {"vse": "triplet_hn", "vse++": "triplet_hn", "vse0": "triplet_sh"}
KIND_OF_OPTION = {kind: kind for kind in PACKAGES}
KIND_OF_OPTION |= {"embedding_regularizer": "regularizer", "weight_regularizer": "regularizer"}


def list_losses() -> tuple[str, ...]:
    """Return the names of all losses, sorted, also of those that cannot be loaded."""
    return tuple(sorted(entry_points(group=GROUP).names))


def create_loss(name: Any, /, gather_across_devices: Any = False, **options: Any) -> Any:
    """Return a new loss, a pytorch-metric-learning ``BaseMetricLossFunction``.

    Args:
        name, options: see :func:`create`; or ``name`` is ``package.module:Class``, which is imported.
        gather_across_devices: True, or a ``ProcessGroup``: the loss is that of the batches of all processes. A loss of
            pytorch-metric-learning becomes a :class:`~vl_plugins.distributed.DistributedLoss`.

    >>> create_loss("unified", margin=0.1, reducer="AvgNonZeroReducer").reducer
    AvgNonZeroReducer()
    """
    loss = _create("loss", name, options, imports=True)
    if not gather_across_devices:
        return loss
    from vl_plugins.distributed import gathering  # imports torch, which takes seconds

    return gathering(loss, gather_across_devices)


def create(kind: str, specification: Any, /, **options: Any) -> Any:
    """Return a new component, of this package or of pytorch-metric-learning.

    Args:
        kind: ``"distance"``, ``"loss"``, ``"miner"``, ``"reducer"`` or ``"regularizer"``.
        specification: one of :func:`names`; or a mapping of ``name`` and options, as in a YAML file; or a class; or a
            component, which is returned as it is.
        options: more of them. Options that are components are specifications too.

    Raises:
        UserError: an unknown kind, name or option, or a component that cannot be loaded.
        ValueError: an option out of its range.

    >>> create("loss", {"name": "unified", "scale": 60, "distance": {"name": "LpDistance", "p": 1}}).distance.p
    1
    """
    return _create(kind, specification, options)


def _create(kind: str, specification: Any, options: dict[str, Any], imports: bool = False) -> Any:
    name = specification
    if isinstance(specification, Mapping):
        name = specification.get("name")
        options = dict(**{option: value for option, value in specification.items() if option != "name"}, **options)
    elif callable(specification) and not inspect.isclass(specification) and not options:
        return specification
    if inspect.isclass(specification):
        name, factory = specification.__name__, specification
    elif isinstance(name, str):
        factory = find(kind, name, imports)
    else:
        raise UserError(f"{kind} must be a name or a mapping with name: NAME, got {specification!r}")
    known = options_of(factory)
    if kind == "loss" and "scale" in known and options.get("scale") == "learned":
        raise UserError(
            "scale=learned is an option of the launcher; in Python, call the loss with scale=model.logit_scale.exp()"
        )
    try:
        components = {
            option: create(KIND_OF_OPTION[option], value)
            for option, value in options.items()
            if option in KIND_OF_OPTION and value is not None
        }
        return _constructed(factory, options | components)
    except (AssertionError, TypeError) as error:  # how pytorch-metric-learning rejects most arguments
        reason = wrong_option(factory, options, known, kind) or str(error) or type(error).__name__
        raise UserError(f"{kind} {name!r}: {reason}") from error


def _constructed(factory: Any, options: dict[str, Any]) -> Any:
    """Return a component; a loss that has one and ``warmup_steps`` begins with a warm-up."""
    if not hasattr(factory, "warmed_up"):
        return factory(**options)
    own = {name: value for name, value in options.items() if name != "warmup_steps"}
    steps = number("warmup_steps", options.get("warmup_steps", 0), least=0, kind=int)
    return factory.warmed_up(steps, **own) if steps else factory(**own)


def check_options(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for an unknown component, or for an option that it does not have, before it is made.

    Options of one that hands them on to another component, as ``smooth_chamfer`` to its base, are not checked.
    """
    factory = find(kind, name, imports=True)
    if "base" in options_of(factory):
        return
    reason = wrong_option(factory, options, factory, kind)
    if reason is not None:
        raise UserError(f"{kind} {name!r}: {reason}")


def wrong_option(factory: Any, options: Mapping[str, Any], valid_options: Any, kind: str = "loss") -> str | None:
    """Return what is wrong with the first option that a class does not have; None if it has them all.

    Args:
        factory: the class whose options are checked.
        options: that are given.
        valid_options: those for the message, or a class that has them.
        kind: of the component.
    """
    own = options_of(factory)
    if inspect.isclass(valid_options):
        valid_options = options_of(valid_options)
    for option, value in options.items():
        if option in own:
            continue
        if kind == "loss" and option == "warmup_steps":
            return (
                "it has no warmup_steps: Warmup(first, then, steps), or create_loss(..., warmup_steps=...) of "
                "triplet_hn and goal, begins with another loss"
            )
        advice = scale_advice(option, value, valid_options) if kind == "loss" else None
        return advice or str(unknown_name("option", option, valid_options))
    return None


def scale_advice(option: str, value: Any, options: Mapping[str, Any]) -> str | None:
    """Return what to do instead of giving a loss a temperature, or a scale that it does not have.

    Args:
        option, value: that the loss does not have.
        options: those that it has.

    Returns:
        A part of an error message, or None for another option.

    >>> scale_advice("temperature", 0.07, {"scale": 50.0})
    'unknown option temperature; scale = 1 / temperature = 14.3'
    """
    if option == "scale" and "scale" not in options:
        return f"it has no scale; losses that have one: {', '.join(losses_with_scale())}"
    if option == "temperature" and "scale" in options and "temperature" not in options:
        temperature = float(value) if isinstance(value, Real) else 0.0
        scale = f" = {1 / temperature:.3g}" if temperature > 0 else ""
        return f"unknown option temperature; scale = 1 / temperature{scale}"
    return None


def losses_with_scale() -> tuple[str, ...]:
    """Return the names of the registered losses that have an option ``scale``."""
    with_scale = []
    for name in list_losses():
        try:
            loss = find("loss", name)
        except UserError:  # of another distribution, which cannot be loaded
            continue
        if "scale" in options_of(loss):
            with_scale.append(name)
    return tuple(with_scale)


def find(kind: str, name: str, imports: bool = False) -> Callable[..., Any]:
    """Return the class of a component; with ``imports``, a loss may be ``package.module:Class``, which is imported.

    Raises:
        UserError: an unknown kind or name, or a class that cannot be loaded.
    """
    one_of("kind of component", kind, PACKAGES)
    providers: Any = entry_points(group=GROUP, name=name) if kind == "loss" else ()
    if len(providers) > 1:
        claimants = " and ".join(sorted(f"{provider.dist.name} ({provider.value})" for provider in providers))
        raise UserError(f"loss {name!r} is provided by {claimants}; uninstall all but one of them")
    if imports and ":" in name:
        providers = [EntryPoint(name, name, GROUP)]
    for provider in providers:
        with user_errors(f"loss {name!r}", ImportError, AttributeError):
            return provider.load()
    known = names(kind)
    if kind == "loss" and name not in known and inspect.isclass(_of_losses(name)):
        raise UserError(f"loss {name!r} is not made by name: import it from vl_plugins.losses")
    if kind == "loss" and name not in known and name.casefold() in OTHER_NAMES:
        raise UserError(f"unknown loss {name!r}; here it is called {OTHER_NAMES[name.casefold()]!r}")
    return _classes(kind)[one_of(kind, name, known)]


def _of_losses(name: str) -> Any:
    return getattr(importlib.import_module("vl_plugins.losses"), name, None)


def check_registered(loss: Any) -> None:
    """Raise ``UserError`` if the loss that a file names, as for :func:`create`, is ``package.module:Class``.

    The file could come from anyone, and importing a module runs its code.
    """
    name = loss.get("name") if isinstance(loss, Mapping) else loss
    if isinstance(name, str) and ":" in name:
        raise UserError(f"loss {name!r}: files name registered losses only; give a class by --loss or in Python")


def names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind of component, sorted."""
    return tuple(sorted([*_classes(kind), *(list_losses() if kind == "loss" else ())]))


def options_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword options of a class or function with their defaults, ``inspect.Parameter.empty`` for none.

    The ``**kwargs`` of a constructor stand for the options of the next base class.
    """
    options: dict[str, Any] = {}
    bases: Any = factory.__mro__[:-1] if inspect.isclass(factory) else ()
    for owner in [base for base in bases if "__init__" in vars(base)] or [factory]:
        parameters = inspect.signature(owner).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for parameter in named:
            options.setdefault(parameter.name, parameter.default)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    if hasattr(factory, "warmed_up"):
        options["warmup_steps"] = 0
    return options


def format_options(options: Mapping[str, Any]) -> str:
    """Return options as they are passed; without a default, the name alone."""
    required = inspect.Parameter.empty
    return ", ".join(name if value is required else f"{name}={value!r}" for name, value in options.items())


def _classes(kind: str) -> dict[str, type]:
    host, *ours = map(importlib.import_module, PACKAGES[kind])
    bases = tuple(value for name, value in vars(host).items() if name.startswith("Base"))
    helpers = ("Base", "GenericPairLoss", "PairLoss", "ScaledLoss", "Set", "Warmup")
    classes = {}
    for package in (host, *ours):
        for name, value in vars(package).items():
            if inspect.isclass(value) and issubclass(value, bases) and not name.startswith(helpers):
                classes[name] = value
    for short, name in SHORT_NAMES.items():
        if name in classes:
            classes[short] = classes[name]
    return classes
