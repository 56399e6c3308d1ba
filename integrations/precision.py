"""open_clip's ``--precision`` for encoding, with torch alone."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["PRECISIONS", "autocast", "input_dtype"]

BFLOAT16, FLOAT16 = ("bf16", "pure_bf16"), ("fp16", "pure_fp16")
AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}
PRECISIONS = (*AUTOCAST, *BFLOAT16, *FLOAT16, "fp32")


def input_dtype(precision: str) -> torch.dtype | None:
    """Return the type of images for a model of this precision; None leaves them as they are."""
    return torch.bfloat16 if precision in BFLOAT16 else torch.float16 if precision in FLOAT16 else None


def autocast(precision: str, device: torch.device | str) -> AbstractContextManager:
    """Return the context in which a model of this precision runs on a device."""
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(torch.device(device).type, AUTOCAST[precision])
