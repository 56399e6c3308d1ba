"""Objective of diverse embedding sets: any pair loss on smooth-Chamfer similarity, and two regularizers."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import BaseReducer
from pytorch_metric_learning.regularizers import BaseRegularizer
from pytorch_metric_learning.utils.module_with_records import ModuleWithRecords
from torch import Tensor

from vl_plugins.functional.precision import full_precision
from vl_plugins.losses.base import IndicesTuple
from vl_plugins.registry import create_component, create_loss, loss_options
from vl_plugins.utils.checks import non_negative

__all__ = ["SmoothChamferLoss"]

ALPHA = 16.0
SET_SIZE = 1
DEFAULTS = {"alpha": ALPHA, "set_size": SET_SIZE, "backend": None}  # of the distance


class SmoothChamferLoss(BaseMetricLossFunction):
    """A loss of pairs, its base, on smooth-Chamfer similarity of sets, with MMD and diversity: the objective of DivE.

    The value is that of ``base``, by default the triplet loss with the hardest negative, plus ``mmd_weight`` times the
    maximum mean discrepancy of the two modalities' elements, plus ``diversity_weight`` times how near the elements of
    one set are to each other. An item is a set of K vectors, (B, K, D), or packed, (B, K * D) with ``set_size`` = K; a
    vector of zeros is padding. Embeddings (B, D) are sets of one: then their cosines are compared.

    Called as any loss of this package, see :class:`~vl_plugins.losses.base.PairLoss`; ``slots`` and ``ref_slots`` are
    new. Regularization does not go through the reducer, whatever pairs there are: it is that of all embeddings.

    - MMD: :func:`vl_plugins.functional.mmd_loss` of ``embeddings`` and ``ref_emb``, both L2-normalised; nothing without
      ``ref_emb``. A queue of embeddings, as of ``CrossBatchMemory``, is taken for the other modality: there it should
      have the weight 0.
    - Diversity: :func:`vl_plugins.functional.diversity_loss` of ``slots``, and ``ref_slots``: the elements as a set
      prediction head makes them before it adds the global feature; of the embeddings where they are left out. Those of
      both modalities are added up. An item counts as any other, however many elements it has.

    Args:
        base: name of the loss, another one of :func:`vl_plugins.list_losses`; or a loss of pytorch-metric-learning,
            which has its own distance and options.
        alpha: inverse temperature of the smooth-Chamfer similarity, > 0. GOAL has an option of this name too: give that
            to a ``GOALLoss`` as ``base``.
        set_size: K of packed sets, >= 1.
        mmd_weight: of the maximum mean discrepancy, >= 0.
        diversity_weight: of the diversity loss, >= 0.
        distance: another one than ``SmoothChamferSimilarity(alpha, set_size, backend)``.
        backend: how that similarity is computed, see :func:`vl_plugins.kernels.smooth_chamfer_similarity`.
        base_options: those of the loss that ``base`` names, such as ``margin``, ``warmup_steps``, ``symmetric``,
            ``reducer``.

    Attributes:
        base: the loss of pairs.

    Raises:
        ValueError: a hyper-parameter out of its range, an unknown name or option, or options beside an object that has
            its own.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-9 and section 3.4.

    >>> import torch
    >>> loss = SmoothChamferLoss("triplet_hn", margin=0.2, mmd_weight=0, diversity_weight=0)
    >>> image_embeddings, text_embeddings = torch.eye(3), torch.eye(3).roll(1, dims=0)
    >>> labels = torch.arange(3)
    >>> loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 6-9 and section 3.4"
    paper = "Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings"

    def __init__(
        self,
        base: str | BaseMetricLossFunction = "triplet_hn",
        alpha: float = ALPHA,
        set_size: int = SET_SIZE,
        mmd_weight: float = 0.01,
        diversity_weight: float = 0.01,
        distance: BaseDistance | None = None,
        backend: str | None = None,
        **base_options,
    ):
        base = _base_loss(base, {"alpha": alpha, "set_size": set_size, "backend": backend}, distance, base_options)
        # Not the base class's: reducer, distance and embedding regularizer are those of the base loss.
        ModuleWithRecords.__init__(self, base.collect_stats)
        self.base = base
        self.mmd_weight = non_negative("mmd_weight", mmd_weight)
        self.diversity_weight = non_negative("diversity_weight", diversity_weight)
        self.add_to_recordable_attributes(list_of_names=["mmd_weight", "diversity_weight"])
        # By name, because distances and regularizers import modules of this package, which imports this one.
        self.mmd = create_component("regularizer", "MMDRegularizer")
        self.diversity = create_component("regularizer", "DiversityRegularizer")

    @classmethod
    def forwarded_options(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of the loss that the option ``base`` names, see :mod:`vl_plugins.registry`."""
        of_base = dict(given)
        base = of_base.pop("base", "triplet_hn")
        return loss_options(base, **of_base) if _is_name_of_base(base) else {}

    @property
    def distance(self) -> BaseDistance:
        """That of the base."""
        return self.base.distance

    @property
    def reducer(self) -> BaseReducer:
        """That of the base."""
        return self.base.reducer

    @property
    def embedding_regularizer(self) -> BaseRegularizer | None:
        """That of the base."""
        return self.base.embedding_regularizer

    @property
    def symmetric(self) -> bool:
        """Whether the base adds both directions; a base that has no such attribute adds none, and this has none."""
        return self.base.symmetric

    @symmetric.setter
    def symmetric(self, value: bool) -> None:
        if not hasattr(self.base, "symmetric"):
            raise AttributeError(f"{type(self.base).__name__} has no attribute 'symmetric'")
        self.base.symmetric = value

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
    ) -> Tensor | dict[str, dict]:
        """Return the reduced loss of the base plus the regularization; a dict of both with ``DoNothingReducer``.

        Args:
            embeddings: (A, K, D), (A, K * D) or (A, D).
            labels, indices_tuple, ref_emb, ref_labels: see :class:`~vl_plugins.losses.base.PairLoss`.
            slots, ref_slots: see :meth:`regularization`.
            scale: in place of that of the base, see :class:`~vl_plugins.losses.base.PairLoss`.

        Raises:
            ValueError: labels missing, a ``scale`` where the base has none, or tensors that do not fit each other, the
                distance or the reducer.
        """
        self.reset_stats()
        if ref_emb is embeddings:
            ref_emb = None
        # Here, so that gradients in half precision are rounded once, not for each term.
        embeddings, ref_emb = full_precision(embeddings, ref_emb)
        with torch.autocast(embeddings.device.type, enabled=False):
            options = {} if scale is None else {"scale": scale}  # a base of pytorch-metric-learning takes none
            loss = self.base(embeddings, labels, indices_tuple, ref_emb, ref_labels, **options)
            terms = self.regularization(embeddings, ref_emb, slots, ref_slots)
        if isinstance(loss, dict):
            return loss | {
                name: {"losses": term, "indices": None, "reduction_type": "already_reduced"}
                for name, term in terms.items()
            }
        return loss + sum(terms.values())

    def regularization(
        self,
        embeddings: Tensor,
        ref_emb: Tensor | None = None,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the weighted terms ``"mmd_loss"`` and ``"diversity_loss"``; one with weight 0 is left out.

        Args:
            embeddings: as in :meth:`forward`.
            ref_emb: those of the other modality. Without them there is no ``"mmd_loss"``, nor if they are the
                ``embeddings`` themselves.
            slots: (A, K, D), what diversity is computed of instead of ``embeddings``.
            ref_slots: (C, K, D), likewise for ``ref_emb``.

        Raises:
            ValueError: tensors of wrong shapes.
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
            terms["diversity_loss"] = self.diversity_weight * sum(
                self.diversity(side) for side in sides if side is not None
            )
        return terms


def _base_loss(
    base: str | BaseMetricLossFunction,
    of_distance: Mapping[str, Any],
    distance: BaseDistance | None,
    options: Mapping[str, Any],
) -> BaseMetricLossFunction:
    changed = [name for name, value in of_distance.items() if value != DEFAULTS[name]]
    if not isinstance(base, str):
        others = [*changed, *options] + (["distance"] if distance is not None else [])
        if others:
            raise ValueError(
                f"{', '.join(others)} cannot be given beside a {type(base).__name__} as base, which has its own: give "
                "the name of a loss as base, or give them to that loss"
            )
        if not isinstance(base, BaseMetricLossFunction) or isinstance(base, SmoothChamferLoss):
            raise ValueError(
                f"base must be another loss of pytorch-metric-learning or a name, got {type(base).__name__}"
            )
        return base
    if not _is_name_of_base(base):
        raise ValueError("base must be another loss, got 'smooth_chamfer'")
    if distance is None:
        distance = create_component("distance", "SmoothChamferSimilarity", **of_distance)
    elif changed:
        raise ValueError(
            f"{', '.join(changed)} cannot be given beside a {type(distance).__name__} as distance: of "
            "SmoothChamferSimilarity, the default, they are options"
        )
    return create_loss(base, distance=distance, **options)


def _is_name_of_base(base: Any) -> bool:
    return isinstance(base, str) and base != "smooth_chamfer"
