"""GOAL: objectives given by their gradient, a triplet weight times two pair weights."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vl_plugins.engine import Pairs
from vl_plugins.errors import number, one_of
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.warmup import Warmup

__all__ = ["PAIR_WEIGHTS", "TRIPLET_WEIGHTS", "GOALLoss"]

TRIPLET_WEIGHTS = ("con", "nca", "cir")
PAIR_WEIGHTS = ("con", "lin", "sig", "sig_ms", "lin_ms")

Relative = tuple[float | Tensor, float | Tensor]


class GOALLoss(PairLoss):
    r"""GOAL: a gradient objective for triplets of an anchor, a positive and the anchor's hardest negative.

    The objective is the gradient of each triplet (a, p, n), which need not be that of any loss. With
    :math:`s_p = S_{ap}` and :math:`s_n = S_{an}`:

    .. math:: \frac{\partial}{\partial s_n} = T P_- \qquad \frac{\partial}{\partial s_p} = -T P_+

    ======  ================================================  ================================================  =======
    T       weight of the triplet                             value V that is reported                          paper
    ======  ================================================  ================================================  =======
    con     1 if :math:`a = m + s_n - s_p > 0` else 0         :math:`\max(0, a)`                                Eq. 5
    nca     :math:`\sigma(a), a = \tau (s_n - s_p)`           :math:`\log(1 + e^a) / \tau`                      Eq. 7
    cir     :math:`\sigma(a)`,                                :math:`\log(1 + e^a) / \tau`                      Eq. 8
            :math:`a = \tau (s_n^2 - s_p (2 - s_p) + o)`
    ======  ================================================  ================================================  =======

    ======  ================================================  ================================================  =======
    P       :math:`P_+` of the positive pair                  :math:`P_-` of the negative pair                  paper
    ======  ================================================  ================================================  =======
    con     1                                                 1                                                 Eq. 9
    lin     :math:`1 - s_p`                                   :math:`s_n`                                       Eq. 10
    sig     :math:`1 / (1 + e^{\alpha (s_p - \lambda)})`      :math:`1 / (1 + e^{-\beta (s_n - \lambda)})`      Eq. 11
    sig_ms  :math:`1 / (m_+ + e^{\alpha (s_p - \lambda)})`    :math:`1 / (m_- + e^{-\beta (s_n - \lambda)})`    Eq. 12
    lin_ms  :math:`(1 - m_+) (1 - s_p)`                       :math:`(1 + m_-) s_n`                             Eq. 13
    ======  ================================================  ================================================  =======

    :math:`m_+` and :math:`m_-` are the means of :math:`e^{\alpha (s_p - R)}` and :math:`e^{-\beta (s_n - R)}`, or of
    :math:`s_p - R` and :math:`s_n - R` for lin_ms, over other pairs R: positive pairs of the batch less than eps above
    the anchor's hardest negative; and negatives of the anchor less than eps below the least similar positive of the
    batch. Known losses among the combinations (T, P) are the triplet loss (con, con), NT-Xent loss (nca, con), Circle
    loss (cir, lin) with offset 1, binomial deviance loss (con, sig) and multi-similarity loss (con, sig_ms) (Table 1).

    When to use it: to reproduce the paper, in training runs of tens of thousands of steps, with Adam, ``SumReducer``,
    clipping at norm 2 and the learning rate of Triplet-HN. Otherwise use :class:`~vl_plugins.losses.UnifiedLoss`. The
    paper's gain of 1 to 3 points of R@1 on COCO came after 130,000 steps. In small experiments on frozen features, no
    combination was shown to be better than Triplet-HN; (con, sig_ms) was the best of four. With pair weights other than
    con, repulsion begins at a twentieth of the attraction, so all embeddings first move together. When a small CLIP was
    fine-tuned for a few hundred steps, (nca, con) and (con, sig_ms) scored below the contrastive loss, most of all from
    a model of another domain; there a warm-up helped but was not enough.

    Use tau from 1 to 10 with (nca, con). With cir, and with any pair weight but con, use ``tau=1, offset=0.5``: with
    ``tau=10, offset=0`` the gradient is hundreds of times smaller.

    The paper has its best results with (cir, sig_ms). Its text and its authors' code
    (https://github.com/microsoft/VSE_Gradient) differ: the offset o is 0 in the text (Eq. 8), so that a triplet with
    both similarities at 0.5, as is common in fine-tuning, has T = 0.007; in the code it is 0.5, as here. In the text,
    as here, T of con is 0 where the margin is kept (Eq. 5); in the code it never is, as with ``margin`` > 2 here. The
    text does not give tau, but Figure 2 has 10, as here; the code has 1 in its loss.

    Args:
        triplet_weight, pair_weight: T and P.
        margin: m of triplet weight con, >= 0.
        tau: inverse temperature of triplet weights nca and cir, > 0.
        offset: of triplet weight cir.
        alpha, beta: steepness of the weights of positives and of negatives in sig and sig_ms, >= 0.
        lam: similarity at which the weights of sig are 1/2.
        eps: slack in the choice of R, >= 0.
        all_negatives: add up the losses of all negatives of an anchor instead of taking the hardest, as in a warm-up,
            with memory for M x C numbers.
        kwargs: and how to call the loss, see :class:`~vl_plugins.losses.PairLoss`. Only (con, con) and (nca, con) take
            real distances, negated.

    Raises:
        ValueError: an unknown weight, a hyper-parameter out of its range, or a distance that does not fit the weights.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> GOALLoss(triplet_weight="con", pair_weight="lin")(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 5-13"
    paper = "Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval"

    def __init__(
        self,
        triplet_weight: str = "nca",
        pair_weight: str = "con",
        margin: float = 0.2,
        tau: float = 10.0,
        offset: float = 0.5,
        alpha: float = 2.0,
        beta: float = 10.0,
        lam: float = 0.5,
        eps: float = 0.1,
        all_negatives: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.triplet_weight = one_of("triplet_weight", triplet_weight, TRIPLET_WEIGHTS)
        self.pair_weight = one_of("pair_weight", pair_weight, PAIR_WEIGHTS)
        self.all_negatives = all_negatives
        self.is_relative = pair_weight.endswith("_ms")  # a pair is compared with other pairs of the batch
        self.tau = number("tau", tau, above=0)
        self.offset, self.lam = number("offset", offset), number("lam", lam)
        self.margin, self.alpha = number("margin", margin, least=0), number("alpha", alpha, least=0)
        self.beta, self.eps = number("beta", beta, least=0), number("eps", eps, least=0)
        numbers = ["margin", "tau", "offset", "alpha", "beta", "lam", "eps"]
        self.add_to_recordable_attributes(list_of_names=numbers)
        if not (self.distance.is_inverted or (triplet_weight != "cir" and pair_weight == "con")):
            raise ValueError(
                f"triplet_weight {triplet_weight!r} with pair_weight {pair_weight!r} needs a similarity such as "
                f"CosineSimilarity as distance, got {type(self.distance).__name__}"
            )

    @property
    def has_matrix_losses(self) -> bool:
        return self.is_relative or self.all_negatives

    @property
    def by_row(self) -> bool:
        return not self.is_relative

    takes_triplets = True

    @classmethod
    def warmed_up(cls, steps: int, **options: Any) -> Warmup:
        """Return this loss with these options after some steps with all negatives."""
        return Warmup(cls(all_negatives=True, **options), cls(**options), steps)

    @property
    def margin_in_use(self) -> float:
        return self.margin if self.triplet_weight == "con" else 0.0

    def of_pairs(self, positive: Tensor, negative: Tensor, relative: Relative = (0.0, 0.0)) -> Tensor:
        """Return V of each triplet, with the objective as its gradient; ``relative`` are m+ and m-."""
        with torch.no_grad():
            weight, value = self.triplet_weights(positive, negative)
            positive_weight, negative_weight = self.pair_weights(positive, negative, relative)
        objective = weight * negative_weight * negative - weight * positive_weight * positive
        return value + (objective - objective.detach())  # in this order the value is exactly V

    def triplet_weights(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """Return T and V of similarities that broadcast together."""
        if self.triplet_weight == "con":
            violation = (self.margin + negative - positive).relu()
            return (violation > 0).to(violation.dtype), violation
        difference = negative - positive
        if self.triplet_weight == "cir":
            difference = negative.square() - positive * (2 - positive) + self.offset
        return (self.tau * difference).sigmoid(), softplus(self.tau * difference, threshold=60) / self.tau

    def pair_weights(self, positive: Tensor, negative: Tensor, relative: Relative = (0.0, 0.0)) -> Relative:
        """Return P+ and P- of similarities, given m+ and m-, which broadcast with them."""
        if self.pair_weight == "con":
            return 1.0, 1.0
        if self.pair_weight.startswith("lin"):  # m+ = m- = 0 for lin
            return (1 - relative[0]) * (1 - positive), (1 + relative[1]) * negative
        exponents = self.alpha * (positive - self.lam), self.beta * (self.lam - negative)
        if self.pair_weight == "sig":
            return (-exponents[0]).sigmoid(), (-exponents[1]).sigmoid()
        # 1 / (m + exp(exponent)), without an exponential that overflows.
        to_positive, to_negative = (
            (-torch.logaddexp(torch.as_tensor(m).to(exponent).log(), exponent)).exp()
            for m, exponent in zip(relative, exponents, strict=True)
        )
        return to_positive, to_negative

    def matrix_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, pairs: tuple[Tensor, Tensor]
    ) -> Tensor:
        rows, columns = pairs
        positive = similarities[rows, columns]
        to_positives, to_negatives = self._relative(similarities.detach(), negative_mask, rows, columns)
        if self.all_negatives:
            relative = to_positives[:, None], to_negatives[rows]
            losses = self.of_pairs(positive[:, None], similarities[rows], relative)  # (M, C)
            return losses.masked_fill(~negative_mask[rows], 0).sum(dim=1)
        hardest = similarities.detach().masked_fill(~negative_mask, -torch.inf).argmax(dim=1)[rows]
        relative = to_positives, to_negatives[rows, hardest]
        losses = self.of_pairs(positive, similarities[rows, hardest], relative)
        return losses.masked_fill(~negative_mask[rows, hardest], 0)

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        negative_mask = Pairs(anchors, negatives).mask(similarities.shape)
        pairs, which = torch.stack([anchors, positives]).unique(dim=1, return_inverse=True)
        to_positives, to_negatives = self._relative(similarities.detach(), negative_mask, *pairs)
        relative = to_positives[which], to_negatives[anchors, negatives]
        return self.of_pairs(similarities[anchors, positives], similarities[anchors, negatives], relative)

    def _relative(
        self, similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return m+ of M different positive pairs, (M,), and m- of all pairs, (A, C); 0 for weights without them."""
        if not self.is_relative:
            return similarities.new_zeros(len(anchors)), similarities.new_zeros(()).expand_as(similarities)
        positive = similarities[anchors, positives]
        hardest = similarities.masked_fill(~negative_mask, -torch.inf).max(dim=1, keepdim=True)  # (A, 1)
        to_positives = self._relative_of_positives(positive, hardest.values[anchors])
        chosen = negative_mask & (similarities > positive.min() - self.eps)
        return to_positives, self._relative_of_negatives(similarities, chosen, *hardest)

    def _relative_of_positives(self, positive: Tensor, hardest: Tensor) -> Tensor:
        """Return m+ of each of M positive pairs, given the hardest negatives of their anchors, (M, 1)."""
        chosen = positive < hardest + self.eps  # (M, M)
        chosen.fill_diagonal_(False)
        terms = positive[:, None] - positive
        if self.pair_weight == "sig_ms":
            terms = (self.alpha * terms).exp()
        return terms.masked_fill(~chosen, 0).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)

    def _relative_of_negatives(self, similarities: Tensor, chosen: Tensor, hardest: Tensor, index: Tensor) -> Tensor:
        """Return m- of all pairs from the chosen negatives, (A, C), given the hardest of each anchor, (A, 1)."""
        number_of_others = chosen.sum(dim=1, keepdim=True) - chosen.long()  # (A, C), of each pair
        if self.pair_weight == "lin_ms":
            terms = similarities.masked_fill(~chosen, 0)
            others = terms.sum(dim=1, keepdim=True) - terms
            mean = similarities - others / number_of_others.clamp(min=1)
        else:
            exponents = self.beta * (similarities - hardest.masked_fill(hardest == -torch.inf, 0))
            terms = exponents.exp().masked_fill(~chosen, 0)  # 1 for the hardest, at most 1 for others
            without_hardest = terms.scatter(1, index, 0).sum(dim=1, keepdim=True)
            # The term of the hardest is not subtracted from the sum, because it may drown all others.
            others = terms.gather(1, index) + without_hardest - terms
            others = torch.where(similarities == hardest, without_hardest, others)
            mean = others / number_of_others.clamp(min=1) * (-exponents).exp()
        return torch.where(number_of_others > 0, mean, 0)
