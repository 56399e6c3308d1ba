"""Unified loss of pair similarity optimisation."""

from torch import Tensor

from vl_plugins.functional import unified_loss
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.checks import non_negative, positive

__all__ = ["UnifiedLoss"]


class UnifiedLoss(PairLoss):
    """Contrastive loss with the margin of the triplet loss, over all negatives of an anchor.

    See :func:`vl_plugins.functional.unified_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for how
    to call it.

    Args:
        margin: by how much the positive should be closer than the negatives, >= 0, in units of the similarity.
        scale: inverse temperature, > 0. 50 is the paper's value for CLIP, 60 for VSE++.
        kwargs: ``symmetric`` and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 5.

    >>> import torch
    >>> loss = UnifiedLoss(margin=0.2, scale=50)
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 5"
    paper = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"

    def __init__(self, margin: float = 0.2, scale: float = 50.0, **kwargs):
        super().__init__(**kwargs)
        self.margin = non_negative("margin", margin)
        self.scale = positive("scale", scale)
        self.add_to_recordable_attributes(list_of_names=["margin", "scale"])

    def pair_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, *, symmetric: bool
    ) -> Tensor:
        return unified_loss(
            similarities,
            positive_mask,
            negative_mask,
            self.margin,
            self.scale,
            symmetric=symmetric,
            reduction="none",
        )
