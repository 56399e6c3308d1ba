"""Modules that make embeddings from the features of an encoder."""

from vl_plugins.modules.positions import sinusoidal_positions, sinusoidal_positions_2d
from vl_plugins.modules.set_prediction import SetPrediction, SetPredictionOutput

__all__ = ["SetPrediction", "SetPredictionOutput", "sinusoidal_positions", "sinusoidal_positions_2d"]
