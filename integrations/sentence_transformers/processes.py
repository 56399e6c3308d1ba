"""Several processes: their trainer wraps the model in ``DistributedDataParallel``, and leaves the loss as it is."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from vl_plugins.distributed import world_size

__all__ = ["average_gradients", "in_one_call"]


def in_one_call(model: nn.Module, embed: Callable[[Any, Any], Any], columns: list[dict[str, Any]]) -> Any:
    """Return ``embed(model, columns)``, which may call the model several times.

    ``DistributedDataParallel`` looks for parameters without a gradient after each call. CLIP embeds images and captions
    in calls that leave one tower unused, so it would count that tower twice. Here all calls are within one of its own.
    """
    if not isinstance(model, DistributedDataParallel):
        return embed(model, columns)
    module = model.module
    forward = module.forward
    is_replaced = "forward" in vars(module)  # such as by mixed precision
    module.forward = partial(embed, forward)
    try:
        return model(columns)
    finally:
        del module.forward
        if is_replaced:
            module.forward = forward


def average_gradients(loss: Tensor, parameters: Iterable[nn.Parameter]) -> tuple[Tensor, list[RemovableHandle]]:
    """Return a loss whose backward pass averages the gradients of parameters over all processes, and what ends that."""
    handles = []
    if world_size() > 1 and torch.is_grad_enabled():
        for parameter in parameters:
            if parameter.requires_grad:
                loss = loss + 0 * parameter.sum()  # so that each process takes part
                handles.append(parameter.register_hook(_average))
    return loss, handles


def _average(gradient: Tensor) -> Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total / world_size()
