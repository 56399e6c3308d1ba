"""The options of a constructor: which there are, and calling it with them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vl_plugins.utils.errors import UserError, did_you_mean

__all__ = ["REQUIRED", "construct", "constructor_options", "format_options", "own_and_forwarded_options"]

REQUIRED = inspect.Parameter.empty
"""The default of an option that has none."""


def constructor_options(factory: Callable, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keyword options of a class or function with their defaults, :data:`REQUIRED` for those without one.

    An ``__init__`` that takes ``**kwargs`` hands them to the next one of the class's bases, so those options are
    listed too, as far as the chain goes; also one that the class sets itself, which nothing in a signature shows.

    A class that hands them to something else instead, such as another loss that it holds, says so with a class method
    ``forwarded_options(given)``. It returns the options of that, which may depend on the ``given`` ones.

    >>> class Base:
    ...     def __init__(self, reducer=None): ...
    >>> class Loss(Base):
    ...     def __init__(self, margin=0.2, **kwargs): ...
    >>> constructor_options(Loss)
    {'margin': 0.2, 'reducer': None}
    """
    own, forwarded = own_and_forwarded_options(factory, given)
    return own | forwarded


def own_and_forwarded_options(
    factory: Callable, given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what :func:`constructor_options` does in two parts, the second from ``forwarded_options``."""
    options: dict[str, Any] = {}
    for owner, function in _constructor_chain(factory):
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name != "self":
                options.setdefault(parameter.name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
        if owner is not None and "forwarded_options" in vars(owner):
            forwarded = factory.forwarded_options(given or {})
            options.update({name: default for name, default in forwarded.items() if name not in options})
    return options, {}


def _constructor_chain(factory: Callable) -> list[tuple[type | None, Callable]]:
    """Return each constructor with its class, in the order in which they call each other."""
    if not inspect.isclass(factory):
        return [(None, factory)]
    return [(base, vars(base)["__init__"]) for base in factory.__mro__[:-1] if "__init__" in vars(base)]


def construct(kind: str, name: str, factory: Callable, options: Mapping[str, Any]) -> Any:
    """Call ``factory`` with ``options``; errors speak of the ``kind`` and ``name`` that the user gave.

    Raises:
        UserError: an unknown option, or options that the constructor refuses.
        ValueError: from the constructor, as it is.
    """
    known = constructor_options(factory, options)
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise UserError(f"unknown option {option!r} of {kind} {name!r}{hint}; options: {format_options(known)}")
    try:
        return factory(**options)
    except (AssertionError, TypeError) as error:  # how most constructors of PML refuse an argument
        raise UserError(
            f"{kind} {name!r} refuses {format_options(options) or 'to be made without options'}: "
            f"{str(error) or type(error).__name__}; options: {format_options(known)}"
        ) from error


def format_options(options: Mapping[str, Any]) -> str:
    """Write options the way they are passed; one without a default by its name alone.

    >>> format_options({"weights": REQUIRED, "margin": 0.2})
    'weights, margin=0.2'
    """
    return ", ".join(name if value is REQUIRED else f"{name}={value!r}" for name, value in options.items())
