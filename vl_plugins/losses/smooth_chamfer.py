"""Objective of diverse embedding sets: any pair loss on smooth-Chamfer similarity, and two regularizers."""

from typing import Any

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import Tensor

from vl_plugins.distances import SetDistance, SmoothChamferSimilarity
from vl_plugins.errors import number
from vl_plugins.numerics import full_precision
from vl_plugins.registry import create
from vl_plugins.regularizers import DiversityRegularizer, MMDRegularizer

__all__ = ["SmoothChamferLoss"]


class SmoothChamferLoss(BaseMetricLossFunction):
    """A pair loss, its base, on smooth-Chamfer similarity of sets, plus MMD and diversity: the objective of DivE.

    The value is that of ``base``, by default the triplet loss with the hardest negative, plus ``mmd_weight`` times the
    maximum mean discrepancy of the two modalities' elements, plus ``diversity_weight`` times how near the elements of
    one set are to each other. An item is a set of K vectors, (B, K, D), or packed, (B, K * D) with ``set_size`` = K; a
    zero vector is padding. Embeddings (B, D) are sets of one, compared by cosine.

    Called as any loss of this package, see :class:`~vl_plugins.losses.base.PairLoss`, with ``slots`` and ``ref_slots`` in
    addition: the elements before a set prediction head adds the global feature, of which diversity is then computed
    instead of the embeddings. The regularization does not go through the reducer.

    Args:
        base: the name of a loss, or a mapping with its ``name`` and options, such as ``margin`` and ``reducer``; or a
            loss of pytorch-metric-learning, whose own distance counts.
        alpha: inverse temperature of the smooth-Chamfer similarity, > 0.
        set_size: K of packed sets, >= 1.
        mmd_weight, diversity_weight: >= 0, of :func:`~vl_plugins.regularizers.mmd_loss` and of
            :func:`~vl_plugins.regularizers.diversity_loss`.
        distance: instead of ``SmoothChamferSimilarity(alpha, set_size=set_size)``.
        base_options: options of the loss that ``base`` names.

    Raises:
        ValueError: a hyper-parameter out of its range, or an unknown name or option.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-9 and section 3.4.

    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> loss = SmoothChamferLoss("triplet_hn", margin=0.2, mmd_weight=0, diversity_weight=0)
    >>> loss(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 6-9 and section 3.4"
    paper = "Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings"

    def __init__(
        self,
        base: str | BaseMetricLossFunction = "triplet_hn",
        alpha: float = 16.0,
        set_size: int = 1,
        mmd_weight: float = 0.01,
        diversity_weight: float = 0.01,
        distance: SetDistance | None = None,
        **base_options: Any,
    ):
        if isinstance(base, BaseMetricLossFunction):
            if base_options or distance is not None:
                raise ValueError(f"{type(base).__name__} as base has its own options and distance: give none here")
        else:
            if distance is not None and (alpha, set_size) != (16.0, 1):
                raise ValueError(f"alpha and set_size are options of {type(distance).__name__}: give none here")
            distance = distance or SmoothChamferSimilarity(alpha, set_size=set_size)
            base = create("loss", base, distance=distance, **base_options)
        super().__init__(distance=base.distance, reducer=base.reducer)
        self.base = base
        self.mmd_weight = number("mmd_weight", mmd_weight, least=0)
        self.diversity_weight = number("diversity_weight", diversity_weight, least=0)
        self.add_to_recordable_attributes(list_of_names=["mmd_weight", "diversity_weight"], is_stat=False)
        size = getattr(self.distance, "set_size", 1)
        self.mmd, self.diversity = MMDRegularizer(set_size=size), DiversityRegularizer(set_size=size)

    @property
    def symmetric(self) -> bool:
        """Whether the base adds both directions."""
        return self.base.symmetric

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
        **options: Any,
    ) -> Tensor | dict[str, Any]:
        """Return the reduced loss of the base plus the regularization.

        Args:
            embeddings, labels, indices_tuple, ref_emb, ref_labels, options: see
                :meth:`~vl_plugins.losses.base.PairLoss.forward`.
            slots, ref_slots: (A, K, D) and (C, K, D).
        """
        ref_emb = None if ref_emb is embeddings else ref_emb
        # Here, so that gradients in half precision are rounded once, not for each term.
        embeddings, *other = full_precision(*(side for side in (embeddings, ref_emb) if side is not None))
        ref_emb = other[0] if other else None
        with torch.autocast(embeddings.device.type, enabled=False):
            loss = self.base(embeddings, labels, indices_tuple, ref_emb, ref_labels, **options)
            terms = self.regularization(embeddings, ref_emb, slots, ref_slots)
        if isinstance(loss, dict):  # DoNothingReducer returns its input
            return loss | {name: self.zero_loss() | {"losses": term} for name, term in terms.items()}
        return loss + sum(terms.values())

    def regularization(
        self,
        embeddings: Tensor,
        ref_emb: Tensor | None = None,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the weighted terms ``"mmd_loss"``, of two modalities, and ``"diversity_loss"``; none of weight 0."""
        for side in (slots, ref_slots):
            if side is not None and side.ndim != 3:
                raise ValueError(f"slots must have the shape (items, elements, dimension), got {tuple(side.shape)}")
        terms = {}
        ref_emb = None if ref_emb is embeddings else ref_emb
        if self.mmd_weight > 0 and ref_emb is not None:
            terms["mmd_loss"] = self.mmd_weight * self.mmd(embeddings, ref_emb)
        if self.diversity_weight > 0:
            sides = (embeddings if slots is None else slots, ref_emb if ref_slots is None else ref_slots)
            diversity = sum(self.diversity(side) for side in sides if side is not None)
            terms["diversity_loss"] = self.diversity_weight * diversity
        return terms
