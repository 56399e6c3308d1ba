"""Region or grid features that were computed beforehand, and dropout of whole positions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.modules import TowerFeatures

__all__ = ["FeatureTrunk", "drop_positions"]


class FeatureTrunk(nn.Module):
    """Return region or grid features as they are; rows of zeros are padding. It has no parameters.

    Args:
        width: W, of a feature.
        dropout: rate of the regions that training drops, [0, 1); at least one stays. Kim et al. 2023 and Chen et al.
            2021 drop 0.2.

    >>> trunk = FeatureTrunk(width=3)
    >>> trunk(torch.tensor([[[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]])).padding_mask
    tensor([[False,  True]])
    """

    pooled_width = None

    def __init__(self, width: int = 2048, dropout: float = 0.0):
        super().__init__()
        self.local_width, self.dropout = width, dropout

    def forward(self, features: Tensor) -> TowerFeatures:
        """Return the features (B, N, W) and their padding mask."""
        padding_mask = (features == 0).all(dim=2)
        if self.training and self.dropout:
            padding_mask = drop_positions(padding_mask, self.dropout)
        # Regions lie anywhere, so there is no grid whose positions a head could add.
        return TowerFeatures(features, None, padding_mask, None, has_positions=True)

    def image_transform(self, is_train: bool) -> Callable[[Any], Tensor]:
        """Return a function from an array (N, W) to a tensor."""
        return partial(torch.tensor, dtype=torch.float32)


def drop_positions(padding_mask: Tensor, rate: float) -> Tensor:
    """Add random positions to a padding mask (B, N); at least one stays for every item that has any.

    >>> drop_positions(torch.tensor([[False, True], [True, True]]), 0.999)
    tensor([[False,  True],
            [ True,  True]])
    """
    noise = torch.rand(padding_mask.shape, device=padding_mask.device).masked_fill(padding_mask, -1)
    return padding_mask | ((noise < rate) & (noise < noise.amax(dim=1, keepdim=True)))
