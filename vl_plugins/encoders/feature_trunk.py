"""Features of regions or of a grid that were computed beforehand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vl_plugins.encoders.leave_out import fraction, leave_out
from vl_plugins.errors import UserError, number
from vl_plugins.modules import TowerFeatures

__all__ = ["FeatureTrunk"]

EXAMPLE_REGIONS = 36  # of the bottom-up attention features that most papers use


class FeatureTrunk(nn.Module):
    """Take region or grid features as they are; rows of zeros are padding. It has no parameters.

    Args:
        width: W >= 1, of a feature.
        dropout: part of the regions that training leaves out at random, [0, 1); at least one stays. Kim et al. 2023
            and Chen et al. 2021 leave out 0.2.

    Attributes:
        local_width: W.
        pooled_width: None.

    Raises:
        ValueError: an argument out of its range.

    >>> trunk = FeatureTrunk(width=3)
    >>> trunk(torch.tensor([[[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]])).padding_mask
    tensor([[False,  True]])
    """

    pooled_width = None

    def __init__(self, width: int = 2048, dropout: float = 0.0):
        super().__init__()
        self.local_width = number("width", width, least=1, kind=int)
        self.dropout = fraction("dropout", dropout)

    def forward(self, features: Tensor) -> TowerFeatures:
        """Return the features (B, N, W) and which of them are not there."""
        padding_mask = (features == 0).all(dim=2)
        if self.training and self.dropout:
            padding_mask = leave_out(padding_mask, self.dropout)
        # Regions lie anywhere, so a head has no grid of which it could add the positions.
        return TowerFeatures(features, None, padding_mask, None, has_positions=True)

    def image_transform(self, is_train: bool) -> Callable[[Any], Tensor]:
        """Return a function from an array (N, W) to a tensor, the same in training and evaluation.

        It raises ``UserError`` for an array of another shape.
        """
        return partial(_to_tensor, width=self.local_width)

    def example_inputs(self, batch_size: int) -> Tensor:
        """Return made-up features (batch_size, 36, W)."""
        return torch.randn(batch_size, EXAMPLE_REGIONS, self.local_width)

    def extra_repr(self) -> str:
        return f"width={self.local_width}, dropout={self.dropout}"


def _to_tensor(features: Any, width: int) -> Tensor:
    array = np.asarray(features)
    if array.ndim != 2 or array.shape[1] != width:
        raise UserError(f"features must have the shape (N, {width}) of the trunk's width, got {array.shape}")
    return torch.from_numpy(array.astype(np.float32))
