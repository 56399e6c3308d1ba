"""GOAL: objectives given by their gradient."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from vl_plugins.functional.goal import Objective, goal_loss, goal_triplet_loss, objective_losses
from vl_plugins.kernels import mine_hardest_negatives
from vl_plugins.losses.base import PairBatch
from vl_plugins.losses.triplet import HardestNegativeLoss

__all__ = ["GOALLoss"]

DEFAULTS = {field.name: field.default for field in fields(Objective)}


class GOALLoss(HardestNegativeLoss):
    """GOAL: a triplet weight times a pair weight as the gradient of each mined triplet.

    There are 3 triplet weights and 5 pair weights; negatives are the hardest. :func:`vl_plugins.functional.goal_loss`
    has the formulas, which combination is which known loss, and where the paper's text and its authors' code differ.
    See :class:`~vl_plugins.losses.base.PairLoss` for how to call it. With triplets as ``indices_tuple`` each given
    triplet counts, and no negative is searched. The value is how far the triplets are from being right, not the
    integral of the gradient; ``AvgNonZeroReducer`` keeps those with a triplet weight > 0.

    Args:
        options: the fields of :class:`~vl_plugins.functional.goal.Objective`, by name.
        kwargs: ``warmup_steps``, see :class:`~vl_plugins.losses.triplet.HardestNegativeLoss`; ``symmetric``
            and the options of pytorch-metric-learning, see :class:`~vl_plugins.losses.base.PairLoss`. The ``distance``
            has to be a similarity, best the cosine; only (con, con) and (nca, con) take real distances, negated.

    Raises:
        ValueError: a hyper-parameter out of its range, or a distance that is none for the weights.

    Reference:
        Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval, Eq. 5-13.

    >>> import torch
    >>> image_embeddings, text_embeddings, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> loss = GOALLoss(triplet_weight="con", pair_weight="lin", margin=0.2)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 5-13"
    paper = "Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval"
    independent_pairs = True

    def __init__(self, **options: Any):
        super().__init__(**{name: value for name, value in options.items() if name not in DEFAULTS})
        self.objective = Objective(**{name: value for name, value in options.items() if name in DEFAULTS})
        triplet_weight, pair_weight = self.objective.triplet_weight, self.objective.pair_weight
        only_differences = triplet_weight != "cir" and pair_weight == "con"
        if not (self.distance.is_inverted or only_differences):
            raise ValueError(
                f"triplet_weight {triplet_weight!r} with pair_weight {pair_weight!r} needs a similarity such as "
                f"CosineSimilarity as distance, got {type(self.distance).__name__}"
            )

    @classmethod
    def forwarded_options(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of the objective with their defaults."""
        return DEFAULTS

    def adds_up_over_rows(self) -> bool:
        return not self.objective.is_relative and super().adds_up_over_rows()

    def mined_losses(self, batch: PairBatch, mining: str) -> Tensor:
        if batch.use_kernel and mining == "hardest":
            mined = mine_hardest_negatives(**batch.kernel_arguments(), objective=self.objective, backend=self.backend)
            s_p, s_n, exists, terms, zero = mined
            return objective_losses(self.objective, s_p, s_n, exists, terms).sum(dim=0) + zero
        options: dict[str, Any] = {"mining": mining, "symmetric": batch.symmetric, "reduction": "none"}
        return goal_loss(batch.similarities(), *batch.masks(), self.objective, **options)

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return goal_triplet_loss(similarities, anchors, positives, negatives, self.objective)
