"""Retrieval evaluation: ranks, metrics, comparisons, features and protocols."""

from vl_plugins.retrieval.comparison import Difference, ImageValues, compare, image_values
from vl_plugins.retrieval.metrics import format_metrics_table, hubness, retrieval_metrics
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks, retrieval_ranks, similarity_ranks
from vl_plugins.retrieval.similarities import (
    EmbeddingSimilarities,
    MatrixSimilarities,
    MeanSimilarities,
    Similarities,
)

__all__ = [
    "Difference",
    "DirectionRanks",
    "EmbeddingSimilarities",
    "ImageValues",
    "MatrixSimilarities",
    "MeanSimilarities",
    "Ranks",
    "Similarities",
    "compare",
    "format_metrics_table",
    "hubness",
    "image_values",
    "retrieval_metrics",
    "retrieval_ranks",
    "similarity_ranks",
]
