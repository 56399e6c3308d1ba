"""Benchmarks of the losses, retrieval ranks and shards, to be run from a checkout.

Each script compares with a named peer and says in its ``--help`` what it measures::

    python -m benchmarks.losses --batch-sizes 1024 4096
    python -m benchmarks.sets
    python -m benchmarks.ranks
    python -m benchmarks.data

They need what ``pip install -e '.[dev]'`` installs.
"""

import os

# Before torch is imported: its profiler, which measures memory, reports each start and stop on standard error.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
