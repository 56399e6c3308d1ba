"""Similarities of sets of embeddings and of order embeddings, as pytorch-metric-learning distances."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.distances import (
    BaseDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vl_plugins.engine import LEAST_NORM, MATRIX_BYTES, UnitVectors, block_rows, product, unit_vectors
from vl_plugins.errors import number
from vl_plugins.numerics import full_precision, type_of_products

__all__ = [
    "ChamferSimilarity",
    "MILSimilarity",
    "MatchProbability",
    "OrderSimilarity",
    "SetDistance",
    "SmoothChamferSimilarity",
    "captions_come_first",
]

ABSENT = -1e24  # added to a cosine; finite, because infinity times a weight of 0 is NaN


class OrderSimilarity(BaseDistance):
    r"""Similarity of order embeddings: 0 for a caption that says nothing beyond its image, otherwise negative.

    .. math:: s(i, c) = - \lVert \max(0, |c| - |i|) \rVert^2

    with unit vectors i and c. A caption may leave out what an image shows, so the order matters: images are the first
    argument. :class:`~vl_plugins.losses.CrossModalLoss` takes care of this where captions are the anchors. A miner
    needs this distance too, ``HardestNegativeMiner(distance=OrderSimilarity())``. Where captions are the first
    argument, as with a ``CrossBatchMemory`` of images, set ``captions_first=True``. The margin is on the scale of this
    similarity: the papers use 0.05.

    Args:
        absolute: compare the absolute values of the elements, because order embeddings are not negative.
        captions_first: the first argument of a call is the captions.
        normalize_embeddings: L2-normalize each vector first.

    Raises:
        ValueError: one set of embeddings, which has no images and captions.

    Reference:
        Vendrov et al. 2016, Order-Embeddings of Images and Language; Faghri et al. 2018, VSE++, Table 4 (Order++ with
        ``triplet_hn``, Order0 with ``triplet_sh``).

    >>> images, captions = torch.tensor([[0.6, 0.8]]), torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    >>> OrderSimilarity()(images, captions)
    tensor([[-0.0000, -0.1600]])
    """

    def __init__(self, absolute: bool = True, captions_first: bool = False, normalize_embeddings: bool = True):
        super().__init__(normalize_embeddings, is_inverted=True)
        self.absolute, self.captions_first = absolute, captions_first

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Return the similarities, (A, C)."""
        if ref_emb is None or ref_emb is query_emb:
            raise ValueError("OrderSimilarity compares images with captions, not one set of embeddings")
        similarities: Tensor = super().forward(*full_precision(query_emb, ref_emb))
        return similarities

    def normalize(self, embeddings: Tensor, *_: Any, **__: Any) -> Tensor:
        return unit_vectors(embeddings)  # where zero vectors have finite gradients

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        if self.absolute:
            query_emb, ref_emb = query_emb.abs(), ref_emb.abs()
        images, captions = (ref_emb, query_emb) if self.captions_first else (query_emb, ref_emb)
        size = captions.numel()
        is_large = len(images) * size * images.element_size() > MATRIX_BYTES
        blocks = []
        for block in images.split(block_rows(size, images.device, least=1)):
            if is_large:  # computed again for the gradients
                violations = checkpoint(_violations, block, captions, use_reentrant=False, preserve_rng_state=False)
            else:
                violations = _violations(block, captions)
            blocks.append(-violations)
        similarities = torch.cat(blocks)
        return similarities.T if self.captions_first else similarities


def _violations(images: Tensor, captions: Tensor) -> Tensor:
    """Return by how much captions exceed images, squared, (i, C)."""
    return (captions - images[:, None]).relu().square().sum(dim=2)


@contextlib.contextmanager
def captions_come_first(module: nn.Module) -> Iterator[None]:
    """Let each :class:`OrderSimilarity` in a module take captions as the first argument of its calls, for a while."""
    similarities = [submodule for submodule in module.modules() if isinstance(submodule, OrderSimilarity)]
    for similarity in similarities:
        similarity.captions_first = not similarity.captions_first
    try:
        yield
    finally:
        for similarity in similarities:
            similarity.captions_first = not similarity.captions_first


# Of vectors (B, D). A SetDistance checks its sets itself, and nothing is known of other distances.
VECTOR_DISTANCES = (CosineSimilarity, DotProductSimilarity, LpDistance, OrderSimilarity, SNRDistance)


class SetDistance(BaseDistance):
    """A similarity of sets of embeddings as a pytorch-metric-learning distance: larger is closer.

    An item is a set of K vectors, its elements: (B, K, D), where K may differ on the two sides. Sets may also be packed
    as (B, K * D), because miners and containers such as ``CrossBatchMemory`` and ``AccuracyCalculator`` accept only two
    dimensions. Then ``set_size`` is the K of the query, the first argument, and D and the width of the other side give
    the other K. If only one side is packed, the other one gives D, and ``set_size`` has no effect. With the default
    ``set_size``, 1, embeddings (B, D) are sets of one.

    Similarities (A, C) are float32 or float64, also under autocast. A zero vector, of a norm below 1e-12, is padding
    for sets of unequal size: it does not belong to its set and gets no gradient. An empty set has the similarity 0 to
    every set. NaN or infinity in an element gives NaN. A subclass defines :meth:`formula`.

    Args:
        set_size: number of elements of a packed query, >= 1.
        tiled: compute each block of similarities again for the gradients instead of keeping it. By default beyond 1 GiB
            of cosines.
        normalize_embeddings: L2-normalize each element first.

    Raises:
        ValueError: a hyper-parameter out of its range; in a call, shapes that do not fit.
    """

    def __init__(
        self,
        set_size: int = 1,
        tiled: bool | None = None,
        normalize_embeddings: bool = True,
    ):
        super().__init__(normalize_embeddings, is_inverted=True)
        self.set_size = number("set_size", set_size, least=1, kind=int)
        self.tiled = tiled
        self.add_to_recordable_attributes(name="set_size")

    def formula(self, cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        """Return the similarities of a sets to C sets, (a, C).

        Args:
            cosines: (a, K1, K2, C), because reductions over a short last dimension are slow; about -1e24 for padding.
            weights, ref_weights: (a, K1, 1) and (K2, C), 1 / size of its set for each element, and 0 for padding.
        """
        raise NotImplementedError

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Return the similarities, (A, C)."""
        if ref_emb is None:
            ref_emb = query_emb
        return self.compute_mat(query_emb, ref_emb)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        queries, refs = full_precision(*self.unpack(query_emb, ref_emb))
        x, y = self._elements(queries), self._elements(refs)
        columns = y.vectors.transpose(0, 1).flatten(0, 1)  # (K2 * C, D)
        size = x.vectors.shape[1] * len(columns)  # cosines of a query
        tiled = self.tiled
        if tiled is None:
            tiled = len(queries) * size * queries.element_size() > MATRIX_BYTES
        similarities = []
        for block in x.blocks(block_rows(size, queries.device, least=1)):
            if tiled:
                compare = partial(checkpoint, self._compare, use_reentrant=False, preserve_rng_state=False)
            else:
                compare = self._compare
            similarities.append(compare(block, y, columns, type_of_products()))
        return torch.cat(similarities)

    def _compare(self, x: "Elements", y: "Elements", columns: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return the similarities of some queries to all candidates, whose vectors ``columns`` has too, (K2 * C, D)."""
        y_bias = y.bias.T
        cosines = product(x.vectors.flatten(0, 1), columns, dtype).view(*x.vectors.shape[:2], *y_bias.shape)
        cosines = cosines.add_(x.bias[:, :, None, None]).add_(y_bias)
        # Not masked: 0 times NaN is NaN.
        return self.formula(cosines, x.weights[..., None], y.weights.T) * x.exists * y.exists.T

    def _elements(self, sets: Tensor) -> "Elements":
        if sets.shape[1] == 0:
            sets = functional.pad(sets, (0, 0, 0, 1))  # because a maximum needs an element
        units, norms = UnitVectors.apply(sets)
        absent = (norms < LEAST_NORM).to(sets.dtype).squeeze(2)
        sizes = sets.shape[1] - absent.sum(1, keepdim=True)
        if self.normalize_embeddings:
            sets = units
        return Elements(sets, absent * ABSENT, (1 - absent) / sizes.clamp(min=1), sizes.clamp(max=1))

    def unpack(self, query_emb: Tensor, *others: Tensor) -> list[Tensor]:
        """Return the sides as (A, K1, D) and (C, K2, D)."""
        sides = [query_emb, *others]
        widths = {side.shape[2] for side in sides if side.ndim == 3}
        if not widths and query_emb.ndim == 2 and query_emb.shape[1] % self.set_size == 0:
            widths = {query_emb.shape[1] // self.set_size}
        width = widths.pop() if len(widths) == 1 else 0
        if width == 0 or any(side.ndim not in (2, 3) or side.shape[-1] % width for side in sides):
            names = ["embeddings", "ref_emb"][: len(sides)]
            shapes = [str(tuple(side.shape)) for side in sides]
            raise ValueError(
                f"{' and '.join(names)} must be sets (B, K, D) of the same width D, or packed as (B, K * D), got "
                f"{' and '.join(shapes)}"
            )
        return [side.reshape(len(side), side.shape[1:].numel() // width, width) for side in sides]


class Elements(NamedTuple):
    """The elements of sets.

    Attributes:
        vectors: (B, K, D).
        bias: (B, K), added to their cosines: about -1e24 for padding, and 0 for others.
        weights: (B, K), 1 / size of the set, and 0 for padding.
        exists: (B, 1), 0 for an empty set, and 1 for others.
    """

    vectors: Tensor
    bias: Tensor
    weights: Tensor
    exists: Tensor

    def blocks(self, rows: int) -> Iterator["Elements"]:
        """Yield the elements of ``rows`` sets at a time."""
        for tensors in zip(*(tensor.split(rows) for tensor in self), strict=True):
            yield Elements(*tensors)


class ChamferSimilarity(SetDistance):
    r"""Chamfer similarity of sets: each element and the closest of the other set. Ties share the gradient.

    .. math:: s = \frac{1}{2 |X|} \sum_{x \in X} \max_{y \in Y} c(x, y)
              + \frac{1}{2 |Y|} \sum_{y \in Y} \max_{x \in X} c(x, y)

    with the cosines :math:`c(x, y)`. Arguments are those of :class:`SetDistance`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.3.

    >>> ChamferSimilarity()(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[0.7500]])
    """

    def formula(self, cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        return self.both_sides(cosines, weights, ref_weights) / 2

    def both_sides(self, cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        """Return the mean maximum of the elements of either set, added up."""
        return (self.maximum(cosines, 2) * weights).sum(1) + (self.maximum(cosines, 1) * ref_weights).sum(1)

    def maximum(self, cosines: Tensor, dim: int) -> Tensor:
        """Return the (soft) maximum of cosines (a, K1, K2, C) over one dimension."""
        return cosines.amax(dim)


class SmoothChamferSimilarity(ChamferSimilarity):
    r"""Smooth-Chamfer similarity of sets (Eq. 6-7): each element and a soft maximum over the other set.

    .. math:: s = \frac{1}{2 \alpha |X|} \sum_{x \in X} \log \sum_{y \in Y} e^{\alpha c(x, y)}
              + \frac{1}{2 \alpha |Y|} \sum_{y \in Y} \log \sum_{x \in X} e^{\alpha c(x, y)}

    with the cosines :math:`c(x, y)`. Every pair of elements gets a gradient, the closest ones the most (Eq. 8). Sets of
    one element have their cosine as similarity.

    Args:
        alpha: inverse temperature, > 0.
        kwargs: see :class:`SetDistance`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> texts = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [1.0, 0.0]]])
    >>> SmoothChamferSimilarity()(images, texts)
    tensor([[1.0000, 0.7717]])
    """

    def __init__(self, alpha: float = 16.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.alpha = number("alpha", alpha, above=0)
        self.add_to_recordable_attributes(name="alpha")

    def formula(self, cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        return self.both_sides(self.alpha * cosines, weights, ref_weights) / (2 * self.alpha)

    def maximum(self, cosines: Tensor, dim: int) -> Tensor:
        return cosines.logsumexp(dim)


class MILSimilarity(SetDistance):
    r"""Similarity of multiple-instance learning: that of the closest pair of elements. Ties share the gradient.

    .. math:: s = \max_{x \in X, y \in Y} c(x, y)

    with the cosines :math:`c(x, y)`. Arguments are those of :class:`SetDistance`.

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval (PVSE).

    >>> MILSimilarity(set_size=2)(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[1.]])
    """

    def formula(self, cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        return cosines.amax((1, 2))


class MatchProbability(SetDistance):
    r"""Match probability of sets: the mean probability that two of their elements match, [0, 1].

    .. math:: s = \frac{1}{|X| |Y|} \sum_{x \in X, y \in Y} \sigma(a c(x, y) + b)

    with the cosines :math:`c(x, y)`.

    Args:
        scale, shift: a and b; initial values if they are learnable.
        learnable: make ``scale`` and ``shift`` parameters, float32; give the parameters of the loss to the optimizer.
        kwargs: see :class:`SetDistance`.

    Reference:
        Chun et al. 2021, Probabilistic Embeddings for Cross-Modal Retrieval (PCME).

    >>> MatchProbability(scale=2.0, learnable=False)(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[0.6904]])
    """

    def __init__(self, scale: float = 1.0, shift: float = 0.0, learnable: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.learnable = learnable
        for name, value in (("scale", number("scale", scale)), ("shift", number("shift", shift))):
            setattr(self, name, nn.Parameter(torch.tensor(value, dtype=torch.float32)) if learnable else value)
        self.add_to_recordable_attributes(list_of_names=["scale", "shift"])

    def formula(self, cosines: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
        probabilities = (self.scale * cosines + self.shift).sigmoid()
        return (probabilities * weights[:, :, None] * ref_weights).sum((1, 2))
