"""Losses as pure functions of a similarity matrix and its positive and negative pairs."""

from vl_plugins.functional.goal import Objective, goal_loss, goal_triplet_loss
from vl_plugins.functional.margins import soft_margin
from vl_plugins.functional.polynomial import Polynomial
from vl_plugins.functional.regularizers import circular_variance, diversity_loss, mmd_loss, uniformity_loss
from vl_plugins.functional.set_similarity import (
    chamfer_similarity,
    match_probability,
    mil_similarity,
    smooth_chamfer_similarity,
)
from vl_plugins.functional.triplet import triplet_hn_loss, triplet_margin, triplet_sh_loss
from vl_plugins.functional.unified import unified_loss, vlc_loss

__all__ = [
    "Objective",
    "Polynomial",
    "chamfer_similarity",
    "circular_variance",
    "diversity_loss",
    "goal_loss",
    "goal_triplet_loss",
    "match_probability",
    "mil_similarity",
    "mmd_loss",
    "smooth_chamfer_similarity",
    "soft_margin",
    "triplet_hn_loss",
    "triplet_margin",
    "triplet_sh_loss",
    "unified_loss",
    "uniformity_loss",
    "vlc_loss",
]
