"""A loss of positive pairs and their negatives as a pytorch-metric-learning loss."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import ClassWeightedReducer, MeanReducer
from torch import Tensor, nn

from vl_plugins.distributed import GathersAcrossDevices, learned_numbers
from vl_plugins.engine import Pairs
from vl_plugins.errors import number, unknown_name, warn_of_input
from vl_plugins.losses.batch import Batch, ContentIds, Direction, as_number, by_pair, is_one_of_each, number_of_each
from vl_plugins.losses.paths import (
    PairLosses,
    check_losses,
    hardest,
    losses_of_direction,
    losses_of_hooks,
    losses_of_indices,
    losses_of_masks,
    soft_maximum,
)
from vl_plugins.losses.reduction import reduced
from vl_plugins.losses.statistics import STATISTICS, forget_statistics, record_statistics
from vl_plugins.numerics import check_tensors, eager, full_precision
from vl_plugins.registry import options_of, scale_advice

__all__ = ["PairLoss"]

CONFIDENCE = "confidence"
# What a loss may override, and the number of its arguments before the numbers.
HOOKS = {"of_negatives": 2, "of_pairs": 2, "matrix_losses": 3, "triplet_losses": 4}


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

    The reducer receives one value per positive pair (``"pos_pair"``) or triplet. Everything is computed in float32 at
    least, also under autocast. Without positive pairs or negatives the loss is 0, with a warning if the labels are the
    reason. NaN or infinity in any embedding gives NaN, whatever the reducer. Where embeddings are compared in blocks,
    there are no second derivatives: with :func:`hardest` or :func:`soft_maximum`, by labels, with cosine or dot
    product.

    Args:
        symmetric: add text to image where two sets are compared by labels or positions; otherwise image to text only.
        tiled: compute similarities in tiles, twice, instead of keeping one matrix. By default beyond 1 GiB of them.
        gather_across_devices: True, or a ``ProcessGroup``: each process calls the loss with its own rows, and compares
            them with the rows of all processes. Each process returns its share; the mean over the processes is the loss
            of one process with all rows, and DistributedDataParallel takes the same mean of the gradients. If its own
            rows are not enough, as with a different reducer, each process computes the loss over all rows.
        known_positives: False ignores ``ref_ids``, ``matching_ids`` and ``negative_ids`` of a call, for a comparison
            with training without them.
        kwargs: ``distance`` (default ``CosineSimilarity()``), ``reducer`` (default ``MeanReducer()``),
            ``embedding_regularizer`` (given ``ref_emb`` too if it has an attribute ``takes_ref_emb``),
            ``embedding_reg_weight`` and ``collect_stats`` of pytorch-metric-learning. With the latter, each call by
            labels or positions sets the attributes of :mod:`vl_plugins.losses.statistics`.
    """

    _has_warned = False  # of a batch without pairs

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
        known_positives: bool = True,
        **kwargs: Any,
    ):
        switches = {"symmetric": symmetric, "tiled": tiled, "known_positives": known_positives}
        _check_options(type(self), kwargs, switches)
        if type(self).of_pairs is PairLoss.of_pairs and not self.has_matrix_losses:
            raise TypeError(f"{type(self).__name__} defines neither of_pairs nor matrix_losses")
        super().__init__(**kwargs)
        self.symmetric, self.tiled, self.known_positives = symmetric, tiled, known_positives
        self.gather_across_devices = gather_across_devices
        self.add_to_recordable_attributes(list_of_names=list(STATISTICS), is_stat=True)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _check_hooks(cls)
        if _is_overridden_after(cls, "matrix_losses", "has_matrix_losses"):
            cls.has_matrix_losses = True
        if _is_overridden_after(cls, "matrix_losses", "by_row"):
            cls.by_row = False  # slow, but never wrong

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name == "of_negatives":
            raise AttributeError(f"of_negatives belongs to the class: write it into the body of {kind}")
        is_list = isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value) > 0
        if name == "margin" and (is_list or (is_one_of_each(value) and value.numel() > 1)):
            advice = "UnifiedLoss takes one for each caption"
            if name in self.numbers:
                advice = "one for each caption belongs to the call"
            raise ValueError(f"margin of {kind} must be one number; {advice}: loss(..., margin=values), (C,)")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in STATISTICS:
            raise AttributeError(f"{type(self).__name__} records {name} only with collect_stats=True")
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        parts = []
        for name in getattr(self, "_record_these", ()):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = float(f"{value.item():.6g}")
            parts.append(f"{name}={value}")
        return ", ".join(parts)

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
            numbers: see :meth:`of_pairs`.
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

    @property
    def needs_matrix(self) -> bool:
        """True if a hook of the loss's own reads a matrix of similarities, whole or in blocks of rows."""
        return self.has_matrix_losses or type(self).of_negatives not in (hardest, soft_maximum)

    @property
    def margin_in_use(self) -> Any:
        """By how much a positive should be closer than a negative, for statistics."""
        return getattr(self, "margin", 0.0)

    @property
    def takes_triplets(self) -> bool:
        """True if each given triplet is compared with its own negative; otherwise triplets are treated as pairs."""
        has_formula = type(self).of_pairs is not PairLoss.of_pairs
        return has_formula and type(self).of_negatives is hardest

    def check_number(self, name: str, value: Any) -> Any:
        """Return a number of the call as the hooks receive it; raise ``ValueError`` if it is out of its range."""
        if not isinstance(value, Tensor):
            return number(name, value)
        if value.numel() != 1 and name == "scale" and type(self).of_negatives is soft_maximum:
            raise ValueError(f"scale must be one number for a soft maximum, got the shape {tuple(value.shape)}")
        return value

    # What is called

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
        confidence: Tensor | None = None,
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
        check_tensors(embeddings=embeddings)
        is_mined = self._is_mined(indices_tuple, labels)
        if symmetric is None:
            symmetric = self.symmetric and not is_mined
        scalars, caption_numbers = self._numbers_of_call(numbers, ARGUMENTS, confidence)
        ids = ContentIds(ref_ids, matching_ids, negative_ids) if self.known_positives else ContentIds()
        with torch.autocast(embeddings.device.type, enabled=False):
            batch = Batch.of(
                embeddings,
                labels,
                ref_emb,
                ref_labels,
                distance=self.distance,
                both=symmetric,
                is_mined=is_mined,
                negatives=negatives,
                ids=ids,
                copies=copies,
                numbers=caption_numbers,
            )
            batch = self._gathered(batch, copies, is_mined)
            losses = self._losses_of_batch(batch, indices_tuple, scalars)
            return reduced(self, losses, batch, batch.inputs(), scalars)

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
        check_tensors(similarities=similarities, positive_mask=positive_mask, negative_mask=negative_mask)
        if self.processes.size > 1:
            raise ValueError("similarities are of one process: create the loss without gather_across_devices")
        if self.embedding_regularizer is not None:
            raise ValueError("embedding_regularizer needs embeddings, not similarities")
        for name, mask in (("positive_mask", positive_mask), ("negative_mask", negative_mask)):
            if mask.shape != similarities.shape or mask.dtype != torch.bool:
                shape, shape_of_mask = tuple(similarities.shape), tuple(mask.shape)
                raise ValueError(f"{name} must be torch.bool {shape}, got {mask.dtype} {shape_of_mask}")
        if similarities.device.type == "cpu" and (positive_mask & negative_mask).any():  # would synchronize a GPU
            raise ValueError("a pair is in both positive_mask and negative_mask")
        scalars, caption_numbers = self._numbers_of_call(numbers, ARGUMENTS_OF_MATRIX)
        with torch.autocast(similarities.device.type, enabled=False):
            (similarities,) = full_precision(similarities)
            positives = Pairs.of_mask(positive_mask)
            for name, values in caption_numbers.items():
                caption_numbers[name] = number_of_each(name, values, similarities.T)
            pair_numbers = by_pair(caption_numbers, positives.columns)
            if symmetric is None:
                symmetric = self.symmetric
            columns = similarities.shape[1] if symmetric else 0
            masks = positive_mask, negative_mask
            values = losses_of_masks(self, similarities, *masks, positives, scalars, pair_numbers, columns)
            losses = [PairLosses(values, (positives.rows, positives.columns))]
            return reduced(self, losses, None, [similarities], scalars)

    def _is_mined(self, indices_tuple: Any, labels: Any) -> bool:
        """Return whether a miner chose the pairs; raise ``ValueError`` for arguments that do not fit."""
        if labels is None and isinstance(self.reducer, ClassWeightedReducer):
            raise ValueError("ClassWeightedReducer needs labels, which are the classes that it weights")
        if indices_tuple is None:
            return False
        if callable(indices_tuple):
            raise ValueError(
                "indices_tuple must be pairs or triplets, miner(embeddings, labels, ref_emb, ref_labels), not the miner"
            )
        if isinstance(indices_tuple, Tensor):
            raise ValueError("indices_tuple must be a tuple of index tensors; embeddings go to ref_emb=")
        if len(indices_tuple) not in (3, 4):
            raise ValueError(
                "indices_tuple must be (anchors, positives, negatives) or (anchors, positives, anchors, negatives), "
                f"got {len(indices_tuple)} tensors"
            )
        return True

    def _gathered(self, batch: Batch, copies: Tensor | None, is_mined: bool) -> Batch:
        """Return the batch with the candidates of all processes."""
        if self.processes.size == 1:
            return batch
        if copies is not None:
            raise ValueError("copies are places of one process: create the loss without gather_across_devices")
        numbers = (*self.numbers, CONFIDENCE)
        # In words, so that an error can list them: a warm-up may have ended in one process only.
        settings = type(self).__name__, f"symmetric={batch.both}", "indices_tuple" if is_mined else "no indices_tuple"
        return batch.gathered(self.processes, self.compares_own_rows, numbers, learned_numbers(self), settings)

    def _losses_of_batch(
        self, batch: Batch, indices_tuple: tuple[Tensor, ...] | None, numbers: dict[str, Any]
    ) -> list[PairLosses]:
        """Return the losses of a miner's choice, or those of each direction; record their statistics."""
        if indices_tuple is not None:
            forget_statistics(self)
            return [self._losses_of_indices(batch, indices_tuple, numbers)]
        directions = batch.directions()
        self._warn_of_no_pairs(batch, directions[0])
        losses = [self._losses_of_direction(direction, numbers) for direction in directions]
        if self.collect_stats:
            record_statistics(self, directions[0], numbers)
        return losses

    def _warn_of_no_pairs(self, batch: Batch, direction: Direction) -> None:
        """Warn once of a batch whose loss is 0 because of its labels, such as two numberings."""
        rows, columns = direction.shape
        is_queue = batch.copies is not None and not batch.one_set  # which may be empty at first
        if self._has_warned or rows < 2 or is_queue:
            return
        possible = rows * columns - rows * batch.one_set
        positive = len(direction.positives.rows)
        has_no_negatives = positive == possible and not self.has_matrix_losses  # which may be losses of positives alone
        if positive == 0 or has_no_negatives:
            self._has_warned = True
            which = "no pair" if positive == 0 else "every pair"
            warn_of_input(
                f"{which} of a batch of {rows} is positive, so its loss is 0: labels must be equal for what "
                "belongs together, and for nothing else"
            )

    def _losses_of_direction(self, direction: Direction, numbers: dict[str, Any]) -> PairLosses:
        pair_numbers = dict(direction.pair_numbers)
        confidence = pair_numbers.pop(CONFIDENCE, None)
        direction = direction._replace(pair_numbers=pair_numbers)
        losses = losses_of_direction(self, direction, numbers)
        return losses if confidence is None else losses._replace(values=losses.values * confidence)

    def _losses_of_indices(
        self, batch: Batch, indices_tuple: tuple[Tensor, ...], numbers: dict[str, Any]
    ) -> PairLosses:
        confidence = batch.columns.numbers.pop(CONFIDENCE, None)
        losses = losses_of_indices(self, batch, indices_tuple, numbers)
        if confidence is None:
            return losses
        return losses._replace(values=losses.values * confidence[losses.indices[1]])

    def losses_of_pairs(self, positive: Tensor, negative: Tensor, numbers: dict[str, Any]) -> Tensor:
        """Return :meth:`of_pairs`, but 0 for pairs whose anchor has no negatives, where ``negative`` is -inf."""
        is_missing = negative == -torch.inf
        losses = self.of_pairs(positive, negative.masked_fill(is_missing, 0), **numbers)
        check_losses(self, "of_pairs", losses, len(positive))
        return losses.masked_fill(is_missing, 0)

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

    def _numbers_of_call(
        self, given: dict[str, Any], arguments: tuple[str, ...], confidence: Tensor | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers of a call, with the loss's own as defaults: those for all pairs, and those per caption."""
        for name, value in given.items():
            if name not in self.numbers:
                raise ValueError(_unknown_argument(self, name, value, arguments))
        scalars, caption_numbers = {}, {}
        if confidence is not None:
            caption_numbers[CONFIDENCE] = confidence
        for name in self.numbers:
            value = as_number(given.get(name))
            value = _own_number(self, name) if value is None else self.check_number(name, value)
            if isinstance(value, Tensor) and value.ndim > 0:
                caption_numbers[name] = value
            else:
                scalars[name] = value
        return scalars, caption_numbers

    def check_numbers(self, numbers: dict[str, Any]) -> None:
        """Raise ``ValueError`` for numbers that a call would refuse."""
        self._numbers_of_call(numbers, ARGUMENTS)

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The step of a warm-up, which each loss had until version 0.3.
        if type(self).get_extra_state is nn.Module.get_extra_state:
            state_dict.pop(prefix + "_extra_state", None)
        state_dict.pop(prefix + "training_calls", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments, without ``self`` and those that stand for others."""
    _, *parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)


ARGUMENTS = _arguments(PairLoss.forward)
ARGUMENTS_OF_MATRIX = _arguments(PairLoss.from_similarities)


def _own_number(loss: PairLoss, name: str) -> Any:
    if not hasattr(loss, name):
        raise ValueError(
            f"{type(loss).__name__} has no {name}, one of its numbers: set self.{name} in the constructor, or call "
            f"loss(..., {name}=...)"
        )
    value = getattr(loss, name)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if is_one_of_each(value):
        raise ValueError(
            f"{name} of one batch belongs to the call: loss(..., {name}=values), one for each caption, (C,)"
        )
    return value


def _unknown_argument(loss: PairLoss, name: str, value: Any, arguments: tuple[str, ...]) -> str:
    kind = type(loss).__name__
    if name == "miner":
        return f"{kind} takes no miner: DistributedLoss(loss)(..., miner=miner) does, or give it indices_tuple"
    if name in ARGUMENTS:
        return f"{name} belongs to a call with embeddings, not to from_similarities"
    if advice := scale_advice(name, value, dict.fromkeys(loss.numbers)):
        return f"{kind}: {advice}"
    return f"{kind}: {unknown_name('argument', name, [*arguments, *loss.numbers])}"


def _check_options(kind: type, options: dict[str, Any], switches: dict[str, Any]) -> None:
    """Raise ``TypeError`` for an option that belongs elsewhere, with what to do instead, or a switch that is none."""
    for name, value in switches.items():
        if value not in (True, False) and not (name == "tiled" and value is None):
            raise TypeError(f"{kind.__name__}: {name} must be True or False, got {value!r}")
    for option in {"scale", "temperature"} & options.keys():
        if advice := scale_advice(option, options[option], options_of(kind)):
            raise TypeError(f"{kind.__name__}: {advice}")
    if "warmup_steps" in options:
        raise TypeError(
            f"{kind.__name__} has no warmup_steps: Warmup(first, then, steps), or "
            "create_loss(..., warmup_steps=...), begins with another loss"
        )
    options_of_base = options_of(PairLoss)
    for option in options:
        if option not in options_of_base:
            raise TypeError(f"{kind.__name__}: {unknown_name('option', option, options_of(kind))}")
    for option in ("distance", "reducer", "embedding_regularizer"):
        value = options.get(option)
        if value is not None and not isinstance(value, nn.Module):
            raise TypeError(f"{kind.__name__}: {option} must be a module, got {value!r}; names are for create_loss")


def _owner(kind: type, name: str, first: int = 0) -> type:
    """Return the first class, in the order of inheritance from number ``first`` on, that defines an attribute."""
    return next(owner for owner in kind.__mro__[first:] if name in vars(owner))


def _is_overridden_after(kind: type, name: str, other: str) -> bool:
    """Return whether a class, or a mixin, defines an attribute without the other one that goes with it."""
    return kind.__mro__.index(_owner(kind, name)) < kind.__mro__.index(_owner(kind, other))


def _check_hooks(kind: Any) -> None:
    """Raise ``TypeError`` for a class whose hooks do not fit together, or that was written for version 0.3."""
    own, name = vars(kind), kind.__name__
    matrix_losses: Callable[..., Any] | None = own.get("matrix_losses")
    has_old_matrix = matrix_losses is not None and "anchors" in inspect.signature(matrix_losses).parameters
    if "pair_loss" in own or isinstance(own.get("negatives"), str) or has_old_matrix:
        raise TypeError(
            f"{name} is written for vl_plugins 0.3: define of_negatives and of_pairs(positive, negative, "
            "**numbers), or matrix_losses(similarities, positive_mask, negative_mask, **numbers); see 'From 0.3 to 0.4'"
        )
    if not isinstance(kind.numbers, tuple):
        raise TypeError(f"{name}: numbers must be a tuple of names, such as ('scale',), got {kind.numbers!r}")
    if not callable(kind.of_negatives):
        raise TypeError(
            f"{name}: of_negatives must be hardest, soft_maximum or a method (self, similarities, negative_mask, "
            f"**numbers), got {kind.of_negatives!r}"
        )
    if kind.of_negatives is soft_maximum and "scale" not in kind.numbers:
        advice = "derive the class from ScaledLoss"
        if "numbers" in own and kind.numbers:
            advice = f"numbers = {('scale', *kind.numbers)}"
        raise TypeError(f"{name}: of_negatives = soft_maximum needs a scale; {advice}")
    defines_pairs_only = "of_pairs" in own and "matrix_losses" not in own
    if kind.has_matrix_losses is True and defines_pairs_only and _owner(kind, "of_pairs", 1) is PairLoss:
        raise TypeError(
            f"{name}: of_pairs is never called, because {_owner(kind, 'matrix_losses').__name__} defines "
            "matrix_losses: override that, or derive the class from PairLoss"
        )
    for hook in HOOKS:
        _check_numbers_of_hook(kind, hook)


def _check_numbers_of_hook(kind: Any, hook: str) -> None:
    """Raise ``TypeError`` for a method that does not take the numbers of its loss by name."""
    function = getattr(kind, hook)
    if not inspect.isfunction(function) or function in (hardest, soft_maximum):
        return
    names, takes_others = set(), False
    for parameter in list(inspect.signature(function).parameters.values())[HOOKS[hook] + 1 :]:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_others = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names.add(parameter.name)
            if parameter.default is parameter.empty and parameter.name not in kind.numbers:
                advice = f"add it to numbers, {kind.numbers}, or rename it"
                if parameter.name == "scale":
                    advice = "derive the class from ScaledLoss, which has one"
                raise TypeError(f"{kind.__name__}: {hook} takes {parameter.name}, which is no number of it: {advice}")
    missing = [name for name in kind.numbers if name not in names]
    if missing and not takes_others:
        raise TypeError(f"{kind.__name__}: {hook} must take {', '.join(missing)}, its numbers by name, or **numbers")
