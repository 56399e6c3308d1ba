"""Retrieval evaluation: ranks, metrics, comparisons, features and protocols."""

from vl_plugins.retrieval.comparison import Difference, ImageValues, compare, image_values
from vl_plugins.retrieval.disagreement import Group, caption_groups, group_differences, only_one_finds
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
    "Group",
    "ImageValues",
    "MatrixSimilarities",
    "MeanSimilarities",
    "Ranks",
    "Similarities",
    "caption_groups",
    "compare",
    "format_metrics_table",
    "group_differences",
    "hubness",
    "image_values",
    "only_one_finds",
    "retrieval_metrics",
    "retrieval_ranks",
    "similarity_ranks",
]
