"""Losses for pytorch-metric-learning."""

from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.cross_modal import CrossModalLoss
from vl_plugins.losses.goal import GOALLoss
from vl_plugins.losses.matrix import hardest, soft_maximum
from vl_plugins.losses.scaled import ScaledLoss
from vl_plugins.losses.siglip import SigLIPLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.losses.triplet import TripletHNLoss, TripletSHLoss
from vl_plugins.losses.unified import Polynomial, UnifiedLoss, VLCLoss, soft_margin
from vl_plugins.losses.warmup import Warmup
from vl_plugins.losses.wrappers import CrossBatchMemory, SelfSupervisedLoss

__all__ = [
    "CrossBatchMemory",
    "CrossModalLoss",
    "GOALLoss",
    "PairLoss",
    "Polynomial",
    "ScaledLoss",
    "SelfSupervisedLoss",
    "SigLIPLoss",
    "SmoothChamferLoss",
    "TripletHNLoss",
    "TripletSHLoss",
    "UnifiedLoss",
    "VLCLoss",
    "Warmup",
    "hardest",
    "soft_margin",
    "soft_maximum",
]
