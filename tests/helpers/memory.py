"""How much memory an operation asks for at once."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measurement import extra_bytes

__all__ = ["LargestTensor", "extra_bytes"]


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                # A sparse one holds what is not zero only.
                self.elements = max(self.elements, tensor._nnz() if tensor.is_sparse else tensor.numel())
        return result
