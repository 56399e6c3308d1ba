"""A loss of positive pairs and their negatives as a pytorch-metric-learning loss."""

import inspect
import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn

from vl_plugins import engine
from vl_plugins.distances import VECTOR_DISTANCES
from vl_plugins.distributed import GathersAcrossDevices, Processes, learned_numbers
from vl_plugins.engine import Comparison, Pairs
from vl_plugins.errors import number, one_of, unknown_name, warn_of_input
from vl_plugins.losses.batch import Batch
from vl_plugins.losses.matrix import (
    Call,
    PairLosses,
    hardest,
    losses_of_blocks,
    losses_of_hooks,
    losses_of_indices,
    losses_of_matrix,
    matrix_of,
    soft_maximum,
    wrong_result,
)
from vl_plugins.losses.reduction import reduced, share_of_mean
from vl_plugins.losses.statistics import STATISTICS, forget_statistics, record_statistics
from vl_plugins.numerics import checked_rows, eager, full_precision_call
from vl_plugins.registry import scale_advice, wrong_option

__all__ = ["PairLoss"]

CONFIDENCE = "confidence"


class PairLoss(GathersAcrossDevices, BaseMetricLossFunction):
    """A loss of each positive pair, given its similarity and a summary of its anchor's negatives.

    A subclass sets :attr:`of_negatives` and defines a formula::

        class SquaredHinge(ScaledLoss):
            of_negatives = soft_maximum

            def __init__(self, margin=0.2, scale=50.0, **kwargs):
                super().__init__(scale=scale, **kwargs)
                self.margin = margin

            def of_pairs(self, positive, negative, scale):  # (M,), (M,), and the number of a ScaledLoss
                return (self.margin + negative - positive).relu() ** 2

    The base class handles the rest: several positives, one set or two, labels, positions or a miner's choice, known
    positives, any distance and reducer, large batches in tiles, several processes (:mod:`vl_plugins.distributed`).
    If one number cannot summarize the negatives, a loss overrides :meth:`matrix_losses` instead. Call a loss as

    - ``loss(image_embeddings, ref_emb=text_embeddings)``: positive by position. With k texts per image, rows k * i to
      k * i + k - 1 of the texts belong to image i.
    - ``loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=text_labels)``: pairs of equal labels are
      positive, all others negative; image to text plus text to image.
    - ``loss(embeddings, labels)``: one set, where an item is not its own positive. Every item is already an anchor, so
      no second direction is added.
    - ``loss(embeddings, labels, indices_tuple)``, with or without ``ref_emb``: a miner's pairs or triplets instead of
      the pairs by labels, in the mined direction. A loss that defines :meth:`of_pairs` with the hardest negative
      compares each triplet with its own negative; any other loss treats triplets as pairs.
    - ``loss.from_similarities(similarities, positive_mask, negative_mask)``, for a model that compares pairs itself.

    The reducer receives one value per positive pair (``"pos_pair"``) or triplet. All is computed in float32 at least,
    also under autocast, but for matrix products, see ``products``. Without positive pairs or negatives the loss is 0,
    with a warning if the labels are the reason. NaN or infinity in any embedding gives NaN, whatever the reducer. Where
    embeddings are compared in blocks, there are no second derivatives: with :func:`hardest` or :func:`soft_maximum`, by
    labels, with cosine or dot product.

    Args:
        symmetric: add text to image where two sets are compared by labels or positions; otherwise image to text only.
        tiled: compute similarities in tiles, twice, instead of keeping one matrix. By default beyond 1 GiB of them.
        gather_across_devices: True, or a ``ProcessGroup``: each process calls the loss with its own rows, and compares
            them with the rows of all processes. Each process returns its share; the mean over the processes is the loss
            of one process with all rows, and DistributedDataParallel takes the same mean of the gradients. If its own
            rows are not enough, as with a different reducer, each process computes the loss over all rows. Within
            another loss that gathers, it does not gather again.
        global_labels: labels mean the same in all processes, also where they are 0 to B - 1 in each, which is
            otherwise an error, because it makes unrelated rows positives.
        products: ``"autocast"`` multiplies embeddings in the type of the caller's autocast, or in their own if that is
            bfloat16 or float16, and adds up in float32: similarities are those of the rounded embeddings, and gradients
            are rounded to the three digits of that type. ``"float32"`` multiplies in float32 at least. It makes no
            difference without autocast, for embeddings in float32.
        known_positives: False ignores ``ref_ids``, ``matching_ids`` and ``negative_ids`` of a call, for a comparison
            with training without them.
        kwargs: ``distance`` (default ``CosineSimilarity()``), ``reducer`` (default ``MeanReducer()``),
            ``embedding_regularizer`` (given ``ref_emb`` too if it has an attribute ``takes_ref_emb``),
            ``embedding_reg_weight`` and ``collect_stats`` of pytorch-metric-learning. With the latter, each call by
            labels or positions sets the attributes of :mod:`vl_plugins.losses.statistics`.
    """

    _has_warned = False  # of a batch without pairs
    learns_scale = False

    of_negatives: Any = hardest
    """:func:`hardest`, :func:`soft_maximum`, or a method ``(self, similarities, negative_mask, **numbers)``.

    It summarizes each anchor's negatives in one number, (A,), given similarities and a mask (A, C). The number may
    depend only on the anchor's own row, because large batches come in blocks of rows. A method need not care for an
    anchor without negatives: its pairs have loss 0 anyway, and its row of the mask is True everywhere, so that the
    method has something to compute. The method receives the numbers that a call gives for all pairs, not those for each
    caption. It belongs to the class, so two variants need two classes."""

    numbers: tuple[str, ...] = ()
    """Names of hyper-parameters that a call may give, such as ``("scale", "margin")``; the hooks receive them by name.

    If a call does not give one, it is the attribute with this name."""

    def __init__(
        self,
        *,
        symmetric: bool = True,
        tiled: bool | None = None,
        gather_across_devices: Any = False,
        global_labels: bool = False,
        products: str = "autocast",
        known_positives: bool = True,
        **kwargs: Any,
    ):
        switches = {"symmetric": symmetric, "known_positives": known_positives, "global_labels": global_labels}
        if tiled is not None:
            switches["tiled"] = tiled
        _check_options(type(self), kwargs, switches)
        if type(self).of_pairs is PairLoss.of_pairs and not self.has_matrix_losses:
            raise TypeError(
                f"{type(self).__name__} defines neither of_pairs nor matrix_losses; for a loss of version 0.3 see "
                "'From 0.3 to 0.4'"
            )
        super().__init__(**kwargs)
        self.symmetric, self.tiled, self.known_positives = symmetric, tiled, known_positives
        self.products = one_of("products", products, ("autocast", "float32"))
        self.processes = Processes(gather_across_devices, global_labels)
        self.add_to_recordable_attributes(list_of_names=list(STATISTICS), is_stat=True)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # Of a class, or a mixin, that overrides matrix_losses and says nothing else: slow, but never wrong.
        for name, value in (("has_matrix_losses", True), ("by_row", False)):
            for owner in cls.__mro__:
                if name in vars(owner):
                    break
                if "matrix_losses" in vars(owner):
                    setattr(cls, name, value)
                    break
        cls.takes_pairs = "pairs" in inspect.signature(cls.matrix_losses).parameters
        cls.has_own_negatives = cls.of_negatives not in (hardest, soft_maximum)
        if cls.of_negatives is soft_maximum and "scale" not in cls.numbers:
            raise TypeError(
                f"{cls.__name__}: of_negatives = soft_maximum needs a scale; derive the class from ScaledLoss, whose "
                "numbers begin with it"
            )
        is_never_called = cls.has_matrix_losses is True and "of_pairs" in vars(cls) and "matrix_losses" not in vars(cls)
        if is_never_called and super(cls, cls).of_pairs is PairLoss.of_pairs:
            raise TypeError(
                f"{cls.__name__}: of_pairs is never called, because a class above it defines matrix_losses: override "
                "that, or derive the class from PairLoss"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name == "of_negatives":
            raise AttributeError(f"of_negatives belongs to the class: write it into the body of {kind}")
        if name == "margin" and math.prod(np.shape(value)) > 1:
            advice = "UnifiedLoss takes one for each caption"
            if name in self.numbers:
                advice = "one for each caption belongs to the call"
            raise ValueError(f"margin of {kind} must be one number; {advice}: loss(..., margin=values), (C,)")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        settings = []
        for name in getattr(self, "_record_these", ()):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = float(f"{value.item():.6g}")
            settings.append(f"{name}={value}")
        return ", ".join(settings)

    # What a loss overrides. An override lists its numbers by name; `*_` keeps type checkers from objecting.

    def of_pairs(self, positive: Tensor, negative: Tensor, *_: Any, **numbers: Any) -> Tensor:
        """Return the loss of each pair, (M,), elementwise. A pair whose anchor has no negatives has loss 0 anyway.

        Args:
            positive: (M,), similarities of the pairs.
            negative: (M,), :attr:`of_negatives` of their anchors.
            numbers: those of :attr:`numbers`: floats or 0-D tensors; (M,) where the call gives one for each caption.
        """
        raise NotImplementedError

    def matrix_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, *_: Any, **numbers: Any
    ) -> Tensor:
        """Return the losses of the positive pairs, (M,), in the order of ``positive_mask.nonzero()``.

        Rows are anchors, and a row may have no negatives. If the loss of a pair depends only on its own row, set
        ``by_row = True`` in the class that overrides this: the loss may then come in blocks of rows, and each process
        computes its own rows.

        Args:
            similarities: (A, C), larger is closer; the transposed matrix for the other direction.
            positive_mask, negative_mask: (A, C), bool.
            numbers: see :meth:`of_pairs`. An override with an argument ``pairs`` also gets the rows and columns of the
                positive pairs, (M,) each, so that it needs no ``nonzero``, for which a GPU makes the host wait.
        """
        return losses_of_hooks(self, similarities, negative_mask, Pairs.of_mask(positive_mask), numbers)

    def triplet_losses(
        self, similarities: Tensor, anchors: Tensor, positives: Tensor, negatives: Tensor, *_: Any, **numbers: Any
    ) -> Tensor:
        """Return the losses of T given triplets of a row and two columns, (T,)."""
        return self.of_pairs(similarities[anchors, positives], similarities[anchors, negatives], **numbers)

    has_matrix_losses: Any = False
    """True if :meth:`matrix_losses` computes the loss; otherwise ``of_negatives`` and ``of_pairs`` do.

    A class that overrides :meth:`matrix_losses` has True, unless it says otherwise."""

    by_row: Any = True
    """True if the loss of a pair depends on the similarities of its row only, so that rows may come in blocks.

    A class that overrides :meth:`matrix_losses` has False, unless it says otherwise."""

    counts_unpaired_rows = False
    """True if :meth:`matrix_losses` returns two things: the losses of the pairs, and a sum, (), that rows without a
    positive pair add to the losses of all pairs. It is shared by all of them."""

    takes_pairs = has_own_negatives = False

    has_statistics = False
    """True after a call that recorded its statistics, see :mod:`vl_plugins.losses.statistics`."""

    @property
    def margin_in_use(self) -> Any:
        """By how much a positive should be closer than a negative, for statistics."""
        return getattr(self, "margin", 0.0)

    @property
    def takes_triplets(self) -> bool:
        """True if each given triplet is compared with its own negative; otherwise triplets are treated as pairs."""
        has_formula = type(self).of_pairs is not PairLoss.of_pairs
        return has_formula and type(self).of_negatives is hardest

    @property
    def compares_own_rows(self) -> bool:
        """True if several processes need to compare their own rows only, with those of all."""
        is_mean = type(self.reducer) is MeanReducer and self.embedding_regularizer is None
        return is_mean and self.by_row and self.is_plain()

    def is_plain(self) -> bool:
        """Return True if the distance is a cosine similarity or a dot product, and nothing else."""
        distance = self.distance  # a subclass may compute something else
        is_plain = type(distance) in (CosineSimilarity, DotProductSimilarity) and not distance.collect_stats
        return is_plain and distance.p == 2 and distance.power == 1

    def check_number(self, name: str, value: Any) -> Any:
        """Return a number of the call as the hooks receive it; raise ``ValueError`` if it is out of its range."""
        if not isinstance(value, Tensor):
            return number(name, value)
        if value.numel() != 1 and name == "scale" and type(self).of_negatives is soft_maximum:
            raise ValueError(f"scale must be one number for a soft maximum, got the shape {tuple(value.shape)}")
        return value

    # What is called: checks, gather, comparisons, losses, reduction.

    @eager
    def forward(
        self,
        embeddings: Tensor,
        labels: Any = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Any = None,
        *,
        symmetric: bool | None = None,
        confidence: Any = None,
        negatives: Tensor | None = None,
        ref_ids: Any = None,
        matching_ids: Any = None,
        negative_ids: Any = None,
        copies: Tensor | None = None,
        **numbers: Any,
    ) -> Any:
        """Return the reduced loss.

        Args:
            embeddings, ref_emb: (A, D) and (C, D), or what the distance compares.
            labels, ref_labels: (A,) and (C,), integers: tensors, numpy arrays or lists. Without ``ref_labels``, rows
                k * i to k * i + k - 1 of ``ref_emb`` have the label of row i; without ``labels`` too, they belong to
                row i only. That is the fastest form, because it does not synchronize the GPU.
            indices_tuple: (anchors, positives, negatives) or (anchors, positives, anchors, negatives), index tensors.
            symmetric: instead of the loss's own; True adds text to image to the pairs of an ``indices_tuple`` too.
            confidence: (C,), >= 0, how much to trust each caption: it multiplies the losses of the caption's pairs, and
                the mean is still over all pairs. The caption remains a negative of other images. With one set, it is
                the candidate's.
            negatives: (N, D), extra candidates for every row. They are never positives or anchors.
            ref_ids: (C,), integer ids of the candidates' contents, such as those of
                :func:`vl_plugins.data.content_ids`. A candidate with the same id as one of an anchor's positives is
                not a negative of that anchor, in both directions and in all processes; with one set, the anchor's own
                id counts, too. Negative numbers mean "no id".
            matching_ids: (A, M), ids of further contents that match a row, such as captions that are not shown. Pad
                shorter rows with -1; lists may have unequal lengths.
            negative_ids: (N,), ids of ``negatives``.
            copies: (A,), for queues: which candidate is a copy of each row, so that the two are not compared. One set
                needs none.
            numbers: those of :attr:`numbers`, such as ``scale``: a number; a 0-D tensor, which receives a gradient,
                such as ``model.logit_scale.exp()``; or one for each caption, (C,).

        Raises:
            ValueError: embeddings of unequal widths; labels that are missing, NaN, of another type or length; a number
                that the loss does not take, or out of its range; or ``tiled=True`` where all similarities are needed.
        """
        arguments = {"embeddings": embeddings, "ref_emb": ref_emb, "labels": labels, "ref_labels": ref_labels}
        arguments |= {"negatives": negatives, "copies": copies}
        arguments |= {"ref_ids": ref_ids, "matching_ids": matching_ids, "negative_ids": negative_ids}
        if not self.known_positives:
            arguments |= dict.fromkeys(["ref_ids", "matching_ids", "negative_ids"])
        if self.learns_scale:
            self.limit_scale()
        numbers, caption_numbers = self._numbers_of_call(numbers)
        if confidence is not None:
            caption_numbers[CONFIDENCE] = confidence
        is_mined = indices_tuple is not None
        with full_precision_call(self.products, embeddings=embeddings, ref_emb=ref_emb) as dtype:
            call, compares_vectors = Call(numbers, dtype), isinstance(self.distance, VECTOR_DISTANCES)
            # Anchors are those of the batch, candidates are of everything: one object in one process, and where each
            # process computes the whole loss.
            batch = everything = Batch.of(arguments, caption_numbers, compares_vectors, is_mined)
            if symmetric is None:
                symmetric = self.symmetric and not is_mined
            both = symmetric and not batch.one_set
            if not self.processes.is_alone:
                batch, everything = self._gathered(batch, both, is_mined, numbers)
            if is_mined:
                return self._of_indices(batch, indices_tuple, both, call)
            return self._of_comparisons(batch, everything, both, call)

    def _gathered(self, batch: Batch, both: bool, is_mined: bool, numbers: dict[str, Any]) -> tuple[Batch, Batch]:
        """Return the rows and columns that this process compares as anchors, and those of all processes."""
        if self.processes.size == 1:
            return batch, batch
        # In words, so that an error can list them: a warm-up may have ended in one process only.
        settings = type(self).__name__, f"symmetric={both}", "indices_tuple" if is_mined else "no indices_tuple"
        equal = numbers
        if next(self.parameters(), None) is not None:
            equal = learned_numbers(self) | numbers
        everything = batch.gathered(self.processes, (*self.numbers, CONFIDENCE), equal, settings)
        if is_mined:  # only now: a process that raised before would leave the others waiting
            raise ValueError("indices_tuple would be of this process only: give a DistributedLoss the miner")
        if self.compares_own_rows and not batch.one_set:
            return batch, everything
        return everything, everything

    def _of_indices(self, batch: Batch, indices_tuple: Any, both: bool, call: Call) -> Any:
        """Return the reduced loss of a miner's choice."""
        forget_statistics(self)
        confidence = batch.numbers.pop(CONFIDENCE, None)
        pairs = losses_of_indices(self, batch, indices_tuple, both, call)
        if confidence is not None:
            pairs = pairs._replace(values=pairs.values * confidence[pairs.indices[1]])
        return reduced(self, pairs, batch, [*call.numbers.values(), confidence])

    def _of_comparisons(self, batch: Batch, everything: Batch, both: bool, call: Call) -> Any:
        """Return the reduced loss of the pairs by labels or positions, of both directions."""
        uses_engine = self.is_plain() and not (self.has_matrix_losses or self.has_own_negatives)
        # Whether NaN in any embedding is NaN in the losses already, so that it need not be looked for. By labels, an
        # embedding may have no positive: then it must be a candidate, and the loss read all negatives, as the engine
        # does. By position, each is in a positive pair; rows of other processes are seen as candidates of columns.
        shows_nan = getattr(self.distance, "normalize_embeddings", False)
        if batch.owners is None:
            shows_nan = shows_nan and uses_engine and (both or batch.one_set)
        else:
            shows_nan = shows_nan and (both or batch is everything) and everything.embeddings.shape[0] > 1
        comparisons, losses = batch.comparisons(everything, both), []
        for comparison in comparisons:
            confidence = comparison.numbers.pop(CONFIDENCE, None)
            pairs = self._losses(comparison, call, uses_engine, batch.one_set)
            if confidence is not None:
                pairs = pairs._replace(values=pairs.values * confidence)
            shows_nan = shows_nan and comparison.known_positives is None and pairs.values.shape[0] > 0
            losses.append(pairs)
        if self.collect_stats:
            record_statistics(self, comparisons[0], call)
        pairs = losses[0]
        if batch is not everything:
            pairs = share_of_mean(self.processes, losses)
        return reduced(self, pairs, everything, [*call.numbers.values(), *batch.numbers.values()], shows_nan)

    def _losses(self, comparison: Comparison, call: Call, uses_engine: bool, one_set: bool) -> PairLosses:
        """Return the losses of the positive pairs: from vectors, by blocks of rows of a matrix, or by the matrix."""
        pairs, x, y = comparison.positives, comparison.anchors, comparison.candidates
        count, possible = pairs.rows.shape[0], x.shape[0] * y.shape[0]
        if count == 0 or count >= possible - x.shape[0]:  # a cheap bound; the method has the exact condition
            self._warn_of_no_pairs(comparison, one_set)
        has_turned_copies = comparison.copies is not None and comparison.anchor_columns > 0  # no block of columns has
        can_be_tiled = uses_engine or (self.by_row and self.is_plain() and not has_turned_copies)
        if self.tiled and not can_be_tiled:
            raise ValueError(
                "tiled=True needs a plain CosineSimilarity or DotProductSimilarity, a loss whose pairs depend on their "
                f"own row only (by_row), without copies in both directions; got {self.distance}, {type(self).__name__}"
            )
        tiled = self.tiled
        if tiled is None:
            tiled = can_be_tiled and possible * x.element_size() > engine.MATRIX_BYTES
        if count == 0 and not self.counts_unpaired_rows:  # torch has no maximum of nothing
            return PairLosses(x.new_zeros(0), (pairs.rows, pairs.columns))
        if uses_engine:
            return PairLosses(self._of_vectors(comparison, call, tiled), (pairs.rows, pairs.columns))
        if tiled:
            return losses_of_blocks(self, comparison, call)
        similarities = matrix_of(self, x, y, call.dtype)
        numbers, columns = comparison.numbers, comparison.anchor_columns
        return losses_of_matrix(self, similarities, comparison.masks(), pairs, columns, numbers, call)

    def _of_vectors(self, comparison: Comparison, call: Call, tiled: bool) -> Tensor:
        """Return the losses by :mod:`vl_plugins.engine`, both directions from one product."""
        scale = None if type(self).of_negatives is hardest else call.numbers["scale"]
        maxima = engine.maxima(comparison, scale, self.distance.normalize_embeddings, call.dtype, tiled)
        positive, negative = maxima.positive, maxima.of_pairs(comparison)
        numbers, are_both = call.numbers | comparison.numbers, comparison.anchor_columns > 0
        if are_both:  # apply the formula once, to the pairs of both directions
            positive = torch.cat([positive, positive])
            for name, values in comparison.numbers.items():
                numbers[name] = torch.cat([values, values])
        if not comparison.all_have_negatives:  # NaN stays NaN, also in a pair whose anchor has none
            negative = negative.masked_fill(positive.isnan(), torch.nan)
        losses = self.losses_of_pairs(positive, negative, numbers, comparison.all_have_negatives)
        if not are_both:
            return losses
        from_rows, from_columns = losses.chunk(2)
        return from_rows + from_columns

    def losses_of_pairs(
        self, positive: Tensor, negative: Tensor, numbers: dict[str, Any], all_have_negatives: bool = False
    ) -> Tensor:
        """Return :meth:`of_pairs`, but 0 for pairs whose anchor has no negatives, where ``negative`` is -inf."""
        if not all_have_negatives:
            is_missing = negative == -torch.inf
            negative = negative.masked_fill(is_missing, 0)
        losses = self.of_pairs(positive, negative, **numbers)
        if not isinstance(losses, Tensor) or losses.shape != positive.shape or not losses.is_floating_point():
            raise wrong_result(self, "of_pairs", losses, positive.shape[0])
        return losses if all_have_negatives else losses.masked_fill(is_missing, 0)

    def from_similarities(
        self,
        similarities: Tensor,
        positive_mask: Tensor,
        negative_mask: Tensor,
        *,
        symmetric: bool | None = None,
        **numbers: Any,
    ) -> Any:
        """Return the reduced loss of a matrix.

        Args:
            similarities: (A, C), anchors x candidates, larger is closer; finite also where a pair is in no mask.
            positive_mask, negative_mask: (A, C), bool; no pair is in both, which is checked on the CPU.
            symmetric: instead of the loss's own; False for the matrix of one set, which has both directions already.
            numbers: see :meth:`forward`.

        Raises:
            ValueError: masks of another shape or type, a number that the loss does not take, or an option of the loss
                that needs embeddings: a process group or an embedding regularizer.
        """
        if self.processes.size > 1:
            raise ValueError("similarities are of one process: create the loss without gather_across_devices")
        if self.embedding_regularizer is not None:
            raise ValueError("embedding_regularizer needs embeddings, not similarities")
        with full_precision_call(similarities=similarities):
            for name, mask in (("positive_mask", positive_mask), ("negative_mask", negative_mask)):
                if mask.shape != similarities.shape or mask.dtype != torch.bool:
                    expected, shape = tuple(similarities.shape), tuple(mask.shape)
                    raise ValueError(f"{name} must be torch.bool {expected}, got {mask.dtype} {shape}")
            if similarities.device.type == "cpu" and (positive_mask & negative_mask).any():  # would synchronize a GPU
                raise ValueError("a pair is in both positive_mask and negative_mask")
            if self.learns_scale:
                self.limit_scale()
            numbers, caption_numbers = self._numbers_of_call(numbers, is_matrix=True)
            sides = {"embeddings": similarities, "ref_emb": similarities.T}
            rows = checked_rows(sides | caption_numbers, compares_vectors=False)
            similarities, pairs = rows["embeddings"], Pairs.of_mask(positive_mask)
            pair_numbers = {}
            for name in caption_numbers:
                pair_numbers[name] = rows[name][pairs.columns]
            columns = 0
            if self.symmetric if symmetric is None else symmetric:
                columns = similarities.shape[1]
            masks, call = (positive_mask, negative_mask), Call(numbers, None)
            losses = losses_of_matrix(self, similarities, masks, pairs, columns, pair_numbers, call)
            return reduced(self, losses, similarities, [*numbers.values(), *pair_numbers.values()])

    def _warn_of_no_pairs(self, comparison: Comparison, one_set: bool) -> None:
        """Warn once of a batch whose loss is 0 because of its labels, such as two numberings."""
        rows, columns = comparison.anchors.shape[0], comparison.candidates.shape[0]
        is_queue = comparison.copies is not None and not one_set  # which may be empty at first
        if self._has_warned or rows < 2 or is_queue:
            return
        count, possible = comparison.positives.rows.shape[0], rows * columns - rows * one_set
        if count == 0 or (count == possible and not self.has_matrix_losses):  # which may need no negatives
            self._has_warned = True
            which = "no pair" if count == 0 else "every pair"
            warn_of_input(
                f"{which} of a batch of {rows} is positive, so its loss is 0: labels must be equal for what "
                "belongs together, and for nothing else"
            )

    def _numbers_of_call(self, given: dict[str, Any], is_matrix: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the numbers of a call, with the loss's own as defaults: those for all pairs, and those per caption."""
        for name in given:
            if name not in self.numbers:
                raise ValueError(_unknown_argument(self, name, given[name], is_matrix))
        numbers, caption_numbers = {}, {}
        for name in self.numbers:
            value = given.get(name)
            if value is None:
                value = getattr(self, name, None)
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.reshape(())
            else:
                is_array = hasattr(value, "__array__") and not isinstance(value, (Tensor, Real))
                if is_array or isinstance(value, (list, tuple)):
                    value = torch.as_tensor(value, dtype=torch.float32)
                value = self.check_number(name, value)
            if value is None:
                raise ValueError(
                    f"{type(self).__name__} has no {name}, one of its numbers: set self.{name} in the constructor, or "
                    f"call loss(..., {name}=...)"
                )
            if isinstance(value, Tensor) and value.ndim > 0:
                caption_numbers[name] = value
            else:
                numbers[name] = value
        return numbers, caption_numbers

    def check_numbers(self, numbers: dict[str, Any]) -> None:
        """Raise ``ValueError`` for numbers that a call would refuse."""
        self._numbers_of_call(numbers)

    def limit_scale(self) -> None:
        """Keep a learned scale below its limit; of a loss that learns one."""

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The step of a warm-up, which each loss had until version 0.3.
        if type(self).get_extra_state is nn.Module.get_extra_state:
            state_dict.pop(prefix + "_extra_state", None)
        state_dict.pop(prefix + "training_calls", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _unknown_argument(loss: PairLoss, name: str, value: Any, is_matrix: bool) -> str:
    kind = type(loss).__name__
    arguments = list(inspect.signature(loss.from_similarities if is_matrix else loss.forward).parameters)[:-1]
    if name == "miner":
        return f"{kind} takes no miner: DistributedLoss(loss)(..., miner=miner) does, or give it indices_tuple"
    if is_matrix and name in inspect.signature(loss.forward).parameters:
        return f"{name} belongs to a call with embeddings, not to from_similarities"
    if advice := scale_advice(name, value, dict.fromkeys(loss.numbers)):
        return f"{kind}: {advice}"
    return f"{kind}: {unknown_name('argument', name, [*arguments, *loss.numbers])}"


def _check_options(kind: type, options: dict[str, Any], switches: dict[str, Any]) -> None:
    """Raise ``TypeError`` for an option that belongs elsewhere, with what to do instead, or a switch that is none."""
    for name, value in switches.items():
        if value not in (True, False):
            raise TypeError(f"{kind.__name__}: {name} must be True or False, got {value!r}")
    if reason := wrong_option(PairLoss, options, kind):
        raise TypeError(f"{kind.__name__}: {reason}")
    for option in ("distance", "reducer", "embedding_regularizer"):
        value = options.get(option)
        if value is not None and not isinstance(value, nn.Module):
            raise TypeError(f"{kind.__name__}: {option} must be a module, got {value!r}; names are for create_loss")
