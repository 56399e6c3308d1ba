"""Triplet losses of VSE++, with the hardest negative or with all of them."""

from typing import Any

from torch import Tensor

from vl_plugins.errors import number
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.warmup import Warmup

__all__ = ["TripletHNLoss", "TripletSHLoss"]

PAPER = "Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives"


class TripletHNLoss(PairLoss):
    r"""Triplet loss with the hardest negative of each anchor, the max of hinges of VSE++.

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \max(0, m + \max_{n \in N_i} S_{in} - S_{ip})

    When to use it: to reproduce VSE++ and its successors. From scratch it stalls at first, and in small experiments
    it still scored below :class:`~vl_plugins.losses.UnifiedLoss` after three times as many steps.

    Args:
        margin: m, by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: and how to call the loss, see :class:`~vl_plugins.losses.PairLoss`.

    >>> import torch
    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> TripletHNLoss(margin=0.2)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.4000)
    """

    equation, paper = "l_MH, max of hinges", PAPER

    def __init__(self, margin: float = 0.2, **kwargs: Any):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, least=0)
        self.add_to_recordable_attributes(name="margin")

    def of_pairs(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (self.margin + negative - positive).relu()

    @classmethod
    def warmed_up(cls, steps: int, **options: Any) -> Warmup:
        """Return this loss with these options after some steps with all negatives."""
        return Warmup(TripletSHLoss(**options), cls(**options), steps)


class TripletSHLoss(PairLoss):
    r"""Triplet loss summed over all negatives of each anchor, the sum of hinges of VSE0.

    .. math:: \ell_{ip} = \sum_{n \in N_i} \max(0, m + S_{in} - S_{ip})

    When to use it: in the first steps before Triplet-HN, or to compare with it. It has many small gradients and
    does not stall.

    Memory is one row of candidates per positive pair, M x C. Arguments are those of :class:`TripletHNLoss`.

    >>> import torch
    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> TripletSHLoss(margin=0.2)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.8000)
    """

    equation, paper = "l_SH, sum of hinges", PAPER
    by_row = True

    def __init__(self, margin: float = 0.2, **kwargs: Any):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, least=0)
        self.add_to_recordable_attributes(name="margin")

    def matrix_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, pairs: tuple[Tensor, Tensor]
    ) -> Tensor:
        rows, columns = pairs
        violations = (self.margin + similarities[rows] - similarities[rows, columns][:, None]).relu()  # (M, C)
        return violations.masked_fill(~negative_mask[rows], 0).sum(dim=1)

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return (self.margin + similarities[anchors, negatives] - similarities[anchors, positives]).relu()

    takes_triplets = True
