"""Smooth-Chamfer similarity of sets on the device's best kernels."""

import torch
from torch import Tensor

from vl_plugins import functional
from vl_plugins.functional import set_similarity
from vl_plugins.kernels.dispatch import log_choice, triton_is_usable
from vl_plugins.utils.eager import eager
from vl_plugins.utils.errors import check_name

__all__ = ["SET_BACKENDS", "smooth_chamfer_similarity"]

SET_BACKENDS = ("tiled", "triton")

# Those of several sets have to fit into a fused tile.
MAX_ELEMENTS = 16


def smooth_chamfer_similarity(
    x: Tensor,
    y: Tensor,
    alpha: float = 16.0,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Smooth-Chamfer similarity of sets: :func:`vl_plugins.functional.smooth_chamfer_similarity`, fused on a GPU.

    Args:
        x, y, alpha, x_mask, y_mask, normalize, paired: see that function.
        backend: ``"tiled"``, which is that function, or ``"triton"``, fused tiles on a CUDA GPU for sets of at most 16
            elements, not ``paired``. The latter where it can run, if left out.

    Returns:
        (A, C), or (A,) if ``paired``, float32 or float64, as that function.

    Raises:
        ValueError: wrong shape, type or device, alpha out of its range, or a backend that cannot compute this.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.

    >>> images, texts = torch.eye(2).expand(3, 2, 2), torch.ones(5, 1, 2)
    >>> smooth_chamfer_similarity(images, texts).shape
    torch.Size([3, 5])
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be > 0, got {alpha!r}")
    set_similarity.check_sets(x, y, x_mask, y_mask, paired)
    if eager()(_choose_backend, backend, x, y, paired) == "tiled":
        return functional.smooth_chamfer_similarity(
            x, y, alpha, x_mask=x_mask, y_mask=y_mask, normalize=normalize, paired=paired
        )

    from vl_plugins.kernels import triton_sets

    return triton_sets.smooth_chamfer_similarity(x, y, alpha, x_mask=x_mask, y_mask=y_mask, normalize=normalize)


def _choose_backend(backend: str | None, x: Tensor, y: Tensor, paired: bool) -> str:
    problem = _fusion_problem(x, y, paired)
    if backend is not None:
        check_name("backend", backend, SET_BACKENDS)
        if backend == "triton" and problem is not None:
            raise ValueError(f"backend 'triton' cannot be used, because {problem}; 'tiled' can always")
        return backend
    chosen = "tiled" if problem else "triton"
    log_choice("smooth_chamfer_similarity", chosen, f"on {x.device.type}")
    return chosen


def _fusion_problem(x: Tensor, y: Tensor, paired: bool) -> str | None:
    """Say why fused tiles cannot compare these sets; None if they can."""
    if not triton_is_usable(x.device):
        return (
            f"it needs Triton and a CUDA GPU of compute capability 8.0 or later, and the embeddings are on {x.device}"
        )
    if paired:
        return "sets are compared in pairs"
    if x.dtype != y.dtype or x.dtype == torch.float64:
        return f"it compares sets of one type, not float64, and these are {x.dtype} and {y.dtype}"
    if max(x.shape[1], y.shape[1]) > MAX_ELEMENTS:
        return f"sets have up to {max(x.shape[1], y.shape[1])} elements, more than {MAX_ELEMENTS}"
    return None
