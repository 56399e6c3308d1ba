"""Two-tower training by pytorch-metric-learning: ``python -m vl_plugins.integrations.pytorch_metric_learning``.

As a library: :func:`build_trainer` makes a trainer from a configuration; :class:`CrossModalTrainer` trains models and
data of your own.
"""

import importlib

__all__ = [
    "CrossModalTrainer",
    "build_trainer",
    "main",
    "read_config",
]

# Imported when they are used, so that the command line can name an extra that is not installed.
MODULES = {
    "CrossModalTrainer": "trainers",
    "build_trainer": "runs",
    "main": "command_line",
    "read_config": "config",
}


def __getattr__(name: str):
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
