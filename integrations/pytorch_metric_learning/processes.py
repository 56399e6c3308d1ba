"""One or several processes and the precision of a training, by Hugging Face accelerate."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vl_plugins.distributed import all_gather_rows, stop_processes
from vl_plugins.errors import UserError, first_line, require
from vl_plugins.integrations.pytorch_metric_learning.batch_norm import JoinedBatchNorm
from vl_plugins.numerics import full_precision

__all__ = ["Processes", "start_processes"]

# The others wait while the first process evaluates; when one fails, torchrun ends them.
TIMEOUT = timedelta(hours=12)


def start_processes(precision: str | None = None, cpu: bool = False) -> "Processes":
    """Join the processes that ``torchrun`` or ``accelerate launch`` started, if any.

    Args:
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; by default that of ``accelerate launch``, or ``"fp32"``.
        cpu: whether to train on the CPU.

    Raises:
        MissingExtraError: accelerate is needed and not installed.
        UserError: the device has no such precision, or ``accelerate launch`` is set to shard the model.
    """
    precision = "no" if precision == "fp32" else precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "no" and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    accelerate = require("accelerate", extra="pml")
    waiting = accelerate.InitProcessGroupKwargs(timeout=TIMEOUT)
    try:
        accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=[waiting])
    except ValueError as error:
        raise UserError(f"--precision {precision}: {first_line(error)}") from error
    if precision == "fp16" and accelerator.scaler is None:
        raise UserError(f"--precision fp16: not on the device {accelerator.device}; use bf16 or fp32")
    for setting in (precision, accelerator.distributed_type.value):
        if setting.startswith(("fp8", "DEEPSPEED", "FSDP", "MEGATRON")):
            raise UserError(f"accelerate launch is set to {setting}, which is not supported")
    return Processes(accelerator)


class Processes:
    """The processes of a training. All of them call its methods together.

    Each process computes the loss of the joined batch, whose embeddings come from :meth:`gather`. The mean of the
    processes' gradients, by :meth:`backward`, then is the gradient of one process with the joined batch.

    Args:
        accelerator: an ``accelerate.Accelerator``; None for one process in single precision.
    """

    def __init__(self, accelerator: Any = None):
        self._accelerator = accelerator
        self.rank = 0 if accelerator is None else accelerator.process_index
        self.count = 1 if accelerator is None else accelerator.num_processes
        self.device = torch.device("cpu") if accelerator is None else accelerator.device
        self.scaler = None if accelerator is None else accelerator.scaler
        self.precision = "fp32" if accelerator is None else accelerator.mixed_precision.replace("no", "fp32")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Run models in mixed precision, with batch norm over the joined batch."""
        with contextlib.ExitStack() as stack:
            if self._accelerator is not None:
                stack.enter_context(self._accelerator.autocast())
            if self.count > 1:
                stack.enter_context(JoinedBatchNorm())
            yield

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, in the order of their ranks.

        Floating-point numbers become float32 at least, so that a loss is not computed in half precision.
        """
        if rows.is_floating_point():
            (rows,) = full_precision(rows)
        return all_gather_rows(rows)[0]

    def backward(self, loss: Tensor, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Compute the gradients of the modules' parameters, each the mean over the processes."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.count > 1:
            parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            means = self._accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "mean")
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, means.split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))
        if self.scaler is not None:
            for optimizer in filter(_has_gradients, optimizers):
                self.scaler.unscale_(optimizer)

    def step(self, optimizers: Iterable[Optimizer]) -> None:
        """Take a step with each optimizer; they share the loss scale of fp16."""
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            elif _has_gradients(optimizer):
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def copy_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Give all processes the parameters and buffers of the first one."""
        for module in modules if self.count > 1 else ():
            for tensor in (*module.parameters(), *module.buffers()):
                torch.distributed.broadcast(tensor.data, 0)

    def from_first(self, value: Any) -> Any:
        """Return the value of the first process; the others wait for it."""
        return value if self.count == 1 else require("accelerate.utils", "pml").broadcast_object_list([value])[0]

    def from_all(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        return [value] if self.count == 1 else require("accelerate.utils", "pml").gather_object([value])

    def stop(self) -> None:
        """End the communication with the other processes."""
        stop_processes()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
