"""Retrieval evaluation: ranks, metrics, features and protocols."""

from vl_plugins.retrieval.metrics import format_metrics_table, retrieval_metrics
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks, retrieval_ranks, similarity_ranks
from vl_plugins.retrieval.similarities import (
    EmbeddingSimilarities,
    MatrixSimilarities,
    MeanSimilarities,
    Similarities,
)

__all__ = [
    "DirectionRanks",
    "EmbeddingSimilarities",
    "MatrixSimilarities",
    "MeanSimilarities",
    "Ranks",
    "Similarities",
    "format_metrics_table",
    "retrieval_metrics",
    "retrieval_ranks",
    "similarity_ranks",
]
