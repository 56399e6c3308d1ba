"""How much memory an operation asks for at once."""

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LargestTensor", "extra_bytes"]


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def extra_bytes(function, *, kept: int = 0) -> int:
    """Return by how much the memory of tensors grows at most while ``function()`` runs, above ``kept`` bytes.

    What it keeps is measured too: give the bytes of its results as ``kept``.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    # The averages that the profiler offers know no peak.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "nothing was allocated"
    total = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        largest = max(largest, total)
    return largest - kept
