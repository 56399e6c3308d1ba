"""What encoders hand to heads."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["TowerFeatures"]


class TowerFeatures(NamedTuple):
    """What a tower knows of its inputs.

    Attributes:
        local: (B, N, W), of the last block: patches, places of a feature map, regions, or tokens.
        pooled: (B, D), the tower's own embedding, not normalised; None where it has none.
        padding_mask: (B, N) bool, True for tokens behind the end of the text and for regions that are not there; None
            where all are there.
        grid: (height, width) of the N places of an image, None for texts and where patches are dropped.
        has_positions: whether the features themselves know where they are, as those of a transformer do.
    """

    local: Tensor
    pooled: Tensor | None
    padding_mask: Tensor | None
    grid: tuple[int, int] | None
    has_positions: bool
