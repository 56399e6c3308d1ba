"""Terms that spread embeddings out, or bring two clouds of them together."""

from typing import Any

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.utils.eager import eager
from vl_plugins.utils.errors import check_name

__all__ = ["circular_variance", "diversity_loss", "mmd_loss", "uniformity_loss"]

REDUCTIONS = ("mean", "sum", "none")
KERNELS_AT_ONCE = 2**22  # 16 MiB in float32
LEAST_NORM = 1e-12  # as in torch's normalize
# A squared distance from a Gram matrix is off by a few eps of the squared norms; below this it is only rounding.
ROUNDING = 32


def mmd_loss(x: Tensor, y: Tensor, gamma: float = 0.5, *, squared: bool = False) -> Tensor:
    r"""Maximum mean discrepancy of two clouds of vectors, squared, by its biased estimator.

    .. math::
        \frac{1}{M^2} \sum_{x, x'} k(x, x') + \frac{1}{N^2} \sum_{y, y'} k(y, y') - \frac{2}{MN} \sum_{x, y} k(x, y)
        \qquad k(x, y) = e^{-\gamma \lVert x - y \rVert}

    over all pairs, a vector and itself included. It is 0 if the clouds have the same vectors in the same proportions.
    Vectors are taken as they are, not normalised; sets are passed as the cloud of their elements, (B * K, D).

    Memory is that of x and y, and of blocks of the kernel of a fixed size. Value and gradients are computed together;
    there are no second derivatives, and ``create_graph=True`` is refused. Coinciding vectors do not move each other; in
    float32, those count as coinciding whose distance is below 0.003 of their distance from the mean of both clouds.

    Args:
        x: (M, D).
        y: (N, D).
        gamma: of the kernel, > 0, by unit of distance, or of squared distance.
        squared: the Gaussian kernel :math:`e^{-\gamma \lVert x - y \rVert^2}` instead.

    Returns:
        A scalar, >= 0, float32 or float64; 0 for an empty cloud. NaN if any vector is not finite.

    Raises:
        ValueError: vectors of two dimensions or on two devices, or tensors that are not 2-D.

    Reference:
        Gretton et al. 2012, A Kernel Two-Sample Test, Eq. 5; Kim et al. 2023, Improving Cross-Modal Retrieval with Set
        of Diverse Embeddings, section 3.4, whose code has these defaults.

    >>> x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> mmd_loss(x, y)  # 2 - 2 exp(-0.5 * 5)
    tensor(1.8358)
    """
    for name, cloud in (("x", x), ("y", y)):
        if cloud.ndim != 2:
            raise ValueError(f"{name} must have the shape (vectors, dimension), got {tuple(cloud.shape)}")
    for what, expected, actual in (("dimension", x.shape[1], y.shape[1]), ("device", x.device, y.device)):
        if actual != expected:
            raise ValueError(f"y must have the {what} of x, {expected}, got {actual}")
    x, y = full_precision(x, y)
    value = zero_or_nan(x) + zero_or_nan(y)
    if len(x) == 0 or len(y) == 0:
        return value
    with torch.autocast(x.device.type, enabled=False):
        return value + eager()(_MeanDiscrepancy.apply, x, y, gamma, squared)


def diversity_loss(sets: Tensor, *, mask: Tensor | None = None, scale: float = 2.0, reduction: str = "mean") -> Tensor:
    r"""How near the elements of one set are to each other: 1 where they coincide.

    Of an item with the K elements x, L2-normalised here, it is the mean over pairs of different elements

    .. math:: \frac{1}{K (K - 1)} \sum_{x \ne x'} e^{-2 \lVert x - x' \rVert^2}

    The paper sums; a mean does not depend on the number of elements. It regularizes the slots of a set prediction head.

    Args:
        sets: (B, K, D).
        mask: (B, K), bool, True where an element belongs to the set; all do if left out.
        scale: 2 in the formula, > 0.
        reduction: ``"mean"`` over the items with two elements or more, each counting the same, however many it has;
            ``"sum"``; or ``"none"`` for one value per item, (B,), 0 for one with fewer elements.

    Returns:
        A scalar, or (B,), float32 or float64; a mean is in [exp(-4 scale), 1], or exactly 0 where no item has two
        elements. NaN if any element of a set is not finite.

    Raises:
        ValueError: wrong shape, type or device, or an unknown reduction.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> sets = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]]])
    >>> diversity_loss(sets, reduction="none")  # exp(-2 * 2) and exp(0)
    tensor([0.0183, 1.0000])
    """
    check_name("reduction", reduction, REDUCTIONS)
    sets, mask = _checked_sets(sets, mask)
    units = _units(sets)
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

    P are the pairs of embeddings of different items, L2-normalised here; of sets, the pairs of their elements. Memory
    is one number for each pair.

    Args:
        embeddings: (B, D), or sets (B, K, D).
        t: of the kernel, > 0.
        mask: (B, K), bool, True where an element belongs to the set; all do if left out.

    Returns:
        A scalar in [-4 t, 0], float32 or float64; 0 with fewer than two items. NaN if any embedding or element of a set
        is not finite.

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
    sets, mask = _checked_sets(embeddings, mask)
    elements = _units(sets)[mask]  # (P, D)
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

    The elements x are L2-normalised here. A set whose elements point the same way has 0, one whose elements cancel 1.

    Args:
        sets: (B, K, D).
        mask: (B, K), bool, True where an element belongs to the set; all do if left out.

    Returns:
        (B,), in [0, 1], float32 or float64; 0 for a set without elements. NaN for one with an element that is not
        finite.

    Raises:
        ValueError: wrong shape, type or device.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Table 3.

    >>> circular_variance(torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]]))
    tensor([0., 1.])
    """
    sets, mask = _checked_sets(sets, mask)
    number_of_elements = mask.sum(dim=1)
    lengths = (_units(sets).sum(dim=1) / number_of_elements.clamp(min=1)[:, None]).norm(dim=-1)
    return (1 - lengths).clamp(0, 1).where(number_of_elements > 0, 0.0)


def _checked_sets(sets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sets in float32 at least, zero where an element is none of the set, and the mask of the elements."""
    if sets.ndim != 3:
        raise ValueError(f"sets must have the shape (items, elements, dimension), got {tuple(sets.shape)}")
    (sets,) = full_precision(sets)
    if mask is None:
        return sets, torch.ones(sets.shape[:2], dtype=torch.bool, device=sets.device)
    for what, expected, actual in (
        ("shape", tuple(sets.shape[:2]), tuple(mask.shape)),
        ("dtype", torch.bool, mask.dtype),
        ("device", sets.device, mask.device),
    ):
        if actual != expected:
            raise ValueError(f"mask must have the {what} {expected}, got {actual}")
    return sets.masked_fill(~mask[..., None], 0.0), mask


def _units(vectors: Tensor) -> Tensor:
    """Return the vectors L2-normalised; one without a direction stays zero, and has no gradient."""
    norms = vectors.norm(dim=-1, keepdim=True)
    return vectors / norms.masked_fill(norms < LEAST_NORM, float("inf"))


def _products(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x @ y.mT


class _MeanDiscrepancy(torch.autograd.Function):
    """Of a scalar, the gradients cost little more where it is computed, and no block of the kernel has to be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gamma: float, squared: bool) -> Tensor:
        center = (x.mean(dim=0) + y.mean(dim=0)) / 2  # near vectors far from zero would round to the same
        x, y = x - center, y - center
        needed = ctx.needs_input_grad
        of_x, gradient_x = _own_minus_other(x, y, gamma, squared, needed[0])
        of_y, gradient_y = _own_minus_other(y, x, gamma, squared, needed[1])
        ctx.save_for_backward(gradient_x, gradient_y)
        return (of_x + of_y).clamp(min=0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph; the gradients are constants, and so would come out wrong
            raise RuntimeError("mmd_loss has no second derivatives: leave out create_graph=True")
        gradients = (None if gradient is None else upstream * gradient for gradient in ctx.saved_tensors)
        return *gradients, None, None


def _own_minus_other(
    x: Tensor, y: Tensor, gamma: float, squared: bool, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the mean of k(x, x') minus that of k(x, y), and the gradient by x of this and its counterpart for y."""
    own, own_gradient = _mean_kernel(x, x, gamma, squared, needs_gradient)
    other, other_gradient = _mean_kernel(x, y, gamma, squared, needs_gradient)
    # Each pair is met twice: (x, x') and (x', x), or here and in the counterpart.
    return own - other, 2 * (own_gradient - other_gradient) if needs_gradient else None


def _mean_kernel(
    x: Tensor, y: Tensor, gamma: float, squared: bool, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the mean of k(x, y) - 1 over all pairs, and its gradient by x; a vector of x and itself has none."""
    x_norms, y_norms = x.square().sum(dim=1, keepdim=True), y.square().sum(dim=1)
    total = x.new_zeros(())
    gradients = []
    places = torch.arange(len(y), device=y.device)
    rows_at_once = max(1, KERNELS_AT_ONCE // len(y))
    for start in range(0, len(x), rows_at_once):
        rows = x[start : start + rows_at_once]
        norms = x_norms[start : start + rows_at_once] + y_norms
        distances = torch.addmm(norms, rows, y.T, alpha=-2)  # squared, (R, N)
        coincide = distances <= ROUNDING * torch.finfo(x.dtype).eps * norms
        if x is y:
            coincide |= places[start : start + rows_at_once, None] == places
        distances = distances.masked_fill(coincide, 0.0)
        if not squared:
            distances = distances.sqrt()
        exponents = -gamma * distances
        total = total + exponents.expm1().sum()  # the ones cancel, and would drown what is left
        if needs_gradient:
            pulls = -gamma * exponents.exp()  # (R, N), the gradient is their sum over x - y
            pulls = 2 * pulls if squared else pulls / distances
            pulls = pulls.masked_fill(coincide, 0.0)
            gradients.append(pulls.sum(dim=1, keepdim=True) * rows - pulls @ y)
    pairs = len(x) * len(y)
    return total / pairs, torch.cat(gradients) / pairs if needs_gradient else None
