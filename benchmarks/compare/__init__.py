"""Comparison of two versions of this package: ``python -m benchmarks.compare OLD_CHECKOUT``, or ``make compare``."""
