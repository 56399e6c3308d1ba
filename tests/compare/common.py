"""What the case modules share: names of both versions, and the file of arrays.

A case module is a script, ``PYTHON tests/compare/AREA.py OUT.npz``::

    from common import Cases, get, run

    def cases(found: Cases, arguments):
        @found.case("unified labels/defaults")
        def compute():
            return {"value": get("create_loss")("unified")(...)}

    if __name__ == "__main__":
        run(cases)

A key of the file is ``group/case/quantity``. Quantities named ``grad...`` are gradients, all others values. A group
named ``gone ...`` has features that the next version drops: its cases are compared where both versions have them.
"""

import argparse
import hashlib
import importlib
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

# Last, because modules here have names of installed packages, such as open_clip.
HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE] + [HERE]

# Where to find a thing, in the order of preference: the first name that exists.
NAMES = {
    "DistributedLoss": ("vl_plugins.distributed:DistributedLoss", "vl_plugins.losses.wrappers:DistributedLossWrapper"),
    "EmbeddingSimilarities": ("vl_plugins.retrieval:EmbeddingSimilarities",),
    "MeanSimilarities": ("vl_plugins.retrieval:MeanSimilarities",),
    "Polynomial": ("vl_plugins.losses:Polynomial", "vl_plugins.functional:Polynomial"),
    "TowerFeatures": ("vl_plugins.modules:TowerFeatures",),
    "blocks": ("vl_plugins.negatives", "vl_plugins.kernels.comparison"),
    "circular_variance": ("vl_plugins.regularizers:circular_variance", "vl_plugins.functional:circular_variance"),
    "create_component": ("vl_plugins.registry:create", "vl_plugins.registry:create_component"),
    "create_loss": ("vl_plugins:create_loss",),
    "distances": ("vl_plugins.distances",),
    "list_losses": ("vl_plugins:list_losses", "vl_plugins.registry:list_losses"),
    "miners": ("vl_plugins.miners",),
    "modules": ("vl_plugins.modules",),
    "regularizers": ("vl_plugins.regularizers",),
    "retrieval": ("vl_plugins.retrieval",),
    "soft_margin": ("vl_plugins.losses:soft_margin", "vl_plugins.functional:soft_margin"),
    "wrappers": ("vl_plugins.losses.wrappers", "vl_plugins.losses"),
}
# Names of attributes, likewise.
ATTRIBUTES = {
    "relevant": ("relevant", "right_answers"),
}


@cache
def get(name: str) -> Any:
    """Return what a name of ``NAMES`` stands for in this version; raise ``LookupError`` if it has no such thing."""
    for target in NAMES[name]:
        module, _, attribute = target.partition(":")
        try:
            return reduce(getattr, filter(None, [attribute]), importlib.import_module(module))
        except (ImportError, AttributeError):
            pass
    raise LookupError(f"this version has no {name}")


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute by any of its names."""
    return next(getattr(owner, found) for found in ATTRIBUTES.get(name, (name,)) if hasattr(owner, found))


class Cases(dict):
    """The arrays of all cases."""

    def add(self, case: str, **quantities: Any) -> None:
        """Add the quantities of a case: numbers, arrays, tensors and text; bytes as their hash; None is left out."""
        for name, value in quantities.items():
            if value is None:
                continue
            if isinstance(value, bytes):
                value = hashlib.sha256(value).hexdigest()
            if isinstance(value, str):
                value = np.frombuffer(value.encode(), dtype=np.uint8)
            if hasattr(value, "detach"):
                value = value.detach().cpu().numpy()
            key = f"{case}/{name}"
            if key in self:
                raise ValueError(f"two cases {key}")
            self[key] = np.array(value)

    def case(self, name: str) -> Callable[[Callable[[], dict[str, Any]]], None]:
        """Return a decorator that calls a function at once and adds what it returns, or the type of its error."""

        def add(compute: Callable[[], dict[str, Any]]) -> None:
            try:
                quantities = compute()
            except Exception as error:
                quantities = {} if name.startswith("gone") else {"error": type(error).__name__}
            self.add(name, **quantities)

        return add


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the numbers and texts of a JSON value by their paths, such as ``results.0.name``."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in items for name, leaf in flatten(part, f"{prefix}{key}.").items()}
    return {} if value is None else {prefix.removesuffix(".").replace("/", ":"): value}


def vl_plugins(*arguments: Any) -> tuple[int, str]:
    """Run the command ``vl-plugins``; return its exit status and standard output."""
    command = next(iter(entry_points(group="console_scripts", name="vl-plugins")))
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()):
        try:
            status = command.load()([str(argument) for argument in arguments])
        except SystemExit as stop:  # of argparse
            status = stop.code
    return int(status or 0), output.getvalue()


def run(cases: Callable[[Cases, argparse.Namespace], None]) -> None:
    """Write the arrays of a case module's cases to the file that its command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--batches", help="file of real batches")
    arguments = parser.parse_args()
    found = Cases()
    cases(found, arguments)
    np.savez(arguments.out, **found)
