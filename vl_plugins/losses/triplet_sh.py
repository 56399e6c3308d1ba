"""Triplet loss summed over all negatives."""

from torch import Tensor

from vl_plugins.functional import triplet_sh_loss
from vl_plugins.losses.base import PairBatch
from vl_plugins.losses.hardest_negative import TripletLoss

__all__ = ["TripletSHLoss"]


class TripletSHLoss(TripletLoss):
    """Triplet loss summed over all negatives of each anchor, the sum of hinges of VSE0.

    See :func:`vl_plugins.functional.triplet_sh_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for
    how to call it. With triplets as ``indices_tuple`` each given triplet is a value of its own.

    Args:
        margin: by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: ``symmetric`` and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives, l_SH.

    >>> import torch
    >>> loss = TripletSHLoss(margin=0.2)
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.8000)
    """

    equation = "l_SH, sum of hinges"
    paper = "Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives"
    independent_pairs = True

    def pair_losses(self, batch: PairBatch) -> Tensor:
        similarities, masks = batch.similarities(), batch.masks()
        return triplet_sh_loss(similarities, *masks, self.margin, symmetric=batch.symmetric, reduction="none")
