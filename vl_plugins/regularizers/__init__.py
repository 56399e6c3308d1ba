"""Regularizers of embeddings for pytorch-metric-learning."""

from vl_plugins.regularizers.diversity import DiversityRegularizer
from vl_plugins.regularizers.mmd import MMDRegularizer
from vl_plugins.regularizers.uniformity import UniformityRegularizer

__all__ = ["DiversityRegularizer", "MMDRegularizer", "UniformityRegularizer"]
