"""Losses over the batches of several processes."""

from vl_plugins.distributed.ring import Ring

__all__ = ["Ring"]
