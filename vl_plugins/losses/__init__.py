"""Losses for pytorch-metric-learning."""

from vl_plugins.losses.base import PairLoss, Pairs
from vl_plugins.losses.goal import GOALLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.losses.triplet import TripletHNLoss, TripletSHLoss
from vl_plugins.losses.unified import Polynomial, UnifiedLoss, VLCLoss, soft_margin

__all__ = [
    "GOALLoss",
    "PairLoss",
    "Pairs",
    "Polynomial",
    "SmoothChamferLoss",
    "TripletHNLoss",
    "TripletSHLoss",
    "UnifiedLoss",
    "VLCLoss",
    "soft_margin",
]
