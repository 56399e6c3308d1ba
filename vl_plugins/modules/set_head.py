"""The set prediction head, and the features that encoders give to heads."""

from typing import NamedTuple

from torch import Tensor, nn

from vl_plugins.modules.positions import sinusoidal_positions_2d
from vl_plugins.modules.set_prediction import SetPrediction, SetPredictionOutput

__all__ = ["SetHead", "TowerFeatures"]


class TowerFeatures(NamedTuple):
    """Features of a tower's inputs.

    Attributes:
        local: (B, N, W), of the last block: patches, places of a feature map, regions, or tokens.
        pooled: (B, D), the tower's own embedding, not normalized; None if it has none.
        padding_mask: (B, N) bool, True for tokens after the end of the text and for missing regions; None if no feature
            is padding.
        grid: (height, width) of the N places of an image; None for texts, and if patches are dropped.
        has_positions: whether the features contain their positions, as those of a transformer do.
    """

    local: Tensor
    pooled: Tensor | None
    padding_mask: Tensor | None
    grid: tuple[int, int] | None
    has_positions: bool


class SetHead(nn.Module):
    """A set prediction module on a tower's local features and its embedding."""

    def __init__(self, prediction: SetPrediction):
        super().__init__()
        self.prediction = prediction

    def predict(self, features: TowerFeatures) -> SetPredictionOutput:
        """Return sets, slots and attention; sinusoidal positions are added to features without positions."""
        local, pooled, padding_mask, grid, has_positions = features
        positions = None if has_positions else sinusoidal_positions_2d(*grid, local.shape[-1]).to(local.device)
        if self.prediction.global_feature:
            return self.prediction(local, pooled, padding_mask=padding_mask, positions=positions)
        output = self.prediction(local, padding_mask=padding_mask, positions=positions)
        # DistributedDataParallel fails if a parameter of the tower has no gradient.
        return output._replace(embeddings=output.embeddings + 0 * pooled.sum())

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:
        output = self.predict(features)
        return {"features": output.embeddings, "slots": output.slots}
