"""Similarities of sets of embeddings as pytorch-metric-learning distances."""

from vl_plugins.distances.sets import ChamferSimilarity, MatchProbability, MILSimilarity, SmoothChamferSimilarity

__all__ = ["ChamferSimilarity", "MILSimilarity", "MatchProbability", "SmoothChamferSimilarity"]
