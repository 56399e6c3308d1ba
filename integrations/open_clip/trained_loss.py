"""A loss with parameters of its own as a part of the model that open_clip trains.

As ``model.trained_loss`` its parameters are in the optimizer, in data parallelism, in the clipping of gradients, in
averages of weights and in checkpoints. In a file they have an entry of their own, so that plain open_clip reads the
weights of the model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["attach_loss", "joined_checkpoint", "separated_checkpoint"]

PREFIX = "trained_loss."
# Entries of a checkpoint with weights of a model, and those for the parameters of its loss.
ENTRIES = {"state_dict": "trained_loss", "state_dict_ema": "trained_loss_ema"}


def attach_loss(model: nn.Module, loss: nn.Module) -> int:
    """Make a loss a part of a model if it has parameters that are not the model's; return how many numbers they are."""
    own = set(loss.parameters()) - set(model.parameters())
    if own:
        model.trained_loss = loss
    return sum(parameter.numel() for parameter in own)


def separated_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the parameters of the loss apart from the weights of the model."""
    separated = dict(checkpoint)
    for entry, entry_of_loss in ENTRIES.items():
        of_model: dict[str, torch.Tensor] = {}
        of_loss: dict[str, torch.Tensor] = {}
        for name, weight in checkpoint.get(entry, {}).items():
            if name.removeprefix("module.").startswith(PREFIX):
                of_loss[name] = weight
            else:
                of_model[name] = weight
        if of_loss:
            separated[entry] = of_model
            separated[entry_of_loss] = of_loss
    return separated


def joined_checkpoint(checkpoint: Any) -> Any:
    """Return a checkpoint with the parameters of the loss among the weights again, unchanged if it has none."""
    if not isinstance(checkpoint, Mapping):
        return checkpoint
    joined = dict(checkpoint)
    for entry, entry_of_loss in ENTRIES.items():
        if isinstance(joined.get(entry_of_loss), Mapping) and isinstance(joined.get(entry), Mapping):
            joined[entry] = {**joined[entry], **joined.pop(entry_of_loss)}
    return joined
