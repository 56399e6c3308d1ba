"""The hardest negatives of each row and column, searched a block of similarities at a time."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.goal import Objective, RelativeTerms, relative_negatives, relative_positives
from vl_plugins.functional.norms import unit_vectors
from vl_plugins.functional.precision import full_precision
from vl_plugins.functional.triplet import hardest_negatives as hardest_of_rows
from vl_plugins.kernels.comparison import (
    EmbeddingPair,
    check_embeddings,
    choose_backend,
    differentiable_gradients,
    row_blocks,
)
from vl_plugins.utils.eager import eager

__all__ = ["HardestNegatives", "hardest_negatives"]


class HardestNegatives(NamedTuple):
    """The similarities of M positive pairs and of the hardest negatives of their rows and columns.

    Attributes:
        positive_similarities: (M,).
        negative_similarities: (2, M), or (1, M) unless the columns are anchors too: of each pair the similarity of its
            row and the hardest negative of that, and the same of its column; 0 without negatives.
        exists: (2, M) or (1, M), bool: whether there is a negative.
        terms: (2, M) or (1, M) each, what an objective with relative weights needs; otherwise None.
        zero: 0-D, to be added to the losses: 0, or NaN with NaN gradients if any embedding is not finite.
    """

    positive_similarities: Tensor
    negative_similarities: Tensor
    exists: Tensor
    terms: RelativeTerms | None
    zero: Tensor


def hardest_negatives(
    embeddings: Tensor,
    ref_emb: Tensor,
    labels: Tensor,
    ref_labels: Tensor,
    pairs: tuple[Tensor, Tensor],
    *,
    objective: Objective | None = None,
    normalize: bool = True,
    symmetric: bool = True,
    backend: str | None = None,
) -> HardestNegatives:
    """Compare embeddings, where pairs of different labels are negative, without a matrix of all similarities.

    Of equally hard negatives the first counts.

    Args:
        embeddings: (A, D), floating point.
        ref_emb: (C, D).
        labels: (A,), integers.
        ref_labels: (C,), integers.
        pairs: rows and columns of the positive pairs, (M,) each.
        objective: of GOAL; with relative weights ``terms`` are computed.
        normalize: compare by cosine, otherwise by dot product. A zero vector has the cosine 0 to any other.
        symmetric: columns are anchors too.
        backend: see :data:`~vl_plugins.kernels.comparison.BACKENDS`; ``dense`` is the same as ``tiled``.

    Returns:
        Float32 or float64, also under autocast; both similarities have gradients. Second derivatives take the
        embeddings of each pair, (M, D).

    Raises:
        ValueError: wrong shape, type or device, or a backend that cannot run.
    """
    check_embeddings(embeddings, ref_emb, labels, ref_labels)
    backend = choose_backend(backend, embeddings, ref_emb, name="hardest negatives")
    return eager()(_compare, embeddings, ref_emb, labels, ref_labels, pairs, objective, normalize, symmetric, backend)


def _compare(embeddings, ref_emb, labels, ref_labels, pairs, objective, normalize, symmetric, backend):
    pair = EmbeddingPair.prepare(embeddings, ref_emb, normalize=normalize, keep_half=backend == "triton")
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        search = _search
        if backend == "triton":
            from vl_plugins.kernels.triton_hardest_negatives import search  # here, because Triton is optional
        hardest, ref_hardest = search(pair, labels, ref_labels, symmetric=symmetric)
        (rows, columns), count = pairs, len(pairs[0])
        # Of each positive pair, and of the hardest negatives of its row and its column.
        all_rows, all_columns = [rows, rows], [columns, hardest[1][rows]]
        if symmetric:
            all_rows, all_columns = [*all_rows, ref_hardest[1][columns]], [*all_columns, columns]
    similarities, zero = _PairSimilarities.apply(
        embeddings, ref_emb, pair, torch.cat(all_rows), torch.cat(all_columns), normalize
    )
    s_p, s_n = similarities[:count], similarities[count:].view(2 if symmetric else 1, count)
    values = [hardest[0][rows]] + ([ref_hardest[0][columns]] if symmetric else [])
    exists = torch.stack(values) != -torch.inf
    s_n = torch.where(exists, s_n, 0)
    terms = None
    if objective is not None and objective.is_relative:
        with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
            terms = _relative_terms(objective, pair, labels, ref_labels, pairs, hardest, ref_hardest, s_p, s_n)
    return HardestNegatives(s_p, s_n, exists, terms, zero)


def _search(
    pair: EmbeddingPair, labels: Tensor, ref_labels: Tensor, *, symmetric: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return the largest similarity to a negative of each row and its column, (A,), and of each column and its row.

    -inf and 0 without negatives.
    """
    found = []
    best = pair.ref_emb.new_full((len(ref_labels),), -torch.inf), torch.zeros_like(ref_labels, dtype=torch.long)
    for block in row_blocks(len(labels), len(ref_labels), labels.device):
        similarities = pair.similarities(block)
        similarities.masked_fill_(labels[block, None] == ref_labels, -torch.inf)
        if similarities.numel() == 0:
            break
        found.append(similarities.max(dim=1))
        if symmetric:
            values, index = similarities.max(dim=0)
            index = torch.where(values > best[0], index + block.start, best[1])
            best = torch.maximum(values, best[0]), index
    if not found:
        empty = pair.embeddings.new_full((len(labels),), -torch.inf), torch.zeros_like(labels, dtype=torch.long)
        return empty, best
    return tuple(map(torch.cat, zip(*found, strict=True))), best if symmetric else None


def _relative_terms(objective, pair, labels, ref_labels, pairs, hardest, ref_hardest, s_p, s_n) -> RelativeTerms:
    """Compute m+ and m- of the hardest negatives, a block of rows at a time for each direction."""
    if len(s_p) == 0:
        return RelativeTerms(torch.zeros_like(s_n), torch.zeros_like(s_n))
    floor = s_p.min() - objective.eps
    directions = [(pair, labels, ref_labels, pairs[0], hardest)]
    if ref_hardest is not None:
        directions.append((pair.swapped(), ref_labels, labels, pairs[1], ref_hardest))
    terms = []
    for (pair, labels, ref_labels, anchors, (_, index)), hardest in zip(directions, s_n, strict=True):
        to_positives = [
            relative_positives(objective, s_p, hardest, part) for part in row_blocks(len(s_p), len(s_p), s_p.device)
        ]
        to_negatives = s_p.new_empty(len(labels))
        for block in row_blocks(len(labels), len(ref_labels), s_p.device):
            similarities = pair.similarities(block)
            negative_mask = labels[block, None] != ref_labels
            hardest_of_block, _ = hardest_of_rows(similarities, negative_mask)
            hardest_of_block.masked_fill_(hardest_of_block == -torch.inf, 0)
            statistics = relative_negatives(
                objective, similarities, negative_mask, hardest_of_block, index[block], floor
            )
            rows = torch.arange(len(similarities), device=s_p.device)
            to_negatives[block] = statistics.mean(objective, hardest_of_block, rows)
        terms.append((torch.cat(to_positives), to_negatives[anchors]))
    return RelativeTerms(*map(torch.stack, zip(*terms, strict=True)))


class _PairSimilarities(torch.autograd.Function):
    """Similarities of listed pairs, whose gradients take no copy of the embeddings of each pair; and 0 or NaN."""

    @staticmethod
    def forward(ctx, embeddings, ref_emb, pair, rows, columns, normalize):
        zero = pair.zero_or_nan
        ctx.save_for_backward(embeddings, ref_emb, rows, columns, zero)
        ctx.pair, ctx.normalize = pair, normalize
        with torch.autocast(embeddings.device.type, enabled=False):
            return pair.similarities_of_pairs(rows, columns), zero

    @staticmethod
    def backward(ctx, upstream, zero_upstream):
        embeddings, ref_emb, rows, columns, zero = ctx.saved_tensors
        upstream = upstream + zero_upstream * zero
        if torch.is_grad_enabled():
            formula = partial(_plain_similarities, rows, columns, ctx.normalize)
            return *differentiable_gradients(formula, (embeddings, ref_emb), (upstream,)), None, None, None, None
        needed = zip((ctx.pair.embeddings, ctx.pair.ref_emb), ctx.needs_input_grad, strict=False)
        grad, ref_grad = (torch.zeros_like(side, dtype=ctx.pair.dtype) if needs else None for side, needs in needed)
        with torch.autocast(upstream.device.type, enabled=False):
            ctx.pair.add_gradients_of_pairs(rows, columns, upstream, grad, ref_grad)
            grad, ref_grad = ctx.pair.finish_gradients(grad, ref_grad)
        grad = None if grad is None else grad.to(embeddings.dtype)
        return grad, None if ref_grad is None else ref_grad.to(ref_emb.dtype), None, None, None, None


def _plain_similarities(
    rows: Tensor, columns: Tensor, normalize: bool, embeddings: Tensor, ref_emb: Tensor
) -> tuple[Tensor]:
    """Return the same from plain operations, for second derivatives."""
    sides = (unit_vectors(embeddings), unit_vectors(ref_emb)) if normalize else full_precision(embeddings, ref_emb)
    return ((sides[0][rows] * sides[1][columns]).sum(dim=1),)
