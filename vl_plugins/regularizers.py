"""Terms that spread embeddings out, or bring two clouds of them together, also as pytorch-metric-learning regularizers.

Sets are (B, K, D); a zero vector is padding, as in :mod:`vl_plugins.distances`. Results are float32 or float64, also
under autocast, and NaN if any element is NaN or infinite.
"""

from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.distances import SetDistance, unit_elements
from vl_plugins.errors import number
from vl_plugins.negatives import LEAST_NORM
from vl_plugins.numerics import full_precision

__all__ = [
    "DiversityRegularizer",
    "MMDRegularizer",
    "UniformityRegularizer",
    "circular_variance",
    "diversity_loss",
    "mmd_loss",
    "uniformity_loss",
]

ROUNDING = 32  # times eps and the squared norms: the error of a squared distance from dot products


def mmd_loss(x: Tensor, y: Tensor, gamma: float = 0.5, *, squared: bool = False) -> Tensor:
    r"""Maximum mean discrepancy of two clouds of vectors, squared, by its biased estimator.

    .. math::
        \frac{1}{M^2} \sum_{x, x'} k(x, x') + \frac{1}{N^2} \sum_{y, y'} k(y, y') - \frac{2}{MN} \sum_{x, y} k(x, y)
        \qquad k(x, y) = e^{-\gamma \lVert x - y \rVert}

    over all pairs, a vector and itself included. Vectors are taken as they are, not normalized. Coinciding vectors do
    not move each other; in float32, those count as coinciding whose distance is below 0.003 of their distance from the
    mean of both clouds.

    Args:
        x, y: (M, D) and (N, D). Memory is several numbers per pair.
        gamma: of the kernel, > 0, by unit of distance, or of squared distance.
        squared: the Gaussian kernel :math:`e^{-\gamma \lVert x - y \rVert^2}` instead.

    Returns:
        A scalar, >= 0; 0 for an empty cloud.

    Reference:
        Gretton et al. 2012, A Kernel Two-Sample Test, Eq. 5; Kim et al. 2023, Improving Cross-Modal Retrieval with Set
        of Diverse Embeddings, section 3.4, whose code has these defaults.

    >>> mmd_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]))  # 2 - 2 exp(-0.5 * 5)
    tensor(1.8358)
    """
    x, y = full_precision(x, y)
    weights = [side.new_full((len(side),), sign / max(1, len(side))) for side, sign in ((x, 1), (y, -1))]
    return _mmd(torch.cat([x, y]), torch.cat(weights), gamma, squared)


def _mmd(vectors: Tensor, weights: Tensor, gamma: float, squared: bool) -> Tensor:
    """Return the sum of k(x, x') over all pairs of vectors (N, D), each times both weights.

    Args:
        weights: (N,), of one cloud 1 / its size, of the other one -1 / its size, and 0 for vectors that do not exist. A
            cloud may be empty: the sum is not positive then.
    """
    number("gamma", gamma, above=0)
    with torch.autocast(vectors.device.type, enabled=False):
        # Otherwise close vectors far from zero round to the same. Distances do not depend on it: no gradient.
        center = weights.abs() @ vectors.detach() / 2
        vectors = vectors - center
        products = vectors @ vectors.T
        squared_norms = products.diagonal()
        sums = squared_norms[:, None] + squared_norms
        distances = sums.sub(products, alpha=2)
        if not squared:
            coincide = distances <= ROUNDING * torch.finfo(vectors.dtype).eps * sums
            # The derivatives of a root are infinite at 0.
            distances = distances.masked_fill(coincide, 1).sqrt().masked_fill(coincide, 0)
        # k - 1: the ones cancel, and would drown what is left.
        return (weights @ (-gamma * distances).expm1() @ weights).clamp(min=0)


def diversity_loss(sets: Tensor, scale: float = 2.0) -> Tensor:
    r"""How near the elements of each set are to each other, (B,): 1 where they coincide, 0 with fewer than two.

    Of an item with the K elements x, L2-normalized here, it is the mean over pairs of different elements

    .. math:: \frac{1}{K (K - 1)} \sum_{x \ne x'} e^{-2 \lVert x - x' \rVert^2}

    The paper sums; a mean does not depend on the number of elements. It regularizes the slots of a set prediction head.

    Args:
        sets: (B, K, D).
        scale: 2 in the formula, > 0.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> diversity_loss(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]]]))  # exp(-2 * 2) and exp(0)
    tensor([0.0183, 1.0000])
    """
    return _diversity(*join_sets(sets)[:2], scale)[0]


def _diversity(units: Tensor, present: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return :func:`diversity_loss` of elements (B, K, D) that are present (B, K), and the numbers of pairs, (B,)."""
    number("scale", scale, above=0)
    pairs = (present[:, :, None] & present[:, None]).triu(1)
    count = pairs.sum(dim=(1, 2))
    with torch.autocast(units.device.type, enabled=False):
        kernels = (2 * scale * (units @ units.mT - 1)).exp()  # unit vectors: ||x - x'||^2 = 2 - 2 cos
    # Not masked: 0 times NaN is NaN.
    return (kernels * pairs).sum(dim=(1, 2)) / count.clamp(min=1), count


def uniformity_loss(embeddings: Tensor, t: float = 2.0) -> Tensor:
    r"""How far embeddings are from being spread over the whole sphere: 0 where they coincide, else negative, >= -4 t.

    .. math:: \log \frac{1}{|P|} \sum_{(x, x') \in P} e^{-t \lVert x - x' \rVert^2}

    P are the pairs of embeddings of different items, L2-normalized here; of sets, the pairs of their elements.

    Args:
        embeddings: (B, D), or sets (B, K, D). With fewer than two items the value is 0.
        t: of the kernel, > 0.

    Reference:
        Wang and Isola 2020, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, section 4.1.2.

    >>> uniformity_loss(torch.eye(3))  # log(exp(-2 * 2))
    tensor(-4.)
    """
    number("t", t, above=0)
    units, present, _ = join_sets(embeddings[:, None] if embeddings.ndim == 2 else embeddings)
    items = torch.arange(len(units), device=units.device)[:, None].expand(present.shape).flatten()
    units, present = units.flatten(0, 1), present.flatten()
    pairs = (items[:, None] != items) & present[:, None] & present
    count = pairs.sum()
    with torch.autocast(units.device.type, enabled=False):
        exponents = 2 * t * (units @ units.T - 1)
        total = exponents.masked_fill(~pairs, torch.finfo(units.dtype).min).flatten().logsumexp(dim=0)
    return torch.where(count > 0, total - count.clamp(min=1).to(total).log(), 0) + 0 * units.sum()


def circular_variance(sets: Tensor) -> Tensor:
    r"""Return how much the directions in each set differ, :math:`1 - \lVert \frac{1}{K} \sum_x x \rVert`, (B,), [0, 1].

    A set whose elements point the same way has 0, one whose elements cancel 1; one without elements 0.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Table 3.

    >>> circular_variance(torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]]))
    tensor([0., 1.])
    """
    units, present, _ = join_sets(sets)
    sizes = present.sum(dim=1, keepdim=True)
    lengths = ((units * present[..., None]).sum(dim=1) / sizes.clamp(min=1)).norm(dim=1)
    return (1 - lengths).clamp(0, 1) * (sizes[:, 0] > 0)


class JoinedSets(NamedTuple):
    """The sets of one or two sides, one below the other, and smaller sets padded.

    Attributes:
        units: (A + C, K, D), L2-normalized elements, zero at padding.
        present: (A + C, K), False at padding.
        sides: numbers of sets of each side, (A, C) or (A,).
    """

    units: Tensor
    present: Tensor
    sides: list[int]

    def mmd(self, gamma: float, squared: bool) -> Tensor:
        """Return :func:`mmd_loss` of the elements of two sides."""
        weights = self._shares(self.present)
        weights[self.sides[0] :].neg_()
        return _mmd(self.units.flatten(0, 1), weights.flatten(), gamma, squared)

    def diversity(self, scale: float) -> Tensor:
        """Return the mean of :func:`diversity_loss` of the sets of two elements or more, added up over the sides."""
        values, count = _diversity(self.units, self.present, scale)
        return values @ self._shares(count > 0)

    def _shares(self, mask: Tensor) -> Tensor:
        """Return 1 / number of True entries of a side, and 0 for others."""
        parts = mask.to(self.units.dtype).split(self.sides)
        return torch.cat([part / part.sum().clamp(min=1) for part in parts])


def join_sets(*sides: Tensor) -> JoinedSets:
    """Return the sets (B, K, D) of one or two sides with normalized elements."""
    for side in sides:
        if side.ndim != 3:
            raise ValueError(f"sets must have the shape (B, K, D), got {tuple(side.shape)}")
    sets = full_precision(*sides)
    most = max(side.shape[1] for side in sides)
    sets = [side if side.shape[1] == most else pad(side, (0, 0, 0, most - side.shape[1])) for side in sets]
    units, norms = unit_elements(sets[0] if len(sets) == 1 else torch.cat(sets))
    return JoinedSets(units, (norms >= LEAST_NORM).squeeze(2), [len(sets) for sets in sides])


class DiversityRegularizer(BaseRegularizer):
    """How near the elements of one embedding set are to each other, see :func:`diversity_loss`.

    The reducer receives one value for each item of two elements or more, ``reduction_type="element"``.

    Args:
        scale: of the squared distances in the exponent, > 0.
        set_size: K of packed sets (B, K * D), >= 1; of no effect on sets (B, K, D).
        kwargs: ``reducer`` and ``collect_stats`` of pytorch-metric-learning.

    >>> regularizer = DiversityRegularizer(set_size=2)
    >>> regularizer(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]))  # mean of exp(-2 * 2) and exp(0)
    tensor(0.5092)
    """

    def __init__(self, scale: float = 2.0, set_size: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)
        self.sets = SetDistance(set_size)

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict[str, Any]]:
        sets, _ = self.sets.unpack(embeddings, embeddings)
        values, count = _diversity(*join_sets(sets)[:2], self.scale)
        (items,) = count.nonzero().T
        if len(items) == 0:
            return {"loss": {"losses": 0, "indices": None, "reduction_type": "already_reduced"}}
        losses = values[items] + 0 * values.sum()  # items of one element may be NaN
        return {"loss": {"losses": losses, "indices": items, "reduction_type": "element", "divisor": len(items)}}


class MMDRegularizer(BaseRegularizer):
    """Maximum mean discrepancy of the embeddings of two modalities, ``regularizer(embeddings, ref_emb)``.

    See :func:`mmd_loss`. The vectors are L2-normalized; of sets they are all elements, whichever item they belong to.
    As ``embedding_regularizer`` it works in the losses of this package: those of pytorch-metric-learning do not pass
    ``ref_emb``.

    Args:
        gamma: of the distances in the exponent, > 0.
        squared: the Gaussian kernel, of squared distances.
        set_size, kwargs: see :class:`DiversityRegularizer`.

    >>> MMDRegularizer()(torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, 0.0]]))  # 2 - 2 exp(-0.5 * 2)
    tensor(1.2642)
    """

    takes_ref_emb = True

    def __init__(self, gamma: float = 0.5, squared: bool = False, set_size: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.gamma = number("gamma", gamma, above=0)
        self.squared = squared
        self.sets = SetDistance(set_size)

    def forward(self, embeddings: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        if ref_emb is None:
            raise ValueError("MMDRegularizer compares two modalities: call the loss with ref_emb and ref_labels")
        self.reset_stats()
        value = join_sets(*self.sets.unpack(embeddings, ref_emb)).mmd(self.gamma, self.squared)
        loss = {"losses": value, "indices": None}
        return self.reducer({"loss": loss | {"reduction_type": "already_reduced"}}, embeddings, None)


class UniformityRegularizer(BaseRegularizer):
    """How far the embeddings of different items are from being spread over the sphere, see :func:`uniformity_loss`.

    Args:
        t: of the squared distances in the exponent, > 0.
        set_size, kwargs: see :class:`DiversityRegularizer`; by default embeddings (B, D) are sets of one.

    >>> UniformityRegularizer()(torch.eye(3))  # log(exp(-2 * 2))
    tensor(-4.)
    """

    def __init__(self, t: float = 2.0, set_size: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.t = number("t", t, above=0)
        self.sets = SetDistance(set_size)

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict[str, Any]]:
        value = uniformity_loss(self.sets.unpack(embeddings, embeddings)[0], self.t)
        return {"loss": {"losses": value, "indices": None, "reduction_type": "already_reduced"}}
