"""Optional dependencies: imported where they are used, with an error that names the extra."""

import importlib
from types import ModuleType

from vl_plugins.utils.errors import MissingExtraError

__all__ = ["require"]


def require(module: str, extra: str) -> ModuleType:
    """Import ``module`` or raise :class:`MissingExtraError` that names the ``extra`` to install.

    >>> require("math", extra="data").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # A module that is installed but broken must not be reported as missing.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{module} is not installed; install it with: pip install 'vl_plugins[{extra}]'"
        ) from error
