"""The similarities of :mod:`vl_plugins.functional.set_similarity` as pytorch-metric-learning distances.

All have the arguments of :class:`SetDistance`, and raise its errors.
"""

import math
from collections.abc import Callable

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn

from vl_plugins import functional
from vl_plugins.functional.precision import full_precision
from vl_plugins.kernels import BACKENDS, pairwise_smooth_chamfer
from vl_plugins.utils.checks import finite, integer, positive
from vl_plugins.utils.errors import check_name

__all__ = [
    "ChamferSimilarity",
    "MILSimilarity",
    "MatchProbability",
    "SetDistance",
    "SmoothChamferSimilarity",
    "elements_present",
]


class SetDistance(BaseDistance):
    """A similarity of sets of embeddings as a pytorch-metric-learning distance: larger is closer.

    An item is a set of K vectors, its elements: (B, K, D), where K may differ on the two sides. Sets may also be packed
    as (B, K * D), because miners' containers such as ``CrossBatchMemory`` and ``AccuracyCalculator`` insist on two
    dimensions. Then ``set_size`` is the K of the query, the first argument; the K of the other side follows from its
    width. If only one side is packed, the other one gives D, and ``set_size`` does not matter. With the default
    ``set_size``, 1, embeddings (B, D) are sets of one.

    An element that is exactly zero is padding, as sets of unequal size need it: it is not in the set and has no
    gradient. A set without any other element has the similarity 0 to all. Everything is computed in float32 at least.

    Args:
        set_size: number of elements of a packed query, >= 1.
        kwargs: those of pytorch-metric-learning's ``BaseDistance``, such as ``normalize_embeddings`` (each element is
            normalized, or dot products take the place of cosines), ``p`` (by which norm), ``power`` and
            ``collect_stats``.

    Raises:
        ValueError: a hyper-parameter out of its range.
    """

    similarity: Callable[..., Tensor]
    """Similarity of sets, with the arguments of :mod:`vl_plugins.functional.set_similarity`."""

    def __init__(self, set_size: int = 1, **kwargs):
        super().__init__(is_inverted=True, **kwargs)
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(name="set_size", is_stat=False)

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Return the similarities, (A, C).

        Args:
            query_emb: (A, K1, D), or packed (A, set_size * D).
            ref_emb: (C, K2, D), or packed (C, K2 * D); the queries themselves if left out.

        Raises:
            ValueError: shapes that do not match.
        """
        # The base class would keep normalized copies.
        self.reset_stats()
        sides = self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)
        if self.collect_stats:
            with torch.no_grad():
                self.set_default_stats(*sides, *map(self.maybe_normalize, sides))
        similarities = self.compute_mat(*sides)
        return similarities if self.power == 1 else similarities**self.power

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor, paired: bool = False) -> Tensor:
        """Return the similarities, (A, C), of embeddings that are normalized already or not."""
        sides = self.unpack(query_emb, ref_emb)
        normalize = self.normalize_embeddings
        if normalize and self.p != 2:
            sides, normalize = [self.normalize(side) for side in sides], False
        mask, ref_mask = map(elements_present, sides)
        return self.similarity(*sides, mask=mask, ref_mask=ref_mask, normalize=normalize, paired=paired)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarity of each set and the one at its place, (A,)."""
        return self.compute_mat(query_emb, ref_emb, paired=True)

    def unpack(self, query_emb: Tensor, ref_emb: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides as (A, K1, D) and (C, K2, D), or raise ``ValueError`` if that is not possible."""
        sides = query_emb, ref_emb
        dimensions = {side.shape[2] for side in sides if side.ndim == 3}
        if not dimensions and query_emb.ndim == 2 and query_emb.shape[1] % self.set_size == 0:
            dimensions = {query_emb.shape[1] // self.set_size}
        dimension = dimensions.pop() if len(dimensions) == 1 else 0
        if dimension == 0 or any(side.ndim not in (2, 3) or side.shape[-1] % dimension for side in sides):
            raise ValueError(
                f"embeddings must be sets (B, K, D) of the same D, or packed: (B, {self.set_size} * D) for the query "
                f"and a multiple of D for the other, got {tuple(query_emb.shape)} and {tuple(ref_emb.shape)}"
            )
        query, ref = (side.reshape(len(side), side.shape[1:].numel() // dimension, dimension) for side in sides)
        return query, ref

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs) -> Tensor:
        """Return the embeddings, packed or not, with all elements normalized."""
        (embeddings,) = full_precision(embeddings)
        return super().normalize(self.unpack(embeddings, embeddings)[0], dim=-1, **kwargs).view_as(embeddings)

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs) -> Tensor:
        """Return the norms of all elements, (B, K)."""
        return super().get_norm(self.unpack(embeddings, embeddings)[0], dim=-1, **kwargs)


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

    similarity = staticmethod(functional.chamfer_similarity)


class MILSimilarity(SetDistance):
    """Similarity of the closest pair of elements, see :func:`vl_plugins.functional.mil_similarity`.

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval (PVSE).

    >>> MILSimilarity(set_size=2)(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[1.]])
    """

    similarity = staticmethod(functional.mil_similarity)


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


def elements_present(sets: Tensor) -> Tensor | None:
    """Return which elements of (B, K, D) are in their sets, (B, K) bool: those that are not zero; None if all are.

    >>> elements_present(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]))
    tensor([[ True, False]])
    """
    if sets.numel() == 0:
        return None
    # NaN is not equal to zero either.
    present = torch.linalg.vector_norm(sets.detach(), ord=math.inf, dim=2) != 0
    return None if present.all() else present
