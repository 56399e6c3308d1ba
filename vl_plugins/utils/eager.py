"""Functions that ``torch.compile`` runs as they are, without tracing them."""

from collections.abc import Callable

import torch

# torch.compile traces either; torch 2.2 has only the second.
is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def eager() -> Callable:
    """Return ``call(function, *args, **kwargs)``, into which ``torch.compile`` does not look.

    Tracing would unroll loops over tiles. A decorator would itself be traced, again for each function that it is given.
    """
    if is_compiling():
        from vl_plugins.utils.untraced import call  # imports the compiler, which takes seconds

        return call
    return lambda function, *args, **kwargs: function(*args, **kwargs)
