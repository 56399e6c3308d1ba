"""A loss with an inverse temperature, which may be learned."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.errors import number
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.paths import soft_maximum

__all__ = ["ScaledLoss"]


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
    _has_checked_scale = False  # a tensor on a device, in an earlier call

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.scale, property):
            raise TypeError(f"{cls.__name__}: give the scale to the constructor, super().__init__(scale={cls.scale})")

    def __init__(self, *, scale: float = 50.0, learn_scale: bool = False, max_scale: float = 100.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_scale = number("max_scale", max_scale, above=0)
        self.own_scale = self._checked_scale(scale)
        if learn_scale and self.own_scale > self.max_scale:
            raise ValueError(f"scale must be at most max_scale, {max_scale}, to be learned, got {scale}")
        self.log_scale = nn.Parameter(torch.tensor(math.log(self.own_scale))) if learn_scale else None
        self.add_to_recordable_attributes(name="scale")

    @property
    def scale(self) -> Any:
        """The number of the constructor, or the learned one, a 0-D tensor, which is at most ``max_scale``."""
        if self.log_scale is None:
            return self.own_scale
        with torch.no_grad():  # in place, so that the gradient does not die at the limit
            self.log_scale.clamp_(max=math.log(self.max_scale))
        return self.log_scale.exp()

    @scale.setter
    def scale(self, value: float) -> None:
        if self.log_scale is not None:
            raise ValueError(
                "scale is learned (learn_scale=True); its logarithm is a parameter: "
                "loss.log_scale.data.fill_(math.log(scale))"
            )
        self.own_scale = self._checked_scale(value)

    @staticmethod
    def _checked_scale(value: Any) -> float:
        if isinstance(value, (Tensor, str)):
            raise ValueError(
                "scale must be a number; learn_scale=True learns it, and a call takes a tensor: loss(..., scale=tensor)"
            )
        return number("scale", value, above=0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "scale" and isinstance(value, nn.Parameter):  # which torch would take for a new parameter
            self._checked_scale(value)
        super().__setattr__(name, value)

    def check_number(self, name: str, value: Any) -> Any:
        if name != "scale":
            return super().check_number(name, value)
        if self.log_scale is not None:
            raise ValueError("scale is the loss's own parameter (learn_scale=True); a call cannot give another one")
        if not isinstance(value, Tensor):
            return number("scale", value, above=0)
        if value.numel() != 1:
            raise ValueError(f"scale must be a number or a tensor of one element, got the shape {tuple(value.shape)}")
        value = value.reshape(())
        is_on_cpu = value.device.type == "cpu"
        if is_on_cpu or not self._has_checked_scale:
            number("scale", value.item(), above=0)  # waits for the device
            self._has_checked_scale = not is_on_cpu
            return value
        return torch.where(value > 0, value, torch.nan)
