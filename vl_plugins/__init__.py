"""Losses of vision-language retrieval as plugins for open_clip, sentence-transformers and pytorch-metric-learning."""

from importlib.metadata import version

from vl_plugins.registry import create_loss, list_losses

__all__ = ["__version__", "create_loss", "list_losses"]

__version__ = version("vl_plugins")
