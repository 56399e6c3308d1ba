"""A stand-in for open_clip 4.x, which is not released: its trainer's interface around the models of the installed 3.x.

Written from the interface: what ``open_clip_train.main`` imports and calls, in which order and with which arguments,
and what its tasks do with a model, a loss and a batch. What no test needs is not here: audio, NaFlex, other tasks.
``python -m tests.integrations.open_clip.open_clip_4`` is our launcher on it.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import open_clip
import open_clip_train

from tests.integrations.open_clip.open_clip_4 import main, params, task, train
from vl_plugins.integrations.open_clip import host

__all__ = ["VERSION", "installed"]

VERSION = "4.0.0.dev0"


@contextlib.contextmanager
def installed() -> Iterator[ModuleType]:
    """Put the stand-in in the place of the installed version; gives its ``open_clip_train.main``."""
    modules = {"open_clip_train.main": main, "open_clip_train.params": params, "open_clip_train.train": train}
    with contextlib.ExitStack() as stack:
        stack.callback(_put_back, {name: sys.modules.get(name) for name in (*modules, "open_clip.task")})
        sys.modules.update({**modules, "open_clip.task": task})
        for name, module in modules.items():
            stack.enter_context(mock.patch.object(open_clip_train, name.rpartition(".")[2], module))
        stack.enter_context(mock.patch.object(open_clip, "task", task, create=True))
        stack.enter_context(mock.patch.object(host, "version", return_value=VERSION))
        yield main


def _put_back(modules):
    """Undo only what was done: others that have been imported since, such as parts of torch, load only once."""
    for name, module in modules.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
