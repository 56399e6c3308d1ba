"""GOAL: objectives given by their gradient, a triplet weight times two pair weights."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vl_plugins.functional.pairs import reduce_positive_pairs
from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.functional.triplet import hardest_negatives
from vl_plugins.utils.checks import finite, non_negative, positive
from vl_plugins.utils.errors import check_name

__all__ = [
    "PAIR_WEIGHTS",
    "TRIPLET_WEIGHTS",
    "Objective",
    "RelativeTerms",
    "goal_loss",
    "goal_triplet_loss",
    "objective_losses",
    "pair_weights",
    "relative_negatives",
    "relative_positives",
    "triplet_violation",
    "triplet_weight",
]

TRIPLET_WEIGHTS = ("con", "nca", "cir")
PAIR_WEIGHTS = ("con", "lin", "sig", "sig_ms", "lin_ms")


@dataclass(frozen=True)
class Objective:
    """The weights of :func:`goal_loss` and their hyper-parameters.

    Args:
        triplet_weight: con, nca or cir.
        pair_weight: con, lin, sig, sig_ms or lin_ms.
        margin: m of triplet weight con, >= 0.
        tau: inverse temperature of triplet weights nca and cir, > 0.
        offset: added in the exponent of triplet weight cir; 1 is Circle loss with m = 0.
        alpha: steepness of the positives' weights in sig and sig_ms, >= 0.
        beta: steepness of the negatives' weights in sig and sig_ms, >= 0.
        lam: similarity at which the weights of sig are 1/2.
        eps: slack, >= 0, of the other pairs that sig_ms and lin_ms compare a pair with: positives of the batch less
            than eps above the anchor's hardest negative, and negatives of the anchor less than eps below the least
            similar positive of the batch.

    Raises:
        ValueError: an unknown weight, or a hyper-parameter out of its range.
    """

    triplet_weight: str = "nca"
    pair_weight: str = "con"
    margin: float = 0.2
    tau: float = 10.0
    offset: float = 0.5
    alpha: float = 2.0
    beta: float = 10.0
    lam: float = 0.5
    eps: float = 0.1

    def __post_init__(self) -> None:
        check_name("triplet_weight", self.triplet_weight, TRIPLET_WEIGHTS)
        check_name("pair_weight", self.pair_weight, PAIR_WEIGHTS)
        positive("tau", self.tau)
        for name in ("offset", "lam"):
            finite(name, getattr(self, name))
        for name in ("margin", "alpha", "beta", "eps"):
            non_negative(name, getattr(self, name))

    @property
    def is_relative(self) -> bool:
        """Whether a pair is compared with other pairs of the batch."""
        return self.pair_weight in ("sig_ms", "lin_ms")


def goal_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
    objective: Objective = Objective(),
    *,
    mining: str = "hardest",
    symmetric: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""GOAL: a gradient objective for triplets of an anchor, a positive and the anchor's hardest negative.

    The objective is the gradient of each triplet (a, p, n), which need not be that of any loss. With
    :math:`s_p = S_{ap}` and :math:`s_n = S_{an}`:

    .. math:: \frac{\partial}{\partial s_n} = T P_- \qquad \frac{\partial}{\partial s_p} = -T P_+

    The triplet weight T (:func:`triplet_weight`) depends on both similarities, a pair weight P (:func:`pair_weights`)
    on that of one pair. Known losses among the combinations (T, P) are the triplet loss (con, con), NT-Xent loss (nca,
    con), Circle loss (cir, lin), binomial deviance loss (con, sig) and multi-similarity loss (con, sig_ms) (Table 1).

    The value is the triplet's violation (:func:`triplet_violation`), and 0 exactly where T is 0. Only for (con, con)
    and (nca, con) is the objective its derivative. An anchor without negatives gives 0. Memory is that of a few
    matrices like ``similarities``, and for sig_ms and lin_ms of a few (M, M) for M positive pairs.

    The paper has its best results with (cir, sig_ms). Its text and its authors' code
    (https://github.com/microsoft/VSE_Gradient) differ: the offset of cir is 0 in the text (Eq. 8), so that a triplet
    with both similarities at 0.5, as is common in fine-tuning, has T = 0.007; in the code it is 0.5, as here, and T is
    0.5 too. In the text, as here, T of con is 0 where the margin is kept (Eq. 5); in the code it never is, as with
    ``margin`` > 2 here. The text does not give tau, but Figure 2 has 10, as here; the code has 1 in its loss.

    Args:
        similarities: (A, C), cosines of anchors x candidates, [-1, 1]. (con, con) and (nca, con) take any similarity.
        positive_mask, negative_mask: (A, C), bool; see :func:`triplet_hn_loss`, also for ``symmetric``, ``reduction``.
        objective: the weights and their hyper-parameters.
        mining: ``"hardest"``, or ``"all"``: the sum over all negatives of the anchor, with memory for M x C numbers.

    Returns:
        A scalar, or (number of positive pairs,), float32 or float64. NaN if any similarity is not finite.

    Raises:
        ValueError: wrong shape, type or device, or an unknown weight, mining or reduction.

    Reference:
        Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval.

    >>> similarities = torch.tensor([[0.5, 0.4], [0.6, 0.9]], requires_grad=True)
    >>> positives = torch.eye(2, dtype=torch.bool)
    >>> objective = Objective("con", "lin")
    >>> goal_loss(similarities, positives, ~positives, objective, symmetric=False, reduction="sum").backward()
    >>> similarities.grad
    tensor([[-0.5000,  0.4000],
            [ 0.0000,  0.0000]])
    """
    check_name("mining", mining, ("hardest", "all"))

    def anchor_loss(similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor) -> Tensor:
        at_negatives = anchors  # their whole rows, (M, C)
        if mining == "hardest":
            _, hardest = hardest_negatives(similarities, negative_mask)  # (A,)
            at_negatives = anchors[:, None], hardest[anchors, None]  # (M, 1)
        terms = None
        if objective.is_relative:
            to_positives, to_negatives = _relative_terms(objective, similarities, negative_mask, anchors, positives)
            terms = RelativeTerms(to_positives[:, None], to_negatives[at_negatives])
        s_p = similarities[anchors, positives][:, None]
        losses = objective_losses(objective, s_p, similarities[at_negatives], negative_mask[at_negatives], terms)
        return losses.sum(dim=1)

    return reduce_positive_pairs(
        anchor_loss, similarities, positive_mask, negative_mask, symmetric=symmetric, reduction=reduction
    )


def goal_triplet_loss(
    similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor, objective: Objective = Objective()
) -> Tensor:
    """Return :func:`goal_loss` of each given triplet, (T,); sig_ms and lin_ms compare pairs with those of all triplets.

    Args:
        similarities: (A, C), cosines of anchors x candidates.
        anchors, positives, negatives: (T,), indices of rows, columns and columns.
        objective: see :func:`goal_loss`.

    >>> index = torch.tensor([0])
    >>> goal_triplet_loss(torch.tensor([[0.5, 0.9, 0.4]]), index, index, index + 2, Objective("con"))
    tensor([0.1000])
    """
    (similarities,) = full_precision(similarities)
    if len(anchors) == 0:
        return similarities.new_zeros(0) + zero_or_nan(similarities)
    s_p, s_n = similarities[anchors, positives], similarities[anchors, negatives]
    terms = None
    if objective.is_relative:
        negative_mask = torch.zeros_like(similarities, dtype=torch.bool)
        negative_mask[anchors, negatives] = True
        pairs, pair_index = torch.stack([anchors, positives]).unique(dim=1, return_inverse=True)
        to_positives, to_negatives = _relative_terms(objective, similarities, negative_mask, *pairs)
        terms = RelativeTerms(to_positives[pair_index], to_negatives[anchors, negatives])
    losses = objective_losses(objective, s_p, s_n, torch.ones_like(s_n, dtype=torch.bool), terms)
    return losses + zero_or_nan(similarities)


def triplet_weight(s_p: Tensor, s_n: Tensor, objective: Objective) -> Tensor:
    r"""Return T, the weight of both gradients of a triplet, in [0, 1].

    ====  ==============================================================================  =====
    con   1 if :math:`m + s_n - s_p > 0` else 0                                           Eq. 5
    nca   :math:`\sigma(\tau (s_n - s_p))`, :math:`\sigma` is the logistic function        Eq. 7
    cir   :math:`\sigma(\tau (s_n^2 - s_p (2 - s_p) + \mathrm{offset}))`                   Eq. 8
    ====  ==============================================================================  =====

    Args:
        s_p, s_n: similarities of anchor and positive, and of anchor and negative; any shapes that broadcast together.
        objective: names the weight.

    >>> triplet_weight(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]), Objective("con"))
    tensor([0., 1.])
    """
    argument = _violation_argument(s_p, s_n, objective)
    return (argument > 0).to(argument.dtype) if objective.triplet_weight == "con" else argument.sigmoid()


def triplet_violation(s_p: Tensor, s_n: Tensor, objective: Objective) -> Tensor:
    r"""Return V, the value that :func:`goal_loss` reports for a triplet, with the arguments of :func:`triplet_weight`.

    That is :math:`\max(0, m + s_n - s_p)` for con, and :math:`\log(1 + e^a) / \tau` for nca and cir, where :math:`a` is
    the argument of :math:`\sigma` in the triplet weight.

    >>> triplet_violation(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]), Objective("con"))
    tensor([0.0000, 0.2000])
    """
    argument = _violation_argument(s_p, s_n, objective)
    return argument.relu() if objective.triplet_weight == "con" else -logsigmoid(-argument) / objective.tau


def _violation_argument(s_p: Tensor, s_n: Tensor, objective: Objective) -> Tensor:
    if objective.triplet_weight == "con":
        return objective.margin + s_n - s_p
    if objective.triplet_weight == "nca":
        return objective.tau * (s_n - s_p)
    return objective.tau * (s_n.square() - s_p * (2 - s_p) + objective.offset)


class RelativeTerms(NamedTuple):
    """m+ and m-: how similar the pairs of triplets are, compared with other positives, or negatives of the anchor."""

    positive: float | Tensor
    negative: float | Tensor


def pair_weights(
    s_p: Tensor, s_n: Tensor, objective: Objective, terms: RelativeTerms | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`P_+` and :math:`P_-`, the weights of the gradients of a triplet's two pairs.

    ======  ============================================  ==============================================  ======
    kind    :math:`P_+`                                   :math:`P_-`
    ======  ============================================  ==============================================  ======
    con     1                                             1                                               Eq. 9
    lin     :math:`1 - s_p`                               :math:`s_n`                                     Eq. 10
    sig     :math:`1 / (1 + e^{\alpha (s_p - \lambda)})`  :math:`1 / (1 + e^{-\beta (s_n - \lambda)})`    Eq. 11
    sig_ms  :math:`1 / (m_+ + e^{\alpha (s_p - \lambda)})`  :math:`1 / (m_- + e^{-\beta (s_n - \lambda)})`  Eq. 12
    lin_ms  :math:`(1 - m_+) (1 - s_p)`                   :math:`(1 + m_-) s_n`                           Eq. 13
    ======  ============================================  ==============================================  ======

    Args:
        s_p, s_n, objective: see :func:`triplet_weight`.
        terms: m+ and m-, for sig_ms and lin_ms; >= 0 for sig_ms.

    >>> [weight.item() for weight in pair_weights(torch.tensor(0.75), torch.tensor(0.5), Objective("con", "lin"))]
    [0.25, 0.5]
    """
    kind = objective.pair_weight
    if kind == "con":
        return torch.ones_like(s_p), torch.ones_like(s_n)
    if kind == "lin":
        return 1 - s_p, s_n
    exponents = objective.alpha * (s_p - objective.lam), objective.beta * (objective.lam - s_n)
    if kind == "sig":
        return (-exponents[0]).sigmoid(), (-exponents[1]).sigmoid()
    assert terms is not None, f"pair weight {kind} needs terms"
    if kind == "lin_ms":
        return (1 - terms.positive) * (1 - s_p), (1 + terms.negative) * s_n
    # 1 / (term + exp(exponent)), without an exponential that overflows.
    positive_weight, negative_weight = (
        (-torch.logaddexp(torch.as_tensor(term).to(exponent).log(), exponent)).exp()
        for term, exponent in zip(terms, exponents, strict=True)
    )
    return positive_weight, negative_weight


def objective_losses(
    objective: Objective, s_p: Tensor, s_n: Tensor, valid: Tensor, terms: RelativeTerms | None = None
) -> Tensor:
    """Return V of each triplet, with the objective as its gradient.

    Args:
        objective, s_p, s_n, terms: see :func:`pair_weights`; ``s_p`` broadcasts to the shape of ``s_n``.
        valid: bool, which are triplets at all; the others are 0 with zero gradients.
    """
    with torch.no_grad():
        weight = torch.where(valid, triplet_weight(s_p, s_n, objective), 0)
        positive_weight, negative_weight = (
            torch.where(valid, weight * pair_weight, 0)  # what is no triplet may have a pair weight of NaN
            for pair_weight in pair_weights(s_p, s_n, objective, terms)
        )
        # V underflows before T does, but T decides what a reducer of non-zero values has to keep.
        values = triplet_violation(s_p, s_n, objective).clamp_min(torch.finfo(weight.dtype).tiny)
        values = torch.where(weight > 0, values, 0)
    surrogate = negative_weight * s_n - positive_weight * s_p
    return values + (surrogate - surrogate.detach())  # in this order the value is exactly V


def _relative_terms(
    objective: Objective, similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor
) -> tuple[Tensor, Tensor]:
    """Return m+ of M different positive pairs, (M,), and m- of all pairs, (A, C)."""
    with torch.no_grad():
        s_p = similarities[anchors, positives]
        hardest, _ = hardest_negatives(similarities, negative_mask)
        to_negatives = relative_negatives(objective, similarities, negative_mask, s_p.min() - objective.eps)
        return relative_positives(objective, s_p, hardest[anchors]), to_negatives


def relative_positives(objective: Objective, s_p: Tensor, hardest: Tensor, part: slice = slice(None)) -> Tensor:
    """Return m+ of positive pairs, (m,).

    It is the mean of exp(alpha (s_p - R)), or of s_p - R for lin_ms, over others R < ceiling; 0 without any.

    Args:
        objective: of sig_ms or lin_ms.
        s_p: (M,), the similarities of all positive pairs of the batch.
        hardest: (M,), those of their anchors' hardest negatives; eps above them is the ceiling.
        part: of which m of these pairs; memory is m x M.
    """
    chosen = s_p < hardest[part, None] + objective.eps  # (m, M)
    chosen.diagonal(part.start or 0).fill_(False)
    terms = s_p[part, None] - s_p
    if objective.pair_weight == "sig_ms":
        terms = (objective.alpha * terms).exp()
    return terms.masked_fill_(~chosen, 0).sum(dim=1) / chosen.sum(dim=1).clamp_min(1)


def relative_negatives(objective: Objective, similarities: Tensor, negative_mask: Tensor, floor: Tensor) -> Tensor:
    """Return m- of all pairs, (A, C).

    It is the mean of exp(-beta (s_n - R)), or of s_n - R for lin_ms, over the anchor's other negatives R > ``floor``,
    0-D, which is eps below the least similar positive of the batch; 0 without any.
    """
    chosen = negative_mask & (similarities > floor)  # (A, C)
    others = chosen.sum(dim=1, keepdim=True) - chosen.long()  # (A, C), of each pair
    if objective.pair_weight == "lin_ms":
        terms = similarities.masked_fill(~chosen, 0)
        mean = similarities - (terms.sum(dim=1, keepdim=True) - terms) / others.clamp_min(1)
    else:
        hardest, index = hardest_negatives(similarities, negative_mask)
        hardest, index = hardest.masked_fill(hardest == -torch.inf, 0)[:, None], index[:, None]
        exponents = objective.beta * (similarities - hardest)
        terms = exponents.exp().masked_fill(~chosen, 0)  # 1 for the hardest, at most 1 for others
        rest = terms.scatter(1, index, 0).sum(dim=1, keepdim=True)
        # The difference would lose what is small beside the hardest, but that is not subtracted from itself.
        total = torch.where(similarities == hardest, rest, terms.gather(1, index) + rest - terms)
        mean = total / others.clamp_min(1) * (-exponents).exp()
    return torch.where(others > 0, mean, 0)
