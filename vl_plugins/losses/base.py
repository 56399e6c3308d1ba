"""A loss of positive pairs and their negatives as a pytorch-metric-learning loss."""

from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from vl_plugins.errors import number
from vl_plugins.negatives import MATRIX_BYTES, label_pairs, maximum, of_matrix, soft_maximum, unit_vectors
from vl_plugins.numerics import full_precision

__all__ = ["PairLoss", "Pairs"]

IndicesTuple = tuple[Tensor, ...]


class Pairs(NamedTuple):
    """The M positive pairs of a call, with rows and columns (M,) of the similarities, and the inverse temperature."""

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]
    scale: float | Tensor = 1.0

    def values(self, name: str, of: float | Tensor) -> float | Tensor:
        """Return those of the pairs: a number, or (M,) from a tensor (A,) of the rows or (A, C)."""
        if not isinstance(of, Tensor) or of.ndim == 0:
            return of
        if of.shape != self.shape[: of.ndim]:
            raise ValueError(f"{name} must have the shape {self.shape[: of.ndim]}, got {tuple(of.shape)}")
        return of[(self.rows, self.columns)[: of.ndim]]


class PairLoss(BaseMetricLossFunction):
    """A loss of each positive pair, given its similarity and that of its anchor's negatives.

    A subclass says by :attr:`negatives` what it needs to know of the negatives, and gives a formula::

        class SquaredHinge(PairLoss):
            negatives = "logsumexp"

            def __init__(self, margin=0.2, scale=50.0, **kwargs):
                super().__init__(**kwargs)
                self.margin, self.scale = margin, scale

            def pair_loss(self, positive, negative, pairs):
                return (self.margin + negative - positive).relu() ** 2

    The rest follows: several positives, one set or two, labels or a miner's choice, any distance and reducer, large
    batches in tiles, several processes. A loss that needs more defines :meth:`matrix_losses`. It is called as

    - ``loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=text_labels)``: pairs of equal labels are
      positive, all others negative; image to text plus text to image.
    - ``loss(embeddings, labels)``: one set, where an item is not its own positive. Every item is an anchor, so each
      pair already occurs in both directions and none is added.
    - ``loss(embeddings, labels, indices_tuple)``, with or without ``ref_emb``: a miner's pairs or triplets instead of
      the labels' pairs, in the direction that it mined. Each triplet counts on its own if :attr:`takes_triplets`.
    - ``loss.from_similarities(similarities, positive_mask, negative_mask)``, of a model that compares pairs itself.

    The reducer receives one value per positive pair (``"pos_pair"``) or triplet. Everything is computed in float32 at
    least, also under autocast. Nothing to compare gives 0. No reducer hides NaN or infinity in the embeddings.

    Args:
        symmetric: add text to image where two sets are compared by labels; otherwise image to text only.
        tiled: compute similarities in tiles, twice, instead of keeping one matrix. By default beyond 1 GiB of them.
        kwargs: ``distance`` (default ``CosineSimilarity()``), ``reducer`` (default ``MeanReducer()``),
            ``embedding_regularizer`` (given ``ref_emb`` too if it has an attribute ``takes_ref_emb``),
            ``embedding_reg_weight`` and ``collect_stats`` of pytorch-metric-learning.
    """

    negatives: str = "max"
    """Which negatives :meth:`pair_loss` receives for each pair:

    - ``"max"``: the hardest one of the anchor.
    - ``"logsumexp"``: the soft maximum ``log(sum(exp(scale * s))) / scale``, with the attribute ``scale`` of the loss.
    - ``"all"``: every one; the losses are added up, with memory for M x C numbers.
    - ``"matrix"``: none; :meth:`matrix_losses` computes the loss from all similarities.
    """

    def __init__(self, symmetric: bool = True, tiled: bool | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.symmetric = symmetric
        self.tiled = tiled

    def pair_loss(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        """Return the loss of each pair, (..., M).

        Args:
            positive: (M,), similarities of the pairs.
            negative: (..., M), similarities of the negatives: of both directions, or of every negative.
            pairs: where the pairs are, and the scale of the call.
        """
        raise NotImplementedError

    def matrix_losses(
        self, similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor, pairs: Pairs
    ) -> Tensor:
        """Return the losses of M positive pairs with the rows of a matrix as anchors, (M,).

        Args:
            similarities: (A, C), larger is closer; the transposed matrix for the other direction.
            negative_mask: (A, C), bool.
            anchors, positives: (M,), rows and columns.
            pairs: the same in the direction of the call.
        """
        raise NotImplementedError

    @property
    def takes_triplets(self) -> bool:
        """Whether each given triplet counts on its own; otherwise triplets are taken for pairs."""
        return self.negatives in ("max", "all")

    def triplet_losses(
        self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor, scale: float | Tensor
    ) -> Tensor:
        """Return the losses of T given triplets of a row and two columns, (T,)."""
        pairs = Pairs(anchors, positives, similarities.shape, scale)
        return self.pair_loss(similarities[anchors, positives], similarities[anchors, negatives], pairs)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        scale: float | Tensor | None = None,
        symmetric: bool | None = None,
    ) -> Tensor | dict[str, Any]:
        """Return the reduced loss.

        Args:
            embeddings, ref_emb: (A, D) and (C, D), or what the distance compares.
            labels, ref_labels: (A,) and (C,); may be left out with an ``indices_tuple``.
            indices_tuple: (anchors, positives, negatives) or (anchors, positives, anchors, negatives), index tensors.
            scale: instead of the loss's own: a number, or a tensor of one element, which receives a gradient, such as
                ``model.logit_scale.exp()``.
            symmetric: instead of the loss's own.

        Raises:
            ValueError: labels missing or too many or few, a ``scale`` for a loss that has none, or ``tiled=True`` where
                all similarities are needed.
        """
        self.reset_stats()
        one_set = ref_emb is None or ref_emb is embeddings
        if one_set and ref_labels is not None and not torch.equal(labels, ref_labels):
            raise ValueError("ref_emb is embeddings, so ref_labels must be labels")
        ref_emb, ref_labels = (embeddings, labels) if one_set else (ref_emb, ref_labels)
        if indices_tuple is not None and len(indices_tuple) not in (3, 4):
            raise ValueError(f"indices_tuple must have 3 tensors (triplets) or 4 (pairs), got {len(indices_tuple)}")
        for name, side_labels, side in (("labels", labels, embeddings), ("ref_labels", ref_labels, ref_emb)):
            if side_labels is not None or indices_tuple is None:
                _check_labels(name, side_labels, len(side))
        both = (self.symmetric if symmetric is None else symmetric) and not one_set and indices_tuple is None
        scale = self._scale(scale)
        with torch.autocast(embeddings.device.type, enabled=False):
            x, y = full_precision(embeddings, ref_emb)
            if indices_tuple is None:
                labels, ref_labels = labels.to(x.device), ref_labels.to(x.device)
                info = self._losses_of_labels(x, labels, y, ref_labels, scale, one_set, both)
            else:
                info = self._losses_of_indices(x, y, indices_tuple, scale)
            loss_dict = {"loss": info}
            if self.embedding_regularizer is not None:
                references = (
                    (None if one_set else y,) if getattr(self.embedding_regularizer, "takes_ref_emb", 0) else ()
                )
                term = self.embedding_regularizer(x, *references) * self.embedding_reg_weight
                loss_dict["embedding_reg_loss"] = self.zero_loss() | {"losses": term}
            return self._reduce(loss_dict, x, labels, (y, scale))

    def from_similarities(
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        scale: float | Tensor | None = None,
    ) -> Tensor | dict[str, Any]:
        """Return the reduced loss of a matrix.

        Args:
            similarities: (A, C), anchors x candidates, larger is closer.
            positive_mask, negative_mask: (A, C), bool.
            scale: see :meth:`forward`.
        """
        (similarities,), scale = full_precision(similarities), self._scale(scale)
        pairs = Pairs(*positive_mask.nonzero().T, similarities.shape, scale)
        losses = self._losses_of_matrix(similarities, negative_mask, pairs, self.symmetric)
        return self._reduce({"loss": _info(losses, pairs[:2])}, similarities, None, (scale,))

    def _losses_of_labels(self, x, labels, y, ref_labels, scale, one_set: bool, both: bool) -> dict[str, Any]:
        rows, columns = label_pairs(labels, ref_labels)
        problem = self._tiling_problem()
        if problem is None and len(rows):
            if self.distance.normalize_embeddings:
                x, y = unit_vectors(x), unit_vectors(y)
            if self.negatives == "max":
                positive, *sides = maximum(x, y, rows, columns)
            else:
                tiled = len(x) * len(y) * x.element_size() > MATRIX_BYTES if self.tiled is None else self.tiled
                positive, *sides = soft_maximum(x, y, rows, columns, scale, tiled=tiled)
            if one_set:
                (different,) = (rows != columns).nonzero().T
                rows, columns, positive = rows[different], columns[different], positive[different]
            negative = torch.stack([sides[0][rows], sides[1][columns]] if both else [sides[0][rows]])  # (1 or 2, M)
            pairs = Pairs(rows, columns, (len(x), len(y)), scale)
            losses = self._guarded(positive, negative, pairs).sum(dim=0)
            return _info(losses, (rows, columns))
        if self.tiled and problem:
            raise ValueError(f"tiled=True cannot be used, because {problem}")
        if one_set:
            rows, columns = rows[rows != columns], columns[rows != columns]
        pairs = Pairs(rows, columns, (len(x), len(y)), scale)
        losses = self._losses_of_matrix(self._similarities(x, y), labels[:, None] != ref_labels, pairs, both)
        return _info(losses, (rows, columns))

    def _losses_of_indices(self, x, y, indices_tuple, scale) -> dict[str, Any]:
        if self.tiled:
            raise ValueError("tiled=True cannot be used, because pairs are given as an indices_tuple")
        similarities, (anchors, positives, *negatives) = self._similarities(x, y), indices_tuple
        if len(negatives) == 1 and self.takes_triplets and len(anchors):
            return _info(self.triplet_losses(similarities, *indices_tuple, scale), indices_tuple)
        pairs = Pairs(*_mask(similarities, anchors, positives).nonzero().T, similarities.shape, scale)
        negative_mask = _mask(similarities, negatives[0] if len(negatives) == 2 else anchors, negatives[-1])
        return _info(self._losses_of_matrix(similarities, negative_mask, pairs, both=False), pairs[:2])

    def _losses_of_matrix(self, similarities: Tensor, negative_mask: Tensor, pairs: Pairs, both: bool) -> Tensor:
        if len(pairs.rows) == 0:  # torch has no maximum of nothing
            return similarities.new_zeros(0)
        losses = self._of_anchors(similarities, negative_mask, pairs.rows, pairs.columns, pairs)
        if both:
            losses = losses + self._of_anchors(similarities.T, negative_mask.T, pairs.columns, pairs.rows, pairs)
        return losses

    def _of_anchors(self, similarities, negative_mask, anchors, positives, pairs) -> Tensor:
        if self.negatives == "matrix":
            return self.matrix_losses(similarities, negative_mask, anchors, positives, pairs)
        positive = similarities[anchors, positives]
        if self.negatives == "all":
            losses = self.pair_loss(positive, similarities[anchors].T, pairs)  # (C, M)
            return losses.masked_fill(~negative_mask[anchors].T, 0).sum(dim=0)
        scale = pairs.scale if self.negatives == "logsumexp" else None
        return self._guarded(positive, of_matrix(similarities, negative_mask, scale)[anchors], pairs)

    def _guarded(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        """Return the losses of the pairs, 0 for anchors without negatives."""
        exists = negative != -torch.inf
        # Not masked: 0 times NaN is NaN.
        return self.pair_loss(positive, torch.where(exists, negative, 0), pairs) * exists

    def _similarities(self, x: Tensor, y: Tensor) -> Tensor:
        distances = self.distance(x, y)
        return distances if self.distance.is_inverted else -distances

    def _reduce(self, loss_dict: dict[str, Any], x: Tensor, labels: Tensor | None, others: tuple) -> Any:
        losses = loss_dict["loss"]["losses"]
        if len(losses) == 0:
            loss_dict["loss"] = self.zero_loss()
        loss = self.reducer(loss_dict, x, labels)
        if not isinstance(loss, Tensor) or (type(self.reducer) is MeanReducer and len(losses)):
            return loss  # DoNothingReducer returns the dict
        # Other reducers may drop NaN; without pairs everything still belongs to the graph.
        sources = (losses,) if len(losses) else (x, *(other for other in others if isinstance(other, Tensor)))
        return loss + 0 * sum(source.sum() for source in sources)

    @property
    def has_independent_pairs(self) -> bool:
        """True if the loss of a batch is the mean of its pairs', and each pair depends on its row and column alone."""
        return self.negatives != "matrix" and type(self.reducer) is MeanReducer and self.embedding_regularizer is None

    def _scale(self, scale: float | Tensor | None) -> float | Tensor:
        if scale is None:
            return getattr(self, "scale", 1.0)
        if not hasattr(self, "scale"):
            raise ValueError(f"{type(self).__name__} has no scale")
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ValueError(f"scale must have one element, got shape {tuple(scale.shape)}")
        return scale.reshape(()) if isinstance(scale, Tensor) else number("scale", scale, above=0)

    def _tiling_problem(self) -> str | None:
        """Return why the loss needs the matrix of all similarities; None if it does not."""
        if self.negatives not in ("max", "logsumexp"):
            return f"{type(self).__name__} needs all similarities"
        distance = self.distance
        is_plain = type(distance) in (CosineSimilarity, DotProductSimilarity) and not distance.collect_stats
        if not (is_plain and distance.p == 2 and distance.power == 1):
            return f"{distance} is not a plain CosineSimilarity or DotProductSimilarity"
        return None

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()


def _check_labels(name: str, labels: Any, size: int) -> None:
    given = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
    if not isinstance(labels, Tensor) or labels.shape != (size,):
        raise ValueError(f"{name} must be a tensor of shape {(size,)}, got {given}")


def _info(losses: Tensor, indices: tuple[Tensor, ...]) -> dict[str, Any]:
    kind = "pos_pair" if len(indices) == 2 else "triplet"
    return {"losses": losses, "indices": indices, "reduction_type": kind, "divisor": len(losses)}


def _mask(similarities: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    mask = torch.zeros_like(similarities, dtype=torch.bool)
    mask[rows, columns] = True
    return mask
