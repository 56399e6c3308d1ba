"""The similarities of :mod:`vl_plugins.functional.set_similarity` as pytorch-metric-learning distances."""

import torch
from torch import Tensor, nn

from vl_plugins.distances.base import SetDistance
from vl_plugins.functional.set_similarity import (
    chamfer_similarity,
    match_probability,
    mil_similarity,
    smooth_chamfer_similarity,
)
from vl_plugins.losses.checks import finite, positive

__all__ = ["ChamferSimilarity", "MILSimilarity", "MatchProbability", "SmoothChamferSimilarity"]


class SmoothChamferSimilarity(SetDistance):
    """Smooth-Chamfer similarity of sets, see :func:`vl_plugins.functional.smooth_chamfer_similarity`.

    Args:
        alpha: inverse temperature, > 0.
        set_size, kwargs: see :class:`~vl_plugins.distances.base.SetDistance`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-8.

    >>> SmoothChamferSimilarity(alpha=8)(torch.ones(2, 4, 3), torch.ones(5, 6, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(self, alpha: float = 16.0, set_size: int = 1, **kwargs):
        super().__init__(set_size, **kwargs)
        self.alpha = positive("alpha", alpha)
        self.add_to_recordable_attributes(name="alpha", is_stat=False)

    def similarity(self, x: Tensor, y: Tensor, **options) -> Tensor:
        return smooth_chamfer_similarity(x, y, self.alpha, **options)


class ChamferSimilarity(SetDistance):
    """Chamfer similarity of sets, see :func:`vl_plugins.functional.chamfer_similarity`.

    Args:
        set_size, kwargs: see :class:`~vl_plugins.distances.base.SetDistance`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.3.
    """

    def similarity(self, x: Tensor, y: Tensor, **options) -> Tensor:
        return chamfer_similarity(x, y, **options)


class MILSimilarity(SetDistance):
    """Similarity of the closest pair of elements, see :func:`vl_plugins.functional.mil_similarity`.

    Args:
        set_size, kwargs: see :class:`~vl_plugins.distances.base.SetDistance`.

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval.
    """

    def similarity(self, x: Tensor, y: Tensor, **options) -> Tensor:
        return mil_similarity(x, y, **options)


class MatchProbability(SetDistance):
    """Probability of a match of sets, see :func:`vl_plugins.functional.match_probability`.

    Args:
        scale: of the cosines; to start with, where it is learned.
        shift: added to them, likewise.
        learnable: whether scale and shift are parameters.
        set_size, kwargs: see :class:`~vl_plugins.distances.base.SetDistance`.

    Reference:
        Chun et al. 2021, Probabilistic Embeddings for Cross-Modal Retrieval.
    """

    def __init__(self, scale: float = 1.0, shift: float = 0.0, learnable: bool = True, set_size: int = 1, **kwargs):
        super().__init__(set_size, **kwargs)
        self.learnable = learnable
        for name, value in (("scale", finite("scale", scale)), ("shift", finite("shift", shift))):
            setattr(self, name, nn.Parameter(torch.tensor(value)) if learnable else value)

    def similarity(self, x: Tensor, y: Tensor, **options) -> Tensor:
        return match_probability(x, y, self.scale, self.shift, **options)
