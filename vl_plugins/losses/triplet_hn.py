"""Triplet loss with the hardest negative."""

from torch import Tensor

from vl_plugins.functional import triplet_hn_loss, triplet_margin, triplet_sh_loss
from vl_plugins.losses.base import PairBatch
from vl_plugins.losses.hardest_negative import HardestNegativeLoss, TripletLoss

__all__ = ["TripletHNLoss"]


class TripletHNLoss(HardestNegativeLoss, TripletLoss):
    """Triplet loss with the hardest negative of each anchor, the max of hinges of VSE++.

    See :func:`vl_plugins.functional.triplet_hn_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for
    how to call it. With triplets as ``indices_tuple`` each given triplet counts, and no negative is searched.

    Args:
        margin: by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: ``warmup_steps``, see :class:`~vl_plugins.losses.hardest_negative.HardestNegativeLoss`; ``symmetric``
            and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 1-2.

    >>> import torch
    >>> loss = TripletHNLoss(margin=0.2)
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 1-2"
    paper = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    independent_pairs = True

    def hardest_losses(self, batch: PairBatch) -> Tensor:
        if batch.use_kernel:
            mined = self.mine(batch)
            losses = triplet_margin(mined.positive_similarities, mined.negative_similarities, self.margin)
            return losses.where(mined.exists, 0).sum(dim=0) + mined.zero
        similarities, masks = batch.similarities(), batch.masks()
        return triplet_hn_loss(similarities, *masks, self.margin, symmetric=batch.symmetric, reduction="none")

    def all_negative_losses(self, batch: PairBatch) -> Tensor:
        similarities, masks = batch.similarities(), batch.masks()
        return triplet_sh_loss(similarities, *masks, self.margin, symmetric=batch.symmetric, reduction="none")
