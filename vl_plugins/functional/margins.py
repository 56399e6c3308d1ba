"""Margins that adapt to the pair."""

import math

from torch import Tensor

from vl_plugins.functional.precision import full_precision

__all__ = ["soft_margin"]


def soft_margin(confidence: Tensor, margin: float = 0.2, base: float = 10.0) -> Tensor:
    r"""Soft margin of Noisy Correspondence Rectifier: the less a pair is trusted to match, the smaller its margin.

    .. math:: \hat{m} = \frac{b^y - 1}{b - 1} m

    It is 0 for a confidence of 0 and the whole margin for 1. :func:`~vl_plugins.functional.unified_loss` takes it as
    ``margin``, per anchor or per pair.

    Args:
        confidence: y, that a pair matches, [0, 1], which is not checked; any shape.
        margin: m, that of a pair which matches for certain.
        base: b > 1; the larger, the more confidence a pair needs.

    Returns:
        Of the shape of ``confidence``, float32 or float64.

    Raises:
        ValueError: base is not a finite number > 1.

    Reference:
        Huang et al. 2021, Learning with Noisy Correspondence for Cross-modal Matching. The loss with such margins is
        Eq. 27 of Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval.

    >>> import torch
    >>> soft_margin(torch.tensor([0.0, 0.5, 1.0]), margin=0.2, base=10)
    tensor([0.0000, 0.0481, 0.2000])
    """
    if not 1 < base < math.inf:
        raise ValueError(f"base must be a finite number > 1, got {base!r}")
    (confidence,) = full_precision(confidence)
    return margin * (math.log(base) * confidence).expm1() / (base - 1)
