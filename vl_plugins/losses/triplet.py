"""Triplet losses, and the warm-up without mining of losses that search for hardest negatives."""

from typing import Any

import torch
from torch import Tensor

from vl_plugins.functional import triplet_hn_loss, triplet_margin, triplet_sh_loss
from vl_plugins.kernels import mine_hardest_negatives
from vl_plugins.losses.base import PairBatch, PairLoss, distance_problem
from vl_plugins.utils.checks import integer, non_negative

__all__ = ["HardestNegativeLoss", "TripletHNLoss", "TripletSHLoss"]


class HardestNegativeLoss(PairLoss):
    """A loss that compares each positive pair with the hardest negatives, optionally after a warm-up without mining.

    Early in training the hardest negative is often wrong for most pairs, and the model can collapse: all embeddings
    become the same, and the loss stays at its value for that, 2 * margin for each pair of a triplet loss. Counting all
    negatives for the first epoch or so helps, as VSE++ and its successors are trained.

    Args:
        warmup_steps: number of calls in training mode, with gradients enabled, in which all negatives of an anchor
            count and are summed up, on all similarities. Given triplets and evaluation are not affected.
        kwargs: see :class:`~vl_plugins.losses.base.PairLoss`.

    Attributes:
        training_calls: the number of such calls so far, a 0-D buffer.
    """

    def __init__(self, warmup_steps: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.warmup_steps = integer("warmup_steps", warmup_steps, least=0)
        self.register_buffer("training_calls", torch.zeros((), dtype=torch.long))

    def mined_losses(self, batch: PairBatch, mining: str) -> Tensor:
        """Return the loss of each positive pair with its ``"hardest"`` negatives, or summed over ``"all"``, (M,)."""
        raise NotImplementedError

    def pair_losses(self, batch: PairBatch) -> Tensor:
        is_warming_up = False
        if self.warmup_steps and self.training and torch.is_grad_enabled():
            self.training_calls += 1
            is_warming_up = self.training_calls <= self.warmup_steps
        return self.mined_losses(batch, "all" if is_warming_up else "hardest")

    def kernel_problem(self) -> str | None:
        return distance_problem(self.distance)


class TripletSHLoss(PairLoss):
    """Triplet loss summed over all negatives of each anchor, the sum of hinges of VSE0.

    See :func:`vl_plugins.functional.triplet_sh_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for
    how to call it. With triplets as ``indices_tuple`` the reducer receives ``relu(margin + S_an - S_ap)`` of each given
    triplet, ``reduction_type="triplet"``.

    Args:
        margin: by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: ``symmetric`` and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives, l_SH.

    >>> image_embeddings, text_embeddings, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> TripletSHLoss(margin=0.2)(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.8000)
    """

    equation = "l_SH, sum of hinges"
    paper = "Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives"
    independent_pairs = True

    def __init__(self, margin: float = 0.2, **kwargs: Any):
        super().__init__(**kwargs)
        self.margin = non_negative("margin", margin)
        self.add_to_recordable_attributes(name="margin")

    def pair_losses(self, batch: PairBatch) -> Tensor:
        similarities, masks = batch.similarities(), batch.masks()
        return triplet_sh_loss(similarities, *masks, self.margin, symmetric=batch.symmetric, reduction="none")

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return triplet_margin(similarities[anchors, positives], similarities[anchors, negatives], self.margin)


class TripletHNLoss(HardestNegativeLoss, TripletSHLoss):
    """Triplet loss with the hardest negative of each anchor, the max of hinges of VSE++.

    See :func:`vl_plugins.functional.triplet_hn_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for
    how to call it. With triplets as ``indices_tuple`` no negative is searched.

    Args:
        kwargs: ``warmup_steps``, see :class:`HardestNegativeLoss`; those of :class:`TripletSHLoss`, also for errors.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 1-2.

    >>> image_embeddings, text_embeddings, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> TripletHNLoss(margin=0.2)(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 1-2"
    paper = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    independent_pairs = True

    def mined_losses(self, batch: PairBatch, mining: str) -> Tensor:
        if mining == "all":
            return TripletSHLoss.pair_losses(self, batch)
        if batch.use_kernel:
            mined = mine_hardest_negatives(**batch.kernel_arguments(), backend=self.backend)
            losses = triplet_margin(mined.positive_similarities, mined.negative_similarities, self.margin)
            return losses.where(mined.exists, 0).sum(dim=0) + mined.zero
        similarities, masks = batch.similarities(), batch.masks()
        return triplet_hn_loss(similarities, *masks, self.margin, symmetric=batch.symmetric, reduction="none")
