"""Fast paths of the losses and similarities, for embeddings and labels instead of all similarities."""

from vl_plugins.kernels.comparison import BACKENDS, equal_label_pairs
from vl_plugins.kernels.hardest_negatives import HardestNegatives, mine_hardest_negatives
from vl_plugins.kernels.log_sum_exp import unified_losses_from_embeddings
from vl_plugins.kernels.smooth_chamfer import pairwise_smooth_chamfer

__all__ = [
    "BACKENDS",
    "HardestNegatives",
    "equal_label_pairs",
    "mine_hardest_negatives",
    "pairwise_smooth_chamfer",
    "unified_losses_from_embeddings",
]
