"""Losses of images and captions for the trainers of sentence-transformers."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.losses import CachedLossMixin, RandContext
from sentence_transformers.base.losses.gradcache import _create_minibatch
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, distributed, nn
from torch.nn.functional import pad

from vl_plugins.distributed import DistributedLoss, all_gather_rows, world_size
from vl_plugins.errors import number, warn_of_input
from vl_plugins.integrations.sentence_transformers.scoring import join_sets
from vl_plugins.losses import CrossModalLoss, PairLoss, Warmup
from vl_plugins.losses.cross_modal import known_positives
from vl_plugins.numerics import full_precision
from vl_plugins.registry import create_loss

__all__ = ["CachedRetrievalLoss", "RetrievalLoss"]

NO_IMAGE = torch.iinfo(torch.int64).min  # the image id of negatives
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASHED_ROWS = 32  # at a time, because an image has some 150,000 values


class RetrievalLoss(nn.Module):
    """A loss of vl_plugins or of pytorch-metric-learning for the trainers of sentence-transformers.

    The first column of the data set is the anchor, such as an image, and the next ``num_positives`` columns are its
    positives, such as captions. Further columns are negatives of all rows. Rows of one image are positives of each
    other: those with equal integers in the column ``label``, image ids of the whole job, or without it those of equal
    anchors. A caption that equals one of an image's captions is no negative of that image, wherever it stands.

    Args:
        model: a ``SentenceTransformer``, or a ``MultiVectorEncoder``, whose sets are compared by smooth-Chamfer
            similarity unless there is a ``distance``.
        loss: as for :func:`~vl_plugins.registry.create_loss`: a name, a mapping with ``name`` and options, or a loss,
            the latter two with their own ``distance``. Losses of this package compare in both directions unless
            ``symmetric=False``, those of pytorch-metric-learning anchors with candidates.
        num_positives: number of columns with positives, >= 1.
        gather_across_devices: compare the batches of all processes, with the gradients of one process with all rows.
        options: of the named loss, such as ``margin`` and ``scale``. Give the trainer a
            :class:`~vl_plugins.integrations.sentence_transformers.LossStateCallback` for a loss that learns or counts,
            such as one with ``learn_scale=True``; a warning says so.

    Raises:
        UserError: an unknown loss or option.
        ValueError: too few columns, labels that are no integers, inputs that cannot be compared without labels, or a
            loss with parameters in several processes or with gradient caching.

    Example::

        loss = RetrievalLoss(model, "unified", margin=0.2, scale=50)
        trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss)
    """

    uses_gradient_cache = False
    is_in_checkpoints = False  # of a trainer, see LossStateCallback
    _has_warned = False

    def __init__(
        self,
        model: nn.Module,
        loss: Any = "unified",
        num_positives: int = 1,
        gather_across_devices: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.model = model
        self.num_positives = number("num_positives", num_positives, least=1, kind=int)
        self.gather_across_devices = gather_across_devices
        self.compares_sets = isinstance(model, MultiVectorEncoder)
        self._config = {"loss": loss, **options}
        if self.compares_sets and isinstance(loss, str) and loss != "smooth_chamfer":
            options = {"distance": "smooth_chamfer"} | options
        self.loss = create_loss(loss, gather_across_devices=gather_across_devices, **options)
        if not isinstance(self.loss, (BaseMetricLossFunction, CrossModalLoss)) and not gather_across_devices:
            raise ValueError(f"loss must be one of vl_plugins or of pytorch-metric-learning, got {self.loss}")
        self.takes_ids = _takes_ids(self.loss)
        if gather_across_devices and not self.takes_ids and not isinstance(self.loss, DistributedLoss):
            raise ValueError(f"gather_across_devices needs losses of this package alone, got {self.loss}")

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, given the preprocessed columns, anchors first, and integer image ids (B,) or None."""
        columns = list(sentence_features)
        rows = self._rows(columns, labels)
        if not self.compares_sets:
            return self._loss_of(embed_columns(self.model, columns), rows)
        return self._loss_of([self._embed(column) for column in columns], rows)

    def _rows(self, columns: Sequence[dict[str, Any]], labels: Tensor | None) -> tuple[Tensor, list[Tensor] | None]:
        """Return the images (B,), and the ids of the inputs of all further columns, (B,) each.

        There are none if inputs cannot be compared and labels say which image is which.
        """
        if (world_size() > 1 or self.uses_gradient_cache) and any(p.requires_grad for p in self.loss.parameters()):
            raise ValueError(f"{self.loss} has parameters, whose gradients would be neither averaged nor scaled")
        self._warn_of_state()
        if labels is None:
            return _input_keys(columns[0]), [_ids(column) for column in columns[1:]]
        if labels.ndim != 1 or labels.is_floating_point():
            raise ValueError(f"labels must be integer image ids (B,), got {labels.dtype} {tuple(labels.shape)}")
        try:
            ids = [_ids(column) for column in columns[1:]]
        except ValueError:
            ids = None
        return labels.long(), ids

    def _warn_of_state(self) -> None:
        """Warn in the first step of a training whose checkpoints do not have what the loss learns or counts."""
        if self.is_in_checkpoints or self._has_warned or not torch.is_grad_enabled():
            return
        self._has_warned = True
        if self.loss.state_dict():
            name = type(self.loss).__name__
            warn_of_input(
                f"the trainer's checkpoints do not have the parameters or the warm-up of {name}, which start anew when "
                "training resumes: give the trainer callbacks=[LossStateCallback(loss)]"
            )

    def _embed(self, column: dict[str, Any]) -> Tensor:
        if not self.compares_sets:
            return self.model(column)["sentence_embedding"]
        outputs = self.model(column, task=column["task"])
        return join_sets(outputs["token_embeddings"], outputs["attention_mask"])

    def _loss_of(self, embeddings: Sequence[Tensor], rows: tuple[Tensor, list[Tensor] | None]) -> Tensor:
        images, ids = rows
        k = self.num_positives
        anchors, captions = self._join(embeddings[:1]), self._join(embeddings[1 : 1 + k])
        call: dict[str, Any] = {"ref_emb": captions, "ref_labels": torch.cat([images] * k)}
        if ids is not None:
            call["ref_ids"] = torch.cat(ids[:k])
        if len(embeddings) > 1 + k:
            call["negatives"] = self._join(embeddings[1 + k :])
            if ids is not None:
                call["negative_ids"] = torch.cat(ids[k:])
        if not self.takes_ids:
            return self._loss_of_host(anchors, images, **call)
        return self.loss(anchors, images, **call)

    def _loss_of_host(
        self,
        anchors: Tensor,
        images: Tensor,
        ref_emb: Tensor,
        ref_labels: Tensor,
        ref_ids: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of pytorch-metric-learning, which takes pairs and no ids."""
        loss: Any = self.loss
        candidates, labels, ids = ref_emb, ref_labels, ref_ids
        if negatives is not None:
            candidates = torch.cat([ref_emb, negatives])
            labels = torch.cat([ref_labels, images.new_full((len(negatives),), NO_IMAGE)])
            ids = None if ids is None or negative_ids is None else torch.cat([ids, negative_ids])
        if self.gather_across_devices:
            loss, sides = loss.loss, full_precision(anchors, candidates)
            anchors, candidates, images, labels, ids = all_gather_rows(*sides, images, labels, ids)
        if isinstance(loss, CrossModalLoss):
            return loss(anchors, images, ref_emb=candidates, ref_labels=labels, ref_ids=ids)
        if ids is None:
            return loss(anchors, images, None, candidates, labels)
        known = known_positives(images, labels, ids)
        positive = images[:, None] == labels
        pairs = *positive.nonzero(as_tuple=True), *(~positive & ~known).nonzero(as_tuple=True)
        return loss(anchors, images, pairs, candidates, labels)

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate rows; sets are padded to the size of the largest one in all processes."""
        if self.compares_sets:
            size = torch.tensor(max(part.shape[1] for part in parts), device=parts[0].device)
            if self.gather_across_devices and world_size() > 1:
                distributed.all_reduce(size, op=distributed.ReduceOp.MAX)
            parts = [pad(part, (0, 0, 0, int(size) - part.shape[1])) for part in parts]
        return torch.cat(list(parts))

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options, for the model card."""
        own = {"num_positives": self.num_positives, "gather_across_devices": self.gather_across_devices}
        return self._config | own

    @property
    def citation(self) -> str:
        """BibTeX of the loss's paper for the model card; of pytorch-metric-learning's for its losses."""
        papers = {module.paper for module in self.loss.modules() if hasattr(module, "paper")}
        papers = papers or {"Musgrave et al. 2020, PyTorch Metric Learning"}
        return "\n".join(f"@misc{{vl_plugins_{i}, note={{{paper}}}}}" for i, paper in enumerate(sorted(papers)))


class CachedRetrievalLoss(CachedLossMixin, RetrievalLoss):
    """:class:`RetrievalLoss` of batches whose activations do not fit in memory, with equal value and gradients.

    Inputs are embedded in mini-batches, first without gradients and then again with them and with the same dropout (Gao
    et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").

    Args:
        model, loss, num_positives, gather_across_devices, options: see :class:`RetrievalLoss`.
        mini_batch_size: number of rows that are embedded at a time.
    """

    def __init__(self, model: nn.Module, *arguments: Any, mini_batch_size: int = 32, **options: Any):
        super().__init__(model, *arguments, **options)
        self.mini_batch_size = number("mini_batch_size", mini_batch_size, least=1, kind=int)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        rows: Any = self._rows(columns, labels)
        return CachedLossMixin.forward_cached(self, columns, rows)

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        loss = self._loss_of(list(map(self._join, reps)), labels)
        if with_backward:
            loss.backward()
        return loss.detach() if with_backward else loss

    def embed_minibatch(self, sentence_feature, begin, end, with_grad, copy_random_state, random_state=None):
        part = _create_minibatch(sentence_feature, begin, end)
        with random_state or nullcontext(), torch.set_grad_enabled(with_grad):
            state = RandContext(*part.values()) if copy_random_state else None
            return self._embed(part), state

    def get_config_dict(self) -> dict[str, Any]:
        return super().get_config_dict() | {"mini_batch_size": self.mini_batch_size}


def _takes_ids(loss: Any) -> bool:
    """Return whether a loss is of this package, and so are the parts of one that has parts."""
    if isinstance(loss, Warmup):
        return _takes_ids(loss.first) and _takes_ids(loss.then)
    return isinstance(getattr(loss, "base", loss), PairLoss)


def _input_keys(features: dict[str, Any]) -> Tensor:
    """Hash the input of each row of a column to 64 bits, (B,) int64; padding of tokens does not count."""
    tensors = {name: value for name, value in features.items() if isinstance(value, Tensor) and value.ndim > 0}
    tensors.pop("prompt_length", None)  # of the whole column
    if len(set(map(len, tensors.values()))) != 1 or {"cu_seq_lens_q", "offsets"} & tensors.keys():
        raise ValueError(
            f"{', '.join(tensors)} cannot be compared by rows: add a column `label` with integer image ids"
        )
    mask = tensors.pop("attention_mask", torch.empty(0))
    keys = torch.zeros((), dtype=torch.int64)
    for name in sorted(tensors):
        bits = tensors[name].flatten(1) if tensors[name].ndim > 1 else tensors[name][:, None]  # (B, N)
        if bits.is_floating_point():
            bits = bits.contiguous().view(INTEGERS[bits.element_size()])
        weights = mask if mask.shape == bits.shape else bits.new_ones(()).expand_as(bits)
        parts = zip(bits.split(HASHED_ROWS), weights.long().split(HASHED_ROWS), strict=True)
        sums = [(_mix(part + _mix(weight.cumsum(1))) * weight).sum(1) for part, weight in parts]
        keys = _mix(keys + torch.cat(sums))
    return keys


def _ids(column: dict[str, Any]) -> Tensor:
    """Return ids of the inputs of a column, (B,), equal for equal inputs; 0 or larger."""
    return _input_keys(column) & torch.iinfo(torch.int64).max


def _mix(values: Tensor) -> Tensor:
    """Map int64 to int64 one-to-one so that similar values become dissimilar (finalizer of SplitMix64)."""
    values = (values ^ (values >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    values = (values ^ (values >> 27)) * (0x94D049BB133111EB - 2**64)
    return values ^ (values >> 31)
