"""Losses as pure functions of a similarity matrix and its positive and negative pairs."""

from vl_plugins.functional.goal import goal_loss, goal_triplet_loss
from vl_plugins.functional.margins import soft_margin
from vl_plugins.functional.polynomial import Polynomial
from vl_plugins.functional.triplet import triplet_hn_loss, triplet_margin, triplet_sh_loss
from vl_plugins.functional.unified import unified_loss, vlc_loss

__all__ = [
    "Polynomial",
    "goal_loss",
    "goal_triplet_loss",
    "soft_margin",
    "triplet_hn_loss",
    "triplet_margin",
    "triplet_sh_loss",
    "unified_loss",
    "vlc_loss",
]
