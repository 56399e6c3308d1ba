"""Retrieval evaluation: ranks, recalls, and plots of them over training."""

from vl_plugins.retrieval.metrics import format_metrics_table, retrieval_metrics
from vl_plugins.retrieval.plots import plot_training_curves, read_results
from vl_plugins.retrieval.ranks import Ranks, retrieval_ranks

__all__ = [
    "Ranks",
    "format_metrics_table",
    "plot_training_curves",
    "read_results",
    "retrieval_metrics",
    "retrieval_ranks",
]
