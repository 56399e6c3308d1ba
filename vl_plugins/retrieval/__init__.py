"""Retrieval evaluation: ranks, recalls and protocols."""

from vl_plugins.retrieval.ground_truth import GroundTruth
from vl_plugins.retrieval.metrics import (
    format_metrics_table,
    format_precision_table,
    precision_at_r,
    retrieval_metrics,
)
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
    "GroundTruth",
    "MatrixSimilarities",
    "MeanSimilarities",
    "Ranks",
    "Similarities",
    "best_answers",
    "format_metrics_table",
    "format_precision_table",
    "precision_at_r",
    "retrieval_metrics",
    "retrieval_ranks",
    "similarity_ranks",
]
