"""Two-tower training from a YAML file: ``python -m vl_plugins.integrations.pytorch_metric_learning``.

As a library: :class:`Run` trains a configuration of :func:`read_config` or :func:`parse_config`, and
:class:`CrossModalTrainer` is a trainer of pytorch-metric-learning for models and data of your own.
"""

import importlib

# Imported at first use, so that the command line can name an extra that is not installed.
_MODULES = {
    "CrossModalTrainer": "trainers",
    "Run": "run",
    "build_objective": "objective",
    "main": "command_line",
    "make_accelerator": "run",
    "parse_config": "config",
    "read_config": "config",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
