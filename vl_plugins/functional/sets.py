"""Checks and masks of embedding sets."""

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision

__all__ = ["check_sets", "check_sides", "element_weights", "masked_sets"]


def check_sets(embeddings: Tensor, ref_emb: Tensor, mask: Tensor | None, ref_mask: Tensor | None) -> None:
    """Raise ``ValueError`` unless there are sets (A, K1, D) and (C, K2, D), with bool masks (A, K1) and (C, K2)."""
    check_sides(embeddings, ref_emb, "(A, K1, D) and (C, K2, D)", ndim=3)
    _check_mask("mask", mask, embeddings)
    _check_mask("ref_mask", ref_mask, ref_emb)


def check_sides(embeddings: Tensor, ref_emb: Tensor, shapes: str, ndim: int) -> None:
    """Raise ``ValueError`` unless both have so many dimensions, and the same vector dimension and device."""
    if not embeddings.ndim == ref_emb.ndim == ndim or embeddings.shape[-1] != ref_emb.shape[-1]:
        given = f"{tuple(embeddings.shape)} and {tuple(ref_emb.shape)}"
        raise ValueError(f"embeddings and ref_emb must have the shapes {shapes}, got {given}")
    if ref_emb.device != embeddings.device:
        raise ValueError(f"ref_emb must have the device of embeddings, {embeddings.device}, got {ref_emb.device}")


def masked_sets(sets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sets (B, K, D) in float32 at least, zero where the mask (B, K) is False, and the mask, True if None."""
    if sets.ndim != 3:
        raise ValueError(f"sets must have the shape (items, elements, dimension), got {tuple(sets.shape)}")
    _check_mask("mask", mask, sets)
    (sets,) = full_precision(sets)
    if mask is None:
        return sets, torch.ones(sets.shape[:2], dtype=torch.bool, device=sets.device)
    return sets.masked_fill(~mask[..., None], 0), mask


def element_weights(sets: Tensor, mask: Tensor | None) -> Tensor:
    """Return 1 / number of elements of the set, (B, K), in float32 at least; 0 where the mask is False."""
    dtype = torch.promote_types(sets.dtype, torch.float32)
    if mask is None:
        return torch.full(sets.shape[:2], 1 / max(1, sets.shape[1]), dtype=dtype, device=sets.device)
    return mask.to(dtype) / mask.sum(1, keepdim=True).clamp(min=1)


def _check_mask(name: str, mask: Tensor | None, sets: Tensor) -> None:
    expected = torch.bool, tuple(sets.shape[:2]), sets.device
    if mask is not None and (mask.dtype, tuple(mask.shape), mask.device) != expected:
        given = f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}"
        raise ValueError(f"{name} must be torch.bool of shape {expected[1]} on {expected[2]}, got {given}")
