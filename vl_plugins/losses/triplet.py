"""Triplet losses of VSE++, with the hardest negative or with all of them."""

from typing import Any

import torch
from torch import Tensor

from vl_plugins.errors import number
from vl_plugins.losses.base import PairLoss, Pairs

__all__ = ["HardestNegativeLoss", "TripletHNLoss", "TripletSHLoss"]

PAPER = "Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives"


class HardestNegativeLoss(PairLoss):
    """A loss of the hardest negatives, optionally after a warm-up in which all negatives count.

    Early in training the hardest negative is often wrong for most pairs, and the model can collapse: all embeddings
    become the same, and a triplet loss stays at 2 * margin. Counting all negatives for the first epoch or so helps.

    Args:
        warmup_steps: number of steps in which the losses of all negatives are added up, with memory for M x C numbers.
            Given triplets are not affected.
        kwargs: see :class:`~vl_plugins.losses.PairLoss`.

    Attributes:
        step: number of steps so far, part of ``state_dict``. Each call in training mode with gradients adds 1; a
            trainer that calls the loss several times in a step sets it before each call.
    """

    def __init__(self, warmup_steps: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.warmup_steps = number("warmup_steps", warmup_steps, least=0, kind=int)
        self.step = 0
        self.add_to_recordable_attributes(name="warmup_steps")

    @property
    def negatives(self) -> str:  # type: ignore[override]
        return "all" if self.is_warming_up else "max"

    @property
    def is_warming_up(self) -> bool:
        """True if all negatives count in the next call."""
        return self._counts() and self.step < self.warmup_steps

    @property
    def has_independent_pairs(self) -> bool:
        return not self.is_warming_up and super().has_independent_pairs  # so that a step of the warm-up is one call

    def _reduce(self, *args: Any) -> Any:
        self.step += self._counts()
        return super()._reduce(*args)

    def _counts(self) -> bool:
        return self.warmup_steps > 0 and self.training and torch.is_grad_enabled()

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.step)

    def set_extra_state(self, state: Tensor) -> None:
        self.step = int(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "training_calls" in state_dict:  # until version 0.2
            state_dict[prefix + "_extra_state"] = state_dict.pop(prefix + "training_calls")
        super()._load_from_state_dict(state_dict, prefix, *args)


class TripletHNLoss(HardestNegativeLoss):
    r"""Triplet loss with the hardest negative of each anchor, the max of hinges of VSE++.

    For a positive pair (i, p), and with ``symmetric`` the same with the columns as anchors added:

    .. math:: \ell_{ip} = \max(0, m + \max_{n \in N_i} S_{in} - S_{ip})

    When to use it: to reproduce VSE++ and its successors. From scratch it stalls at first, and in small trainings it
    was still below :class:`~vl_plugins.losses.UnifiedLoss` after three times the steps.

    Args:
        margin: m, by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: ``warmup_steps``, see :class:`HardestNegativeLoss`; others, and how to call the loss, see
            :class:`~vl_plugins.losses.PairLoss`.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> TripletHNLoss(margin=0.2)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.4000)
    """

    equation, paper = "l_MH, max of hinges", PAPER

    def __init__(self, margin: float = 0.2, **kwargs: Any):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, least=0)
        self.add_to_recordable_attributes(name="margin")

    def pair_loss(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        return (self.margin + negative - positive).relu()


class TripletSHLoss(PairLoss):
    r"""Triplet loss summed over all negatives of each anchor, the sum of hinges of VSE0.

    .. math:: \ell_{ip} = \sum_{n \in N_i} \max(0, m + S_{in} - S_{ip})

    When to use it: in the first steps before Triplet-HN, or to compare with it. It has many small gradients and
    does not stall.

    Memory is one row of candidates per positive pair, M x C. Arguments are those of :class:`TripletHNLoss`, without a
    warm-up.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> TripletSHLoss(margin=0.2)(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.8000)
    """

    equation, paper = "l_SH, sum of hinges", PAPER
    negatives = "all"

    def __init__(self, margin: float = 0.2, **kwargs: Any):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, least=0)
        self.add_to_recordable_attributes(name="margin")

    pair_loss = TripletHNLoss.pair_loss
