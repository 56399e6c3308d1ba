"""Modules that make embeddings from the features of an encoder."""

from vl_plugins.modules.positions import sinusoidal_positions, sinusoidal_positions_2d
from vl_plugins.modules.set_head import SetHead
from vl_plugins.modules.set_prediction import SetPrediction, SetPredictionOutput
from vl_plugins.modules.tower_features import TowerFeatures

__all__ = [
    "SetHead",
    "SetPrediction",
    "SetPredictionOutput",
    "TowerFeatures",
    "sinusoidal_positions",
    "sinusoidal_positions_2d",
]
