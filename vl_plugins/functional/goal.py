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
MININGS = ("hardest", "all")


@dataclass(frozen=True)
class Objective:
    """The weights of :func:`goal_loss` and their hyper-parameters.

    Args:
        triplet_weight: con, nca or cir.
        pair_weight: con, lin, sig, sig_ms or lin_ms.
        margin: m of triplet weight con, >= 0.
        tau: inverse temperature of triplet weights nca and cir, > 0.
        offset: added in the exponent of triplet weight cir: 0 in the paper's text, 0.5 in its code; 1 is Circle loss
            with m = 0.
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

    def __post_init__(self):
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
    on that of one pair. Many losses are such a combination (Table 1 of the paper):

    ==========  ======================  ==============  ===============
    P / T       con                     nca             cir
    ==========  ======================  ==============  ===============
    con         triplet loss            NT-Xent loss    new
    lin         new                     new             Circle loss
    sig         binomial deviance loss  new             new
    lin_ms      new                     new             new
    sig_ms      multi-similarity loss   new             new
    ==========  ======================  ==============  ===============

    The value is the triplet's violation (:func:`triplet_violation`): never negative, and 0 exactly where T is 0. It
    says how far the triplet is from being right; only for (con, con) and (nca, con) is the objective its derivative.
    T and P carry no gradient of their own. An anchor without negatives gives 0. Memory is that of a few matrices like
    ``similarities``, for all weights.

    The paper's text and its authors' code (https://github.com/microsoft/VSE_Gradient) differ in three points:

    ===============  =========================  ====================================  ============
    point            text                       code                                  default here
    ===============  =========================  ====================================  ============
    exponent of cir  ``offset=0`` (Eq. 8)       ``offset=0.5``                        0.5
    T of con         1 if the margin is         1 for every triplet, as with          as the text
                     violated, else 0 (Eq. 5)   ``margin`` > 2 here
    tau              not given; Figure 2 is     1 in the loss, 10 in its functions    10
                     drawn with 10
    ===============  =========================  ====================================  ============

    The paper has its best results with (cir, sig_ms). By Eq. 8 to the letter, a triplet with both similarities at 0.5,
    as is common in fine-tuning, has T = 0.007, so hardly anything is learned from it; with ``offset=0.5`` T is 0.5.

    Args:
        similarities: (A, C), cosines of anchors x candidates, [-1, 1]. (con, con) and (nca, con) take any similarity.
        positive_mask: (A, C), bool.
        negative_mask: (A, C), bool. A pair in both masks counts as both; this is not checked.
        objective: the weights and their hyper-parameters.
        mining: ``"hardest"``, or ``"all"``: the sum over all negatives of the anchor; memory is then one row of
            candidates per positive pair.
        symmetric: rows and columns are anchors; otherwise rows only.
        reduction: ``"mean"`` or ``"sum"`` over the positive pairs, or ``"none"`` for one value per positive pair, in
            the order of ``torch.where(positive_mask)``.

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
    check_name("mining", mining, MININGS)

    def anchor_loss(similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor) -> Tensor:
        s_p = similarities[anchors, positives]  # (M,)
        hardest, index = hardest_negatives(similarities, negative_mask)  # (A,)
        exists = hardest != -torch.inf
        hardest = hardest.masked_fill(~exists, 0)
        if mining == "hardest":
            s_p, s_n, valid = s_p[None], hardest[anchors][None], exists[anchors][None]  # (1, M)
        else:
            s_p, s_n, valid = s_p[None], similarities[anchors].T, negative_mask[anchors].T  # (C, M)
        terms = None
        if objective.is_relative:
            with torch.no_grad():
                floor = s_p.min() - objective.eps
                statistics = relative_negatives(objective, similarities, negative_mask, hardest, index, floor)
                terms = RelativeTerms(
                    relative_positives(objective, s_p[0], hardest[anchors]),
                    statistics.mean(objective, s_n, anchors),
                )
        return objective_losses(objective, s_p, s_n, valid, terms).sum(dim=0)

    return reduce_positive_pairs(
        anchor_loss, similarities, positive_mask, negative_mask, symmetric=symmetric, reduction=reduction
    )


def goal_triplet_loss(
    similarities: Tensor,
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor,
    objective: Objective = Objective(),
) -> Tensor:
    """Return :func:`goal_loss` of each given triplet, (T,).

    For sig_ms and lin_ms a pair is compared with the pairs of all triplets.

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
        with torch.no_grad():
            positive_mask, negative_mask = torch.zeros(2, *similarities.shape, dtype=torch.bool, device=s_p.device)
            positive_mask[anchors, positives] = True
            negative_mask[anchors, negatives] = True
            hardest, index = hardest_negatives(similarities, negative_mask)
            hardest = hardest.masked_fill(hardest == -torch.inf, 0)
            floor = s_p.min() - objective.eps
            statistics = relative_negatives(objective, similarities, negative_mask, hardest, index, floor)
            rows, _ = torch.where(positive_mask)
            to_positives = torch.zeros_like(similarities)
            to_positives[positive_mask] = relative_positives(objective, similarities[positive_mask], hardest[rows])
            terms = RelativeTerms(to_positives[anchors, positives], statistics.mean(objective, s_n, anchors))
    losses = objective_losses(objective, s_p, s_n, torch.ones_like(anchors, dtype=torch.bool), terms)
    return losses + zero_or_nan(similarities)


def triplet_weight(s_p: Tensor, s_n: Tensor, objective: Objective) -> Tensor:
    r"""Return T, the weight of both gradients of a triplet, in [0, 1].

    ====  ==============================================================================  =====
    con   1 if :math:`m + s_n - s_p > 0` else 0                                           Eq. 5
    nca   :math:`\sigma(\tau (s_n - s_p))`, :math:`\sigma` is the logistic function        Eq. 7
    cir   :math:`\sigma(\tau (s_n^2 - s_p (2 - s_p) + \mathrm{offset}))`                   Eq. 8
    ====  ==============================================================================  =====

    Args:
        s_p: similarities of anchor and positive; any shape that broadcasts with s_n.
        s_n: similarities of anchor and negative.
        objective: names the weight.

    >>> triplet_weight(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]), Objective("con"))
    tensor([0., 1.])
    """
    argument = _violation_argument(s_p, s_n, objective)
    return (argument > 0).to(argument.dtype) if objective.triplet_weight == "con" else argument.sigmoid()


def triplet_violation(s_p: Tensor, s_n: Tensor, objective: Objective) -> Tensor:
    r"""Return V, the value that :func:`goal_loss` reports for a triplet.

    ====  ==================================================================================
    con   :math:`\max(0, m + s_n - s_p)`
    nca   :math:`\log(1 + e^{\tau (s_n - s_p)}) / \tau`
    cir   :math:`\log(1 + e^{\tau (s_n^2 - s_p (2 - s_p) + \mathrm{offset})}) / \tau`
    ====  ==================================================================================

    Args:
        s_p, s_n, objective: see :func:`triplet_weight`.

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
    """The relative similarities of the pairs of triplets to other pairs of the batch.

    Attributes:
        positive: m+, how similar the positive pair is compared with other positive pairs.
        negative: m-, how similar the negative pair is compared with other negatives of the anchor.
    """

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
    if kind == "lin_ms":
        return (1 - terms.positive) * (1 - s_p), (1 + terms.negative) * s_n
    exponents = objective.alpha * (s_p - objective.lam), objective.beta * (objective.lam - s_n)
    if kind == "sig":
        return tuple((-exponent).sigmoid() for exponent in exponents)
    # 1 / (term + exp(exponent)), without an exponential that overflows.
    return tuple(
        (-torch.logaddexp(torch.as_tensor(term).to(exponent).log(), exponent)).exp()
        for term, exponent in zip(terms, exponents, strict=True)
    )


def objective_losses(
    objective: Objective, s_p: Tensor, s_n: Tensor, valid: Tensor, terms: RelativeTerms | None = None
) -> Tensor:
    """Return V of each triplet, with the objective as its gradient.

    Args:
        objective: see :func:`goal_loss`.
        s_p: similarities of anchors and positives.
        s_n: those of anchors and negatives, of a shape that ``s_p`` broadcasts to.
        valid: bool, which are triplets at all; the others are 0 with zero gradients.
        terms: for sig_ms and lin_ms.
    """
    with torch.no_grad():
        weight = torch.where(valid, triplet_weight(s_p, s_n, objective), 0)
        # m- of what is no negative means nothing, and may give NaN.
        positive_weight, negative_weight = (
            torch.where(valid, weight * pair_weight, 0) for pair_weight in pair_weights(s_p, s_n, objective, terms)
        )
        # V underflows before T does, but T decides what a reducer of non-zero values has to keep.
        values = triplet_violation(s_p, s_n, objective).clamp_min(torch.finfo(weight.dtype).tiny)
        values = torch.where(weight > 0, values, 0)
    surrogate = negative_weight * s_n - positive_weight * s_p
    return values + (surrogate - surrogate.detach())  # in this order the value is exactly V


def relative_positives(objective: Objective, s_p: Tensor, hardest: Tensor, part: slice = slice(None)) -> Tensor:
    """Return m+ of positive pairs: the mean of exp(alpha (s_p - R)), or of s_p - R for lin_ms, over others R < ceiling.

    Args:
        objective: of sig_ms or lin_ms.
        s_p: (M,), the similarities of all positive pairs of the batch.
        hardest: (M,), those of their anchors' hardest negatives; eps above them is the ceiling.
        part: of which m of these pairs; memory is m x M.

    Returns:
        (m,), 0 without such other pairs.
    """
    chosen = s_p < hardest[part, None] + objective.eps  # (m, M)
    chosen.diagonal(part.start or 0).fill_(False)
    terms = s_p[part, None] - s_p
    if objective.pair_weight == "sig_ms":
        terms = (objective.alpha * terms).exp()
    return terms.masked_fill_(~chosen, 0).sum(dim=1) / chosen.sum(dim=1).clamp_min(1)


class NegativeStatistics(NamedTuple):
    """What m- of a pair takes of all negatives R of its anchor with R > floor, (A,) each.

    Attributes:
        hardest: the largest similarity of any negative.
        count: how many there are above the floor.
        rest: the sum of exp(beta (R - hardest)), or of R for lin_ms, over those but the hardest.
        floor: 0-D.
    """

    hardest: Tensor
    count: Tensor
    rest: Tensor
    floor: Tensor

    def mean(self, objective: Objective, s_n: Tensor, anchors: Tensor) -> Tensor:
        """Return m-: the mean of exp(-beta (s_n - R)), or of s_n - R for lin_ms, over the others above the floor.

        Args:
            objective: of sig_ms or lin_ms.
            s_n: (..., M), similarities to negatives.
            anchors: (M,), indices of their anchors.

        Returns:
            (..., M), 0 without others.
        """
        hardest, count, rest = (values[anchors] for values in self[:3])
        is_hardest, is_chosen = s_n == hardest, s_n > self.floor
        others = count - is_chosen.to(count.dtype)
        if objective.pair_weight == "lin_ms":
            own, first = s_n, hardest
        else:
            own, first = (objective.beta * (s_n - hardest)).exp(), torch.ones_like(hardest)
        # Without the hardest, the largest of all terms, nothing is lost by a difference.
        total = torch.where(is_hardest, rest, rest + first * (hardest > self.floor) - own * is_chosen)
        mean = total / others.clamp_min(1)
        mean = s_n - mean if objective.pair_weight == "lin_ms" else mean * (objective.beta * (hardest - s_n)).exp()
        return torch.where(others > 0, mean, 0)


def relative_negatives(
    objective: Objective, similarities: Tensor, negative_mask: Tensor, hardest: Tensor, index: Tensor, floor: Tensor
) -> NegativeStatistics:
    """Sum up the negatives of each row.

    Args:
        objective: of sig_ms or lin_ms.
        similarities: (A, C).
        negative_mask: (A, C), bool.
        hardest: (A,), the largest similarity to a negative; any number without one.
        index: (A,), its column.
        floor: 0-D, eps below the least similar positive of the batch.
    """
    chosen = negative_mask & (similarities > floor)
    count = chosen.sum(dim=1)
    chosen.scatter_(1, index[:, None], False)
    terms = similarities
    if objective.pair_weight == "sig_ms":
        terms = (objective.beta * (similarities - hardest[:, None])).exp()
    return NegativeStatistics(hardest, count, terms.masked_fill(~chosen, 0).sum(dim=1), floor)
