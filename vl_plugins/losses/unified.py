"""Unified loss of pair similarity optimization, and vision-language contrastive loss, its case without a margin."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from vl_plugins.engine import matrix_maximum
from vl_plugins.errors import number
from vl_plugins.losses.scaled import ScaledLoss
from vl_plugins.numerics import check_not_negative, full_precision

__all__ = ["Polynomial", "UnifiedLoss", "VLCLoss", "soft_margin"]

Function = Callable[[Tensor], Tensor] | Sequence[float]
PAPER = "Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"


class UnifiedLoss(ScaledLoss):
    r"""Contrastive loss with the margin of the triplet loss, over all negatives of an anchor (Eq. 5).

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \frac{1}{\gamma} \log \Bigl(1 + \sum_{n \in N_i} e^{\gamma (S_{in} - S_{ip} + m)} \Bigr)

    When to use it: it is the first loss to try, with one caption of each image or several, in fine-tuning and from
    scratch. In small experiments it was better than the contrastive loss by 7 to 37 RSUM, and better than Triplet-HN
    by much more, as long as Triplet-HN had not yet plateaued. A learned scale was as good as a fixed one.

    Other positives of an anchor are never its negatives. A larger scale brings the loss closer to
    :class:`~vl_plugins.losses.TripletHNLoss` (Eq. 6). Its variants, alone or together:

    - Weighted (Eq. 24): :math:`w_{in} S_{in} - w_{ip} S_{ip} + m` in the exponent. The self-similarity polynomial loss
      SSP has ``weights=([...], [...])``, for the positives and for the negatives.
    - Of relative similarities (Eq. 25): :math:`G(S_{in} - S_{ip}) + m`. The relative-similarity polynomial loss RSP has
      ``relative=[...]``. Memory is then one row of candidates per positive pair, M x C.
    - With adaptive margins (Eq. 26): a margin :math:`m_p` for each caption, for example
      ``loss(..., margin=soft_margin(confidence))`` of Noisy Correspondence Rectifier, see :func:`soft_margin` (Eq. 27).

    Args:
        margin: m, by how much the positive should be closer than the negatives, >= 0: a number, or a parameter of one
            element, which is not kept above 0. A call may give another one, or one for each caption, (C,).
        scale: gamma, the inverse temperature, > 0. 50 is the paper's value for CLIP, 60 for VSE++. A learned one
            belongs to the call, ``loss(..., scale=model.logit_scale.exp())``, or to the loss, ``learn_scale=True``.
        weights: w, two elementwise functions of similarities, one for positives and one for negatives. Here and in
            ``relative``, a list of numbers means the :class:`Polynomial` with these coefficients.
        relative: G, an elementwise function of differences of similarities.
        kwargs: see :class:`~vl_plugins.losses.ScaledLoss`; for how to call it, see
            :class:`~vl_plugins.losses.PairLoss`.

    Raises:
        ValueError: a hyper-parameter out of its range.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> UnifiedLoss(margin=0.2, scale=50)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.4000)
    """

    equation, paper = "Eq. 5, 24-27", PAPER
    numbers = ("scale", "margin")
    by_row = True
    has_matrix_losses = False  # but with weights or relative similarities

    def __init__(
        self,
        margin: float | Tensor = 0.2,
        scale: float = 50.0,
        weights: tuple[Function, Function] | None = None,
        relative: Function | None = None,
        **kwargs: Any,
    ):
        super().__init__(scale=scale, **kwargs)
        self.margin = margin if isinstance(margin, Tensor) else number("margin", margin, least=0)
        if weights is None:
            weights = (None, None)
        elif len(weights) != 2:
            raise ValueError(f"weights must be two functions, of positives and of negatives, got {len(weights)}")
        self.positive_weight, self.negative_weight = map(_function, weights)
        self.relative = _function(relative)
        if self.positive_weight is not None or self.relative is not None:
            self.has_matrix_losses = True
        self.add_to_recordable_attributes(name="margin")

    def check_number(self, name: str, value: Any) -> Any:
        if name != "margin":
            return super().check_number(name, value)
        if not isinstance(value, Tensor):
            return number("margin", value, least=0)
        check_not_negative("margin", value)
        return value

    def of_pairs(self, positive: Tensor, negative: Tensor, scale: Any, margin: Any) -> Tensor:
        exponent = scale * (margin + negative - positive)
        return softplus(exponent, threshold=60) / scale  # exact in float64 beyond 60

    def matrix_losses(
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        pairs: tuple[Tensor, Tensor],
        scale: Any,
        margin: Any,
    ) -> Tensor:
        rows, columns = pairs
        positive = similarities[rows, columns]
        if self.positive_weight is not None:
            positive = self.positive_weight(positive) * positive
            similarities = self.negative_weight(similarities) * similarities
        if self.relative is None:
            negative = matrix_maximum(similarities, negative_mask, scale)[rows]
        else:  # of the differences to each positive, (M, C)
            differences = self.relative(similarities[rows] - positive[:, None])
            negative = matrix_maximum(differences, negative_mask[rows], scale)
            positive = torch.zeros_like(positive)
        return self.losses_of_pairs(positive, negative, {"scale": scale, "margin": margin})


class VLCLoss(ScaledLoss):
    r"""Vision-language contrastive loss, known as InfoNCE, NT-Xent or CLIP loss (Eq. 3-4).

    It is :class:`UnifiedLoss` with margin 0, times the scale (Eq. 7). With one text per image it is twice open_clip's
    ``ClipLoss``, which averages the two directions.

    When to use it: as the baseline of a comparison, also with several captions, which ``ClipLoss`` would take for
    negatives of each other.

    Args:
        kwargs: ``scale`` and others, see :class:`~vl_plugins.losses.ScaledLoss`.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> VLCLoss(scale=50)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(100.)
    """

    equation, paper = "Eq. 3-4", PAPER

    def of_pairs(self, positive: Tensor, negative: Tensor, scale: Any) -> Tensor:
        return softplus(scale * (negative - positive), threshold=60)


class Polynomial(nn.Module):
    """``c0 + c1 x + c2 x^2 + ...`` of each element of a tensor (section A.4.1 of the paper of :class:`UnifiedLoss`).

    >>> Polynomial([1, 0, 0.5])(torch.tensor([0.0, 2.0]))
    tensor([1., 3.])
    """

    def __init__(self, coefficients: Sequence[float]):
        super().__init__()
        self.coefficients = tuple(number("coefficients", value) for value in coefficients)

    def forward(self, values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for coefficient in reversed(self.coefficients):  # Horner
            result = result * values + coefficient
        return result


def soft_margin(confidence: Any, margin: float = 0.2, base: float = 10.0) -> Tensor:
    r"""Soft margin of Noisy Correspondence Rectifier: the less a pair is trusted to match, the smaller its margin.

    .. math:: \hat{m} = \frac{b^y - 1}{b - 1} m

    Args:
        confidence: y, that a pair matches, [0, 1], which is not checked; a tensor of any shape, an array or a list.
        margin: m, the margin of a pair that certainly matches.
        base: b > 1; with a larger base, the margin grows only at higher confidence.

    Returns:
        Of the shape of ``confidence``, float32 or float64.

    Reference:
        Huang et al. 2021, Learning with Noisy Correspondence for Cross-modal Matching.

    >>> soft_margin(torch.tensor([0.0, 0.5, 1.0]), margin=0.2, base=10)
    tensor([0.0000, 0.0481, 0.2000])
    """
    number("base", base, above=1)
    (confidence,) = full_precision(torch.as_tensor(confidence))
    return margin * torch.expm1(confidence * math.log(base)) / (base - 1)


def _function(value: Function | None) -> Any:
    if value is None or callable(value):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"weights and relative must be functions or lists of coefficients, got {value!r}")
    return Polynomial(value)
