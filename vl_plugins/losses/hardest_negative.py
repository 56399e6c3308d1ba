"""What triplet losses share: given triplets, and a warm-up without mining for those that mine."""

import torch
from torch import Tensor

from vl_plugins.functional import triplet_margin
from vl_plugins.functional.goal import Objective
from vl_plugins.kernels import HardestNegatives, mine_hardest_negatives
from vl_plugins.losses.base import PairBatch, PairLoss, distance_problem
from vl_plugins.utils.checks import integer, non_negative

__all__ = ["HardestNegativeLoss", "TripletLoss"]


class TripletLoss(PairLoss):
    """A triplet loss: given triplets are used as they are, ``relu(margin + S_an - S_ap)`` each.

    The reducer then receives one value per triplet, ``reduction_type="triplet"``.

    Args:
        margin: by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: see :class:`~vl_plugins.losses.base.PairLoss`.
    """

    def __init__(self, margin: float = 0.2, **kwargs):
        super().__init__(**kwargs)
        self.margin = non_negative("margin", margin)
        self.add_to_recordable_attributes(name="margin")

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return triplet_margin(similarities[anchors, positives], similarities[anchors, negatives], self.margin)


class HardestNegativeLoss(PairLoss):
    """A loss that compares each positive pair with the hardest negatives, optionally after a warm-up without mining.

    Early in training the hardest negative is often wrong for most pairs, and the model can collapse: all embeddings
    become the same, and the loss stays at its value for that, 2 * margin for each pair of a triplet loss. Counting all
    negatives for the first epoch or so helps, as VSE++ and its successors are trained.

    Args:
        warmup_steps: number of calls in training mode, with gradients enabled, in which all negatives of an anchor
            count and are summed up, on all similarities. Given triplets and evaluation are not affected.
        kwargs: see :class:`~vl_plugins.losses.base.PairLoss`.

    Attributes:
        training_calls: the number of such calls so far, a 0-D buffer.
    """

    def __init__(self, warmup_steps: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.warmup_steps = integer("warmup_steps", warmup_steps, least=0)
        self.register_buffer("training_calls", torch.zeros((), dtype=torch.long))

    def all_negative_losses(self, batch: PairBatch) -> Tensor:
        """Return the loss of each positive pair summed over all negatives, (M,)."""
        raise NotImplementedError

    def hardest_losses(self, batch: PairBatch) -> Tensor:
        """Return the loss of each positive pair with the hardest negatives, (M,)."""
        raise NotImplementedError

    def pair_losses(self, batch: PairBatch) -> Tensor:
        if self.warmup_steps and self.training and torch.is_grad_enabled():
            self.training_calls += 1
            if self.training_calls <= self.warmup_steps:
                return self.all_negative_losses(batch)
        return self.hardest_losses(batch)

    def mine(self, batch: PairBatch, objective: Objective | None = None) -> HardestNegatives:
        """Return the similarities of the positive pairs and of the hardest negatives, see :mod:`vl_plugins.kernels`."""
        return mine_hardest_negatives(**batch.kernel_arguments(), objective=objective, backend=self.backend)

    def kernel_problem(self) -> str | None:
        return distance_problem(self.distance)
