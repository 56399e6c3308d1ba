"""The components of the installed pytorch-metric-learning, found by looking, and how each is made."""

import importlib
import inspect

import torch
from pytorch_metric_learning import reducers

from vl_plugins.registry import names

# For what cannot be made, or has nothing to do, without arguments. Functions, so that no two tests share a component.
ARGUMENTS = {
    "ClassWeightedReducer": lambda: {"weights": torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)},
    "MultipleReducers": lambda: {"reducers": {"loss": reducers.SumReducer()}},
    "SparseCentersRegularizer": lambda: {"num_classes": 3, "centers_per_class": 2},
    "ThresholdReducer": lambda: {"low": 0.02},
    # Else it chooses all negatives and no positive of a small batch.
    "BatchEasyHardMiner": lambda: {"pos_strategy": "hard", "neg_strategy": "all"},
    "PairMarginMiner": lambda: {"pos_margin": 0.6, "neg_margin": 1.6},
}


def classes(package, base):
    """Return ``{name: class}`` of what is derived from ``base`` in a package of pytorch-metric-learning."""
    module = importlib.import_module(f"pytorch_metric_learning.{package}")
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    assert found, f"nothing derived from {base.__name__} in pytorch_metric_learning.{package}"
    return found


def make(name, component_class):
    return component_class(**ARGUMENTS.get(name, dict)())


def miners():
    """Return ``{name: miner}`` of all miners, ours included."""
    package = importlib.import_module("pytorch_metric_learning.miners")
    own = importlib.import_module("vl_plugins.miners")
    found = names("miner")
    assert {*classes("miners", package.BaseMiner), *own.__all__} == set(found)
    return {name: make(name, getattr(package, name, None) or getattr(own, name)) for name in found}


def all_of(kind):
    """Return ``{name: component}`` of all distances, reducers or regularizers."""
    package = importlib.import_module(f"pytorch_metric_learning.{kind}s")
    base = getattr(package, f"Base{kind.capitalize()}")
    return {name: make(name, component_class) for name, component_class in classes(f"{kind}s", base).items()}
