"""A loss of positive pairs and their negatives as a pytorch-metric-learning loss."""

from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from vl_plugins.distances import check_widths
from vl_plugins.errors import number
from vl_plugins.negatives import MATRIX_BYTES, cosines, label_pairs, matrix_maximum, maximum, soft_maximum
from vl_plugins.numerics import as_labels, check_tensors, eager, fill_at, full_precision
from vl_plugins.registry import losses_with_scale, options_of, scale_advice

__all__ = ["PairLoss", "Pairs"]

IndicesTuple = tuple[Tensor, ...]


class Pairs(NamedTuple):
    """The M positive pairs of a call: rows and columns (M,) of the similarities, their shape, and the scale."""

    rows: Tensor
    columns: Tensor
    shape: torch.Size
    scale: float | Tensor = 1.0


class PairLoss(BaseMetricLossFunction):
    """A loss of each positive pair, given its similarity and that of its anchor's negatives.

    A subclass says by :attr:`negatives` what it must know of the negatives, and gives a formula::

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
    least, also under autocast. Nothing to compare gives 0. NaN or infinity in any embedding gives NaN, whatever the
    reducer. Gradients of embeddings that are compared in blocks, those of ``"max"`` and ``"logsumexp"`` by labels and
    cosine or dot product, have no second derivatives; all others have.

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

    _has_checked_scale = False  # a tensor on a device, in an earlier call

    def __init__(self, symmetric: bool = True, tiled: bool | None = None, **kwargs: Any):
        for option in {"scale", "temperature"} & kwargs.keys():
            if advice := scale_advice(option, kwargs[option], options_of(type(self))):
                raise TypeError(f"{type(self).__name__}: {advice}")
        super().__init__(**kwargs)
        self.symmetric = symmetric
        self.tiled = tiled

    def pair_loss(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        """Return the loss of each pair, (..., M), elementwise: a loss that compares pairs is a ``"matrix"`` loss.

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
        """True if each given triplet counts on its own; otherwise triplets are taken for pairs."""
        return self.negatives in ("max", "all")

    def triplet_losses(
        self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor, scale: float | Tensor
    ) -> Tensor:
        """Return the losses of T given triplets of a row and two columns, (T,)."""
        pairs = Pairs(anchors, positives, similarities.shape, scale)
        return self.pair_loss(similarities[anchors, positives], similarities[anchors, negatives], pairs)

    @property
    def has_independent_pairs(self) -> bool:
        """True if the loss of a batch is the mean of its pairs' losses, each of its row and column alone."""
        return self.negatives != "matrix" and type(self.reducer) is MeanReducer and self.embedding_regularizer is None

    @eager
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        scale: float | Tensor | None = None,
        symmetric: bool | None = None,
    ) -> Any:
        """Return the reduced loss.

        Args:
            embeddings, ref_emb: (A, D) and (C, D), or what the distance compares.
            labels, ref_labels: (A,) and (C,), integers: tensors, numpy arrays or lists. They may be left out with an
                ``indices_tuple``.
            indices_tuple: (anchors, positives, negatives) or (anchors, positives, anchors, negatives), index tensors.
            scale: instead of the loss's own, > 0: a number, or a tensor of one element, which receives a gradient, such
                as ``model.logit_scale.exp()``. Reading a tensor of a GPU would wait for the GPU in each call, so only
                the first call does; a later scale that is not > 0 gives NaN.
            symmetric: instead of the loss's own; True adds text to image to the pairs of an ``indices_tuple`` too.

        Raises:
            ValueError: embeddings of unequal widths; labels that are missing, NaN, of another type or length; a
                ``scale`` that is not > 0, or for a loss that has none; or ``tiled=True`` where all similarities are
                needed.
        """
        one_set = ref_emb is None or ref_emb is embeddings
        ref_emb = embeddings if ref_emb is None else ref_emb
        by_labels = indices_tuple is None
        check_tensors(embeddings=embeddings, ref_emb=ref_emb)
        check_widths(self.distance, embeddings, ref_emb)
        labels, ref_labels = _checked_labels(embeddings, labels, ref_emb, ref_labels, by_labels)
        in_blocks = by_labels and self.negatives in ("max", "logsumexp") and self._is_plain()
        if self.tiled and not in_blocks:
            raise ValueError(
                "tiled=True needs labels, a plain CosineSimilarity or DotProductSimilarity, and a loss of the (soft) "
                f"maximum of the negatives; got {self.distance} and negatives {self.negatives!r}"
            )
        if symmetric is None:
            symmetric = self.symmetric and by_labels
        both = symmetric and not one_set
        scale = self._scale(scale)
        with torch.autocast(embeddings.device.type, enabled=False):
            x, y = full_precision(embeddings, ref_emb)
            if in_blocks:
                info = self._losses_in_blocks(x, y, labels, ref_labels, scale, one_set, both)
            elif indices_tuple is None:
                same = labels[:, None] == ref_labels
                positive_mask = same.clone().fill_diagonal_(False) if one_set else same
                info = self._losses_of_masks(self._similarities(x, y), positive_mask, ~same, scale, both)
            else:
                info = self._losses_of_indices(self._similarities(x, y), indices_tuple, scale, both)
            loss_dict = {"loss": info}
            if self.embedding_regularizer is not None:
                takes_ref_emb = getattr(self.embedding_regularizer, "takes_ref_emb", False)
                term = self.embedding_regularizer(x, *([None if one_set else y] if takes_ref_emb else []))
                loss_dict["embedding_reg_loss"] = self.zero_loss() | {"losses": term * self.embedding_reg_weight}
            return self._reduce(loss_dict, labels, [x] if one_set else [x, y], scale)

    def from_similarities(
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        scale: float | Tensor | None = None,
    ) -> Any:
        """Return the reduced loss of a matrix, with the loss's own ``symmetric``.

        Args:
            similarities: (A, C), anchors x candidates, larger is closer.
            positive_mask, negative_mask: (A, C), bool.
            scale: see :meth:`forward`.

        Raises:
            ValueError: masks of another shape or type.
        """
        for name, mask in (("positive_mask", positive_mask), ("negative_mask", negative_mask)):
            if mask.shape != similarities.shape or mask.dtype != torch.bool:
                raise ValueError(f"{name} must be bool {similarities.shape}, got {mask.dtype} {mask.shape}")
        scale = self._scale(scale)
        with torch.autocast(similarities.device.type, enabled=False):
            (similarities,) = full_precision(similarities)
            info = self._losses_of_masks(similarities, positive_mask, negative_mask, scale, self.symmetric)
            return self._reduce({"loss": info}, None, [similarities], scale)

    def _losses_in_blocks(
        self,
        x: Tensor,
        y: Tensor,
        labels: Tensor,
        ref_labels: Tensor,
        scale: float | Tensor,
        one_set: bool,
        both: bool,
    ) -> dict[str, Any]:
        rows, columns = label_pairs(labels, ref_labels)
        if len(rows) == 0:  # torch has no maximum of nothing
            return _info(x.new_zeros(0), (rows, columns))
        normalize = self.distance.normalize_embeddings
        if self.negatives == "max":
            positive, *maxima = maximum(x, y, rows, columns, normalize=normalize)
        else:
            tiled = len(x) * len(y) * x.element_size() > MATRIX_BYTES if self.tiled is None else self.tiled
            positive, *maxima = soft_maximum(x, y, rows, columns, scale, normalize=normalize, tiled=tiled)
        if one_set:
            (different,) = (rows != columns).nonzero().unbind(dim=1)
            rows, columns, positive = rows[different], columns[different], positive[different]
        negative = torch.stack([maxima[0][rows], maxima[1][columns]]) if both else maxima[0][rows][None]  # (1 or 2, M)
        losses = self._guarded(positive, negative, Pairs(rows, columns, torch.Size((len(x), len(y))), scale))
        return _info(losses.sum(dim=0), (rows, columns))

    def _losses_of_indices(
        self, similarities: Tensor, indices_tuple: IndicesTuple, scale: float | Tensor, both: bool
    ) -> dict[str, Any]:
        anchors, positives, *negatives = indices_tuple
        if len(negatives) == 1 and self.takes_triplets and len(anchors) > 0:
            losses = self.triplet_losses(similarities, anchors, positives, negatives[0], scale)
            return _info(losses, indices_tuple)
        negative_mask = _mask(similarities, negatives[0] if len(negatives) == 2 else anchors, negatives[-1])
        return self._losses_of_masks(similarities, _mask(similarities, anchors, positives), negative_mask, scale, both)

    def _losses_of_masks(
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        scale: float | Tensor,
        both: bool,
    ) -> dict[str, Any]:
        """Return the losses of all positive pairs, (M,), with rows as anchors, plus those with columns if ``both``."""
        rows, columns = positive_mask.nonzero().unbind(dim=1)
        pairs = Pairs(rows, columns, similarities.shape, scale)
        if len(rows) == 0:
            return _info(similarities.new_zeros(0), (rows, columns))
        losses = self._direction(similarities, negative_mask, rows, columns, pairs)
        if both:
            losses = losses + self._direction(similarities.T, negative_mask.T, columns, rows, pairs)
        return _info(losses, (rows, columns))

    def _direction(
        self, similarities: Tensor, negative_mask: Tensor, anchors: Tensor, positives: Tensor, pairs: Pairs
    ) -> Tensor:
        if self.negatives == "matrix":
            losses = self.matrix_losses(similarities, negative_mask, anchors, positives, pairs)
            if losses.shape != anchors.shape:
                raise ValueError(f"matrix_losses must return shape {anchors.shape}, got {losses.shape}")
            return losses
        positive = similarities[anchors, positives]
        if self.negatives == "all":
            losses = self.pair_loss(positive, similarities[anchors].T, pairs)  # (C, M)
            return losses.masked_fill(~negative_mask[anchors].T, 0).sum(dim=0)
        scale = pairs.scale if self.negatives == "logsumexp" else None
        return self._guarded(positive, matrix_maximum(similarities, negative_mask, scale)[anchors], pairs)

    def _guarded(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        """Return the losses of the pairs, 0 for anchors without negatives."""
        is_missing = negative == -torch.inf
        return self.pair_loss(positive, negative.masked_fill(is_missing, 0), pairs).masked_fill(is_missing, 0)

    def _similarities(self, x: Tensor, y: Tensor) -> Tensor:
        if self._is_plain() and self.distance.normalize_embeddings:
            return cosines(x, y)  # where zero vectors have finite gradients
        distances: Tensor = self.distance(x, y)
        return distances if self.distance.is_inverted else -distances

    def _reduce(
        self, loss_dict: dict[str, Any], labels: Tensor | None, inputs: list[Tensor], scale: float | Tensor
    ) -> Any:
        losses = loss_dict["loss"]["losses"]
        keeps_all = type(self.reducer) is MeanReducer and len(losses) > 0
        if len(losses) == 0:
            loss_dict["loss"] = self.zero_loss()
        loss = self.reducer(loss_dict, inputs[0], labels)
        if not isinstance(loss, Tensor):
            return loss  # DoNothingReducer returns the dict
        # An anchor without positives is in no pair, and a reducer may drop NaN: add 0, or NaN. What is reduced to 0
        # still belongs to the graph of every input.
        sources = [x.detach() for x in inputs] if keeps_all else [*inputs, losses, torch.as_tensor(scale)]
        first, *others = (source.sum() for source in sources)
        return loss.add(sum(others, first), alpha=0)

    def _scale(self, scale: float | Tensor | None) -> float | Tensor:
        if scale is None:
            return getattr(self, "scale", 1.0)
        if not hasattr(self, "scale"):
            names = ", ".join(losses_with_scale())
            raise ValueError(f"{type(self).__name__} has no scale; losses that have one: {names}")
        if not isinstance(scale, Tensor):
            return number("scale", scale, above=0)
        if scale.numel() != 1:
            raise ValueError(f"scale must be a number or a tensor of one element, got the shape {tuple(scale.shape)}")
        scale = scale.reshape(())
        is_on_cpu = scale.device.type == "cpu"
        if is_on_cpu or not self._has_checked_scale:
            number("scale", scale.item(), above=0)  # waits for the device
            self._has_checked_scale = not is_on_cpu
            return scale
        return torch.where(scale > 0, scale, torch.nan)

    def _is_plain(self) -> bool:
        distance = self.distance  # a subclass may compute something else
        is_plain = type(distance) in (CosineSimilarity, DotProductSimilarity) and not distance.collect_stats
        return is_plain and distance.p == 2 and distance.power == 1

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()


def _checked_labels(embeddings: Tensor, labels: Any, ref_emb: Tensor, ref_labels: Any, by_labels: bool) -> Any:
    """Return the labels of both sides as tensors, which may be None unless pairs are chosen ``by_labels``."""
    one_set = ref_emb is embeddings
    if by_labels or labels is not None or (one_set and ref_labels is not None):
        labels = as_labels("labels", labels, embeddings)
    if one_set and ref_labels is None:
        return labels, labels
    if ref_labels is not None:
        ref_labels = as_labels("ref_labels", ref_labels, ref_emb)
        if one_set and not _are_equal(labels, ref_labels):
            raise ValueError("ref_labels must be the labels, because ref_emb is the embeddings or missing")
    elif by_labels:
        raise ValueError(f"ref_labels must be given with ref_emb{_advice_on_ref_labels(len(embeddings), len(ref_emb))}")
    return labels, ref_labels


def _are_equal(labels: Any, ref_labels: Any) -> bool:
    return labels is ref_labels or torch.equal(labels, ref_labels.to(labels.dtype))


def _advice_on_ref_labels(rows: int, ref_rows: int) -> str:
    if rows == 0 or ref_rows == 0 or ref_rows % rows != 0:
        return ""
    captions = ref_rows // rows
    return f"; with {captions} rows of ref_emb for each row of the embeddings, labels.repeat_interleave({captions})"


def _info(losses: Tensor, indices: IndicesTuple) -> dict[str, Any]:
    kind = "pos_pair" if len(indices) == 2 else "triplet"
    return {"losses": losses, "indices": indices, "reduction_type": kind, "divisor": len(losses)}


def _mask(similarities: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    mask = torch.zeros_like(similarities, dtype=torch.bool)
    fill_at(mask, (rows, columns), True)
    return mask
