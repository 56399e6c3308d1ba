"""Losses for pytorch-metric-learning; see :mod:`vl_plugins.functional` for the formulas alone."""

from vl_plugins.losses.goal import GOALLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.losses.triplet import TripletHNLoss, TripletSHLoss
from vl_plugins.losses.unified import UnifiedLoss, VLCLoss

__all__ = ["GOALLoss", "SmoothChamferLoss", "TripletHNLoss", "TripletSHLoss", "UnifiedLoss", "VLCLoss"]
