"""GOAL: objectives that are given by their gradient, a triplet weight times two pair weights."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vl_plugins.functional.pairs import reduce_positive_pairs
from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.functional.triplet import hardest_negatives
from vl_plugins.utils.errors import check_name

__all__ = [
    "PAIR_WEIGHTS",
    "TRIPLET_WEIGHTS",
    "NegativeStatistics",
    "Objective",
    "goal_loss",
    "goal_triplet_loss",
    "hardest_negative_losses",
    "pair_weights",
    "triplet_violation",
    "triplet_weight",
]

TRIPLET_WEIGHTS = ("con", "nca", "cir")
PAIR_WEIGHTS = ("con", "lin", "sig", "sig_ms", "lin_ms")
MININGS = ("hardest", "all")


@dataclass(frozen=True)
class Objective:
    """The weights and options of :func:`goal_loss`, and the one place of their defaults.

    Raises:
        ValueError: an unknown weight.
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

    @property
    def is_relative(self) -> bool:
        """Whether a pair is compared with others of the batch."""
        return self.pair_weight in ("sig_ms", "lin_ms")

    def floor(self, least_positive: Tensor) -> Tensor:
        """Return above which similarity negatives are chosen to be compared with, 0-D."""
        return least_positive - self.eps


def goal_loss(
    similarities: Tensor,
    positive_mask: Tensor,
    negative_mask: Tensor,
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
        triplet_weight: con, nca or cir.
        pair_weight: con, lin, sig, sig_ms or lin_ms.
        margin: m of triplet weight con, >= 0.
        tau: inverse temperature of triplet weights nca and cir, > 0.
        offset: added in the exponent of triplet weight cir, 0 in the paper's text and 0.5 in its code; 1 is Circle
            loss with m = 0.
        alpha: steepness of the positives' weights in sig and sig_ms, >= 0.
        beta: steepness of the negatives' weights in sig and sig_ms, >= 0.
        lam: similarity at which the weights of sig are 1/2.
        eps: slack by which sig_ms and lin_ms choose the other pairs that a pair is compared with: positives of the
            batch less than eps above the anchor's hardest negative, and negatives of the anchor less than eps below
            the least similar positive of the batch.
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
    >>> goal_loss(similarities, positives, ~positives, "con", "lin", symmetric=False, reduction="sum").backward()
    >>> similarities.grad
    tensor([[-0.5000,  0.4000],
            [ 0.0000,  0.0000]])
    """
    check_name("mining", mining, MININGS)
    objective = Objective(triplet_weight, pair_weight, margin, tau, offset, alpha, beta, lam, eps)
    anchor_loss = _all_negatives if mining == "all" else _hardest_negatives
    return reduce_positive_pairs(
        lambda *pairs: anchor_loss(*pairs, objective=objective),
        similarities,
        positive_mask,
        negative_mask,
        symmetric=symmetric,
        reduction=reduction,
    )


def goal_triplet_loss(
    similarities: Tensor,
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor,
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
) -> Tensor:
    """Return :func:`goal_loss` of each given triplet, (number of triplets,).

    For sig_ms and lin_ms the pairs of all triplets are those that a pair is compared with.

    Args:
        similarities: (A, C), cosines of anchors x candidates.
        anchors, positives, negatives: (T,), indices of rows, columns and columns.
        triplet_weight, pair_weight, margin, tau, offset, alpha, beta, lam, eps: see :func:`goal_loss`.

    Raises:
        ValueError: an unknown weight.

    >>> index = torch.tensor([0])
    >>> goal_triplet_loss(torch.tensor([[0.5, 0.9, 0.4]]), index, index, index + 2, "con")
    tensor([0.1000])
    """
    objective = Objective(triplet_weight, pair_weight, margin, tau, offset, alpha, beta, lam, eps)
    (similarities,) = full_precision(similarities)
    if len(anchors) == 0:
        return similarities.new_zeros(0) + zero_or_nan(similarities)
    positive_mask, negative_mask = (torch.zeros_like(similarities, dtype=torch.bool) for _ in range(2))
    positive_mask[anchors, positives] = True
    negative_mask[anchors, negatives] = True
    triplets = _Triplets(
        anchors,
        similarities[anchors, positives],
        similarities[anchors, negatives],
        torch.ones_like(anchors, dtype=torch.bool),
    )
    batch_positives = similarities[positive_mask]
    of_negatives = None
    if objective.is_relative:
        of_negatives = _statistics(objective, similarities, negative_mask, batch_positives)
    losses = _violation_with_gradient(objective, triplets, batch_positives, of_negatives)
    return losses + zero_or_nan(similarities)


def triplet_weight(
    anchor_positive: Tensor,
    anchor_negative: Tensor,
    kind: str = Objective.triplet_weight,
    *,
    margin: float = Objective.margin,
    tau: float = Objective.tau,
    offset: float = Objective.offset,
) -> Tensor:
    r"""Return T, the weight of both gradients of a triplet.

    ====  ==============================================================================  =====
    con   1 if :math:`m + s_n - s_p > 0` else 0                                           Eq. 5
    nca   :math:`\sigma(\tau (s_n - s_p))`, :math:`\sigma` is the logistic function        Eq. 7
    cir   :math:`\sigma(\tau (s_n^2 - s_p (2 - s_p) + \mathrm{offset}))`                   Eq. 8
    ====  ==============================================================================  =====

    Args:
        anchor_positive: s_p; any shape that broadcasts with s_n.
        anchor_negative: s_n.
        kind: con, nca or cir.
        margin, tau, offset: see :func:`goal_loss`.

    Raises:
        ValueError: an unknown kind.

    >>> triplet_weight(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]), "con")
    tensor([0., 1.])
    """
    argument = _violation_argument(anchor_positive, anchor_negative, kind, margin, tau, offset)
    return (argument > 0).to(argument.dtype) if kind == "con" else argument.sigmoid()


def triplet_violation(
    anchor_positive: Tensor,
    anchor_negative: Tensor,
    kind: str = Objective.triplet_weight,
    *,
    margin: float = Objective.margin,
    tau: float = Objective.tau,
    offset: float = Objective.offset,
) -> Tensor:
    r"""Return V, the value that :func:`goal_loss` reports for a triplet.

    ====  ==================================================================================
    con   :math:`\max(0, m + s_n - s_p)`
    nca   :math:`\log(1 + e^{\tau (s_n - s_p)}) / \tau`
    cir   :math:`\log(1 + e^{\tau (s_n^2 - s_p (2 - s_p) + \mathrm{offset})}) / \tau`
    ====  ==================================================================================

    Args:
        anchor_positive, anchor_negative, kind, margin, tau, offset: see :func:`triplet_weight`.

    Raises:
        ValueError: an unknown kind.

    >>> triplet_violation(torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.5]), "con")
    tensor([0.0000, 0.2000])
    """
    argument = _violation_argument(anchor_positive, anchor_negative, kind, margin, tau, offset)
    return argument.relu() if kind == "con" else -logsigmoid(-argument) / tau


def pair_weights(
    anchor_positive: Tensor,
    anchor_negative: Tensor,
    kind: str = Objective.pair_weight,
    *,
    alpha: float = Objective.alpha,
    beta: float = Objective.beta,
    lam: float = Objective.lam,
    relative_positive: float | Tensor = 0.0,
    relative_negative: float | Tensor = 0.0,
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
        anchor_positive: s_p, any shape.
        anchor_negative: s_n, any shape.
        kind: con, lin, sig, sig_ms or lin_ms.
        alpha, beta, lam: see :func:`goal_loss`.
        relative_positive: m+, the pair's relative similarity to other positive pairs; >= 0 for sig_ms.
        relative_negative: m-, to other negative pairs.

    Returns:
        Of the shapes of s_p and s_n, where the relative similarities do not broadcast to larger ones.

    Raises:
        ValueError: an unknown kind.

    >>> [weight.item() for weight in pair_weights(torch.tensor(0.75), torch.tensor(0.5), "lin")]
    [0.25, 0.5]
    """
    check_name("pair_weight", kind, PAIR_WEIGHTS)
    if kind == "con":
        return torch.ones_like(anchor_positive), torch.ones_like(anchor_negative)
    if kind == "lin":
        return 1 - anchor_positive, anchor_negative
    if kind == "lin_ms":
        return (1 - relative_positive) * (1 - anchor_positive), (1 + relative_negative) * anchor_negative
    exponent_positive, exponent_negative = alpha * (anchor_positive - lam), beta * (lam - anchor_negative)
    if kind == "sig":
        return (-exponent_positive).sigmoid(), (-exponent_negative).sigmoid()
    return _inverse_sum(relative_positive, exponent_positive), _inverse_sum(relative_negative, exponent_negative)


def _inverse_sum(term: float | Tensor, exponent: Tensor) -> Tensor:
    """Return ``1 / (term + exp(exponent))`` without an exponential that overflows."""
    term = torch.as_tensor(term, dtype=exponent.dtype, device=exponent.device)
    return (-torch.logaddexp(term.log(), exponent)).exp()


def _violation_argument(
    anchor_positive: Tensor, anchor_negative: Tensor, kind: str, margin: float, tau: float, offset: float
) -> Tensor:
    check_name("triplet_weight", kind, TRIPLET_WEIGHTS)
    if kind == "con":
        return margin + anchor_negative - anchor_positive
    if kind == "nca":
        return tau * (anchor_negative - anchor_positive)
    return tau * (anchor_negative.square() - anchor_positive * (2 - anchor_positive) + offset)


class NegativeStatistics(NamedTuple):
    """What the triplets of an anchor have to know of all its negatives.

    Attributes:
        hardest: (A,), the largest similarity; -inf without negatives.
        index: (A,), the candidate that it belongs to, of equal ones the first; 0 without negatives.
        chosen: (A,), number of negatives above :meth:`Objective.floor`; None if no pair is compared with others.
        total: (A,), of those for lin_ms the sum of their similarities, for sig_ms that of
            ``exp(beta * (similarity - hardest))`` without the term of the hardest, 1; or None.
    """

    hardest: Tensor
    index: Tensor
    chosen: Tensor | None = None
    total: Tensor | None = None


class _Triplets(NamedTuple):
    """Triplets of a batch; the four broadcast to one shape."""

    rows: Tensor  # the anchors
    anchor_positive: Tensor  # s_p
    anchor_negative: Tensor  # s_n
    valid: Tensor  # bool; any other is none at all, and its s_n any number


def hardest_negative_losses(
    objective: Objective,
    anchors: Tensor,
    positive_similarities: Tensor,
    of_negatives: NegativeStatistics,
    batch_positives: Tensor | None = None,
) -> Tensor:
    """Return the loss of each positive pair with the hardest negative of its anchor, (M,); 0 where there is none.

    Args:
        objective: what the gradient shall be.
        anchors: (M,), of the positive pairs; indices of ``of_negatives``.
        positive_similarities: (M,).
        of_negatives: of all anchors. The gradient goes to ``hardest`` and to the positives.
        batch_positives: similarities of all positive pairs of the batch, where these are not all.
    """
    if batch_positives is None:
        batch_positives = positive_similarities
    exists = of_negatives.hardest != -torch.inf  # (A,)
    hardest = of_negatives.hardest.masked_fill(~exists, 0)
    triplets = _Triplets(anchors, positive_similarities, hardest[anchors], exists[anchors])
    return _violation_with_gradient(objective, triplets, batch_positives, of_negatives)


def _hardest_negatives(
    similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor, *, objective: Objective
) -> Tensor:
    positive_similarities = similarities[anchors, positives]  # (M,)
    of_negatives = _statistics(objective, similarities, negative_mask, positive_similarities)
    return hardest_negative_losses(objective, anchors, positive_similarities, of_negatives)


def _all_negatives(
    similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor, *, objective: Objective
) -> Tensor:
    positive_similarities = similarities[anchors, positives]  # (M,)
    of_negatives = None
    if objective.is_relative:
        of_negatives = _statistics(objective, similarities, negative_mask, positive_similarities)
    triplets = _Triplets(
        anchors[:, None], positive_similarities[:, None], similarities[anchors], negative_mask[anchors]
    )
    return _violation_with_gradient(objective, triplets, positive_similarities, of_negatives).sum(dim=1)


def _statistics(
    objective: Objective, similarities: Tensor, negative_mask: Tensor, batch_positives: Tensor
) -> NegativeStatistics:
    hardest, index = hardest_negatives(similarities, negative_mask)
    if not objective.is_relative:
        return NegativeStatistics(hardest, index)
    with torch.no_grad():
        chosen = negative_mask & (similarities > objective.floor(batch_positives.min()))  # (A, C)
        count = chosen.sum(dim=1)
        terms = similarities
        if objective.pair_weight == "sig_ms":
            terms = (similarities - hardest[:, None]).mul_(objective.beta).exp_().scatter_(1, index[:, None], 0)
        return NegativeStatistics(hardest, index, count, terms.masked_fill(~chosen, 0).sum(dim=1))


def _violation_with_gradient(
    objective: Objective, triplets: _Triplets, batch_positives: Tensor, of_negatives: NegativeStatistics | None
) -> Tensor:
    """Return V of each triplet, with the objective as its gradient; 0 with zero gradients where not ``valid``.

    Args:
        objective: see above.
        triplets: see above.
        batch_positives: (M,), the similarities of all positive pairs.
        of_negatives: of all anchors; not read unless ``objective.is_relative``.
    """
    _, anchor_positive, anchor_negative, valid = triplets
    of_triplet = {
        "kind": objective.triplet_weight,
        "margin": objective.margin,
        "tau": objective.tau,
        "offset": objective.offset,
    }
    with torch.no_grad():
        weights = triplet_weight(anchor_positive, anchor_negative, **of_triplet)
        relative_positive = relative_negative = 0.0
        if objective.is_relative:
            relative_positive, relative_negative = _relative_similarities(
                objective, triplets, batch_positives, of_negatives
            )
        weights_positive, weights_negative = pair_weights(
            anchor_positive,
            anchor_negative,
            objective.pair_weight,
            alpha=objective.alpha,
            beta=objective.beta,
            lam=objective.lam,
            relative_positive=relative_positive,
            relative_negative=relative_negative,
        )
        weights_positive = torch.where(valid, weights * weights_positive, 0)
        weights_negative = torch.where(valid, weights * weights_negative, 0)
        values = triplet_violation(anchor_positive, anchor_negative, **of_triplet)
        # V underflows before T does, but it is T that decides what a reducer of non-zero values has to keep.
        values = torch.where(valid & (weights > 0), values.clamp_min(torch.finfo(values.dtype).tiny), 0)
    surrogate = weights_negative * anchor_negative - weights_positive * anchor_positive
    return values + (surrogate - surrogate.detach())  # in this order the value is exactly V


def _relative_similarities(
    objective: Objective, triplets: _Triplets, batch_positives: Tensor, of_negatives: NegativeStatistics
) -> tuple[Tensor, Tensor]:
    """Return m+ and m- of each triplet: how its two pairs compare with the others of the batch.

    A pair is compared with a mean over the others of a chosen set. Only what all triplets of an anchor share is summed
    up, so that no triplet needs a row of the batch of its own.
    """
    rows, anchor_positive, anchor_negative, _ = triplets
    hardest, _, negatives_chosen, negative_totals = (values[rows] for values in of_negatives)

    ordered = batch_positives.sort().values  # (M,), so that the chosen ones of any anchor come first
    ceiling = hardest + objective.eps
    positives_chosen = torch.searchsorted(ordered, ceiling)
    positive_is_chosen = anchor_positive < ceiling
    negative_is_chosen = anchor_negative > objective.floor(ordered[0])

    if objective.pair_weight == "lin_ms":
        sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(dim=0)])
        return (
            _mean_difference(anchor_positive, positive_is_chosen, sums[positives_chosen], positives_chosen),
            _mean_difference(anchor_negative, negative_is_chosen, negative_totals, negatives_chosen),
        )
    terms = (objective.alpha * (ordered[0] - ordered)).exp()
    terms[0] = 0
    return (
        _mean_exponential(
            objective.alpha * (anchor_positive - ordered[0]),
            positive_is_chosen,
            terms.cumsum(dim=0)[(positives_chosen - 1).clamp_min(0)],
            positives_chosen,
        ),
        _mean_exponential(
            objective.beta * (hardest - anchor_negative), negative_is_chosen, negative_totals, negatives_chosen
        ),
    )


def _mean_difference(value: Tensor, is_chosen: Tensor, total: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of ``value - other`` over the chosen others, 0 if there is none.

    Args:
        value: the similarity of a pair.
        is_chosen: whether the pair itself is among the chosen.
        total: the sum of the chosen.
        chosen: their number.
    """
    others = chosen - is_chosen.to(chosen.dtype)
    mean = torch.where(is_chosen, total - value, total) / others.clamp_min(1)
    return torch.where(others > 0, value - mean, 0)


def _mean_exponential(difference: Tensor, is_chosen: Tensor, rest: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of ``exp(difference - other difference)`` over the chosen others, 0 if there is none.

    Args:
        difference: of a pair to the extreme one of the chosen, >= 0.
        is_chosen: whether the pair itself is among the chosen.
        rest: the sum of ``exp(-other difference)`` over the chosen but the extreme one, whose term is 1.
        chosen: their number.
    """
    # Subtracting the pair's own term cancels only where it is the largest one, which `rest` leaves out by itself.
    others = torch.where(is_chosen, torch.where(difference == 0, rest, 1 + rest - (-difference).exp()), 1 + rest)
    count = chosen - is_chosen.to(chosen.dtype)
    return torch.where(count > 0, difference.exp() * others / count.clamp_min(1), 0)
