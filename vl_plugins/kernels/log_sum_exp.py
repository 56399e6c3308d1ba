"""Contrastive losses of embeddings, from the log-sum-exp over the negatives of each row and column."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision, unit_vectors
from vl_plugins.functional.unified import unified_pair_losses
from vl_plugins.kernels.comparison import (
    Block,
    EmbeddingPair,
    PairLabels,
    check_embeddings,
    choose_backend,
    differentiable_gradients,
    row_blocks,
)
from vl_plugins.utils.eager import eager

__all__ = ["unified_losses_from_embeddings"]

# Exponentials of -MAX_EXPONENT to MAX_EXPONENT, their sums and inverses are far from the limits of float32.
MAX_EXPONENT = 75.0

Options = tuple[PairLabels, bool, bool, str]  # normalize, symmetric and backend


def unified_losses_from_embeddings(
    embeddings: Tensor,
    ref_emb: Tensor,
    labels: Tensor,
    ref_labels: Tensor,
    pairs: tuple[Tensor, Tensor],
    margin: float | Tensor = 0.2,
    scale: float | Tensor = 50.0,
    *,
    normalize: bool = True,
    same_set: bool = False,
    symmetric: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Return the losses of :func:`vl_plugins.functional.unified_loss`, keeping one matrix of similarities at most.

    Args:
        embeddings: (A, D), floating point.
        ref_emb: (C, D).
        labels: (A,), integers; pairs of different labels are negative.
        ref_labels: (C,), integers.
        pairs: rows, ascending, and columns of the positive pairs, all pairs of equal labels, (M,) each, see
            :func:`~vl_plugins.kernels.comparison.equal_label_pairs`.
        margin: m; a number or (M,).
        scale: gamma > 0, the inverse temperature; a number, or a tensor of one element, which receives a gradient.
        normalize: compare by cosine, otherwise by dot product. A zero vector has the cosine 0 to any other.
        same_set: ``ref_emb`` is ``embeddings``, and ``pairs`` are without those of an item and itself.
        symmetric: columns are anchors too.
        backend: one of :data:`~vl_plugins.kernels.comparison.BACKENDS`; chosen by size by default.

    Returns:
        (M,), float32 or float64, also under autocast; all NaN if any embedding is not finite. Second derivatives take
        several matrices (A, C).

    Raises:
        ValueError: wrong shape, type or device, or an unknown backend.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 5.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> unified_losses_from_embeddings(images, texts, labels, labels, (labels, labels), margin=0.2, scale=50)
    tensor([2.4000, 2.4000, 2.4000])
    """
    check_embeddings(embeddings, ref_emb, labels, ref_labels)
    backend = choose_backend(backend, embeddings, ref_emb, name="log-sum-exp over negatives")
    options = PairLabels(labels, ref_labels, *pairs, same_set), normalize, symmetric, backend
    return eager()(_UnifiedLosses.apply, embeddings, ref_emb, margin, scale, options)


class LogSumExps(NamedTuple):
    """The result of a forward pass, and what its backward pass needs.

    Attributes:
        positive_similarities: (M,).
        row_lse: (A,), log-sum-exps of the scaled similarities of each row's negatives.
        column_lse: (C,), of each column's; None unless columns are anchors.
        blocks: of rows, each with the exponent that became 0 before :func:`torch.exp`, the same for rows and columns;
            None where the exponents of a block are too far apart for that.
        matrix: (A, C), the exponentials of each block, or its exponents where it has no shift; None to recompute them.
    """

    positive_similarities: Tensor
    row_lse: Tensor
    column_lse: Tensor | None
    blocks: list[tuple[Block, float | None]]
    matrix: Tensor | None = None


class _UnifiedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, ref_emb: Tensor, margin: float | Tensor, scale: float | Tensor, options: Options
    ) -> Tensor:
        labels, normalize, symmetric, backend = options
        pair = EmbeddingPair.prepare(embeddings, ref_emb, normalize=normalize)
        numbers = [_number(value, pair) for value in (margin, scale)]
        with torch.autocast(embeddings.device.type, enabled=False):
            keep_matrix = backend == "dense" and any(ctx.needs_input_grad)
            sums = _log_sum_exps(pair, numbers[1], labels, symmetric=symmetric, keep_matrix=keep_matrix)
        negative_lse = [sums.row_lse[labels.rows]]
        if sums.column_lse is not None:
            negative_lse.append(sums.column_lse[labels.columns])
        losses = unified_pair_losses(torch.stack(negative_lse), sums.positive_similarities, *numbers)  # (1 or 2, M)
        if any(shift is None for _, shift in sums.blocks):  # a block with a shift is known to be finite
            losses = losses + pair.zero_or_nan
        ctx.save_for_backward(embeddings, ref_emb, *(v if isinstance(v, Tensor) else None for v in (margin, scale)))
        ctx.pair, ctx.numbers, ctx.options, ctx.sums, ctx.losses = pair, numbers, options, sums, losses
        return losses.sum(dim=0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        labels = ctx.options[0]
        if torch.is_grad_enabled():
            formula = partial(_plain_losses, ctx.options, ctx.numbers)
            return *differentiable_gradients(formula, ctx.saved_tensors, (upstream,)), None
        embeddings, _, margin, scale = ctx.saved_tensors
        pair, numbers = ctx.pair, ctx.numbers
        # The matrix is overwritten; a second backward pass recomputes it.
        sums, ctx.sums = ctx.sums, ctx.sums._replace(matrix=None)
        needs_grad, needs_ref_grad, needs_margin, needs_scale, _ = ctx.needs_input_grad
        # The derivative of softplus(z) is the logistic function of z, 1 - exp(-softplus(z)).
        weights = torch.expm1(ctx.losses * -numbers[1]).mul_(-upstream)  # (1 or 2, M)
        row_weights = torch.zeros_like(sums.row_lse).index_add_(0, labels.rows, weights[0])
        column_weights = None
        if sums.column_lse is not None:
            column_weights = torch.zeros_like(sums.column_lse).index_add_(0, labels.columns, weights[1])
        pair_weights = weights.sum(dim=0)
        margin_grad = scale_grad = None
        with torch.autocast(embeddings.device.type, enabled=False):
            needed = needs_grad or needs_scale, needs_ref_grad
            grad, ref_grad = _gradients(
                pair, numbers[1], labels, sums, row_weights, column_weights, -pair_weights, needed
            )
            if needs_margin:
                margin_grad = pair_weights if margin.ndim else pair_weights.sum()
            if needs_scale:
                # The sum over all pairs of the similarity times its gradient is <embeddings, grad>.
                total = (grad * pair.embeddings).sum() + (weights * numbers[0] - ctx.losses * upstream).sum()
                scale_grad = (total / numbers[1]).to(scale).view_as(scale)
            grad, ref_grad = pair.finish_gradients(grad if needs_grad else None, ref_grad)
        return grad, ref_grad, margin_grad, scale_grad, None  # autograd casts them to the types of the inputs


def _number(value: float | Tensor, pair: EmbeddingPair) -> float | Tensor:
    """Return a tensor of one element as a number where that does not wait for a device."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to(pair.embeddings.device, pair.dtype)
    if value.numel() != 1:
        return value
    return value.item() if value.device.type == "cpu" else value.reshape(())


def _log_sum_exps(
    pair: EmbeddingPair, scale: float | Tensor, labels: PairLabels, *, symmetric: bool, keep_matrix: bool
) -> LogSumExps:
    matrix, blocks = None, []
    if keep_matrix:
        matrix = pair.similarities(slice(None), scale)
        positives = matrix[labels.rows, labels.columns] / scale
    else:
        positives = pair.similarities_of_pairs(labels.rows, labels.columns)
    row_lse = positives.new_empty(len(pair.embeddings))
    column_lse = positives.new_full((len(pair.ref_emb),), -torch.inf) if symmetric else None
    for block in labels.blocks():
        exponents = pair.similarities(block.rows, scale) if matrix is None else matrix[block.rows]
        shift = _common_shift(exponents)
        blocks.append((block, shift))
        exponentials = _exponentials(exponents, shift, block)
        row_lse[block.rows] = _log_sum(exponentials, shift, dim=1)
        if column_lse is not None:
            torch.logaddexp(column_lse, _log_sum(exponentials, shift, dim=0), out=column_lse)
    return LogSumExps(positives, row_lse, column_lse, blocks, matrix)


def _gradients(
    pair: EmbeddingPair,
    scale: float | Tensor,
    labels: PairLabels,
    sums: LogSumExps,
    row_weights: Tensor,
    column_weights: Tensor | None,
    positive_grad: Tensor,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients by both sides of embeddings, as if their norms were constant.

    Args:
        pair, scale, labels, sums: of the forward pass.
        row_weights: (A,), by which the softmax over the negatives of each row is weighted.
        column_weights: (C,), of each column; None unless columns are anchors.
        positive_grad: (M,), the gradients by the similarities of the positive pairs.
        needed: which sides need a gradient.
    """
    if sums.matrix is not None:
        for block, shift in sums.blocks:
            _weigh(sums.matrix[block.rows], shift, pair, sums, block.rows, row_weights, column_weights)
        if pair.inverse_norms is not None:
            positive_grad = positive_grad * pair.inverse_norms[0][labels.rows] * pair.inverse_norms[1][labels.columns]
        sums.matrix[labels.rows, labels.columns] = positive_grad
        grad = sums.matrix @ pair.ref_emb if needed[0] else None
        return grad, sums.matrix.T @ pair.embeddings if needed[1] else None
    grad = torch.empty_like(pair.embeddings) if needed[0] else None
    ref_grad = torch.zeros_like(pair.ref_emb) if needed[1] else None
    for block, shift in sums.blocks:
        weights = _exponentials(pair.similarities(block.rows, scale), shift, block)
        _weigh(weights, shift, pair, sums, block.rows, row_weights, column_weights)
        if grad is not None:
            torch.mm(weights, pair.ref_emb, out=grad[block.rows])
        if ref_grad is not None:
            ref_grad.addmm_(weights.T, pair.embeddings[block.rows])
        del weights  # before the next block is computed
    pair.add_gradients_of_pairs(labels.rows, labels.columns, positive_grad, grad, ref_grad)
    return grad, ref_grad


def _common_shift(exponents: Tensor) -> float | None:
    """Return a shift with which no exponential over- or underflows, if there is one and it can be read at once."""
    if exponents.device.type != "cpu" or exponents.numel() == 0:  # reading it would wait for the device
        return None
    least, largest = (value.item() for value in exponents.aminmax())
    if max(-least, largest) <= MAX_EXPONENT:
        return 0.0
    return (least + largest) / 2 if largest - least <= 2 * MAX_EXPONENT else None


def _exponentials(exponents: Tensor, shift: float | None, block: Block) -> Tensor:
    """Return the exponentials of negatives in place, 0 for others; without a shift the exponents, -inf for others."""
    if shift is None:
        return block.fill_equal(exponents, -torch.inf)
    if shift:
        exponents.sub_(shift)
    return block.fill_equal(exponents.exp_(), 0.0)


def _log_sum(exponentials: Tensor, shift: float | None, dim: int) -> Tensor:
    return exponentials.logsumexp(dim) if shift is None else exponentials.sum(dim).log_().add_(shift)


def _weigh(
    exponentials: Tensor,
    shift: float | None,
    pair: EmbeddingPair,
    sums: LogSumExps,
    block: slice,
    row_weights: Tensor,
    column_weights: Tensor | None,
) -> None:
    """Overwrite a block by the gradient by its dot products: softmaxes times the upstream gradients, over the norms."""
    if shift is None:
        least = torch.finfo(exponentials.dtype).min  # instead of the -inf of no negatives, which minus itself is NaN
        softmax = (exponentials - sums.row_lse[block, None].clamp(min=least)).exp_().mul_(row_weights[block, None])
        if column_weights is not None and sums.column_lse is not None:
            softmax += (exponentials - sums.column_lse.clamp(min=least)).exp_().mul_(column_weights)
        if pair.inverse_norms is not None:
            softmax.mul_(pair.inverse_norms[0][block, None]).mul_(pair.inverse_norms[1])
        exponentials.copy_(softmax)
        return
    # The sum of a number of each row and one of each column, over the norms, is a product of two thin matrices.
    # Clamped where a row or column has no negatives: 0 times infinity is NaN.
    left = row_weights[block] * (shift - sums.row_lse[block]).clamp_(max=MAX_EXPONENT).exp_()
    left = torch.stack([left, torch.ones_like(left)], dim=1)
    right = exponentials.new_zeros(exponentials.shape[1])
    if column_weights is not None and sums.column_lse is not None:
        right = column_weights * (shift - sums.column_lse).clamp_(max=MAX_EXPONENT).exp_()
    right = torch.stack([torch.ones_like(right), right])
    if pair.inverse_norms is not None:
        left, right = left * pair.inverse_norms[0][block, None], right * pair.inverse_norms[1]
    for rows in row_blocks(len(left), 8 * right.shape[1], left.device):  # for little memory
        exponentials[rows].mul_(left[rows] @ right)


def _plain_losses(
    options: Options,
    numbers: list[float | Tensor],
    embeddings: Tensor,
    ref_emb: Tensor,
    margin: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor]:
    """Return the losses from plain operations on all similarities, for second derivatives."""
    labels, normalize, symmetric, _ = options
    margin, scale = numbers[0] if margin is None else margin, numbers[1] if scale is None else scale.reshape(())
    sides = (unit_vectors(embeddings), unit_vectors(ref_emb)) if normalize else full_precision(embeddings, ref_emb)
    similarities = sides[0] @ sides[1].T
    equal = labels.labels[:, None] == labels.ref_labels
    # Not -inf: the log-sum-exp of nothing else would have NaN gradients.
    exponents = (scale * similarities).masked_fill(equal, torch.finfo(similarities.dtype).min)
    negative_lse = [exponents.logsumexp(1)[labels.rows]]
    if symmetric:
        negative_lse.append(exponents.logsumexp(0)[labels.columns])
    positives = similarities[labels.rows, labels.columns]
    return (unified_pair_losses(torch.stack(negative_lse), positives, margin, scale).sum(dim=0),)
