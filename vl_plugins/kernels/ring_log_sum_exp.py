"""Similarities of positive pairs and log-sum-exps over the negatives of all processes, differentiable."""

import torch
from torch import Tensor

from vl_plugins.distributed import Ring
from vl_plugins.functional.norms import inverse_norms
from vl_plugins.kernels.arrangement import Arrangement, Block, RingComparison
from vl_plugins.kernels.log_sum_exp import Contrast, implementation_of, number_for
from vl_plugins.kernels.tiled import Kept
from vl_plugins.kernels.vectors import finish_gradient, number_on, precise
from vl_plugins.utils.eager import eager

__all__ = ["NO_SECOND_DERIVATIVES", "ring_contrast"]

NO_SECOND_DERIVATIVES = "second derivatives (create_graph) cannot be computed through a ring of processes"


def ring_contrast(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    arrangement: Arrangement,
    scale: float | Tensor,
    ring: Ring,
    *,
    symmetric: bool,
    normalize: bool,
    backend: str,
) -> Contrast:
    """Compare the anchors of this process with the candidates of all; pairs of different labels are negative.

    The gradients that a process gets are those of the sum of all processes' losses by its vectors. Those by a tensor
    ``scale`` are parts: the sum over the processes is the gradient of the sum of their losses.

    Args:
        x: (A, D), floating point, of this process.
        y: (C, D), of the same type.
        x_labels: (A,), integers.
        arrangement: of the labels of all processes.
        scale: inverse temperature, the same in all processes; a number, or a tensor of one element.
        ring: of the processes.
        symmetric: columns are anchors too.
        normalize: cosines, otherwise dot products.
        backend: tiled or triton.

    Returns:
        As :func:`~vl_plugins.kernels.log_sum_exp.contrast`: rows (A,) and positives (M,) of this process, columns (N,)
        of all processes, over the rows of all.
    """
    scale = number_on(x.device, precise(x.device, torch.float32), scale)
    rows, columns, positives = eager()(
        _RingContrast.apply, x, y, scale, x_labels, arrangement, ring, symmetric, normalize, backend
    )
    return Contrast(rows, columns if symmetric else None, positives)


class _RingContrast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, scale, x_labels, arrangement, ring, symmetric, normalize, backend):
        comparison = RingComparison.of(x, y, x_labels, arrangement, ring, normalize=normalize)
        implementation = implementation_of(backend)
        number = number_for(scale)
        rows = scale.new_full((len(x),), -torch.inf)
        columns = scale.new_empty(len(arrangement.y_labels)) if symmetric else None
        positives = scale.new_empty(len(arrangement.rows))
        shifts = []
        with torch.autocast(x.device.type, enabled=False):
            for block in comparison.blocks():
                of_block = implementation.log_sum_exps(block.comparison, number, symmetric=symmetric, keep=False)
                torch.logaddexp(rows, of_block.rows.to(rows.dtype), out=rows)
                positives[block.pairs] = of_block.positives.to(positives.dtype)
                if symmetric:
                    columns[block.columns] = of_block.columns.to(columns.dtype)
                shifts.append(of_block.shifts)
        if symmetric:
            columns = ring.log_sum_exp(columns)
        ctx.save_for_backward(x, y, scale)
        ctx.comparison, ctx.implementation = comparison, implementation
        ctx.results = rows, columns, positives, shifts
        least = torch.finfo(scale.dtype).min
        return rows.clamp(min=least), columns.clamp(min=least) if symmetric else scale.new_zeros(0), positives.clone()

    @staticmethod
    def backward(ctx, of_rows, of_columns, of_positives):
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVES)
        *_, scale = ctx.saved_tensors
        comparison = ctx.comparison
        rows, columns, positives, shifts = ctx.results
        of_rows = of_rows.masked_fill(rows == -torch.inf, 0)
        if columns is not None:
            of_columns = comparison.ring.sum(of_columns).masked_fill(columns == -torch.inf, 0)
        needs_x, needs_y, needs_scale = ctx.needs_input_grad[:3]
        number = number_for(scale)
        # In the order of the forward pass.
        shifts = iter(shifts)

        def add(block: Block, x_gradient: Tensor | None, y_gradient: Tensor | None) -> None:
            of_part, upstream_of_part = (
                (None, None) if columns is None else (columns[block.columns], of_columns[block.columns])
            )
            kept = Kept(rows, of_part, positives[block.pairs], next(shifts), None)
            contribution = None if x_gradient is None else torch.empty_like(x_gradient)
            ctx.implementation.log_sum_exp_gradients(
                block.comparison,
                number,
                kept,
                of_rows,
                upstream_of_part,
                of_positives[block.pairs],
                contribution,
                y_gradient,
            )
            if x_gradient is not None:
                x_gradient += contribution

        with torch.autocast(scale.device.type, enabled=False):
            x_gradient, y_gradient = comparison.gradients(add, of_x=needs_x or needs_scale, of_y=needs_y)
            scale_gradient = None
            if needs_scale:
                # The sum of the similarities times the gradients by them over the own rows: <x, dx>.
                along = torch.linalg.vecdot(comparison.x.to(x_gradient.dtype), x_gradient).sum(dtype=scale.dtype)
                scale_gradient = (along - (of_positives * positives).sum()) / scale
            normalized = comparison.x_factors is not None
            x_gradient = finish_gradient(x_gradient, comparison.x, comparison.x_factors) if needs_x else None
            if needs_y:
                y_factors = inverse_norms(comparison.y) if normalized else None
                y_gradient = finish_gradient(y_gradient, comparison.y, y_factors)
        return x_gradient, y_gradient, scale_gradient, None, None, None, None, None, None
