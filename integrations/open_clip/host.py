"""open_clip's trainer, whichever version is installed: what it offers and how it is replaced.

``open_clip_train.main`` has no plugin point. It imports the functions it calls by name, so replacing those names in
that module for the length of one call of ``main(argv)`` is enough; :func:`patched` does so and puts them back. Whatever
is replaced is first compared with the signature it is known with: training with another loss than the one asked for
would be worse than not starting.

What differs between the versions is in :mod:`vl_plugins.integrations.open_clip.host_3` and ``host_4``, two modules of
the same functions; :func:`adapter` returns the one that the installed trainer needs.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from unittest import mock

from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["adapter", "data_parallel_on_cpu", "parser", "patched", "trainer", "warnings_unsaid"]

OLDEST, TOO_NEW = (3, 3), (5, 0)
TO_INSTALL = "install open_clip_torch 3.3, a later 3.x or 4.x: pip install 'open_clip_torch[training]>=3.3,<5'"

# By what the trainer of each version has and that of the other has not.
ADAPTERS = {"create_loss": "host_3", "create_task": "host_4"}


def trainer() -> ModuleType:
    """Return ``open_clip_train.main`` after checking that it is a version we know.

    Raises:
        MissingExtraError: open_clip or its training dependencies are not installed.
        UserError: the installed version is older or newer, or has other functions than the launcher replaces.
    """
    require("open_clip", extra="open-clip")
    check_version()
    require("webdataset", extra="open-clip")
    for module, functions in adapter().CHECKED.items():
        for name, expected in functions.items():
            _check_signature(module, name, expected)
    return importlib.import_module("open_clip_train.main")


def check_version() -> None:
    """Check the installed version, without importing it.

    Raises:
        UserError: it is older or newer than those that are known.
    """
    installed = tuple(map(int, re.findall(r"\d+", version("open_clip_torch"))[:2]))
    if not OLDEST <= installed < TOO_NEW:
        raise _unsupported(f"it is {'older' if installed < OLDEST else 'newer'} than what was tried")


def adapter() -> ModuleType:
    """Return what is particular to the installed version, by what its trainer offers.

    Raises:
        UserError: it is neither that of 3.x nor that of 4.x.
    """
    main = importlib.import_module("open_clip_train.main")
    offered = [name for name in ADAPTERS if hasattr(main, name)]
    if len(offered) != 1:
        raise _unsupported(
            f"open_clip_train.main has {'both' if offered else 'neither'} create_loss, as that of 3.x, "
            f"{'and' if offered else 'nor'} create_task, as that of 4.x"
        )
    return importlib.import_module(f"{__package__}.{ADAPTERS[offered[0]]}")


def _check_signature(module: str, name: str, expected: tuple) -> None:
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        function = None
    found = tuple(inspect.signature(function).parameters) if callable(function) else None
    known = expected[:-1] if expected[-1] is ... else expected
    if found is None or found[: len(known)] != known or (known == expected and len(found) != len(known)):
        what = "does not exist" if found is None else f"takes {_written(found)}"
        raise _unsupported(f"{module}.{name} {what}, expected {_written(expected)}")


def _unsupported(difference: str) -> UserError:
    return UserError(f"open_clip_torch {version('open_clip_torch')} is not supported: {difference}; {TO_INSTALL}")


def _written(parameters: tuple) -> str:
    return f"({', '.join('...' if parameter is ... else parameter for parameter in parameters)})"


@contextlib.contextmanager
def patched(replacements: Mapping[str, Callable]) -> Iterator[ModuleType]:
    """Replace functions of open_clip's trainer by name, where it looks them up; on leaving, put back what was there.

    Args:
        replacements: name -> function; every name is one that :func:`trainer` checks.

    Raises:
        RuntimeError: the trainer is patched already (a launcher inside a launcher).
    """
    main = trainer()
    if getattr(main, "_vl_plugins_patched", False):
        raise RuntimeError("open_clip_train.main is already patched by vl_plugins")
    modules = {name: module for module, functions in adapter().CHECKED.items() for name in functions}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(main, "_vl_plugins_patched", True, create=True))
        for name, function in replacements.items():
            module = importlib.import_module(modules[name])
            stack.enter_context(mock.patch.object(module, name, function))
        yield main


def parser() -> argparse.ArgumentParser:
    """Return the argument parser that open_clip's ``parse_args`` builds and keeps to itself."""
    params = require("open_clip_train.params", extra="open-clip")

    class Captured(Exception):
        pass

    class CapturingParser(argparse.ArgumentParser):
        def parse_args(self, args=None, namespace=None):
            raise Captured(self)

    with mock.patch.object(params, "argparse", SimpleNamespace(ArgumentParser=CapturingParser)):
        try:
            params.parse_args([])
        except Captured as captured:
            built = captured.args[0]
    # From here on it parses like any other parser.
    built.__class__ = argparse.ArgumentParser
    return built


@contextlib.contextmanager
def data_parallel_on_cpu() -> Iterator[None]:
    """Let ``DistributedDataParallel(model, device_ids=[device])``, as open_clip writes it, accept the CPU as device."""
    import torch

    class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module, device_ids=None, **options):
            if device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids):
                device_ids = None
            super().__init__(module, device_ids=device_ids, **options)

    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", DistributedDataParallel):
        yield


@contextlib.contextmanager
def warnings_unsaid() -> Iterator[None]:
    """Let nothing below an error be logged by anyone."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
