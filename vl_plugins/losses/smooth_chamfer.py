"""Objective of diverse embedding sets: any pair loss on smooth-Chamfer similarity, and two regularizers."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils.module_with_records import ModuleWithRecords
from torch import Tensor

from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.functional.precision import full_precision
from vl_plugins.losses.pair_batch import IndicesTuple
from vl_plugins.registry import create_loss, loss_options
from vl_plugins.regularizers import DiversityRegularizer, MMDRegularizer
from vl_plugins.utils.checks import non_negative

__all__ = ["SmoothChamferLoss"]

DISTANCE_DEFAULTS = {"alpha": 16.0, "set_size": 1, "backend": None}


class SmoothChamferLoss(BaseMetricLossFunction):
    """A pair loss, its base, on smooth-Chamfer similarity of sets, plus MMD and diversity: the objective of DivE.

    The value is that of ``base``, by default the triplet loss with the hardest negative, plus ``mmd_weight`` times the
    maximum mean discrepancy of the two modalities' elements, plus ``diversity_weight`` times how near the elements of
    one set are to each other. An item is a set of K vectors, (B, K, D), or packed, (B, K * D) with ``set_size`` = K; a
    zero vector is padding. Embeddings (B, D) are sets of one, compared by cosine.

    Called as any loss of this package, see :class:`~vl_plugins.losses.base.PairLoss`, with ``slots`` and ``ref_slots``
    in addition: the elements before a set prediction head adds the global feature, of which diversity is then computed
    instead of the embeddings. The regularization does not go through the reducer. A queue of embeddings, as of
    ``CrossBatchMemory``, is taken for the other modality: there MMD should have the weight 0.

    Args:
        base: name of the loss, another one of :func:`vl_plugins.list_losses`; or a loss of pytorch-metric-learning,
            which has its own distance and options.
        alpha: inverse temperature of the smooth-Chamfer similarity, > 0. GOAL has an option of this name too: give that
            to a ``GOALLoss`` as ``base``.
        set_size: K of packed sets, >= 1.
        mmd_weight: >= 0, of :func:`vl_plugins.functional.mmd_loss`.
        diversity_weight: >= 0, of :func:`vl_plugins.functional.diversity_loss`.
        distance: instead of ``SmoothChamferSimilarity(alpha, set_size, backend)``.
        backend: of that similarity, see :func:`vl_plugins.kernels.pairwise_smooth_chamfer`.
        base_options: options of the loss that ``base`` names, such as ``margin``, ``warmup_steps``, ``reducer``.

    Attributes:
        base: the pair loss.

    Raises:
        ValueError: a hyper-parameter out of its range, an unknown name or option, or options beside an object that has
            its own.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-9 and section 3.4.

    >>> image_embeddings, text_embeddings, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> loss = SmoothChamferLoss("triplet_hn", margin=0.2, mmd_weight=0, diversity_weight=0)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
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
        distance: BaseDistance | None = None,
        backend: str | None = None,
        **base_options: Any,
    ):
        base = _base_loss(base, distance, {"alpha": alpha, "set_size": set_size, "backend": backend}, base_options)
        # Not the base class's: reducer, distance and embedding regularizer are those of the base loss.
        ModuleWithRecords.__init__(self, base.collect_stats)
        self.base = base
        self.mmd_weight = non_negative("mmd_weight", mmd_weight)
        self.diversity_weight = non_negative("diversity_weight", diversity_weight)
        self.add_to_recordable_attributes(list_of_names=["mmd_weight", "diversity_weight"])
        self.mmd, self.diversity = MMDRegularizer(), DiversityRegularizer()

    @classmethod
    def forwarded_options(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of the loss that the option ``base`` names."""
        base_options = dict(given)
        base = base_options.pop("base", "triplet_hn")
        return loss_options(base, **base_options) if isinstance(base, str) and base != "smooth_chamfer" else {}

    def __getattr__(self, name: str) -> Any:
        if name in ("distance", "reducer", "embedding_regularizer"):
            return getattr(self.base, name)
        return super().__getattr__(name)

    @property
    def symmetric(self) -> bool:
        """Whether the base adds both directions; a base without this attribute adds none."""
        return self.base.symmetric

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
        scale: float | Tensor | None = None,
        symmetric: bool | None = None,
    ) -> Tensor | dict[str, dict[str, Any]]:
        """Return the reduced loss of the base plus the regularization; a dict of both with ``DoNothingReducer``.

        Args:
            embeddings: (A, K, D), (A, K * D) or (A, D).
            labels, indices_tuple, ref_emb, ref_labels: see :class:`~vl_plugins.losses.base.PairLoss`.
            slots, ref_slots: (A, K, D) and (C, K, D).
            scale, symmetric: instead of those of the base.

        Raises:
            ValueError: labels missing, a ``scale`` where the base has none, or tensors that do not fit each other, the
                distance or the reducer.
        """
        self.reset_stats()
        # Here, so that gradients in half precision are rounded once, not for each term.
        if ref_emb is None or ref_emb is embeddings:
            (embeddings,), ref_emb = full_precision(embeddings), None
        else:
            embeddings, ref_emb = full_precision(embeddings, ref_emb)
        with torch.autocast(embeddings.device.type, enabled=False):
            # A base of pytorch-metric-learning takes neither.
            options = {"scale": scale, "symmetric": symmetric}
            options = {name: value for name, value in options.items() if value is not None}
            loss = self.base(embeddings, labels, indices_tuple, ref_emb, ref_labels, **options)
            terms = self.regularization(embeddings, ref_emb, slots, ref_slots)
        if isinstance(loss, dict):
            return loss | {name: self.zero_loss() | {"losses": term} for name, term in terms.items()}
        return loss + sum(terms.values())

    def regularization(
        self,
        embeddings: Tensor,
        ref_emb: Tensor | None = None,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the weighted terms ``"mmd_loss"`` and ``"diversity_loss"``; one with weight 0 is left out.

        Tensors and errors are those of :meth:`forward`. There is no ``"mmd_loss"`` without another modality: without
        ``ref_emb``, or if they are the ``embeddings`` themselves.
        """
        for name, given in (("slots", slots), ("ref_slots", ref_slots)):
            if given is not None and given.ndim != 3:
                raise ValueError(f"{name} must have the shape (items, elements, dimension), got {tuple(given.shape)}")
        if ref_emb is embeddings:
            ref_emb = None
        if hasattr(self.distance, "unpack"):  # the one that knows how sets are packed
            embeddings, other = self.distance.unpack(embeddings, embeddings if ref_emb is None else ref_emb)
            ref_emb = None if ref_emb is None else other
        terms = {}
        if self.mmd_weight > 0 and ref_emb is not None:
            terms["mmd_loss"] = self.mmd_weight * self.mmd(embeddings, ref_emb)
        if self.diversity_weight > 0:
            sides = (embeddings if slots is None else slots, ref_emb if ref_slots is None else ref_slots)
            diversity = sum(self.diversity(side) for side in sides if side is not None)
            terms["diversity_loss"] = self.diversity_weight * diversity
        return terms


def _base_loss(
    base: str | BaseMetricLossFunction,
    distance: BaseDistance | None,
    distance_options: dict[str, Any],
    base_options: dict[str, Any],
) -> BaseMetricLossFunction:
    is_loss = isinstance(base, BaseMetricLossFunction) and not isinstance(base, SmoothChamferLoss)
    if base == "smooth_chamfer" or not (is_loss or isinstance(base, str)):
        raise ValueError(f"base must be another loss of pytorch-metric-learning or the name of one, got {base!r}")
    given = [name for name, value in distance_options.items() if value != DISTANCE_DEFAULTS[name]]
    if is_loss:
        given += [*base_options, *(["distance"] if distance is not None else [])]
    what, owner = ("base", base) if is_loss else ("distance", distance)
    if given and owner is not None:
        raise ValueError(
            f"{', '.join(given)} cannot be given with a {type(owner).__name__} as {what}, which has its own options"
        )
    if is_loss:
        return base
    return create_loss(base, distance=distance or SmoothChamferSimilarity(**distance_options), **base_options)
