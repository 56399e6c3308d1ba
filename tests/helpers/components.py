"""The components of the installed pytorch-metric-learning, found by looking, and how each is made."""

import torch
from pytorch_metric_learning import reducers

from vl_plugins.registry import find, names

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


def all_of(kind):
    """Return ``{name: component}`` of all distances, reducers, regularizers or miners, of the latter ours too."""
    found = {name: find(kind, name) for name in names(kind)}
    assert found
    return {
        name: component(**ARGUMENTS.get(name, dict)())
        for name, component in found.items()
        if component.__module__.startswith("pytorch_metric_learning") or kind == "miner"
    }
