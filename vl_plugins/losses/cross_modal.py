"""Any pytorch-metric-learning loss on two modalities, in both directions."""

import math
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.utils.distributed import DistributedMinerWrapper
from torch import Tensor, nn

from vl_plugins.distances import SetDistance, captions_come_first
from vl_plugins.distributed import GathersAcrossDevices, Processes, all_rows, joined_call, processes_of
from vl_plugins.errors import warn_of_input
from vl_plugins.losses.batch import Batch, joined_sets
from vl_plugins.losses.matrix import without_known
from vl_plugins.losses.warmup import Warmup
from vl_plugins.numerics import check_loss, full_precision_call

__all__ = ["CrossModalLoss", "known_positives"]


class CrossModalLoss(GathersAcrossDevices, nn.Module):
    """Image to text plus text to image, by any loss; :class:`~vl_plugins.distributed.DistributedLoss` may wrap it.

    A loss with an attribute ``symmetric``, such as :class:`~vl_plugins.losses.PairLoss`, adds both directions and
    is called once. Other losses, and all losses with a miner, are called once per direction; the two calls count as one
    step of a warm-up. With ``symmetric`` False, only image to text is computed. The ``regularization`` of a loss, such
    as ``smooth_chamfer``, is added once for both directions.

    Args:
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)`` for each direction.
        one_set: compare images and texts as one set, for losses without ``ref_emb``.

    Raises:
        ValueError: ``miner`` is pytorch-metric-learning's ``DistributedMinerWrapper(efficient=True)``, which drops each
            image's own caption; or it is given with a warm-up of losses with a ``regularization``.
    """

    _has_warned = False

    def __init__(self, loss: nn.Module, miner: Any = None, one_set: bool = False):
        super().__init__()
        check_loss(loss)
        if isinstance(miner, DistributedMinerWrapper) and miner.efficient:
            raise ValueError("DistributedMinerWrapper(efficient=True) drops pairs of an image and its own caption")
        if isinstance(loss, Warmup) and _takes_slots(loss) and miner is not None:  # added in each direction
            raise ValueError(
                "with a miner, the warm-up belongs to the base of SmoothChamferLoss: "
                "base={'name': 'triplet_hn', 'warmup_steps': 1000}"
            )
        self.loss: Any = loss
        self.miner, self.one_set = miner, one_set
        self.pair_loss: Any = loss.base if hasattr(loss, "regularization") else loss
        self.processes = Processes()

    @property
    def symmetric(self) -> bool:
        """Whether the loss of the next call adds text to image."""
        return getattr(self.pair_loss, "symmetric", True)

    @property
    def distance(self) -> Any:
        """The loss's distance, which compares embeddings; None for a loss without one."""
        return getattr(self.pair_loss, "distance", None)

    def forward(
        self,
        embeddings: Tensor,
        labels: Any = None,
        indices_tuple: None = None,
        ref_emb: Any = None,
        ref_labels: Any = None,
        *,
        slots: Tensor | None = None,
        ref_slots: Tensor | None = None,
        ref_ids: Tensor | None = None,
        matching_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the loss.

        Args:
            embeddings, ref_emb: images (B, D) and texts (C, D), or sets (B, K, D) and (C, K, D) where the loss's
                distance compares those.
            labels, ref_labels: (B,) and (C,); a text belongs to the images of its label. Those that are not given
                follow from the order of the rows, see :class:`~vl_plugins.losses.PairLoss`.
            indices_tuple: None, because the miner chooses the pairs.
            slots, ref_slots: (B, K, D) and (C, K, D), from which the sets were made; for the regularization.
            ref_ids, matching_ids: (C,) and (B, M), ids of texts, see :meth:`vl_plugins.losses.PairLoss.forward`. With a
                miner, and for losses of pytorch-metric-learning, this class removes known positives from the negatives.
                A loss of your own that has ``symmetric`` gets them if it has an attribute ``known_positives``, too.
            options: further arguments of the loss, such as ``scale``.

        Raises:
            ValueError: ``ref_labels`` without ``labels``, or embeddings and labels that do not fit.
        """
        if indices_tuple is not None:
            raise ValueError("indices_tuple must be None: CrossModalLoss(loss, miner) calls the miner")
        if self.one_set and ref_ids is not None:
            raise ValueError("ref_ids cannot be given with one_set=True")
        if ref_ids is None and matching_ids is not None:
            raise ValueError("matching_ids need ref_ids, the ids of the texts")
        call = {"embeddings": embeddings, "labels": labels, "ref_emb": ref_emb, "ref_labels": ref_labels} | options
        if ref_ids is not None:
            call |= {"ref_ids": ref_ids, "matching_ids": matching_ids}
        if _takes_slots(self.loss):
            call |= {"slots": slots, "ref_slots": ref_slots}
        is_called_once = self.miner is None and not self.one_set and hasattr(self.pair_loss, "symmetric")
        if ref_ids is not None and is_called_once and not hasattr(self.pair_loss, "known_positives"):
            del call["ref_ids"], call["matching_ids"]
            self._warn_of_ids()
        if is_called_once and self.processes.is_alone:
            return self.loss(**call)
        with full_precision_call(embeddings=embeddings, ref_emb=ref_emb):
            call = joined_call(self, processes_of(self), call)
            with all_rows():
                if is_called_once:
                    return self.loss(**call)
                if self.one_set:
                    return self._loss_of_one_set(**call)
                return self._loss_of_two_sets(**call)

    def _warn_of_ids(self) -> None:
        """Warn once of a loss of both directions that takes no ids."""
        if not self._has_warned:
            self._has_warned = True
            warn_of_input(
                f"{type(self.pair_loss).__name__} takes no ref_ids, so captions of several images are negatives: "
                "without an attribute `symmetric`, it would be called for each direction with pairs that leave them out"
            )

    def _loss_of_one_set(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor, **options: Any
    ) -> Any:
        slots, ref_slots = options.pop("slots", None), options.pop("ref_slots", None)
        if slots is not None and ref_slots is not None:
            options["slots"] = joined_sets([slots, ref_slots])
        embeddings, labels = joined_sets([embeddings, ref_emb]), torch.cat([labels, ref_labels])
        pairs = None
        if self.miner is not None:
            pairs = self.miner(embeddings, labels)
        return self.loss(embeddings, labels, pairs, **options)

    def _loss_of_two_sets(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor, **options: Any
    ) -> Any:
        slots, ref_slots = options.pop("slots", None), options.pop("ref_slots", None)
        ref_ids, matching_ids = options.pop("ref_ids", None), options.pop("matching_ids", None)
        is_known = None
        if ref_ids is not None and getattr(self.pair_loss, "known_positives", True):
            is_known = known_positives(labels, ref_labels, ref_ids, matching_ids)
        value = self._loss_by_direction((embeddings, labels), (ref_emb, ref_labels), is_known, options)
        if self.pair_loss is not self.loss:
            value = value + sum(self.loss.regularization(embeddings, ref_emb, slots, ref_slots).values())
        return value

    def _loss_by_direction(
        self, images: tuple[Any, Any], texts: tuple[Any, Any], is_known: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """Return the loss of image to text, plus that of text to image.

        Args:
            images, texts: embeddings and labels.
            is_known: (B, C), which texts are known positives of which images; None for none.
            options: of the loss's call.
        """
        steps = {module: module.step for module in self.modules() if isinstance(module, Warmup)}
        is_symmetric = options.pop("symmetric", None)
        if is_symmetric is None:
            is_symmetric = self.symmetric  # of this call: a warm-up may end with the first direction
        if is_symmetric:
            _check_directions(options)
        if isinstance(self.distance, SetDistance) and images[0].shape[1] != texts[0].shape[1]:
            # Packed sets of unequal sizes, of which set_size is that of the images.
            unpacked = self.distance.unpack(images[0], texts[0])
            images, texts = (unpacked[0], images[1]), (unpacked[1], texts[1])
        value = self._loss_of_anchors(images, texts, is_known, options)
        if is_symmetric and not isinstance(value, Tensor):
            raise ValueError("DoNothingReducer gives no number that could be added up: symmetric=False")
        if is_symmetric:
            for module, step in steps.items():
                module.step = step  # both directions are one step
            if is_known is not None:
                is_known = is_known.T
            with captions_come_first(self):
                value = value + self._loss_of_anchors(texts, images, is_known, options)
        return value

    def _loss_of_anchors(
        self, anchors: tuple[Any, Any], candidates: tuple[Any, Any], is_known: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """Return the loss of anchors with their labels, by the miner's pairs without known positives."""
        pairs = None
        if self.miner is not None:
            pairs = self.miner(*anchors, *candidates)
        if is_known is not None:
            pairs = without_known(pairs or _all_pairs(anchors[1], candidates[1]), is_known)
        return self.pair_loss(*anchors, pairs, *candidates, **options)


def _takes_slots(loss: Any) -> bool:
    """Return whether a loss, or one of a warm-up, has a regularization of sets."""
    losses = (loss.first, loss.then) if isinstance(loss, Warmup) else (loss,)
    return any(hasattr(one, "regularization") for one in losses)


def _check_directions(options: dict[str, Any]) -> None:
    """Raise ``ValueError`` for what belongs to the texts, which are the anchors of the second direction."""
    for name, value in options.items():
        if math.prod(np.shape(value)) > 1:
            raise ValueError(
                f"{name} cannot be given with a miner or a loss of pytorch-metric-learning, which is called for each "
                "direction"
            )


def known_positives(labels: Tensor, text_labels: Tensor, ref_ids: Any, matching_ids: Any = None) -> Tensor:
    """Return which texts share an id with a text of an image, (B, C) bool, see ``ref_ids`` of ``PairLoss.forward``."""
    sides = {"embeddings": labels[:, None].float(), "ref_emb": text_labels[:, None].float()}  # only their labels count
    rows = sides | {"labels": labels, "ref_labels": text_labels, "ref_ids": ref_ids, "matching_ids": matching_ids}
    batch = Batch.of(rows | dict.fromkeys(["negatives", "negative_ids", "copies"]), {}, compares_vectors=True)
    return batch.known_mask()


def _all_pairs(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
    is_positive = labels[:, None] == ref_labels
    return *is_positive.nonzero(as_tuple=True), *(~is_positive).nonzero(as_tuple=True)
