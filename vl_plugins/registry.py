"""Losses by name: ours, and those of other installed packages.

Another distribution adds a loss with an entry point of the group ``vl_plugins.losses``::

    [project.entry-points."vl_plugins.losses"]
    my_loss = "my_package.losses:MyLoss"

``MyLoss`` is a pytorch-metric-learning loss. Its options are read from its constructor, see
:func:`vl_plugins.options.constructor_options`; what ``vl-plugins losses`` prints, from the attributes ``equation`` and
``paper`` and its docstring.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from vl_plugins.components import resolve_components
from vl_plugins.options import construct, constructor_options
from vl_plugins.utils.errors import UserError, unknown_name

__all__ = ["create_loss", "list_losses", "load_loss", "loss_options"]

GROUP = "vl_plugins.losses"
OWN_DISTRIBUTION = "vl_plugins"

# As strings, so that asking for names imports neither torch nor pytorch-metric-learning.
OWN_LOSSES = MappingProxyType(
    {
        "goal": "vl_plugins.losses.goal:GOALLoss",
        "smooth_chamfer": "vl_plugins.losses.smooth_chamfer:SmoothChamferLoss",
        "triplet_hn": "vl_plugins.losses.triplet_hn:TripletHNLoss",
        "triplet_sh": "vl_plugins.losses.triplet_sh:TripletSHLoss",
        "unified": "vl_plugins.losses.unified:UnifiedLoss",
        "vlc": "vl_plugins.losses.vlc:VLCLoss",
    }
)


def create_loss(name: str, /, **options: Any) -> Any:
    """Return a new loss, a pytorch-metric-learning ``BaseMetricLossFunction``.

    Args:
        name: one of :func:`list_losses`.
        options: those of the loss, see :func:`loss_options`. A ``distance``, ``reducer`` or ``embedding_regularizer``
            may be given by its class name.

    Raises:
        UserError: an unknown name or option, or a loss of another package that cannot be used.
        ValueError: an option out of its range.

    >>> create_loss("unified", margin=0.1, reducer="AvgNonZeroReducer").reducer
    AvgNonZeroReducer()
    """
    return construct("loss", name, load_loss(name), resolve_components(options))


def list_losses() -> tuple[str, ...]:
    """Return the names of all losses, sorted; a name is listed even if using it is an error.

    >>> "unified" in list_losses()
    True
    """
    return tuple(sorted(_providers()))


def loss_options(name: str, /, **given: Any) -> Mapping[str, Any]:
    """Return the options of a loss with their defaults, :data:`vl_plugins.options.REQUIRED` for those without one.

    Args:
        name: one of :func:`list_losses`.
        given: options that decide which others there are, such as ``base`` of ``smooth_chamfer``. Others have no
            effect.

    Raises:
        UserError: an unknown name, or a loss of another package that cannot be used.

    >>> loss_options("vlc")["scale"]
    50.0
    >>> "scale" in loss_options("smooth_chamfer"), "scale" in loss_options("smooth_chamfer", base="vlc")
    (False, True)
    """
    return MappingProxyType(constructor_options(load_loss(name), given))


def load_loss(name: str) -> Callable:
    """Import and return the class behind a name.

    Raises:
        UserError: the name is unknown, or several distributions claim it, or the one that does is broken.
    """
    providers = _providers()
    if name not in providers:
        raise unknown_name("loss", name, providers)
    if len(providers[name]) > 1:
        claimants = " and ".join(f"{_distribution(provider)} ({provider.value})" for provider in providers[name])
        raise UserError(f"loss {name!r} is provided by {claimants}; uninstall all but one of them")
    (provider,) = providers[name]
    if provider.dist is None:
        return provider.load()
    try:
        loss = provider.load()
    except Exception as error:  # whatever goes wrong while another distribution's module runs
        raise _broken(provider, f"{type(error).__name__}: {error}") from error
    if not callable(loss):
        raise _broken(provider, f"a {type(loss).__name__} is not a class")
    return loss


def _providers() -> dict[str, list[EntryPoint]]:
    providers = defaultdict(list)
    for name, value in OWN_LOSSES.items():
        providers[name].append(EntryPoint(name, value, GROUP))
    for entry_point in entry_points(group=GROUP):
        providers[entry_point.name].append(entry_point)
    return dict(providers)


def _distribution(provider: EntryPoint) -> str:
    return OWN_DISTRIBUTION if provider.dist is None else provider.dist.name


def _broken(provider: EntryPoint, reason: str) -> UserError:
    return UserError(
        f"loss {provider.name!r} of the installed distribution {_distribution(provider)} "
        f"cannot be loaded from {provider.value!r}: {reason}"
    )
