"""The hardest negatives of each row and column, searched a block of similarities at a time."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.goal import Objective, RelativeTerms, relative_negatives, relative_positives
from vl_plugins.functional.precision import full_precision, unit_vectors
from vl_plugins.kernels.comparison import (
    EmbeddingPair,
    PairLabels,
    check_embeddings,
    choose_backend,
    differentiable_gradients,
    row_blocks,
)
from vl_plugins.utils.eager import eager

__all__ = ["HardestNegatives", "mine_hardest_negatives"]


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


def mine_hardest_negatives(
    embeddings: Tensor,
    ref_emb: Tensor,
    labels: Tensor,
    ref_labels: Tensor,
    pairs: tuple[Tensor, Tensor],
    *,
    objective: Objective | None = None,
    normalize: bool = True,
    same_set: bool = False,
    symmetric: bool = True,
    backend: str | None = None,
) -> HardestNegatives:
    """Compare embeddings, where pairs of different labels are negative, without a matrix of all similarities.

    Of equally hard negatives the first counts.

    Args:
        embeddings, ref_emb, labels, ref_labels, pairs, normalize, same_set, symmetric: see
            :func:`~vl_plugins.kernels.unified_losses_from_embeddings`.
        objective: of GOAL; with relative weights ``terms`` are computed.
        backend: see :data:`~vl_plugins.kernels.comparison.BACKENDS`; ``dense`` is the same as ``tiled``.

    Returns:
        Float32 or float64, also under autocast; both similarities have gradients. Second derivatives take the
        embeddings of each pair, (M, D).

    Raises:
        ValueError: wrong shape, type or device, or an unknown backend.
    """
    check_embeddings(embeddings, ref_emb, labels, ref_labels)
    choose_backend(backend, embeddings, ref_emb, name="hardest negatives")
    pair_labels = PairLabels(labels, ref_labels, *pairs, same_set)
    return eager()(_mine, embeddings, ref_emb, pair_labels, objective, normalize, symmetric)


def _mine(
    embeddings: Tensor,
    ref_emb: Tensor,
    labels: PairLabels,
    objective: Objective | None,
    normalize: bool,
    symmetric: bool,
) -> HardestNegatives:
    pair = EmbeddingPair.prepare(embeddings, ref_emb, normalize=normalize)
    rows, columns, count = labels.rows, labels.columns, len(labels.rows)
    if count == 0:
        none = torch.zeros(2 if symmetric else 1, 0, dtype=pair.dtype, device=embeddings.device)
        return HardestNegatives(none[0], none, none.bool(), RelativeTerms(none, none), pair.zero_or_nan)
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        positives, hardest, ref_hardest = _search(pair, labels, symmetric=symmetric)
        # Of each positive pair, and of the hardest negatives of its row and its column.
        values, all_rows, all_columns = [positives, hardest[0][rows]], [rows, rows], [columns, hardest[1][rows]]
        if ref_hardest is not None:
            values.append(ref_hardest[0][columns])
            all_rows, all_columns = [*all_rows, ref_hardest[1][columns]], [*all_columns, columns]
        values, all_rows, all_columns = map(torch.cat, (values, all_rows, all_columns))
    values, zero = _PairSimilarities.apply(embeddings, ref_emb, pair, values, (all_rows, all_columns))
    s_p, s_n = values[:count], values[count:].view(-1, count)
    exists = s_n.detach() != -torch.inf
    s_n = torch.where(exists, s_n, 0)
    terms = None
    if objective is not None and objective.is_relative:
        with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
            terms = _relative_terms(objective, pair, labels, hardest, ref_hardest, s_p, s_n)
    return HardestNegatives(s_p, s_n, exists, terms, zero)


def _search(
    pair: EmbeddingPair, labels: PairLabels, *, symmetric: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return the similarities of positive pairs, and of the hardest negatives with their indices for rows and columns.

    A row or column without negatives has the similarity -inf.
    """
    positives, rows, columns = [], [], None
    for block in labels.blocks():
        similarities = pair.similarities(block.rows)
        positives.append(similarities[block.equal_rows, block.equal_columns])
        block.fill_equal(similarities, -torch.inf)
        rows.append(similarities.max(dim=1))
        if symmetric:
            values, index = similarities.max(dim=0)
            index += block.rows.start
            if columns is None:
                columns = values, index
            else:  # of equal ones the first
                is_larger = values > columns[0]
                columns = torch.maximum(values, columns[0]), torch.where(is_larger, index, columns[1])
    row_values, row_index = map(torch.cat, zip(*rows, strict=True))
    return torch.cat(positives), (row_values, row_index), columns


def _relative_terms(
    objective: Objective,
    pair: EmbeddingPair,
    labels: PairLabels,
    hardest: tuple[Tensor, Tensor],
    ref_hardest: tuple[Tensor, Tensor] | None,
    s_p: Tensor,
    s_n: Tensor,
) -> RelativeTerms:
    """Compute m+ and m- of the hardest negatives, a block of rows at a time for each direction."""
    floor = s_p.min() - objective.eps
    directions = [(pair, labels.labels, labels.ref_labels, labels.rows, hardest)]
    if ref_hardest is not None:
        directions.append((pair.swapped(), labels.ref_labels, labels.labels, labels.columns, ref_hardest))
    terms = []
    for (pair, labels, ref_labels, anchors, (_, index)), hardest in zip(directions, s_n, strict=True):
        to_positives = [
            relative_positives(objective, s_p, hardest, part) for part in row_blocks(len(s_p), len(s_p), s_p.device)
        ]
        to_negatives = s_p.new_empty(len(labels))
        for block in row_blocks(len(labels), len(ref_labels), s_p.device):
            negative_mask = labels[block, None] != ref_labels
            relative = relative_negatives(objective, pair.similarities(block), negative_mask, floor)
            to_negatives[block] = relative.gather(1, index[block, None])[:, 0]
        terms.append((torch.cat(to_positives), to_negatives[anchors]))
    return RelativeTerms(*map(torch.stack, zip(*terms, strict=True)))


class _PairSimilarities(torch.autograd.Function):
    """Give known similarities of pairs a gradient that takes no copy of the embeddings of each pair; and 0 or NaN."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, ref_emb: Tensor, pair: EmbeddingPair, values: Tensor, at: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        zero = pair.zero_or_nan
        ctx.save_for_backward(embeddings, ref_emb, zero)
        ctx.pair, ctx.at = pair, at
        return values.clone(), zero

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, zero_upstream: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, ref_emb, zero = ctx.saved_tensors
        upstream = upstream + zero_upstream * zero
        if torch.is_grad_enabled():
            formula = partial(_plain_similarities, ctx.at, ctx.pair.inverse_norms is not None)
            return *differentiable_gradients(formula, (embeddings, ref_emb), (upstream,)), None, None, None
        needed = zip((ctx.pair.embeddings, ctx.pair.ref_emb), ctx.needs_input_grad, strict=False)
        grad, ref_grad = (torch.zeros_like(side, dtype=ctx.pair.dtype) if needs else None for side, needs in needed)
        with torch.autocast(upstream.device.type, enabled=False):
            ctx.pair.add_gradients_of_pairs(*ctx.at, upstream, grad, ref_grad)
            return *ctx.pair.finish_gradients(grad, ref_grad), None, None, None


def _plain_similarities(
    at: tuple[Tensor, Tensor], normalize: bool, embeddings: Tensor, ref_emb: Tensor
) -> tuple[Tensor]:
    """Return the same from plain operations, for second derivatives."""
    sides = (unit_vectors(embeddings), unit_vectors(ref_emb)) if normalize else full_precision(embeddings, ref_emb)
    return ((sides[0][at[0]] * sides[1][at[1]]).sum(dim=1),)
