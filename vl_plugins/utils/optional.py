"""Optional dependencies, imported where they are used."""

import importlib
from types import ModuleType

from vl_plugins.utils.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise :class:`MissingExtraError` that names the ``extra`` to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # A module that is installed but broken is not missing.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        hint = f"pip install 'vl_plugins[{extra}]'"
        raise MissingExtraError(f"{module} is not installed; install it with: {hint}") from error
