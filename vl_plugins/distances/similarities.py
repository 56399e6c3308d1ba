"""The similarities of :mod:`vl_plugins.functional.set_similarity` as pytorch-metric-learning distances.

All have the arguments of :class:`~vl_plugins.distances.base.SetDistance`. A hyper-parameter out of its range raises
``ValueError``.
"""

import torch
from torch import Tensor, nn

from vl_plugins import functional
from vl_plugins.distances.base import SetDistance
from vl_plugins.kernels import BACKENDS, pairwise_smooth_chamfer
from vl_plugins.utils.checks import finite, positive
from vl_plugins.utils.errors import check_name

__all__ = ["ChamferSimilarity", "MILSimilarity", "MatchProbability", "SmoothChamferSimilarity"]


class SmoothChamferSimilarity(SetDistance):
    """Smooth-Chamfer similarity of sets, see :func:`vl_plugins.functional.smooth_chamfer_similarity`.

    Args:
        alpha: inverse temperature, > 0.
        backend: see :func:`vl_plugins.kernels.pairwise_smooth_chamfer`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-8.

    >>> images, texts = torch.eye(2).expand(3, 2, 2), torch.ones(5, 1, 2)
    >>> SmoothChamferSimilarity(alpha=8)(images, texts).shape
    torch.Size([3, 5])
    """

    def __init__(self, alpha: float = 16.0, set_size: int = 1, backend: str | None = None, **kwargs):
        super().__init__(set_size, **kwargs)
        self.alpha = positive("alpha", alpha)
        self.backend = None if backend is None else check_name("backend", backend, BACKENDS)
        self.add_to_recordable_attributes(name="alpha", is_stat=False)

    def similarity(self, query_emb: Tensor, ref_emb: Tensor, *, paired: bool = False, **options) -> Tensor:
        if paired:
            return functional.smooth_chamfer_similarity(query_emb, ref_emb, self.alpha, paired=True, **options)
        return pairwise_smooth_chamfer(query_emb, ref_emb, self.alpha, backend=self.backend, **options)


class ChamferSimilarity(SetDistance):
    """Chamfer similarity of sets, see :func:`vl_plugins.functional.chamfer_similarity`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.3.

    >>> ChamferSimilarity(set_size=2)(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[0.7500]])
    """

    def similarity(self, query_emb: Tensor, ref_emb: Tensor, **options) -> Tensor:
        return functional.chamfer_similarity(query_emb, ref_emb, **options)


class MILSimilarity(SetDistance):
    """Similarity of the closest pair of elements, see :func:`vl_plugins.functional.mil_similarity`.

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval (PVSE).

    >>> MILSimilarity(set_size=2)(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[1.]])
    """

    def similarity(self, query_emb: Tensor, ref_emb: Tensor, **options) -> Tensor:
        return functional.mil_similarity(query_emb, ref_emb, **options)


class MatchProbability(SetDistance):
    """Mean probability that two elements match, see :func:`vl_plugins.functional.match_probability`.

    Args:
        scale: by which cosines are multiplied; to start with, if it is learnable.
        shift: what is added, likewise.
        learnable: ``scale`` and ``shift`` are parameters: give those of the loss to the optimizer.

    Reference:
        Chun et al. 2021, Probabilistic Embeddings for Cross-Modal Retrieval (PCME).

    >>> MatchProbability(scale=2.0, learnable=False)(torch.ones(1, 3), torch.ones(1, 3))
    tensor([[0.8808]])
    """

    def __init__(self, scale: float = 1.0, shift: float = 0.0, learnable: bool = True, set_size: int = 1, **kwargs):
        super().__init__(set_size, **kwargs)
        self.learnable = learnable
        for name, value in (("scale", finite("scale", scale)), ("shift", finite("shift", shift))):
            setattr(self, name, nn.Parameter(torch.tensor(value)) if learnable else value)

    def similarity(self, query_emb: Tensor, ref_emb: Tensor, **options) -> Tensor:
        return functional.match_probability(query_emb, ref_emb, self.scale, self.shift, **options)
