"""Losses for pytorch-metric-learning; see :mod:`vl_plugins.functional` for the formulas alone."""

from vl_plugins.losses.goal import GOALLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.losses.triplet_hn import TripletHNLoss
from vl_plugins.losses.triplet_sh import TripletSHLoss
from vl_plugins.losses.unified import UnifiedLoss
from vl_plugins.losses.vlc import VLCLoss

__all__ = ["GOALLoss", "SmoothChamferLoss", "TripletHNLoss", "TripletSHLoss", "UnifiedLoss", "VLCLoss"]
