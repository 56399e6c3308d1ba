"""Retrieval evaluation: ranks and recalls."""

from vl_plugins.retrieval.metrics import format_metrics_table, retrieval_metrics
from vl_plugins.retrieval.ranks import Ranks, retrieval_ranks

__all__ = [
    "Ranks",
    "format_metrics_table",
    "retrieval_metrics",
    "retrieval_ranks",
]
