"""Objective of diverse embedding sets: any pair loss on smooth-Chamfer similarity, and two regularizers."""

import inspect
from collections.abc import Mapping
from typing import Any

from pytorch_metric_learning.distances import BaseDistance
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.utils.module_with_records import ModuleWithRecords
from torch import Tensor, nn

from vl_plugins.distances import SetDistance, SmoothChamferSimilarity
from vl_plugins.distributed import GathersAcrossDevices, Processes, all_rows, joined_call, processes_of
from vl_plugins.errors import UserError, number
from vl_plugins.numerics import eager, full_precision_call
from vl_plugins.registry import create, find, options_of, wrong_option
from vl_plugins.regularizers import JoinedSets

__all__ = ["SmoothChamferLoss"]

# Attributes that are those of the base.
OF_BASE = frozenset(
    [
        "check_numbers",
        "distance",
        "embedding_regularizer",
        "known_positives",
        "margin",
        "numbers",
        "reducer",
        "scale",
        "symmetric",
    ]
)


class SmoothChamferLoss(GathersAcrossDevices, BaseMetricLossFunction):
    """A pair loss, its base, on smooth-Chamfer similarity of sets, plus MMD and diversity: the objective of DivE.

    The value is that of ``base``, by default the triplet loss with the hardest negative, plus ``mmd_weight`` times the
    maximum mean discrepancy of the two modalities' elements, plus ``diversity_weight`` times the mean similarity of the
    elements of one set, of both modalities. An item is a set of K vectors, (B, K, D), or packed, (B, K * D) with
    ``set_size`` = K; a zero vector is padding. Embeddings (B, D) are sets of one, compared by cosine.

    When to use it: with a head that predicts sets, where captions fit several images. In small experiments, four
    vectors showed no clear gain over one from the same head, and a single vector with ``unified`` was as good.

    Called as any loss of this package, see :class:`~vl_plugins.losses.PairLoss`, and takes ``slots`` and
    ``ref_slots`` too: the elements before a set prediction head adds the global feature. Diversity is then computed
    from them instead of the embeddings. The regularization does not go through the reducer.

    Args:
        base: the name of a loss, or a mapping with its ``name`` and options, such as ``margin`` and ``reducer``; or a
            loss of pytorch-metric-learning, which keeps its own distance.
        alpha: inverse temperature of the smooth-Chamfer similarity, > 0. A base that has an ``alpha`` too, as ``goal``,
            gets its own in a mapping: ``base={"name": "goal", "alpha": 2.0}``.
        set_size: K of packed sets, >= 1.
        mmd_weight, diversity_weight: >= 0, of :class:`~vl_plugins.regularizers.MMDRegularizer` and of
            :class:`~vl_plugins.regularizers.DiversityRegularizer`.
        distance: instead of ``SmoothChamferSimilarity(alpha, set_size=set_size)``.
        gather_across_devices, global_labels: see :class:`~vl_plugins.losses.PairLoss`. Each process computes the loss
            of all rows.
        base_options: options of the loss that ``base`` names.

    Raises:
        UserError: an unknown name or option.
        ValueError: a hyper-parameter out of its range.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-9 and section 3.4.

    >>> import torch
    >>> images, texts, labels = torch.eye(3), torch.eye(3).roll(1, dims=0), torch.arange(3)
    >>> loss = SmoothChamferLoss("triplet_hn", margin=0.2, mmd_weight=0, diversity_weight=0)
    >>> loss(images, labels, ref_emb=texts, ref_labels=labels)
    tensor(2.4000)
    """

    equation = "Eq. 6-9 and section 3.4"
    paper = "Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings"

    def __init__(
        self,
        base: str | Mapping[str, Any] | BaseMetricLossFunction = "triplet_hn",
        alpha: float = 16.0,
        set_size: int = 1,
        mmd_weight: float = 0.01,
        diversity_weight: float = 0.01,
        distance: BaseDistance | None = None,
        gather_across_devices: Any = False,
        global_labels: bool = False,
        **base_options: Any,
    ):
        if isinstance(base, BaseMetricLossFunction):
            if base_options or distance is not None or (alpha, set_size) != (16.0, 1):
                raise ValueError(f"{type(base).__name__} as base has its own options and distance: give none here")
        else:
            if distance is not None and (alpha, set_size) != (16.0, 1):
                raise ValueError(f"{type(distance).__name__} as distance has its own alpha and set_size")
            distance = distance or SmoothChamferSimilarity(alpha, set_size=set_size)
            _check_base_options(base, base_options)
            base = create("loss", base, distance=distance, **base_options)
        # Not the base class's: distance, reducer and embedding regularizer are those of the base loss.
        ModuleWithRecords.__init__(self, base.collect_stats)
        self.base = base
        self.processes = Processes(gather_across_devices, global_labels)
        self.mmd_weight = number("mmd_weight", mmd_weight, least=0)
        self.diversity_weight = number("diversity_weight", diversity_weight, least=0)
        self.add_to_recordable_attributes(list_of_names=["mmd_weight", "diversity_weight"])

    def __getattr__(self, name: str) -> Any:
        if name == "from_similarities":
            raise AttributeError("SmoothChamferLoss needs embeddings: loss.base.from_similarities(...) takes a matrix")
        if name in OF_BASE:
            return getattr(self.base, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_BASE:
            raise AttributeError(f"{name} belongs to the base of SmoothChamferLoss: set that of loss.base")
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if type(self).get_extra_state is nn.Module.get_extra_state:
            state_dict.pop(prefix + "_extra_state", None)  # the step of a warm-up, until version 0.3
        super()._load_from_state_dict(state_dict, prefix, *args)

    @eager
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
                :meth:`~vl_plugins.losses.PairLoss.forward`.
            slots, ref_slots: (A, K, D) and (C, K, D).
        """
        processes = processes_of(self)
        if processes.size > 1 and indices_tuple is not None:
            raise ValueError(
                "indices_tuple would be of this process only: create the loss without gather_across_devices, and "
                "give DistributedLoss(loss) the miner"
            )
        call: dict[str, Any] = {"embeddings": embeddings, "ref_emb": ref_emb}
        call |= {"labels": labels, "ref_labels": ref_labels}
        call |= {"slots": slots, "ref_slots": ref_slots} | options
        # Here, so that gradients in half precision are rounded once, not for each term; with base losses of
        # pytorch-metric-learning too.
        with full_precision_call(embeddings=embeddings, ref_emb=ref_emb):
            # Losses of this package take positions, unless the positions are those of several processes.
            needs_labels = indices_tuple is None and (processes.size > 1 or not hasattr(self.base, "symmetric"))
            call = joined_call(self, processes, call, needs_labels)
            slots, ref_slots = call.pop("slots"), call.pop("ref_slots")
            with all_rows():
                loss = self.base(**call, indices_tuple=indices_tuple)
            terms = self.regularization(call["embeddings"], call["ref_emb"], slots, ref_slots)
        if isinstance(loss, dict):  # DoNothingReducer returns its input
            for name, term in terms.items():
                loss[name] = self.zero_loss() | {"losses": term}
            return loss
        return sum(terms.values(), start=loss)

    def regularization(
        self,
        embeddings: Tensor,
        ref_emb: Tensor | None = None,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the weighted terms ``"mmd_loss"``, of two modalities, and ``"diversity_loss"``; none of weight 0."""
        distance = self.distance if isinstance(self.distance, SetDistance) else SetDistance()
        sides = [embeddings]
        if ref_emb is not None and ref_emb is not embeddings:
            sides.append(ref_emb)
        sets = distance.unpack(*sides)
        terms, joined = {}, JoinedSets(*sets)
        if self.mmd_weight > 0 and len(sets) == 2:
            terms["mmd_loss"] = self.mmd_weight * joined.mmd(gamma=0.5)
        if self.diversity_weight > 0:
            if slots is not None or ref_slots is not None:
                joined = JoinedSets(*_slots_of_sets(sets, slots, ref_slots))
            terms["diversity_loss"] = self.diversity_weight * joined.diversity(scale=2.0)
        return terms


def _slots_of_sets(sets: list[Tensor], slots: Tensor | None, ref_slots: Tensor | None) -> list[Tensor]:
    """Return the slots of each side, from which its sets were made; the sets themselves where there are none."""
    if len(sets) == 1 and ref_slots is not None:
        raise ValueError("ref_slots need ref_emb")
    of_sides = []
    for name, of_side, sets_of_side in zip(("slots", "ref_slots"), (slots, ref_slots), sets, strict=False):
        if of_side is None:
            of_sides.append(sets_of_side)
            continue
        if of_side.ndim != 3 or len(of_side) != len(sets_of_side):
            raise ValueError(f"{name} must be ({len(sets_of_side)}, K, D), got {tuple(of_side.shape)}")
        of_sides.append(of_side)
    widths = {of_side.shape[2] for of_side in of_sides}
    if len(widths) > 1:
        raise ValueError(f"slots and ref_slots must have the same width, got {sorted(widths)}: give both, or neither")
    return of_sides


def _check_base_options(base: Any, options: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for an option that neither the loss of sets has nor its base."""
    name = base.get("name") if isinstance(base, Mapping) else base
    if not isinstance(name, str) and not inspect.isclass(name):
        return  # which is refused next
    factory = find("loss", name) if isinstance(name, str) else name
    all_known = [*options_of(SmoothChamferLoss), *options_of(factory)]
    if reason := wrong_option(factory, options, all_known):
        raise UserError(f"loss 'smooth_chamfer', base {name!r}: {reason}")
