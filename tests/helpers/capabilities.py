"""What only some of the supported versions can do."""

import pytest
import torch

__all__ = ["FLOAT16_ON_CPU", "needs_float16_on_cpu"]


def _float16_on_cpu() -> bool:
    try:
        torch.layer_norm(torch.ones(2, dtype=torch.float16), [2])
    except RuntimeError:
        return False
    return True


FLOAT16_ON_CPU = _float16_on_cpu()


def needs_float16_on_cpu() -> None:
    """Skip the rest of a test where torch's modules do not compute in float16 on the CPU."""
    if not FLOAT16_ON_CPU:
        pytest.skip(f"torch {torch.__version__} has no layer norm of float16 on the CPU")
