"""Terms that spread embeddings out, or bring two clouds of them together."""

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision, unit_vectors, zero_or_nan
from vl_plugins.functional.sets import check_sides, masked_sets
from vl_plugins.utils.errors import check_name

__all__ = ["circular_variance", "diversity_loss", "mmd_loss", "uniformity_loss"]

ROUNDING = 32  # times eps and the squared norms: the error of a squared distance from dot products


def mmd_loss(embeddings: Tensor, ref_emb: Tensor, gamma: float = 0.5, *, squared: bool = False) -> Tensor:
    r"""Maximum mean discrepancy of two clouds of vectors, squared, by its biased estimator.

    .. math::
        \frac{1}{M^2} \sum_{x, x'} k(x, x') + \frac{1}{N^2} \sum_{y, y'} k(y, y') - \frac{2}{MN} \sum_{x, y} k(x, y)
        \qquad k(x, y) = e^{-\gamma \lVert x - y \rVert}

    over all pairs, a vector and itself included. It is 0 if the clouds have the same vectors in the same proportions.
    Vectors are taken as they are, not normalized; sets are passed as the cloud of their elements, (B * K, D). Memory is
    several numbers per pair. Coinciding vectors do not move each other; in float32, those count as coinciding whose
    distance is below 0.003 of their distance from the mean of both clouds.

    Args:
        embeddings, ref_emb: (M, D) and (N, D).
        gamma: of the kernel, > 0, by unit of distance, or of squared distance.
        squared: the Gaussian kernel :math:`e^{-\gamma \lVert x - y \rVert^2}` instead.

    Returns:
        A scalar, >= 0, float32 or float64; 0 for an empty cloud. NaN if any vector is not finite.

    Raises:
        ValueError: vectors of two dimensions or on two devices, or tensors that are not 2-D.

    Reference:
        Gretton et al. 2012, A Kernel Two-Sample Test, Eq. 5; Kim et al. 2023, Improving Cross-Modal Retrieval with Set
        of Diverse Embeddings, section 3.4, whose code has these defaults.

    >>> mmd_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]))  # 2 - 2 exp(-0.5 * 5)
    tensor(1.8358)
    """
    check_sides(embeddings, ref_emb, "(M, D) and (N, D)", ndim=2)
    embeddings, ref_emb = full_precision(embeddings, ref_emb)
    zero = zero_or_nan(embeddings) + zero_or_nan(ref_emb)
    if len(embeddings) == 0 or len(ref_emb) == 0:
        return zero
    center = (embeddings.mean(dim=0) + ref_emb.mean(dim=0)) / 2  # near vectors far from zero would round to the same
    x, y = embeddings - center, ref_emb - center
    within = _mean_kernel(x, x, gamma, squared) + _mean_kernel(y, y, gamma, squared)
    return (within - 2 * _mean_kernel(x, y, gamma, squared)).clamp(min=0) + zero


def _mean_kernel(x: Tensor, y: Tensor, gamma: float, squared: bool) -> Tensor:
    """Return the mean of k(x, y) - 1 over all pairs: the ones cancel, and would drown what is left."""
    squared_norms = x.square().sum(dim=1)[:, None] + y.square().sum(dim=1)
    distances = squared_norms - 2 * _products(x, y)
    if not squared:
        coincide = distances <= ROUNDING * torch.finfo(x.dtype).eps * squared_norms
        # The derivatives of a root are infinite at 0.
        distances = distances.masked_fill(coincide, 1).sqrt().masked_fill(coincide, 0)
    return (-gamma * distances).expm1().mean()


def diversity_loss(sets: Tensor, *, mask: Tensor | None = None, scale: float = 2.0, reduction: str = "mean") -> Tensor:
    r"""How near the elements of one set are to each other: 1 where they coincide.

    Of an item with the K elements x, L2-normalized here, it is the mean over pairs of different elements

    .. math:: \frac{1}{K (K - 1)} \sum_{x \ne x'} e^{-2 \lVert x - x' \rVert^2}

    The paper sums; a mean does not depend on the number of elements. It regularizes the slots of a set prediction head.

    Args:
        sets: (B, K, D).
        mask: (B, K), bool: the elements that are in the set; all of them if left out.
        scale: 2 in the formula, > 0.
        reduction: ``"mean"`` over the items with two elements or more; ``"sum"``; or ``"none"`` for one value per item,
            (B,), 0 for one with fewer elements.

    Returns:
        A scalar, or (B,), float32 or float64; a mean is in [exp(-4 scale), 1], or 0 if no item has two elements. NaN if
        any element of a set is not finite.

    Raises:
        ValueError: wrong shape, type or device, or an unknown reduction.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> sets = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]]])
    >>> diversity_loss(sets, reduction="none")  # exp(-2 * 2) and exp(0)
    tensor([0.0183, 1.0000])
    """
    check_name("reduction", reduction, ("mean", "sum", "none"))
    sets, mask = masked_sets(sets, mask)
    units = unit_vectors(sets)
    pairs = mask[:, :, None] & mask[:, None, :]  # (B, K, K)
    pairs.diagonal(dim1=1, dim2=2).fill_(False)
    number_of_pairs = pairs.sum(dim=(1, 2))
    kernels = (2 * scale * (_products(units, units) - 1)).exp()  # unit vectors: ||x - x'||^2 = 2 - 2 cos
    values = kernels.masked_fill(~pairs, 0.0).sum(dim=(1, 2)) / number_of_pairs.clamp(min=1)
    if reduction != "none":
        values = values.sum()
    if reduction == "mean":
        values = values / (number_of_pairs > 0).sum().clamp(min=1)
    return values + zero_or_nan(sets)


def uniformity_loss(embeddings: Tensor, t: float = 2.0, *, mask: Tensor | None = None) -> Tensor:
    r"""How far embeddings are from being spread over the whole sphere: 0 where they coincide, else negative.

    .. math:: \log \frac{1}{|P|} \sum_{(x, x') \in P} e^{-t \lVert x - x' \rVert^2}

    P are the pairs of embeddings of different items, L2-normalized here; of sets, the pairs of their elements.

    Args:
        embeddings: (B, D), or sets (B, K, D).
        t: of the kernel, > 0.
        mask: (B, K), bool: the elements that are in the set; all of them if left out.

    Returns:
        A scalar in [-4 t, 0], float32 or float64; 0 with fewer than two items. NaN if any embedding is not finite.

    Raises:
        ValueError: wrong shape, type or device.

    Reference:
        Wang and Isola 2020, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, section 4.1.2.

    >>> uniformity_loss(torch.eye(3))  # log(exp(-2 * 2))
    tensor(-4.)
    """
    if embeddings.ndim == 2 and mask is None:
        embeddings = embeddings[:, None]
    sets, mask = masked_sets(embeddings, mask)
    elements = unit_vectors(sets)[mask]  # (P, D)
    items = torch.where(mask)[0]
    others = items[:, None] != items
    number_of_pairs = others.sum()
    if number_of_pairs == 0:
        return zero_or_nan(sets)
    exponents = 2 * t * (_products(elements, elements) - 1)
    total = exponents.masked_fill(~others, float("-inf")).flatten().logsumexp(dim=0)
    return total - number_of_pairs.to(total.dtype).log()


def circular_variance(sets: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return how much the directions in each set differ, its circular variance.

    .. math:: 1 - \Bigl\lVert \frac{1}{K} \sum_x x \Bigr\rVert

    The elements x are L2-normalized here. A set whose elements point the same way has 0, one whose elements cancel 1.

    Args:
        sets: (B, K, D).
        mask: (B, K), bool: the elements that are in the set; all of them if left out.

    Returns:
        (B,), in [0, 1], float32 or float64; 0 for a set without elements, NaN for one with NaN or infinity.

    Raises:
        ValueError: wrong shape, type or device.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Table 3.

    >>> circular_variance(torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]]))
    tensor([0., 1.])
    """
    sets, mask = masked_sets(sets, mask)
    number_of_elements = mask.sum(dim=1)
    lengths = (unit_vectors(sets).sum(dim=1) / number_of_elements.clamp(min=1)[:, None]).norm(dim=-1)
    return (1 - lengths).clamp(0, 1).where(number_of_elements > 0, 0.0)


def _products(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x @ y.mT
