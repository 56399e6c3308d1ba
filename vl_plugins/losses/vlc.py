"""Vision-language contrastive loss."""

from torch import Tensor

from vl_plugins.functional import vlc_loss
from vl_plugins.kernels import unified_losses_from_embeddings
from vl_plugins.losses.base import PairBatch, PairLoss, distance_problem
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

    def pair_losses(self, batch: PairBatch) -> Tensor:
        if not batch.use_kernel:
            similarities, masks = batch.similarities(), batch.masks()
            return vlc_loss(similarities, *masks, batch.scale, symmetric=batch.symmetric, reduction="none")
        losses = unified_losses_from_embeddings(
            **batch.kernel_arguments(), margin=0.0, scale=batch.scale, backend=self.backend
        )
        return (batch.scale * losses).to(losses.dtype)

    def kernel_problem(self) -> str | None:
        return distance_problem(self.distance)
