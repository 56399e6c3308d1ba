"""Losses of positive pairs as pytorch-metric-learning losses."""

from typing import Any, ClassVar

import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import ClassWeightedReducer, MeanReducer, PerAnchorReducer
from torch import Tensor

from vl_plugins.functional.precision import full_precision, zero_or_nan
from vl_plugins.kernels import BACKENDS
from vl_plugins.losses.pair_batch import IndicesTuple, PairBatch
from vl_plugins.utils.checks import scale_of_call
from vl_plugins.utils.eager import eager
from vl_plugins.utils.errors import check_name

__all__ = ["PairBatch", "PairLoss", "distance_problem"]


class PairLoss(BaseMetricLossFunction):
    """A loss of positive pairs and their negatives; a subclass overrides :meth:`pair_losses`.

    - ``loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=text_labels)``: pairs of equal labels are
      positive, all others negative; image to text plus text to image.
    - ``loss(embeddings, labels)``: one set, where an item is not its own positive. Every item is an anchor, so each
      pair already occurs in both directions and none is added.
    - ``loss(embeddings, labels, indices_tuple)``, with or without ``ref_emb``: a miner's pairs or triplets instead of
      the labels' pairs, in the direction that it mined: its anchors are the queries.

    The reducer receives one value per positive pair, ``reduction_type="pos_pair"``. Everything is computed in float32
    at least, also under autocast. A batch without pairs gives 0, connected to all embeddings. NaN or infinity in any
    embedding gives NaN, whatever the reducer.

    Args:
        symmetric: add text to image where two sets are compared by labels; otherwise image to text only.
        backend: one of :data:`vl_plugins.kernels.BACKENDS`, where :meth:`kernel_problem` is None; chosen by size by
            default.
        kwargs: ``distance`` (default ``CosineSimilarity()``), ``reducer`` (default ``MeanReducer()``),
            ``embedding_regularizer`` (given ``ref_emb`` too if it has an attribute ``takes_ref_emb``),
            ``embedding_reg_weight`` and ``collect_stats`` of pytorch-metric-learning.
    """

    independent_pairs: ClassVar[bool] = False
    """Whether the loss of a pair depends on the similarities of its own row and column only; not inherited."""

    def __init__(self, symmetric: bool = True, backend: str | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.symmetric = symmetric
        self.backend = None if backend is None else check_name("backend", backend, BACKENDS)

    def pair_losses(self, batch: PairBatch) -> Tensor:
        """Return the loss of each positive pair, (M,), in the order of ``batch.pairs``."""
        raise NotImplementedError

    def triplet_losses(
        self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor
    ) -> Tensor | None:
        """Return the loss of each given triplet, (T,); None to take triplets for pairs.

        Args:
            similarities: (A, C), larger is closer.
            anchors, positives, negatives: (T,), indices of rows, columns and columns.
        """

    def kernel_problem(self) -> str | None:
        """Return why :meth:`pair_losses` needs all similarities; None if it uses :mod:`vl_plugins.kernels`."""
        return f"{type(self).__name__} needs all similarities"

    def adds_up_over_rows(self) -> bool:
        """Return whether the losses of some rows and of the others, weighted by their pairs, make that of all rows."""
        independent_pairs = vars(type(self)).get("independent_pairs", False)  # a subclass may have another formula
        return independent_pairs and type(self.reducer) is MeanReducer and self.embedding_regularizer is None

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
            ref_emb: (C, D); the embeddings themselves by default.
            ref_labels: (C,).
            scale: instead of the loss's own: a number, or a tensor of one element, which receives a gradient, such as
                ``model.logit_scale.exp()``.
            symmetric: instead of the loss's own.

        Raises:
            ValueError: labels missing, tensors that do not fit each other or the reducer, a ``scale`` for a loss that
                has none, or a ``backend`` that cannot compute this.
        """
        # torch.compile would unroll the kernels' loops.
        ref_emb = None if ref_emb is embeddings else ref_emb
        return eager()(self._forward, embeddings, labels, indices_tuple, ref_emb, ref_labels, scale, symmetric)

    def _forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: IndicesTuple | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        scale: float | Tensor | None,
        symmetric: bool | None,
    ) -> Tensor | dict[str, Any]:
        self.reset_stats()
        self._check_reducer(embeddings, labels, ref_emb)
        problem = self.kernel_problem()
        if problem is None and indices_tuple is not None:
            problem = "pairs are given as an indices_tuple"
        if problem is not None and self.backend is not None:
            raise ValueError(f"backend {self.backend!r} cannot be used, because {problem}: leave it out")
        if ref_emb is None:
            (embeddings,) = full_precision(embeddings)
        else:
            embeddings, ref_emb = full_precision(embeddings, ref_emb)
        with torch.autocast(embeddings.device.type, enabled=False):
            batch = PairBatch.make(
                embeddings,
                labels,
                indices_tuple,
                ref_emb,
                ref_labels,
                symmetric=self.symmetric if symmetric is None else symmetric,
                scale=self._scale(scale),
                distance=self.distance,
                use_kernel=problem is None,
            )
            losses, indices, reduction_type = None, batch.pairs, "pos_pair"
            if indices_tuple is not None and len(indices_tuple) == 3:
                losses = self.triplet_losses(batch.similarities(), *indices_tuple)
            if losses is None:
                losses = self.pair_losses(batch)
                if losses.shape != batch.pairs[0].shape:
                    raise ValueError(
                        f"{type(self).__name__}.pair_losses must return a value for each of the {len(batch.pairs[0])} "
                        f"positive pairs, got shape {tuple(losses.shape)}"
                    )
            else:
                indices, reduction_type = indices_tuple, "triplet"
            info = {"losses": losses, "indices": indices, "reduction_type": reduction_type, "divisor": len(losses)}
            loss_dict = {"loss": info if len(losses) > 0 else self.zero_loss()}
            embeddings = embeddings.to(losses.dtype)  # regularizers and reducers compute in the type of what they get
            if self.embedding_regularizer is not None:
                loss_dict["embedding_reg_loss"] = self._regularization(embeddings, ref_emb)
            loss = self.reducer(loss_dict, embeddings, batch.labels)
            return self._connected(loss, losses, batch)

    def _connected(self, loss: Tensor | dict[str, Any], losses: Tensor, batch: PairBatch) -> Tensor | dict[str, Any]:
        """Add 0 that connects what contributes nothing to the loss, or NaN that the reducer has dropped."""
        if not isinstance(loss, Tensor):  # DoNothingReducer returns the dict
            return loss
        if batch.use_kernel and len(losses) > 0:  # NaN for all pairs if any embedding is not finite
            return loss if type(self.reducer) is MeanReducer else loss + zero_or_nan(losses)
        return loss + sum(zero_or_nan(source.to(loss)) for source in (losses, batch.embeddings, batch.ref_emb))

    def _regularization(self, embeddings: Tensor, ref_emb: Tensor | None) -> dict[str, Any]:
        regularizer = self.embedding_regularizer
        options = {}
        if getattr(regularizer, "takes_ref_emb", False):
            options["ref_emb"] = None if ref_emb is None else ref_emb.to(embeddings.dtype)
        losses = regularizer(embeddings, **options) * self.embedding_reg_weight
        return {"losses": losses, "indices": None, "reduction_type": "already_reduced"}

    def _scale(self, scale: float | Tensor | None) -> float | Tensor:
        if scale is None:
            return getattr(self, "scale", 1.0)
        if not hasattr(self, "scale"):
            raise ValueError(f"{type(self).__name__} has no scale")
        return scale_of_call(scale)

    def _check_reducer(self, embeddings: Tensor, labels: Tensor | None, ref_emb: Tensor | None) -> None:
        for reducer in self.reducer.modules():
            if isinstance(reducer, PerAnchorReducer) and ref_emb is not None and len(ref_emb) > len(embeddings):
                raise ValueError(
                    f"PerAnchorReducer takes no more ref_emb than embeddings, {len(embeddings)}, got {len(ref_emb)}"
                )
            if isinstance(reducer, ClassWeightedReducer) and labels is None:
                raise ValueError("ClassWeightedReducer needs labels, got None")

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()


def distance_problem(distance: BaseDistance) -> str | None:
    """Return why :mod:`vl_plugins.kernels` cannot compute the similarities of a distance; None if they can."""
    # A subclass may compute something else.
    if type(distance) not in (CosineSimilarity, DotProductSimilarity):
        return f"{type(distance).__name__} is neither CosineSimilarity nor DotProductSimilarity"
    if distance.power != 1 or (distance.normalize_embeddings and distance.p != 2):
        return f"the distance has p={distance.p} and power={distance.power}, not 2 and 1"
    return "the distance collects statistics" if distance.collect_stats else None
