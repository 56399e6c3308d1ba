"""Losses of vision-language retrieval as plugins for open_clip and pytorch-metric-learning."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("vl_plugins")
