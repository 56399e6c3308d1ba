"""Losses of positive pairs and of triplets as pytorch-metric-learning losses."""

import inspect
from collections.abc import Mapping
from typing import ClassVar

import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import BaseReducer, ClassWeightedReducer, MeanReducer, PerAnchorReducer
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor

from vl_plugins.functional import triplet_margin
from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.kernels import BACKENDS, choose_backend
from vl_plugins.kernels.pairs import RememberedPairs, pairs_of_others
from vl_plugins.utils.checks import non_negative, scale_of_call, tensor_or_none
from vl_plugins.utils.eager import eager
from vl_plugins.utils.errors import check_name

__all__ = ["PairLoss", "TripletLoss"]

IndicesTuple = tuple[Tensor, ...]


class PairLoss(BaseMetricLossFunction):
    """A function of similarities, positive pairs and negative pairs, as a pytorch-metric-learning loss.

    Called as ``loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None, scale=None)``:

    - ``loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=text_labels)``: pairs of equal labels are
      positive, all others negative; image to text plus text to image.
    - ``loss(embeddings, labels)``: one set, where an item is not its own positive. Every item is an anchor, so each
      pair already occurs in both directions and none is added.
    - ``loss(embeddings, labels, indices_tuple)``, with or without ``ref_emb``: a miner's pairs or triplets instead of
      the labels' pairs, in the direction that it mined: its anchors are the queries.

    An ``embedding_regularizer`` is of ``embeddings`` alone, and of ``ref_emb`` too where its ``forward`` takes that.

    The reducer receives one value per positive pair, ``reduction_type="pos_pair"``. Everything is computed in float32
    at least, also under autocast; gradients have the type of the embeddings. A batch without pairs gives 0, connected
    to all embeddings. NaN or infinity in any embedding gives NaN, whatever the reducer.

    Pairs of labels are compared by cosine or dot product without several matrices of all similarities, in the way that
    fits the device and the memory, see :data:`vl_plugins.kernels.BACKENDS`. Where that cannot be (another distance, a
    miner's pairs, weights that are functions) the formulas are computed on all similarities.

    Args:
        symmetric: add text to image where two sets are compared by labels; otherwise image to text only.
        backend: one of :data:`vl_plugins.kernels.BACKENDS`; a call that it cannot serve is an error. Chosen for each
            call if left out.
        kwargs: ``distance`` (default ``CosineSimilarity()``), ``reducer`` (default ``MeanReducer()``),
            ``embedding_regularizer``, ``embedding_reg_weight`` and ``collect_stats`` of pytorch-metric-learning.
    """

    equation: str
    paper: str

    kernels_of_formulas: ClassVar[Mapping[str, str]] = {
        "pair_losses": "embedding_losses",
        "similarities": "embedding_losses",
    }
    """Names of methods: which one computes the same from embeddings as another does from all similarities."""

    def __init__(self, symmetric: bool = True, backend: str | None = None, **kwargs):
        super().__init__(**kwargs)
        self.symmetric = symmetric
        self.backend = None if backend is None else check_name("backend", backend, BACKENDS)
        self._ref_emb: Tensor | None = None  # during a call
        self._given: tuple[Tensor, Tensor] | None = None  # likewise, in their own types
        self._zero: Tensor | None = None  # likewise, or NaN
        self._pairs = RememberedPairs()

    independent_pairs: ClassVar[bool] = False
    """Whether the loss of a pair is one of its own row and column only; each class says so for itself."""

    def pair_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, *, symmetric: bool
    ) -> Tensor:
        """Return the loss of each positive pair, in the order of ``torch.where(positive_mask)``.

        A loss with an attribute ``scale`` also takes an argument of that name, where a call gives one.

        Args:
            similarities: (A, C), larger is closer.
            positive_mask: (A, C), bool.
            negative_mask: (A, C), bool.
            symmetric: rows and columns are anchors; otherwise rows only.
        """
        raise NotImplementedError

    def embedding_losses(self, x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor, **options) -> Tensor:
        """Return the loss of each pair of equal labels as :meth:`pair_losses` does, by :mod:`vl_plugins.kernels`.

        Args:
            x: (A, D).
            y: (C, D).
            x_labels: (A,).
            y_labels: (C,).
            options: ``normalize``, ``same_set``, ``symmetric``, ``pairs`` and ``backend`` of these functions, and
                ``scale`` where there is one.
        """
        raise NotImplementedError

    def kernel_problem(self) -> str | None:
        """Say why the loss as it is set up can only be computed on all similarities; None if it need not."""
        for formula, kernel in self.kernels_of_formulas.items():
            # A subclass with a formula of its own is not what the kernel of its base computes.
            if _place(type(self), formula) < _place(type(self), kernel):
                return f"{type(self).__name__} needs all similarities"
        # Not of a subclass, which may compute something else.
        if type(self.distance) not in (CosineSimilarity, DotProductSimilarity):
            return f"{type(self.distance).__name__} is neither CosineSimilarity nor DotProductSimilarity"
        if self.distance.power != 1 or (self.distance.normalize_embeddings and self.distance.p != 2):
            return f"the distance has p={self.distance.p} and power={self.distance.power}, not 2 and 1"
        if self.distance.collect_stats:
            return "the distance collects statistics"
        return None

    def adds_up_over_rows(self) -> bool:
        """Return whether the losses of some rows and of the others, weighted by their pairs, make that of all rows."""
        declared = "independent_pairs" in vars(type(self))  # a subclass may have another formula
        return (
            declared
            and self.independent_pairs
            and type(self.reducer) is MeanReducer
            and self.embedding_regularizer is None
        )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        scale: float | Tensor | None = None,
        symmetric: bool | None = None,
    ) -> Tensor:
        """Return the reduced loss.

        Args:
            embeddings: (A, D).
            labels: (A,); may be left out with an ``indices_tuple``.
            indices_tuple: (anchors, positives, negatives) or (anchors, positives, anchors, negatives), index tensors.
            ref_emb: (C, D); the embeddings themselves if left out.
            ref_labels: (C,).
            scale: in place of the loss's own: a number, or a tensor of one element, which receives a gradient, such as
                ``model.logit_scale.exp()``.
            symmetric: in place of the loss's own.

        Raises:
            ValueError: labels missing, tensors that do not fit each other or the reducer, a ``scale`` of a loss that
                has none, or a ``backend`` that cannot compute this.
        """
        if ref_emb is embeddings:
            ref_emb = None
        check_embeddings(embeddings, labels, indices_tuple, ref_emb, ref_labels, self.distance)
        check_reducer(self.reducer, embeddings, labels, ref_emb)
        options = {"symmetric": self.symmetric if symmetric is None else symmetric}
        if scale is not None:
            if not hasattr(self, "scale"):
                raise ValueError(f"{type(self).__name__} has no scale")
            options["scale"] = scale_of_call(scale)
        self._given = embeddings, embeddings if ref_emb is None else ref_emb
        embeddings, ref_emb = full_precision(embeddings, ref_emb)
        self._ref_emb = ref_emb
        try:
            loss = self._without_autocast(embeddings, labels, indices_tuple, ref_emb, ref_labels, options)
        finally:
            zero, self._zero = self._zero, None
            self._ref_emb = self._given = None
        if isinstance(loss, Tensor):  # DoNothingReducer returns a dict
            # Only here, because a reducer may drop what it was given: no NaN is above AvgNonZeroReducer's threshold.
            if zero is None:
                zero = sum(zero_or_nan(tensor) for tensor in (embeddings, ref_emb) if tensor is not None)
            loss = loss + zero
            if isinstance(scale, Tensor):  # without pairs it would have no gradient
                loss = loss + zero_or_nan(scale).to(loss)
        return loss

    def _without_autocast(self, embeddings, labels, indices_tuple, ref_emb, ref_labels, options):
        # A method of its own, because torch.compile of torch 2.2 does not compile a `with` in a `try`.
        with torch.autocast(embeddings.device.type, enabled=False):
            # What pytorch-metric-learning's forward does, which has no options.
            self.reset_stats()
            labels = None if labels is None else common_functions.to_device(labels, embeddings)
            ref_emb, ref_labels = common_functions.set_ref_emb(embeddings, labels, ref_emb, ref_labels)
            losses = self.compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels, **options)
            self.add_embedding_regularization_to_loss_dict(losses, embeddings)
            return self.reducer(losses, embeddings, labels)

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels, *, symmetric, **options):
        one_set = ref_emb is embeddings
        backend = self._backend_for(embeddings, indices_tuple, ref_emb)
        if backend != "functional":
            losses, pairs = eager()(
                self._compare, embeddings, labels, ref_emb, ref_labels, one_set, backend, symmetric, options
            )
            # All of them are NaN if any embedding is.
            sources = (losses,) if len(losses) > 0 else (losses, embeddings, ref_emb)
            self._zero = sum(zero_or_nan(tensor) for tensor in sources)
            return self.loss_dict(losses, pairs, "pos_pair")
        similarities = self.similarities(embeddings, ref_emb)
        if indices_tuple is None:
            # PML's own pairs leave the diagonal out whenever labels and ref_labels are the same object.
            positive_mask = labels[:, None] == ref_labels[None, :]
            negative_mask = ~positive_mask
            if one_set:
                positive_mask.fill_diagonal_(False)
        else:
            anchors, positives, negative_anchors, negatives = loss_and_miner_utils.convert_to_pairs(
                indices_tuple, labels
            )
            positive_mask = _mask(similarities, anchors, positives)
            negative_mask = _mask(similarities, negative_anchors, negatives)
        symmetric = symmetric and indices_tuple is None and not one_set
        losses = self.pair_losses(similarities, positive_mask, negative_mask, symmetric=symmetric, **options)
        return self.loss_dict(losses, torch.where(positive_mask), "pos_pair")

    def _backend_for(self, embeddings: Tensor, indices_tuple: IndicesTuple | None, ref_emb: Tensor) -> str:
        problem = self.kernel_problem()
        if problem is None and indices_tuple is not None:
            problem = "pairs are given as an indices_tuple"
        if problem is None:
            return eager()(choose_backend, self.backend, embeddings, ref_emb, name=type(self).__name__)
        if self.backend not in (None, "functional"):
            raise ValueError(f"backend {self.backend!r} cannot be used, because {problem}: leave it out")
        return "functional"

    def _compare(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor,
        ref_labels: Tensor,
        one_set: bool,
        backend: str,
        symmetric: bool,
        options: Mapping[str, float | Tensor],
    ) -> tuple[Tensor, IndicesTuple]:
        x, y = embeddings, ref_emb
        if backend == "triton" and self._given[0].dtype == self._given[1].dtype:
            # Half precision as it is: products are exact in float32, and on a GPU several times as fast.
            x, y = self._given
        pairs = self._pairs(labels, ref_labels)
        losses = self.embedding_losses(
            x,
            y,
            labels,
            ref_labels,
            normalize=self.distance.normalize_embeddings,
            same_set=one_set,
            symmetric=symmetric and not one_set,
            pairs=pairs,
            backend=backend,
            **options,
        )
        return losses, pairs_of_others(*pairs) if one_set else pairs

    def embedding_regularization_loss(self, embeddings: Tensor) -> dict:
        """Return the weighted term of the regularizer as PML does, which would leave the references out."""
        if "ref_emb" not in inspect.signature(self.embedding_regularizer.forward).parameters:
            return super().embedding_regularization_loss(embeddings)
        loss = self.embedding_regularizer(embeddings, ref_emb=self._ref_emb) * self.embedding_reg_weight
        return {"losses": loss, "indices": None, "reduction_type": "already_reduced"}

    def similarities(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        """Return (A, C) similarities, larger is closer, by the loss's distance."""
        distances = self.distance(embeddings, ref_emb)
        return distances if self.distance.is_inverted else -distances

    def loss_dict(self, losses: Tensor, indices: IndicesTuple, reduction_type: str) -> dict[str, dict]:
        """Return what a PML reducer takes. ``DivisorReducer`` divides the sum by the number of values."""
        if len(losses) == 0:
            return self.zero_losses()
        return {
            "loss": {
                "losses": losses,
                "indices": indices,
                "reduction_type": reduction_type,
                "divisor": len(losses),
            }
        }

    def get_default_distance(self):
        return CosineSimilarity()


class TripletLoss(PairLoss):
    """A triplet loss: given triplets are used as they are, by default ``relu(margin + S_an - S_ap)`` each.

    The reducer then receives one value per triplet, ``reduction_type="triplet"``.

    Args:
        margin: by how much the positive should be closer than the negative, >= 0, in units of the similarity.
        kwargs: see :class:`PairLoss`.
    """

    def __init__(self, margin: float = 0.2, **kwargs):
        super().__init__(**kwargs)
        self.margin = non_negative("margin", margin)
        self.add_to_recordable_attributes(name="margin")

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels, **options):
        if indices_tuple is None or len(indices_tuple) != 3:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels, **options)
        losses = self.triplet_losses(self.similarities(embeddings, ref_emb), *indices_tuple)
        return self.loss_dict(losses, indices_tuple, "triplet")

    def triplet_losses(self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Return the loss of each triplet, (T,).

        Args:
            similarities: (A, C), larger is closer.
            anchors: (T,), indices of rows.
            positives: (T,), indices of columns.
            negatives: (T,), indices of columns.
        """
        return triplet_margin(similarities[anchors, positives], similarities[anchors, negatives], self.margin)


def check_embeddings(
    embeddings: Tensor,
    labels: Tensor | None,
    indices_tuple: IndicesTuple | None,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    distance: BaseDistance,
) -> None:
    """Raise ``ValueError`` for a call that PML would answer with a wrong value or an obscure error."""
    common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
    check_labels("labels", labels, embeddings)
    if indices_tuple is not None and len(indices_tuple) not in (3, 4):
        raise ValueError(f"indices_tuple must have 3 tensors (triplets) or 4 (pairs), got {len(indices_tuple)}")
    if ref_emb is None:
        return
    # A distance of sets looks itself: packed sets of unequal size are of unequal width.
    if not hasattr(distance, "unpack") and ref_emb.shape[-1] != embeddings.shape[-1]:
        raise ValueError(
            f"ref_emb must have the dimension of embeddings, {tuple(embeddings.shape)}, got {tuple(ref_emb.shape)}"
        )
    if ref_emb.device != embeddings.device:
        raise ValueError(f"ref_emb must be on the device of embeddings, {embeddings.device}, got {ref_emb.device}")
    if indices_tuple is None and ref_labels is None:
        raise ValueError("ref_labels cannot be None when ref_emb is given without an indices_tuple")
    check_labels("ref_labels", ref_labels, ref_emb)


def check_labels(name: str, labels: Tensor | None, embeddings: Tensor) -> None:
    """Raise ``ValueError`` unless there is one label for each embedding."""
    tensor_or_none(name, labels)
    if labels is not None and labels.shape != embeddings.shape[:1]:
        raise ValueError(f"{name} must have the shape {tuple(embeddings.shape[:1])}, got {tuple(labels.shape)}")


def check_reducer(
    reducer: BaseReducer,
    embeddings: Tensor,
    labels: Tensor | None,
    ref_emb: Tensor | None,
) -> None:
    """Raise ``ValueError`` for a call whose losses the reducer could not look up."""
    for module in reducer.modules():
        if isinstance(module, PerAnchorReducer) and ref_emb is not None and len(ref_emb) > len(embeddings):
            raise ValueError(
                f"PerAnchorReducer takes no more ref_emb than embeddings, {len(embeddings)}, got {len(ref_emb)}"
            )
        if isinstance(module, ClassWeightedReducer) and labels is None:
            raise ValueError("ClassWeightedReducer needs labels, got None")


def _place(owner: type, method: str) -> int:
    """Return how far up in the bases of a class a method is defined."""
    return next(place for place, base in enumerate(owner.__mro__) if method in vars(base))


def _mask(similarities: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    mask = torch.zeros_like(similarities, dtype=torch.bool)
    mask[rows, columns] = True
    return mask
