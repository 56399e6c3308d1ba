"""Learning rates of parts of a model, in the optimizer that open_clip makes."""

from torch import nn
from torch.optim import Optimizer

__all__ = ["split_groups"]

HEADS = ("image_head.", "text_head.", "similarity.", "trained_loss.")


def split_groups(optimizer: Optimizer, model: nn.Module, head_scale: float) -> None:
    """Give heads and the loss groups of their own, whose rate is ``head_scale`` times that of the rest.

    They follow the groups of open_clip, which logs the rate of the first one.

    Args:
        optimizer: new; its groups are changed.
        model: with the parameters ``image_head``, ``text_head``, ``similarity`` or ``trained_loss``.
        head_scale: is multiplied by the ``lr_scale`` of a group.
    """
    heads = set()
    for name, parameter in model.named_parameters():
        if name.startswith(HEADS):
            heads.add(parameter)
    groups_of_model, groups_of_heads = [], []
    for group in optimizer.param_groups:
        of_model = [parameter for parameter in group["params"] if parameter not in heads]
        of_heads = [parameter for parameter in group["params"] if parameter in heads]
        if of_model:
            groups_of_model.append({**group, "params": of_model})
        if of_heads:
            scale = group.get("lr_scale", 1.0) * head_scale
            rate = group["lr"] * head_scale
            groups_of_heads.append({**group, "params": of_heads, "lr": rate, "lr_scale": scale})
    optimizer.param_groups[:] = groups_of_model + groups_of_heads
