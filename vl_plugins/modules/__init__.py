"""Modules that make embeddings from the features of an encoder."""

from vl_plugins.modules.pooling import POOLINGS, GeneralizedPooling, average_pooling, max_pooling
from vl_plugins.modules.positions import sinusoidal_positions, sinusoidal_positions_2d
from vl_plugins.modules.set_prediction import SetHead, SetPrediction, SetPredictionOutput, TowerFeatures

__all__ = [
    "POOLINGS",
    "GeneralizedPooling",
    "SetHead",
    "SetPrediction",
    "SetPredictionOutput",
    "TowerFeatures",
    "average_pooling",
    "max_pooling",
    "sinusoidal_positions",
    "sinusoidal_positions_2d",
]
