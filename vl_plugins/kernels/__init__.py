"""Losses of embeddings and labels that need no matrix of all similarities, or one."""

from vl_plugins.kernels.dispatch import BACKENDS, choose_backend
from vl_plugins.kernels.goal import goal_loss
from vl_plugins.kernels.smooth_chamfer import SET_BACKENDS, pairwise_smooth_chamfer
from vl_plugins.kernels.triplet import triplet_hn_loss
from vl_plugins.kernels.unified import unified_loss, vlc_loss

__all__ = [
    "BACKENDS",
    "SET_BACKENDS",
    "choose_backend",
    "goal_loss",
    "pairwise_smooth_chamfer",
    "triplet_hn_loss",
    "unified_loss",
    "vlc_loss",
]
