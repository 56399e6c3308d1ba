"""Benchmarks against named peers, to be run from a checkout with what ``pip install -e '.[dev]'`` installs.

``python -m benchmarks.losses --help`` says what it measures; likewise ranks, data, and study, which trains. ``gpu``
needs less, and ``compare`` compares two versions of this package.
"""

import os

# Before torch is imported: its profiler, which measures memory, reports each start and stop on standard error.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
