"""How many operations a call takes, and where the host would wait for a device: counted, so the same everywhere."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NEWEST", "count"]

VIEWS = set(
    "view _unsafe_view t transpose expand unsqueeze squeeze detach alias slice select permute split as_strided reshape "
    "unbind _reshape_alias diagonal split_with_sizes promote_types".split()
)
# Their results have sizes that only the device knows, or go to the host. lift_fresh makes a tensor of Python numbers,
# also for `matrix[rows, columns] = 0`, and such a tensor is copied to the device.
WAITS = ("nonzero", "masked_select", "unique", "_unique", "repeat_interleave", "_local_scalar_dense", "lift_fresh")
NEWEST = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14), reason="older versions of torch take other operations"
)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1] or () if len(args) > 1
        )
        self.names["wait" if by_mask or name.startswith(WAITS) else name] += 1
        return function(*args, **(kwargs or {}))


def count(loss, size, by="labels"):
    """Return the operations that are no views, and the waits, of one call with its gradients.

    Args:
        by: ``labels``, ``places``, or ``ids``: labels and ids of the texts, all different.
    """
    sides = [torch.randn(*size, requires_grad=True) for _ in range(2)]
    labels = torch.arange(size[0])
    options = {"places": {}, "labels": {"labels": labels, "ref_labels": labels.clone()}}
    options["ids"] = options["labels"] | {"ref_ids": labels.clone()}

    def call():
        loss(sides[0], ref_emb=sides[1], **options[by]).backward()

    call()
    for side in sides:
        side.grad = None
    with Operations() as operations:
        call()
    return sum(number for name, number in operations.names.items() if name not in VIEWS), operations.names["wait"]
