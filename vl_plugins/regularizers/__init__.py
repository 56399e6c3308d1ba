"""Regularizers of embeddings for pytorch-metric-learning."""

from vl_plugins.regularizers.sets import DiversityRegularizer, MMDRegularizer, UniformityRegularizer

__all__ = ["DiversityRegularizer", "MMDRegularizer", "UniformityRegularizer"]
