"""Similarities of sets of embeddings, as functions and as pytorch-metric-learning distances.

The functions compare ``embeddings`` (A, K1, D) with ``ref_emb`` (C, K2, D), sets of K1 and of K2 elements, and return
similarities (A, C), float32 or float64, also under autocast. Elements are L2-normalized first, unless ``normalize`` is
False. A zero vector, of a norm below 1e-12, is padding for sets of unequal size: it does not belong to its set and gets
no gradient. An empty set has the similarity 0 to every set. NaN or infinity in an element gives NaN. With ``paired``,
set i is compared with set i alone, (A,).

Similarities are computed from blocks of sets, with a few numbers per pair of elements. With ``tiled`` each block is
computed again for the gradients instead of being kept. By default that is so beyond 1 GiB of cosines.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vl_plugins.errors import number
from vl_plugins.negatives import LEAST_NORM, MATRIX_BYTES, block_rows
from vl_plugins.numerics import full_precision

__all__ = [
    "ChamferSimilarity",
    "MILSimilarity",
    "MatchProbability",
    "SetDistance",
    "SmoothChamferSimilarity",
    "chamfer_similarity",
    "match_probability",
    "mil_similarity",
    "smooth_chamfer_similarity",
]

ABSENT = -1e24  # added to a cosine; finite, because infinity times a weight of 0 is NaN


def smooth_chamfer_similarity(embeddings: Tensor, ref_emb: Tensor, alpha: float = 16.0, **options: Any) -> Tensor:
    r"""Smooth-Chamfer similarity of sets (Eq. 6-7): each element and a soft maximum over the other set.

    .. math:: s = \frac{1}{2 \alpha |X|} \sum_{x \in X} \log \sum_{y \in Y} e^{\alpha c(x, y)}
              + \frac{1}{2 \alpha |Y|} \sum_{y \in Y} \log \sum_{x \in X} e^{\alpha c(x, y)}

    with the cosines :math:`c(x, y)` and an inverse temperature :math:`\alpha > 0`. Every pair of elements gets a
    gradient, the closest ones the most (Eq. 8). Sets of one element have their cosine as similarity.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> texts = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [1.0, 0.0]]])
    >>> smooth_chamfer_similarity(images, texts)
    tensor([[1.0000, 0.7717]])
    """
    number("alpha", alpha, above=0)
    return _compare(lambda c, *w: _both_ways(torch.logsumexp, alpha * c, *w) / alpha, embeddings, ref_emb, **options)


def chamfer_similarity(embeddings: Tensor, ref_emb: Tensor, **options: Any) -> Tensor:
    r"""Chamfer similarity of sets: each element and the closest of the other set. Ties share the gradient.

    .. math:: s = \frac{1}{2 |X|} \sum_{x \in X} \max_{y \in Y} c(x, y)
              + \frac{1}{2 |Y|} \sum_{y \in Y} \max_{x \in X} c(x, y)

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.3.

    >>> chamfer_similarity(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[0.7500]])
    """
    return _compare(partial(_both_ways, torch.amax), embeddings, ref_emb, **options)


def mil_similarity(embeddings: Tensor, ref_emb: Tensor, **options: Any) -> Tensor:
    r"""Similarity of multiple-instance learning: that of the closest pair of elements. Ties share the gradient.

    .. math:: s = \max_{x \in X, y \in Y} c(x, y)

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval (PVSE).

    >>> mil_similarity(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[1.]])
    """
    return _compare(lambda cosines, *_: cosines.amax((1, 2)), embeddings, ref_emb, **options)


def match_probability(
    embeddings: Tensor, ref_emb: Tensor, scale: float | Tensor = 1.0, shift: float | Tensor = 0.0, **options: Any
) -> Tensor:
    r"""Match probability of sets: the mean probability that two of their elements match, [0, 1].

    .. math:: s = \frac{1}{|X| |Y|} \sum_{x \in X, y \in Y} \sigma(a c(x, y) + b)

    ``scale`` a and ``shift`` b are numbers, or tensors of one element, which receive gradients.

    Reference:
        Chun et al. 2021, Probabilistic Embeddings for Cross-Modal Retrieval (PCME).

    >>> match_probability(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), scale=2.0)
    tensor([[0.6904]])
    """
    for name, value in (("scale", scale), ("shift", shift)):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(value.shape)}")
    # 0-D tensors do not change the type of the cosines.
    a, b = (value.reshape(()) if isinstance(value, Tensor) else value for value in (scale, shift))

    def formula(cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        probabilities = (a * cosines + b).sigmoid()
        return (probabilities * weights[:, :, None] * ref_weights).sum((1, 2))

    return _compare(formula, embeddings, ref_emb, **options)


def _both_ways(maximum: Callable[..., Tensor], cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
    return ((maximum(cosines, 2) * weights).sum(1) + (maximum(cosines, 1) * ref_weights).sum(1)) / 2


def _compare(
    formula: Callable[[Tensor, Tensor, Tensor], Tensor],
    embeddings: Tensor,
    ref_emb: Tensor,
    *,
    normalize: bool = True,
    tiled: bool | None = None,
    paired: bool = False,
) -> Tensor:
    """Apply a formula to a block of sets at a time.

    Args:
        formula: maps cosines (a, K1, K2, C) to similarities (a, C), because reductions over a short last dimension are
            slow. Its other arguments are the weights of the elements, (a, K1, 1) and (K2, C): 1 / size of the set, and
            0 for padding, whose cosines are ``ABSENT``. With ``paired``, a = 1 and the first weights are (1, K1, C).
        embeddings, ref_emb, normalize, tiled, paired: see above.
    """
    if not embeddings.ndim == ref_emb.ndim == 3 or embeddings.shape[2] != ref_emb.shape[2]:
        given = f"{tuple(embeddings.shape)} and {tuple(ref_emb.shape)}"
        raise ValueError(f"embeddings and ref_emb must have the shapes (A, K1, D) and (C, K2, D), got {given}")
    if paired and len(embeddings) != len(ref_emb):
        raise ValueError(f"paired sets must be equally many, got {len(embeddings)} and {len(ref_emb)}")
    x, y = full_precision(embeddings, ref_emb)
    (x, *x_parts), (y, *y_parts) = _elements(x, normalize), _elements(y, normalize)
    y_bias, y_weights, y_exists = (tensor.T for tensor in y_parts)  # (K2, C), and (1, C)
    if paired:
        with torch.autocast(x.device.type, enabled=False):
            cosines = (x @ y.mT).permute(1, 2, 0)[None]
        bias, weights, exists = (tensor.T[None] for tensor in x_parts)  # (1, K1, C), and (1, 1, C)
        return _apply(formula, cosines, (bias, weights, exists[0]), (y_bias, y_weights, y_exists))[0]
    (k2, c), y = y_bias.shape, y.transpose(0, 1).flatten(0, 1)

    def block(x: Tensor, bias: Tensor, weights: Tensor, exists: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            cosines = (x.flatten(0, 1) @ y.T).view(*x.shape[:2], k2, c)
        return _apply(formula, cosines, (bias[..., None], weights[..., None], exists), (y_bias, y_weights, y_exists))

    size = x.shape[1] * k2 * c
    if tiled is None:
        tiled = len(x) * size * x.element_size() > MATRIX_BYTES
    run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False) if tiled else block
    rows = block_rows(size, x.device, least=1)
    return torch.cat([run(*parts) for parts in zip(*(tensor.split(rows) for tensor in (x, *x_parts)), strict=True)])


def _apply(
    formula: Callable[..., Tensor], cosines: Tensor, x_parts: Sequence[Tensor], y_parts: Sequence[Tensor]
) -> Tensor:
    """Apply a formula, given the bias and weights of the elements of both sides, and which sets are not empty."""
    cosines = cosines.add_(x_parts[0][:, :, None]).add_(y_parts[0])
    # Not masked: 0 times NaN is NaN.
    return formula(cosines, x_parts[1], y_parts[1]) * x_parts[2] * y_parts[2]


def _elements(sets: Tensor, normalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the elements (B, K, D), their bias and weights, (B, K), and 1 for sets that are not empty, (B, 1)."""
    if sets.shape[1] == 0:
        sets = functional.pad(sets, (0, 0, 0, 1))  # because a maximum needs an element
    units, norms = unit_elements(sets)
    absent = (norms < LEAST_NORM).to(sets.dtype).squeeze(2)
    sizes = sets.shape[1] - absent.sum(1, keepdim=True)
    return units if normalize else sets, absent * ABSENT, (1 - absent) / sizes.clamp(min=1), sizes.clamp(max=1)


def unit_elements(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (..., D) divided by their norms, as torch's ``normalize`` in fewer steps, and the norms (..., 1).

    The norms are constants: no gradient passes through them.
    """
    units, norms = _UnitElements.apply(vectors)
    return units, norms


class _UnitElements(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        units = vectors / norms.clamp(min=LEAST_NORM)
        ctx.save_for_backward(vectors, units)
        ctx.mark_non_differentiable(norms)
        ctx.set_materialize_grads(False)
        return units, norms

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Tensor | None:
        if grad is None:
            return None
        vectors, units = ctx.saved_tensors
        # Computed again, for second derivatives.
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=LEAST_NORM)
        return torch.addcmul(grad, units, (grad * units).sum(-1, keepdim=True), value=-1) / norms


class SetDistance(BaseDistance):
    """A similarity of sets of embeddings as a pytorch-metric-learning distance: larger is closer.

    An item is a set of K vectors, its elements: (B, K, D), where K may differ on the two sides. Sets may also be packed
    as (B, K * D), because miners and containers such as ``CrossBatchMemory`` and ``AccuracyCalculator`` accept only two
    dimensions. Then ``set_size`` is the K of the query, the first argument, and D and the width of the other side give
    the other K. If only one side is packed, the other one gives D, and ``set_size`` has no effect. With the default
    ``set_size``, 1, embeddings (B, D) are sets of one.

    Args:
        set_size: number of elements of a packed query, >= 1.
        tiled: see :mod:`vl_plugins.distances`, also for padding.
        kwargs: ``normalize_embeddings`` and ``collect_stats`` of pytorch-metric-learning.

    Raises:
        ValueError: a hyper-parameter out of its range; in a call, shapes that do not fit.
    """

    similarity: Callable[..., Tensor]
    """Similarity of sets, one of the functions of :mod:`vl_plugins.distances`."""

    def __init__(self, set_size: int = 1, tiled: bool | None = None, **kwargs: Any):
        super().__init__(is_inverted=True, **kwargs)
        if (self.p, self.power) != (2, 1):
            raise ValueError(f"{type(self).__name__} takes p=2 and power=1 only, got {self.p} and {self.power}")
        self.set_size = number("set_size", set_size, least=1, kind=int)
        self.tiled = tiled
        self.add_to_recordable_attributes(name="set_size", is_stat=False)

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Return the similarities, (A, C)."""
        sides = self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)
        # The base class keeps normalized copies.
        return super().forward(*sides) if self.collect_stats else self.compute_mat(*sides)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarities, (A, C), of embeddings that are normalized already or not."""
        sides = self.unpack(query_emb, ref_emb)
        return self.similarity(*sides, normalize=self.normalize_embeddings, tiled=self.tiled)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarities of set i and set i, (A,)."""
        sides = self.unpack(query_emb, ref_emb)
        return self.similarity(*sides, normalize=self.normalize_embeddings, paired=True)

    def unpack(self, query_emb: Tensor, ref_emb: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides as (A, K1, D) and (C, K2, D)."""
        sides = query_emb, ref_emb
        widths = {side.shape[2] for side in sides if side.ndim == 3}
        if not widths and query_emb.ndim == 2 and query_emb.shape[1] % self.set_size == 0:
            widths = {query_emb.shape[1] // self.set_size}
        width = widths.pop() if len(widths) == 1 else 0
        if width == 0 or any(side.ndim not in (2, 3) or side.shape[-1] % width for side in sides):
            raise ValueError(
                f"embeddings must be sets (B, K, D) of the same D, or packed: (B, {self.set_size} * D) for the query "
                f"and a multiple of D for the other, got {tuple(query_emb.shape)} and {tuple(ref_emb.shape)}"
            )
        query, ref = (side.reshape(len(side), side.shape[1:].numel() // width, width) for side in sides)
        return query, ref

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Return the embeddings, packed or not, with all elements normalized."""
        (embeddings,) = full_precision(embeddings)
        return functional.normalize(self.unpack(embeddings, embeddings)[0], dim=2).view_as(embeddings)

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Return the norms of all elements, (B, K)."""
        return self.unpack(embeddings, embeddings)[0].norm(dim=2)


class SmoothChamferSimilarity(SetDistance):
    """Smooth-Chamfer similarity of sets, see :func:`smooth_chamfer_similarity`.

    Args:
        alpha: inverse temperature, > 0.
        kwargs: see :class:`SetDistance`.

    >>> images, texts = torch.eye(2).expand(3, 2, 2), torch.ones(5, 1, 2)
    >>> SmoothChamferSimilarity(alpha=8)(images, texts).shape
    torch.Size([3, 5])
    """

    def __init__(self, alpha: float = 16.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.alpha = number("alpha", alpha, above=0)
        self.add_to_recordable_attributes(name="alpha", is_stat=False)

    def similarity(self, query_emb: Tensor, ref_emb: Tensor, **options: Any) -> Tensor:
        return smooth_chamfer_similarity(query_emb, ref_emb, self.alpha, **options)


class ChamferSimilarity(SetDistance):
    """Chamfer similarity of sets, see :func:`chamfer_similarity` and :class:`SetDistance`.

    >>> ChamferSimilarity(set_size=2)(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[0.7500]])
    """

    similarity = staticmethod(chamfer_similarity)


class MILSimilarity(SetDistance):
    """Similarity of the closest pair of elements, see :func:`mil_similarity` and :class:`SetDistance`.

    >>> MILSimilarity(set_size=2)(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[1.]])
    """

    similarity = staticmethod(mil_similarity)


class MatchProbability(SetDistance):
    """Mean probability that two elements match, see :func:`match_probability`.

    Args:
        scale, shift: of the cosines; initial values if they are learnable.
        learnable: make ``scale`` and ``shift`` parameters, float32; give the parameters of the loss to the optimizer.
        kwargs: see :class:`SetDistance`.

    >>> MatchProbability(scale=2.0, learnable=False)(torch.ones(1, 3), torch.ones(1, 3))
    tensor([[0.8808]])
    """

    def __init__(self, scale: float = 1.0, shift: float = 0.0, learnable: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.learnable = learnable
        for name, value in (("scale", number("scale", scale)), ("shift", number("shift", shift))):
            setattr(self, name, nn.Parameter(torch.tensor(value, dtype=torch.float32)) if learnable else value)

    def similarity(self, query_emb: Tensor, ref_emb: Tensor, **options: Any) -> Tensor:
        return match_probability(query_emb, ref_emb, self.scale, self.shift, **options)
