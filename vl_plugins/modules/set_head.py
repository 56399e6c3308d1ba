"""A set prediction module on what an encoder knows of its inputs."""

from torch import Tensor, nn

from vl_plugins.modules.positions import sinusoidal_positions_2d
from vl_plugins.modules.set_prediction import SetPrediction, SetPredictionOutput
from vl_plugins.modules.tower_features import TowerFeatures

__all__ = ["SetHead"]


class SetHead(nn.Module):
    """A set prediction module on the tower's local features and its embedding."""

    def __init__(self, prediction: SetPrediction):
        super().__init__()
        self.prediction = prediction

    def predict(self, features: TowerFeatures) -> SetPredictionOutput:
        """Return the sets with slots and attention; positions are added where the tower's features have none."""
        positions = None
        if not features.has_positions:
            positions = sinusoidal_positions_2d(*features.grid, features.local.shape[-1]).to(features.local.device)
        uses_global_feature = self.prediction.global_feature
        output = self.prediction(
            features.local,
            features.pooled if uses_global_feature else None,
            padding_mask=features.padding_mask,
            positions=positions,
        )
        if uses_global_feature:
            return output
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        return output._replace(embeddings=output.embeddings + 0 * features.pooled.sum())

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:
        output = self.predict(features)
        return {"features": output.embeddings, "slots": output.slots}
