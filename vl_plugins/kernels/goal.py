"""GOAL, of embeddings and labels."""

from functools import partial

from torch import Tensor

from vl_plugins import functional
from vl_plugins.functional.goal import Objective, hardest_negative_losses
from vl_plugins.kernels.hardest import hardest_negative_loss

__all__ = ["goal_loss"]


def goal_loss(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    triplet_weight: str = Objective.triplet_weight,
    pair_weight: str = Objective.pair_weight,
    *,
    margin: float = Objective.margin,
    tau: float = Objective.tau,
    offset: float = Objective.offset,
    alpha: float = Objective.alpha,
    beta: float = Objective.beta,
    lam: float = Objective.lam,
    eps: float = Objective.eps,
    normalize: bool = True,
    same_set: bool = False,
    symmetric: bool = True,
    reduction: str = "mean",
    pairs: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """GOAL of embeddings with the hardest negatives: :func:`vl_plugins.functional.goal_loss` without a matrix (A, C).

    Pairs of equal labels are positive, all others negative. What is needed of the negatives is searched and summed up
    tile by tile; ``dense`` is the same as ``tiled`` here.

    Args:
        x, y, x_labels, y_labels: embeddings and labels, see :func:`~vl_plugins.kernels.triplet.triplet_hn_loss`.
        triplet_weight: con, nca or cir.
        pair_weight: con, lin, sig, sig_ms or lin_ms.
        margin, tau, offset, alpha, beta, lam, eps: see :func:`vl_plugins.functional.goal_loss`.
        normalize, same_set, symmetric, reduction, pairs, backend: see
            :func:`~vl_plugins.kernels.triplet.triplet_hn_loss`. Dot products (``normalize=False``) suit (con, con) and
            (nca, con); the other weights are made for cosines.

    Returns:
        A scalar, or (number of positive pairs,), as :func:`~vl_plugins.kernels.triplet.triplet_hn_loss`.

    Raises:
        ValueError: wrong shape, type, device, reduction or backend, or an unknown weight.

    Reference:
        Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval, Eq. 5-13.

    >>> import torch
    >>> images, texts = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> goal_loss(images, texts, labels, labels, "con", "lin")
    tensor(2.4000)
    """
    objective = Objective(triplet_weight, pair_weight, margin, tau, offset, alpha, beta, lam, eps)
    return hardest_negative_loss(
        partial(hardest_negative_losses, objective),
        partial(functional.goal_loss, **vars(objective)),
        x,
        y,
        x_labels,
        y_labels,
        objective=objective,
        normalize=normalize,
        same_set=same_set,
        symmetric=symmetric,
        reduction=reduction,
        pairs=pairs,
        backend=backend,
        name="goal_loss",
    )
