"""Miners for pytorch-metric-learning."""

from vl_plugins.miners.hardest_negative import HardestNegativeMiner

__all__ = ["HardestNegativeMiner"]
