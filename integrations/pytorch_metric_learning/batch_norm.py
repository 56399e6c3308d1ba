"""Batch norm over the batches of all processes."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vl_plugins.distributed import all_gather_rows
from vl_plugins.numerics import full_precision

__all__ = ["JoinedBatchNorm"]


class JoinedBatchNorm(TorchFunctionMode):
    """Context in which batch norm in training mode takes mean and variance of the batches of all processes.

    Gradients are those of one process with the joined batch when they are averaged over processes that compute the same
    loss. The batches may be of different sizes. Running statistics are those of the joined batch too.

    torch's ``SyncBatchNorm`` does the same on GPUs only, and replaces modules, those of timm that include an activation
    too. The function that all of them call is replaced here, so models and their checkpoints are as in one process.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is functional.batch_norm:
            function = self.batch_norm
        return function(*args, **(kwargs or {}))

    def batch_norm(
        self, inputs, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ) -> Tensor:
        if not training:
            return functional.batch_norm(inputs, running_mean, running_var, weight, bias, False, momentum, eps)
        (values,) = full_precision(inputs)
        rows = values.numel() // values.shape[1]  # as many as regions of features, which differ between processes
        variance, mean = torch.var_mean(values, [0, *range(2, values.ndim)], correction=0)
        statistics = torch.stack([mean, variance, torch.full_like(mean, rows)])[None]
        (statistics,) = all_gather_rows(statistics)
        means, variances, rows = statistics.unbind(dim=1)
        total = rows.sum(dim=0)
        mean = (rows / total * means).sum(dim=0)
        variance = (rows / total * (variances + (means - mean).square())).sum(dim=0)
        if running_mean is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
        scale = torch.rsqrt(variance + eps) if weight is None else torch.rsqrt(variance + eps) * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        scale, shift = (vector.view(-1, *[1] * (values.ndim - 2)) for vector in (scale, shift))
        return torch.addcmul(shift, values, scale).to(inputs.dtype)
