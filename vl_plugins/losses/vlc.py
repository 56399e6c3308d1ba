"""Vision-language contrastive loss."""

from torch import Tensor

from vl_plugins import kernels
from vl_plugins.functional import vlc_loss
from vl_plugins.losses.base import PairLoss
from vl_plugins.utils.checks import constant_scale

__all__ = ["VLCLoss"]


class VLCLoss(PairLoss):
    """Vision-language contrastive loss, known as InfoNCE, NT-Xent or CLIP loss.

    See :func:`vl_plugins.functional.vlc_loss` for the formula and :class:`~vl_plugins.losses.base.PairLoss` for how to
    call it. With one text per image it is twice open_clip's ``ClipLoss``, which averages the two directions.

    Args:
        scale: inverse temperature, > 0. A learned one belongs to the call:
            ``loss(..., scale=model.logit_scale.exp())``.
        kwargs: ``symmetric`` and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    Reference:
        Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval, Eq. 3-4.

    >>> import torch
    >>> loss = VLCLoss(scale=50)
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(100.)
    """

    equation = "Eq. 3-4"
    paper = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    independent_pairs = True

    def __init__(self, scale: float = 50.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = constant_scale(scale)
        self.add_to_recordable_attributes(name="scale")

    def pair_losses(
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        *,
        symmetric: bool,
        scale: float | Tensor | None = None,
    ) -> Tensor:
        scale = self.scale if scale is None else scale
        return vlc_loss(similarities, positive_mask, negative_mask, scale, symmetric=symmetric, reduction="none")

    def embedding_losses(
        self,
        x: Tensor,
        y: Tensor,
        x_labels: Tensor,
        y_labels: Tensor,
        *,
        scale: float | Tensor | None = None,
        **options,
    ) -> Tensor:
        scale = self.scale if scale is None else scale
        return kernels.vlc_loss(x, y, x_labels, y_labels, scale, reduction="none", **options)
