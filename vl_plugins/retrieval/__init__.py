"""Retrieval evaluation: ranks, metrics, features and protocols."""

from vl_plugins.retrieval.metrics import format_metrics_table, retrieval_metrics
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks, best_answers, retrieval_ranks, similarity_ranks
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
    "best_answers",
    "format_metrics_table",
    "retrieval_metrics",
    "retrieval_ranks",
    "similarity_ranks",
]
