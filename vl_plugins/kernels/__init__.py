"""Losses of embeddings and labels that need no matrix of all similarities, or one."""

from vl_plugins.kernels.dispatch import BACKENDS, choose_backend
from vl_plugins.kernels.unified import unified_loss, vlc_loss

__all__ = ["BACKENDS", "choose_backend", "unified_loss", "vlc_loss"]
