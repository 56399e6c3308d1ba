"""A loss with an inverse temperature, which may be learned."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.errors import number
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.matrix import soft_maximum

__all__ = ["ScaledLoss"]


class LearnedScale:
    """The attribute ``scale`` of a loss that learns it. A fixed one is an attribute of the object, and comes first."""

    def __get__(self, loss: Any, kind: type) -> Any:
        if loss is None or not loss.learns_scale:
            return self
        # A constant is taken off, so that the gradient does not die at the limit, and nothing is changed by reading.
        excess = (loss.log_scale.detach() - math.log(loss.max_scale)).clamp(min=0)
        return (loss.log_scale - excess).exp()


class ScaledLoss(PairLoss):
    """A :class:`PairLoss` with an inverse temperature, ``scale``, which a call may give.

    Args:
        scale: > 0.
        learn_scale: learn its logarithm, starting from ``scale``. Give ``loss.parameters()`` to the optimizer.
        max_scale: the largest scale that is learned.
        kwargs: see :class:`PairLoss`.
    """

    of_negatives = soft_maximum
    numbers: tuple[str, ...] = ("scale",)
    scale: Any = LearnedScale()
    _has_checked_scale = False  # a tensor on a device, in an earlier call

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.scale, LearnedScale):
            raise TypeError(f"{cls.__name__}: give the scale to the constructor, super().__init__(scale={cls.scale})")

    def __init__(self, *, scale: float = 50.0, learn_scale: bool = False, max_scale: float = 100.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_scale = number("max_scale", max_scale, above=0)
        self.scale = scale
        self.log_scale: Any = None
        if learn_scale and self.scale > self.max_scale:
            raise ValueError(f"scale must be at most max_scale, {max_scale}, to be learned, got {scale}")
        if learn_scale:
            self.log_scale = nn.Parameter(torch.tensor(math.log(self.__dict__.pop("scale"))))
            self.learns_scale = True
        self.add_to_recordable_attributes(name="scale")

    def limit_scale(self) -> None:
        with torch.no_grad():
            self.log_scale.clamp_(max=math.log(self.max_scale))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "scale":
            if self.learns_scale:
                raise ValueError(
                    "scale is learned (learn_scale=True); its logarithm is a parameter: "
                    "loss.log_scale.data.fill_(math.log(scale))"
                )
            if isinstance(value, (Tensor, str)):
                raise ValueError(
                    "scale must be a number; learn_scale=True learns it, and a call takes a tensor: "
                    "loss(..., scale=tensor)"
                )
            value = number("scale", value, above=0)
        super().__setattr__(name, value)

    def check_number(self, name: str, value: Any) -> Any:
        if name != "scale":
            return super().check_number(name, value)
        if self.learns_scale:
            raise ValueError("scale is the loss's own parameter (learn_scale=True); a call cannot give another one")
        if not isinstance(value, Tensor):
            return number("scale", value, above=0)
        value = one_element("scale", value)
        is_on_cpu = value.device.type == "cpu"
        if is_on_cpu or not self._has_checked_scale:
            number("scale", value.item(), above=0)  # waits for the device
            self._has_checked_scale = not is_on_cpu
            return value
        return torch.where(value > 0, value, torch.nan)


def one_element(name: str, value: Tensor) -> Tensor:
    """Return a number of a call as a 0-D tensor; raise ``ValueError`` for several."""
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one element, got the shape {tuple(value.shape)}")
    return value.reshape(())
