import os

import pytest

# Triton reads it when it is imported: these tests have a process of their own, see tests/kernels/test_triton.py.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in a small matrix, in several parts of rows."""
    from vl_plugins.kernels import triton_hardest_negatives, triton_log_sum_exp, triton_sets, triton_tiles

    for module in (triton_hardest_negatives, triton_log_sum_exp, triton_sets):
        monkeypatch.setattr(module, "block_sizes", lambda width, dtype: triton_tiles.Blocks(16, 16, 16, 4, 1))
    monkeypatch.setattr(triton_sets, "POOLED", 16)
    monkeypatch.setattr(triton_tiles, "WORKSPACE_BYTES", 1)
