"""Triplet losses: hardest negative and sum over all negatives."""

import torch
from torch import Tensor

from vl_plugins.functional.pairs import reduce_positive_pairs

__all__ = ["hardest_negatives", "triplet_hn_loss", "triplet_margin", "triplet_sh_loss"]


def triplet_margin(anchor_positive: Tensor, anchor_negative: Tensor, margin: float) -> Tensor:
    """Return ``relu(margin + anchor_negative - anchor_positive)`` of similarities that broadcast together.

    >>> triplet_margin(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]), margin=0.2)
    tensor([0.0000, 0.2000])
    """
    return (margin + anchor_negative - anchor_positive).relu()


def triplet_hn_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    margin: float = 0.2,
    *,
    symmetric: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""Triplet loss with the hardest negative of each anchor, Triplet-HN (Eq. 1-2; max of hinges in VSE++).

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \max(0, m + \max_{n \in N_i} S_{in} - S_{ip})

    Of several equally hard negatives one receives the gradient. An anchor without negatives gives 0.

    Args:
        similarities: (A, C), anchors x candidates, larger is closer.
        positive_mask, negative_mask: (A, C), bool. A pair in both masks counts as both; this is not checked.
        margin: by how much the positive should be closer than the hardest negative.
        symmetric: rows and columns are anchors; otherwise rows only.
        reduction: ``"mean"`` or ``"sum"`` over the positive pairs, or ``"none"`` for one value per positive pair, in
            the order of ``torch.where(positive_mask)``.

    Returns:
        A scalar, or (number of positive pairs,), float32 or float64. NaN if any similarity is not finite.

    Raises:
        ValueError: wrong shape, type, device or reduction.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval;
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives.

    >>> similarities = torch.tensor([[0.5, 0.4], [0.6, 0.9]])
    >>> positives = torch.eye(2, dtype=torch.bool)
    >>> triplet_hn_loss(similarities, positives, ~positives, margin=0.2, reduction="none")
    tensor([0.4000, 0.0000])
    """

    def anchor_loss(similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor) -> Tensor:
        hardest, _ = hardest_negatives(similarities, negative_mask)  # (A,)
        return triplet_margin(similarities[anchors, positives], hardest[anchors], margin)

    return reduce_positive_pairs(
        anchor_loss, similarities, positive_mask, negative_mask, symmetric=symmetric, reduction=reduction
    )


def hardest_negatives(similarities: Tensor, negative_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest similarity to a negative and the first column of it; -inf and 0 without negatives."""
    return similarities.masked_fill(~negative_mask, -torch.inf).max(dim=1)


def triplet_sh_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    margin: float = 0.2,
    *,
    symmetric: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""Triplet loss summed over all negatives of each anchor, the sum of hinges (VSE0).

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \sum_{n \in N_i} \max(0, m + S_{in} - S_{ip})

    Memory is one row of candidates per positive pair, M x C. Arguments, result and errors are those of
    :func:`triplet_hn_loss`.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives.

    >>> similarities = torch.tensor([[0.5, 0.4, 0.6]])
    >>> positives = torch.tensor([[True, False, False]])
    >>> triplet_sh_loss(similarities, positives, ~positives, margin=0.2, symmetric=False)
    tensor(0.4000)
    """

    def anchor_loss(similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor) -> Tensor:
        anchor_positive = similarities[anchors, positives]  # (M,)
        hinges = triplet_margin(anchor_positive[:, None], similarities[anchors], margin)  # (M, C)
        return hinges.masked_fill(~negative_mask[anchors], 0).sum(dim=1)

    return reduce_positive_pairs(
        anchor_loss, similarities, positive_mask, negative_mask, symmetric=symmetric, reduction=reduction
    )
