"""Terms that spread embeddings out, or bring two clouds of them together, also as pytorch-metric-learning regularizers.

Sets are (B, K, D); an element that is exactly zero is padding, as in :mod:`vl_plugins.distances`. Results are float32 or
float64, also under autocast, and NaN if any element is NaN.
"""

from typing import Any

import torch
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor
from torch.nn.functional import normalize

from vl_plugins.distances import SetDistance
from vl_plugins.errors import number
from vl_plugins.numerics import full_precision

__all__ = ["DiversityRegularizer", "MMDRegularizer", "circular_variance", "diversity_loss", "mmd_loss"]

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
    if len(x) == 0 or len(y) == 0:
        return 0 * (x.sum() + y.sum())
    center = (x.mean(dim=0) + y.mean(dim=0)) / 2  # near vectors far from zero would round to the same
    x, y = x - center, y - center
    within = _mean_kernel(x, x, gamma, squared) + _mean_kernel(y, y, gamma, squared)
    return (within - 2 * _mean_kernel(x, y, gamma, squared)).clamp(min=0)


def _mean_kernel(x: Tensor, y: Tensor, gamma: float, squared: bool) -> Tensor:
    """Return the mean of k(x, y) - 1 over all pairs: the ones cancel, and would drown what is left."""
    squared_norms = x.square().sum(dim=1)[:, None] + y.square().sum(dim=1)
    with torch.autocast(x.device.type, enabled=False):
        distances = squared_norms - 2 * x @ y.T
    if not squared:
        coincide = distances <= ROUNDING * torch.finfo(x.dtype).eps * squared_norms
        # The derivatives of a root are infinite at 0.
        distances = distances.masked_fill(coincide, 1).sqrt().masked_fill(coincide, 0)
    return (-gamma * distances).expm1().mean()


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
    (sets,) = full_precision(sets)
    present, units = (sets != 0).any(dim=2), normalize(sets, dim=2)
    pairs = present[:, :, None] & present[:, None] & ~torch.eye(sets.shape[1], dtype=torch.bool, device=sets.device)
    with torch.autocast(sets.device.type, enabled=False):
        kernels = (2 * scale * (units @ units.mT - 1)).exp()  # unit vectors: ||x - x'||^2 = 2 - 2 cos
    return kernels.masked_fill(~pairs, 0).sum(dim=(1, 2)) / pairs.sum(dim=(1, 2)).clamp(min=1)


def circular_variance(sets: Tensor) -> Tensor:
    r"""Return how much the directions in each set differ, :math:`1 - \lVert \frac{1}{K} \sum_x x \rVert`, (B,), [0, 1].

    A set whose elements point the same way has 0, one whose elements cancel 1; one without elements 0.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Table 3.

    >>> circular_variance(torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]]))
    tensor([0., 1.])
    """
    (sets,) = full_precision(sets)
    present = (sets != 0).any(dim=2)
    elements = present.sum(dim=1)
    units = normalize(sets, dim=2).masked_fill(~present[:, :, None], 0)
    lengths = (units.sum(dim=1) / elements.clamp(min=1)[:, None]).norm(dim=1)
    return torch.where(elements > 0, (1 - lengths).clamp(0, 1), 0)


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

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict]:
        sets, _ = self.sets.unpack(embeddings, embeddings)
        (items,) = torch.where((sets != 0).any(dim=2).sum(dim=1) > 1)
        if len(items) == 0:
            return self.zero_losses()
        losses = diversity_loss(sets, self.scale)[items]
        return {"loss": {"losses": losses, "indices": items, "reduction_type": "element", "divisor": len(items)}}

    def zero_losses(self) -> dict[str, dict]:
        return {"loss": {"losses": 0, "indices": None, "reduction_type": "already_reduced"}}


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
        x, y = (sets.flatten(0, 1) for sets in full_precision(*self.sets.unpack(embeddings, ref_emb)))
        x, y = (normalize(side[(side != 0).any(dim=1)], dim=1) for side in (x, y))
        loss = {"losses": mmd_loss(x, y, self.gamma, squared=self.squared), "indices": None}
        return self.reducer({"loss": loss | {"reduction_type": "already_reduced"}}, embeddings, None)
