"""Losses for pytorch-metric-learning."""

from vl_plugins.losses.base import PairLoss, Pairs
from vl_plugins.losses.goal import GOALLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.losses.triplet import TripletHNLoss, TripletSHLoss
from vl_plugins.losses.unified import Polynomial, UnifiedLoss, VLCLoss, soft_margin
from vl_plugins.losses.wrappers import CrossBatchMemory, SelfSupervisedLoss

__all__ = [
    "CrossBatchMemory",
    "GOALLoss",
    "PairLoss",
    "Pairs",
    "Polynomial",
    "SelfSupervisedLoss",
    "SmoothChamferLoss",
    "TripletHNLoss",
    "TripletSHLoss",
    "UnifiedLoss",
    "VLCLoss",
    "soft_margin",
]
