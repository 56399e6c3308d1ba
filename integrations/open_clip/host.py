"""All that depends on the installed version of open_clip: what its trainer offers and how it is replaced.

``open_clip_train.main`` has no plugin point. It imports the functions it calls by name, so replacing those names in
that module for the length of one call of ``main(argv)`` is enough; :func:`patched` does so and puts them back. Whatever
is replaced is first compared with the signature this module was written for: training with another loss than the one
asked for would be worse than not starting.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from vl_plugins.errors import UserError
from vl_plugins.optional import require

__all__ = ["data_parallel_on_cpu", "parser", "patched", "trainer", "warnings_unsaid"]

SUPPORTED_VERSIONS = "open_clip_torch 3.3 and later 3.x"

# The functions that the launcher replaces or calls, with the parameters they have in the supported versions; after an
# ellipsis come others, which are passed on as they are.
SIGNATURES = {
    "create_model_and_transforms": ("model_name", ...),
    "parse_args": ("args",),
    "create_loss": ("args",),
    "get_data": ("args", "preprocess_fns", "epoch", "tokenizer"),
    "evaluate": ("model", "data", "epoch", "args", "tb_writer", "tokenizer"),
}


def trainer() -> ModuleType:
    """Return ``open_clip_train.main`` after checking that it is a version this module knows.

    Raises:
        MissingExtraError: open_clip or its training dependencies are not installed.
        UserError: the installed version has other functions than the launcher replaces.
    """
    require("open_clip", extra="open-clip")
    require("webdataset", extra="open-clip")
    main = importlib.import_module("open_clip_train.main")
    installed = version("open_clip_torch")
    for name, expected in SIGNATURES.items():
        function = getattr(main, name, None)
        found = tuple(inspect.signature(function).parameters) if callable(function) else None
        known = expected[:-1] if expected[-1] is ... else expected
        fits = found is not None and found[: len(known)] == known and (known != expected or len(found) == len(known))
        if not fits:
            what = "does not exist" if found is None else f"takes {_written(found)}"
            raise UserError(
                f"open_clip_torch {installed} is not supported: open_clip_train.main.{name} {what}, "
                f"expected {_written(expected)}; install {SUPPORTED_VERSIONS}"
            )
    return main


def _written(parameters: tuple) -> str:
    return f"({', '.join('...' if parameter is ... else parameter for parameter in parameters)})"


@contextlib.contextmanager
def patched(replacements: Mapping[str, Callable]) -> Iterator[ModuleType]:
    """Replace functions of ``open_clip_train.main`` by name; on leaving, put back what was there.

    Args:
        replacements: name -> function; every name is one that :func:`trainer` checks.

    Raises:
        RuntimeError: the trainer is patched already (a launcher inside a launcher).
    """
    main = trainer()
    unchecked = set(replacements) - set(SIGNATURES)
    assert not unchecked, f"no known signature for {sorted(unchecked)}"
    if getattr(main, "_vl_plugins_patched", False):
        raise RuntimeError("open_clip_train.main is already patched by vl_plugins")
    with mock.patch.multiple(main, create=True, _vl_plugins_patched=True, **replacements):
        yield main


def parser() -> argparse.ArgumentParser:
    """Return the argument parser that open_clip's ``parse_args`` builds and keeps to itself."""
    params = importlib.import_module("open_clip_train.params")

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
