"""Terms that spread embeddings out, or bring two clouds of them together, as pytorch-metric-learning regularizers.

They are scalars, float32 or float64, also under autocast, and NaN if any element is NaN or infinite. They do not go
through a reducer.
"""

from typing import Any

import torch
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from vl_plugins.distances import SetDistance
from vl_plugins.engine import LEAST_NORM, UnitVectors, block_rows, product
from vl_plugins.errors import number
from vl_plugins.numerics import full_precision

__all__ = ["DiversityRegularizer", "JoinedSets", "MMDRegularizer", "UniformityRegularizer", "circular_variance"]

MMD_ROWS = 512  # elements whose distances to all others are kept at a time, at least
ROUNDING = 32  # times eps and the squared norms: the error of a squared distance from dot products


class JoinedSets:
    """The sets of one or two sides, one below the other; smaller sets are padded.

    Args:
        sides: (A, K1, D), or also (C, K2, D); zero vectors are padding, as in :mod:`vl_plugins.distances`.

    Attributes:
        units: (A + C, K, D), L2-normalized elements, zero at padding.
        present: (A + C, K), False at padding.
    """

    def __init__(self, *sides: Tensor):
        sets, most = full_precision(*sides), max(side.shape[1] for side in sides)
        padded = [side if side.shape[1] == most else pad(side, (0, 0, 0, most - side.shape[1])) for side in sets]
        self.units, norms = UnitVectors.apply(torch.cat(padded))
        self.present = (norms >= LEAST_NORM).squeeze(2)
        self.sizes = [len(side) for side in sides]

    def mmd(self, gamma: float) -> Tensor:
        """Return the discrepancy of all elements of two sides, see :class:`MMDRegularizer`; 0 if a side has none."""
        shares = self._shares(self.present)
        shares[self.sizes[0] :].neg_()
        vectors, weights = self.units.flatten(0, 1), shares.flatten()
        with torch.autocast(vectors.device.type, enabled=False):
            # Otherwise close vectors far from zero round to the same. Distances do not depend on it: no gradient.
            center = weights.abs() @ vectors.detach() / 2
            vectors = vectors - center
            squared_norms = vectors.square().sum(dim=1)
            whole = vectors, weights, squared_norms
            sums = []
            rows = block_rows(len(vectors), vectors.device, least=MMD_ROWS)
            for block in zip(*(tensor.split(rows) for tensor in whole), strict=True):
                arguments = (*block, *whole, gamma)
                if len(vectors) <= rows:
                    sums.append(_kernel_sum(*arguments))
                else:  # computed again for the gradients, instead of keeping the matrix
                    sums.append(checkpoint(_kernel_sum, *arguments, use_reentrant=False, preserve_rng_state=False))
            return torch.stack(sums).sum().clamp(min=0)

    def diversity(self, scale: float) -> Tensor:
        """Return the mean over the sets of two elements or more, added up over the sides."""
        pairs = (self.present[:, :, None] & self.present[:, None]).triu(1)
        count = pairs.sum(dim=(1, 2))
        cosines = product(self.units, self.units)  # of unit vectors: ||x - x'||^2 = 2 - 2 cos
        kernels = (2 * scale * (cosines - 1)).exp()
        # Not masked: 0 times NaN is NaN.
        means = (kernels * pairs).sum(dim=(1, 2)) / count.clamp(min=1)
        return (means * self._shares(count > 0)).sum()

    def _shares(self, mask: Tensor) -> Tensor:
        """Return 1 / number of True entries of a side, and 0 for others."""
        sides = mask.to(self.units.dtype).split(self.sizes)
        return torch.cat([side / side.sum().clamp(min=1) for side in sides])


def _kernel_sum(
    x: Tensor, x_weights: Tensor, x_squared: Tensor, y: Tensor, y_weights: Tensor, y_squared: Tensor, gamma: float
) -> Tensor:
    """Return the weighted sum of k - 1 over all pairs of two groups of vectors, given their squared norms.

    The ones cancel in the discrepancy, and would drown what is left.
    """
    sums = x_squared[:, None] + y_squared
    distances = sums.sub(product(x, y), alpha=2)
    coincide = distances <= ROUNDING * torch.finfo(x.dtype).eps * sums
    # The derivatives of a root are infinite at 0.
    distances = distances.masked_fill(coincide, 1).sqrt().masked_fill(coincide, 0)
    sums = product((-gamma * distances).expm1(), y_weights[None])  # (x, 1)
    return product(x_weights[None], sums.T).squeeze()


def circular_variance(sets: Tensor) -> Tensor:
    r"""Return how much the directions in each set differ, :math:`1 - \lVert \frac{1}{K} \sum_x x \rVert`, (B,), [0, 1].

    A set (K, D) whose elements point the same way has 0, one whose elements cancel 1; one without elements 0.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Table 3.

    >>> circular_variance(torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]]))
    tensor([0., 1.])
    """
    joined = JoinedSets(sets)
    sizes = joined.present.sum(dim=1, keepdim=True)
    lengths = ((joined.units * joined.present[..., None]).sum(dim=1) / sizes.clamp(min=1)).norm(dim=1)
    return (1 - lengths).clamp(0, 1) * (sizes[:, 0] > 0)


class SetRegularizer(BaseRegularizer):
    """A regularizer of sets (B, K, D), or (B, K * D) with ``set_size`` = K; by default vectors are sets of one."""

    def __init__(self, set_size: int = 1):
        super().__init__()
        self.sets = SetDistance(set_size)

    def join(self, *sides: Tensor) -> JoinedSets:
        return JoinedSets(*self.sets.unpack(*sides))


class DiversityRegularizer(SetRegularizer):
    r"""How near the elements of each set are to each other: 1 where they coincide.

    The mean over the items with the K >= 2 elements x, L2-normalized here, and over their pairs of elements

    .. math:: \frac{1}{K (K - 1)} \sum_{x \ne x'} e^{-2 \lVert x - x' \rVert^2}

    The paper sums; a mean does not depend on the number of elements.

    Args:
        scale: 2 in the formula, > 0.
        kwargs: ``set_size``, see :class:`SetRegularizer`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> regularizer = DiversityRegularizer(set_size=2)
    >>> regularizer(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]))  # mean of exp(-2 * 2) and exp(0)
    tensor(0.5092)
    """

    def __init__(self, scale: float = 2.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.scale = number("scale", scale, above=0)
        self.add_to_recordable_attributes(name="scale")

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.join(embeddings).diversity(self.scale)


class MMDRegularizer(SetRegularizer):
    r"""Maximum mean discrepancy of two modalities, ``regularizer(embeddings, ref_emb)``, squared, >= 0.

    It is the biased estimator over the M elements x of one side and the N elements y of the other, L2-normalized here,
    whichever item they belong to:

    .. math::
        \frac{1}{M^2} \sum_{x, x'} k(x, x') + \frac{1}{N^2} \sum_{y, y'} k(y, y') - \frac{2}{MN} \sum_{x, y} k(x, y)
        \qquad k(x, y) = e^{-\gamma \lVert x - y \rVert}

    Coinciding elements do not move each other; in float32, those count as coinciding whose distance is below 0.003 of
    their distance from the mean of both clouds. Memory is several numbers for each pair of a block, 512 elements at
    least, and all others.

    As ``embedding_regularizer`` it works in the losses of this package: those of pytorch-metric-learning do not pass
    ``ref_emb``.

    Args:
        gamma: > 0.
        kwargs: see :class:`DiversityRegularizer`.

    Reference:
        Gretton et al. 2012, A Kernel Two-Sample Test, Eq. 5; Kim et al. 2023, Improving Cross-Modal Retrieval with Set
        of Diverse Embeddings, section 3.4, whose code has this kernel.

    >>> MMDRegularizer()(torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, 0.0]]))  # 2 - 2 exp(-0.5 * 2)
    tensor(1.2642)
    """

    takes_ref_emb = True

    def __init__(self, gamma: float = 0.5, **kwargs: Any):
        super().__init__(**kwargs)
        self.gamma = number("gamma", gamma, above=0)
        self.add_to_recordable_attributes(name="gamma")

    def forward(self, embeddings: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        if ref_emb is None:
            raise ValueError("MMDRegularizer compares two modalities: call the loss with ref_emb and ref_labels")
        return self.join(embeddings, ref_emb).mmd(self.gamma)


class UniformityRegularizer(SetRegularizer):
    r"""How far embeddings are from being spread over the whole sphere: 0 where they coincide, else negative, >= -4 t.

    .. math:: \log \frac{1}{|P|} \sum_{(x, x') \in P} e^{-t \lVert x - x' \rVert^2}

    P are the pairs of elements of different items, L2-normalized here. With fewer than two items the value is 0.

    Args:
        t: of the kernel, > 0.
        kwargs: see :class:`DiversityRegularizer`.

    Reference:
        Wang and Isola 2020, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, section 4.1.2.

    >>> UniformityRegularizer()(torch.eye(3))  # log(exp(-2 * 2))
    tensor(-4.)
    """

    def __init__(self, t: float = 2.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.t = number("t", t, above=0)
        self.add_to_recordable_attributes(name="t")

    def forward(self, embeddings: Tensor) -> Tensor:
        joined = self.join(embeddings)
        items = torch.arange(len(joined.units), device=joined.units.device)[:, None].expand(joined.present.shape)
        units, present, items = joined.units.flatten(0, 1), joined.present.flatten(), items.flatten()
        pairs = (items[:, None] != items) & present[:, None] & present
        count = pairs.sum()
        exponents = 2 * self.t * (product(units, units) - 1)
        total = exponents.masked_fill(~pairs, torch.finfo(units.dtype).min).flatten().logsumexp(dim=0)
        return torch.where(count > 0, total - count.clamp(min=1).to(total).log(), 0) + 0 * units.sum()
