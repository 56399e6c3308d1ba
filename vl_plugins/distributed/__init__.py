"""Several processes: losses over the batches of all of them, and joining and leaving them."""

from vl_plugins.distributed.ring import Ring

__all__ = ["Ring"]
