"""Sigmoid loss of SigLIP, in which every pair of an image and a text counts once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from vl_plugins.errors import number
from vl_plugins.losses.scaled import ScaledLoss, one_element

__all__ = ["SigLIPLoss"]


class SigLIPLoss(ScaledLoss):
    r"""Minus the logarithm of a sigmoid for each pair of an image and a text, as match or no match.

    With the logits :math:`z_{ij} = \gamma S_{ij} + b`, the positives :math:`P_i` of an image and its negatives
    :math:`N_i`, the loss of a positive pair (i, p) is

    .. math:: \ell_{ip} = \log(1 + e^{-z_{ip}}) + \frac{1}{|P_i|} \sum_{n \in N_i} \log(1 + e^{z_{in}})

    so that each negative counts once. The negatives of images without a positive are shared by all pairs. With one text
    per image, the mean over the pairs is the loss of the paper. There is one direction only: a pair is the same from
    both sides.

    When to use it: to continue training a SigLIP model, whose scale and bias it takes. A CLIP model has
    no bias, and starts far from what this loss expects; there use :class:`~vl_plugins.losses.UnifiedLoss`.

    Args:
        scale: gamma, > 0; the default is the paper's initial value.
        bias: b. A call may give another one, such as ``model.logit_bias``.
        learn_bias: learn the bias, starting from ``bias``.
        symmetric: add the same with texts as anchors.
        kwargs: ``learn_scale`` and others, see :class:`~vl_plugins.losses.ScaledLoss`. The paper learns both.

    Reference:
        Zhai et al. 2023, Sigmoid Loss for Language Image Pre-Training.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> SigLIPLoss(scale=10, bias=0)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(11.3863)
    """

    equation = "Eq. 1"
    paper = "Zhai et al. 2023, Sigmoid Loss for Language Image Pre-Training"
    numbers = ("scale", "bias")
    by_row = True
    counts_unpaired_rows = True

    def __init__(
        self,
        scale: float = 10.0,
        bias: float = -10.0,
        learn_bias: bool = False,
        symmetric: bool = False,
        **kwargs: Any,
    ):
        super().__init__(scale=scale, symmetric=symmetric, **kwargs)
        value = number("bias", bias)
        self.bias: Any = nn.Parameter(torch.tensor(value)) if learn_bias else value
        self.add_to_recordable_attributes(name="bias")

    def check_number(self, name: str, value: Any) -> Any:
        if name == "bias" and isinstance(self.bias, nn.Parameter):
            raise ValueError("bias is the loss's own parameter (learn_bias=True); a call cannot give another one")
        if name == "bias" and isinstance(value, Tensor):
            return one_element("bias", value)
        return super().check_number(name, value)

    def matrix_losses(  # type: ignore[override]
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        pairs: tuple[Tensor, Tensor],
        scale: Any,
        bias: Any,
    ) -> tuple[Tensor, Tensor]:
        rows, columns = pairs
        logits = scale * similarities + bias
        of_negatives = softplus(logits).masked_fill(~negative_mask, 0).sum(dim=1)
        positives_per_row = positive_mask.sum(dim=1)
        losses = softplus(-logits[rows, columns]) + (of_negatives / positives_per_row.clamp(min=1))[rows]
        return losses, of_negatives.masked_fill(positives_per_row > 0, 0).sum()
