"""GOAL: objectives that are given by their gradient."""

from typing import Any

from torch import Tensor

from vl_plugins import kernels
from vl_plugins.functional.goal import (
    PAIR_WEIGHTS,
    TRIPLET_WEIGHTS,
    Objective,
    goal_loss,
    goal_triplet_loss,
    triplet_violation,
)
from vl_plugins.losses.hardest_negative import HardestNegativeLoss
from vl_plugins.utils.checks import finite, non_negative, positive
from vl_plugins.utils.errors import check_name

__all__ = ["GOALLoss"]


class GOALLoss(HardestNegativeLoss):
    """GOAL: a triplet weight times a pair weight as gradient; in fine-tuning (nca, con) gained, (cir, sig_ms) lost.

    There are 3 triplet weights and 5 pair weights; negatives are the hardest. :func:`vl_plugins.functional.goal_loss`
    has the formulas, which combination is which known loss, and where the paper's text and its authors' code differ.
    See :class:`~vl_plugins.losses.base.PairLoss` for how to call it. With triplets as ``indices_tuple`` each given
    triplet counts, and no negative is searched. The value is how far the triplets are from being right, not the
    integral of the gradient; ``AvgNonZeroReducer`` keeps those with a triplet weight > 0.

    Args:
        triplet_weight: con, nca or cir.
        pair_weight: con, lin, sig, sig_ms or lin_ms.
        margin: m of triplet weight con, >= 0.
        tau: inverse temperature of triplet weights nca and cir, > 0.
        offset: added in the exponent of triplet weight cir, 0 in the paper's text and 0.5 in its code; 1 is Circle
            loss with m = 0.
        alpha: steepness of the positives' weights in sig and sig_ms, >= 0.
        beta: steepness of the negatives' weights in sig and sig_ms, >= 0.
        lam: similarity at which the weights of sig are 1/2.
        eps: slack in the choice of the pairs that sig_ms and lin_ms compare a pair with, >= 0.
        kwargs: ``warmup_steps``, see :class:`~vl_plugins.losses.hardest_negative.HardestNegativeLoss`; ``symmetric``
            and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`. The ``distance``
            has to be a similarity, best the cosine; only (con, con) and (nca, con) take real distances, negated.

    Raises:
        ValueError: a hyper-parameter out of its range, or a distance that is none for the weights.

    Reference:
        Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval, Eq. 5-13.

    >>> import torch
    >>> loss = GOALLoss("con", "lin", margin=0.2)
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 5-13"
    paper = "Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval"

    def __init__(
        self,
        triplet_weight: str = Objective.triplet_weight,
        pair_weight: str = Objective.pair_weight,
        margin: float = Objective.margin,
        tau: float = Objective.tau,
        offset: float = Objective.offset,
        alpha: float = Objective.alpha,
        beta: float = Objective.beta,
        lam: float = Objective.lam,
        eps: float = Objective.eps,
        **kwargs,
    ):
        super().__init__(margin=margin, **kwargs)
        self.triplet_weight = check_name("triplet_weight", triplet_weight, TRIPLET_WEIGHTS)
        self.pair_weight = check_name("pair_weight", pair_weight, PAIR_WEIGHTS)
        self.tau = positive("tau", tau)
        self.offset = finite("offset", offset)
        self.alpha = non_negative("alpha", alpha)
        self.beta = non_negative("beta", beta)
        self.lam = finite("lam", lam)
        self.eps = non_negative("eps", eps)
        self.add_to_recordable_attributes(list_of_names=["tau", "offset", "alpha", "beta", "lam", "eps"])
        only_differences = triplet_weight != "cir" and pair_weight == "con"
        if not (self.distance.is_inverted or only_differences):
            raise ValueError(
                f"triplet_weight {triplet_weight!r} with pair_weight {pair_weight!r} needs a similarity such as "
                f"CosineSimilarity as distance, got {type(self.distance).__name__}"
            )

    @property
    def independent_pairs(self) -> bool:
        """Not with sig_ms and lin_ms, which compare a pair with others."""
        return not self.pair_weight.endswith("_ms")

    def mined_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, *, mining: str, symmetric: bool
    ) -> Tensor:
        return goal_loss(
            similarities,
            positive_mask,
            negative_mask,
            mining=mining,
            symmetric=symmetric,
            reduction="none",
            **self._hyper_parameters(),
        )

    def hardest_losses(self, x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor, **options) -> Tensor:
        options = {**self._hyper_parameters(), **options}
        return kernels.goal_loss(x, y, x_labels, y_labels, reduction="none", **options)

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return goal_triplet_loss(similarities, anchors, positives, negatives, **self._hyper_parameters())

    def collapsed_losses(self, positive_similarities: Tensor) -> Tensor:
        return triplet_violation(
            positive_similarities,
            positive_similarities,
            self.triplet_weight,
            margin=self.margin,
            tau=self.tau,
            offset=self.offset,
        )

    def _hyper_parameters(self) -> dict[str, Any]:
        names = ("triplet_weight", "pair_weight", "margin", "tau", "offset", "alpha", "beta", "lam", "eps")
        return {name: getattr(self, name) for name in names}
