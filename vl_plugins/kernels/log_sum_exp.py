"""Similarities of positive pairs and log-sum-exps over negatives, differentiable, of all backends."""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.norms import unit_vectors
from vl_plugins.functional.precision import full_precision
from vl_plugins.kernels import tiled
from vl_plugins.kernels.vectors import (
    Comparison,
    compare,
    differentiable_gradients,
    finish_gradient,
    number_on,
    precise,
)
from vl_plugins.utils.eager import eager

__all__ = ["Contrast", "contrast", "implementation_of", "number_for"]


class Contrast(NamedTuple):
    """What a contrastive loss needs of the similarities, all in float64 where the device has it.

    Attributes:
        rows: (A,), of each row the log-sum-exp of the scaled similarities of its negatives; the least number of its
            type without negatives.
        columns: (C,), of each column likewise; None if the columns are no anchors.
        positives: (M,), similarities of the pairs of equal labels.
    """

    rows: Tensor
    columns: Tensor | None
    positives: Tensor


def contrast(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    pairs: tuple[Tensor, Tensor],
    scale: float | Tensor,
    *,
    symmetric: bool,
    normalize: bool,
    backend: str,
) -> Contrast:
    """Compare anchors and candidates; pairs of different labels are negative.

    Args:
        x: (A, D), floating point.
        y: (C, D), of the same type.
        x_labels: (A,), integers.
        y_labels: (C,), integers.
        pairs: rows and columns, (M,) each, of all pairs of equal labels, see
            :func:`~vl_plugins.kernels.pairs.equal_label_pairs`.
        scale: inverse temperature; a number, or a tensor of one element, which receives a gradient.
        symmetric: columns are anchors too.
        normalize: cosines, otherwise dot products.
        backend: dense, tiled or triton.
    """
    dtype = precise(x.device, torch.float32)
    scale = number_on(x.device, dtype, scale)
    rows, columns, positives = eager()(
        _Contrast.apply, x, y, scale, x_labels, y_labels, pairs, symmetric, normalize, backend
    )
    return Contrast(rows, columns if symmetric else None, positives)


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, scale, x_labels, y_labels, pairs, symmetric, normalize, backend):
        comparison = compare(x, y, x_labels, y_labels, pairs, normalize=normalize)
        keep = backend == "dense" and any(ctx.needs_input_grad)
        ctx.implementation = implementation_of(backend)
        with torch.autocast(x.device.type, enabled=False):
            kept = ctx.implementation.log_sum_exps(comparison, number_for(scale), symmetric=symmetric, keep=keep)
        ctx.save_for_backward(x, y, *comparison, scale)
        ctx.options = symmetric, normalize
        ctx.kept = kept
        least = torch.finfo(scale.dtype).min
        columns = scale.new_zeros(0) if kept.columns is None else kept.columns.clamp(min=least)
        return kept.rows.clamp(min=least), columns, kept.positives.clone()

    @staticmethod
    def backward(ctx, of_rows, of_columns, of_positives):
        x, y, *comparison, scale = ctx.saved_tensors
        comparison = Comparison(*comparison)
        if torch.is_grad_enabled():
            formulas = partial(_plain, comparison, *ctx.options)
            gradients = differentiable_gradients(formulas, (x, y, scale), (of_rows, of_columns, of_positives))
            return *gradients, None, None, None, None, None, None
        x, y, x_factors, y_factors, *_ = comparison
        # Its memory is overwritten: after retain_graph=True all tiles are computed again.
        kept, ctx.kept = ctx.kept, ctx.kept._replace(tiles=None)
        of_rows = of_rows.masked_fill(kept.rows == -torch.inf, 0)
        of_columns = None if kept.columns is None else of_columns.masked_fill(kept.columns == -torch.inf, 0)
        dtype = torch.promote_types(x.dtype, torch.float32)
        needs_x, needs_y, needs_scale = ctx.needs_input_grad[:3]
        x_gradient = torch.empty_like(x, dtype=dtype) if needs_x or needs_scale else None
        y_gradient = torch.empty_like(y, dtype=dtype) if needs_y else None
        with torch.autocast(scale.device.type, enabled=False):
            ctx.implementation.log_sum_exp_gradients(
                comparison, number_for(scale), kept, of_rows, of_columns, of_positives, x_gradient, y_gradient
            )
            del kept
            scale_gradient = None
            if needs_scale:
                # The sum of the similarities times the gradients by them, with neither at hand: <x, dx>.
                along = torch.linalg.vecdot(x.to(dtype), x_gradient).sum(dtype=scale.dtype)
                scale_gradient = (along - (of_positives * ctx.kept.positives).sum()) / scale
            x_gradient, y_gradient = (
                finish_gradient(gradient, vectors, factors) if needed else None
                for gradient, vectors, factors, needed in (
                    (x_gradient, x, x_factors, needs_x),
                    (y_gradient, y, y_factors, needs_y),
                )
            )
        return x_gradient, y_gradient, scale_gradient, None, None, None, None, None, None


def _plain(
    comparison: Comparison, symmetric: bool, normalize: bool, x: Tensor, y: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same from all similarities."""
    x, y = (unit_vectors(x), unit_vectors(y)) if normalize else full_precision(x, y)
    similarities = (x @ y.T).to(scale.dtype)
    # Not -inf, without negatives there would be NaN.
    least = torch.finfo(scale.dtype).min
    equal = comparison.x_labels[:, None] == comparison.y_labels
    exponents = (scale * similarities).masked_fill(equal, least)
    rows, columns = (exponents.logsumexp(dim) for dim in (1, 0))
    return rows, columns if symmetric else scale.new_zeros(0), similarities[comparison.rows, comparison.columns]


def implementation_of(backend: str) -> ModuleType:
    """Return where ``log_sum_exps`` and ``log_sum_exp_gradients`` of a backend are."""
    if backend == "triton":
        from vl_plugins.kernels import triton_log_sum_exp

        return triton_log_sum_exp
    return tiled


def number_for(scale: Tensor) -> float | Tensor:
    """Return a number where that does not wait for a device."""
    return scale.item() if scale.device.type == "cpu" else scale
