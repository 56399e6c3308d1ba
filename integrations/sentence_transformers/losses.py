"""Losses of images and captions for the trainers of sentence-transformers."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import Tensor, distributed, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from vl_plugins.distributed import DistributedLoss, all_gather_rows, world_size
from vl_plugins.errors import number, warn_of_input
from vl_plugins.integrations.sentence_transformers import host
from vl_plugins.integrations.sentence_transformers.inputs import (
    Column,
    check_texts,
    hash_inputs,
    warn_of_hard_negatives,
)
from vl_plugins.integrations.sentence_transformers.processes import average_gradients, in_one_call
from vl_plugins.integrations.sentence_transformers.scoring import join_sets
from vl_plugins.losses import CrossModalLoss, PairLoss, Warmup
from vl_plugins.losses.cross_modal import known_positives
from vl_plugins.numerics import full_precision
from vl_plugins.registry import create_loss

__all__ = ["CachedRetrievalLoss", "RetrievalLoss"]

NO_IMAGE = torch.iinfo(torch.int64).min  # the image id of negatives


class Rows(NamedTuple):
    """What the B rows of a batch show.

    Attributes:
        images: (B,), equal for rows of one image.
        ids: (B,) of each further column, equal for equal inputs; None if inputs cannot be compared.
    """

    images: Tensor
    ids: list[Tensor] | None


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
        ValueError: too few columns, labels that are no integers, inputs that cannot be compared without labels, or
            paths of pictures that do not exist.

    Example::

        loss = RetrievalLoss(model, "unified", margin=0.2, scale=50)
        trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss)
    """

    uses_gradient_cache = False
    is_in_checkpoints = False  # of a trainer, see LossStateCallback
    _has_begun = False

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
        self.compares_sets = isinstance(model, host.MultiVectorEncoder)
        self._config = {"loss": loss} | options
        self._averages: list[RemovableHandle] = []  # of the gradients of parameters, in the last call
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
        if torch.is_grad_enabled():
            self._check_training(columns)
        for handle in self._averages:
            handle.remove()
        value = self._value(columns, self._rows(columns, labels))
        value, self._averages = average_gradients(value, self.loss.parameters())
        return value

    def _check_training(self, columns: Sequence[Column]) -> None:
        """Raise ``ValueError`` for paths of pictures that do not exist; warn in the first step of likely mistakes."""
        check_texts(self.model, columns)
        if self._has_begun:
            return
        self._has_begun = True
        if self.num_positives == 1:
            warn_of_hard_negatives(self.model, columns)
        if not self.is_in_checkpoints and self.loss.state_dict():
            name = type(self.loss).__name__
            warn_of_input(
                f"the trainer's checkpoints do not have the parameters or the warm-up of {name}, which start anew when "
                "training resumes: give the trainer callbacks=[LossStateCallback(loss)]"
            )

    def _rows(self, columns: Sequence[Column], labels: Tensor | None) -> Rows:
        if labels is None:
            return Rows(hash_inputs(columns[0]), [hash_inputs(column) for column in columns[1:]])
        if labels.ndim != 1 or labels.is_floating_point():
            raise ValueError(f"labels must be integer image ids (B,), got {labels.dtype} {tuple(labels.shape)}")
        try:
            ids = [hash_inputs(column) for column in columns[1:]]
        except ValueError:
            ids = None
        return Rows(labels.long(), ids)

    def _value(self, columns: list[Column], rows: Rows) -> Tensor:
        embed = self._embed_sets if self.compares_sets else self._embed_vectors
        outputs = in_one_call(self.model, embed, columns)
        return self._loss_of(outputs["sentence_embedding"], rows)

    @staticmethod
    def _embed_vectors(model: Any, columns: Sequence[Column]) -> dict[str, Tensor]:
        """Return embeddings (columns, B, D), by the host's name, under which ``MatryoshkaLoss`` cuts them."""
        return {"sentence_embedding": torch.stack(host.embed_columns(model, columns))}

    @staticmethod
    def _embed_sets(model: Any, columns: Sequence[Column]) -> dict[str, list[Tensor]]:
        sets = []
        for column in columns:
            outputs = model(column, task=column["task"])
            sets.append(join_sets(outputs["token_embeddings"], outputs["attention_mask"]))
        return {"sentence_embedding": sets}

    def _loss_of(self, embeddings: Sequence[Tensor], rows: Rows) -> Tensor:
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
            return self._loss_of_pairs(anchors, images, **call)
        return self.loss(anchors, images, **call)

    def _loss_of_pairs(
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
            if ids is not None and negative_ids is not None:
                ids = torch.cat([ids, negative_ids])
        if self.gather_across_devices:
            loss = loss.loss
            anchors, candidates = full_precision(anchors, candidates)
            anchors, candidates, images, labels, ids = all_gather_rows(anchors, candidates, images, labels, ids)
        if isinstance(loss, CrossModalLoss):
            return loss(anchors, images, ref_emb=candidates, ref_labels=labels, ref_ids=ids)
        if ids is None:
            return loss(anchors, images, None, candidates, labels)
        positive = images[:, None] == labels
        negative = ~positive & ~known_positives(images, labels, ids)
        pairs = positive.nonzero(as_tuple=True) + negative.nonzero(as_tuple=True)
        return loss(anchors, images, pairs, candidates, labels)

    def _join(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Concatenate rows of vectors, or of sets, which are padded to the size of the largest one in all processes."""
        if not self.compares_sets:
            return torch.cat(tuple(embeddings))
        size = torch.tensor(max(sets.shape[1] for sets in embeddings), device=embeddings[0].device)
        if self.gather_across_devices and world_size() > 1:
            distributed.all_reduce(size, op=distributed.ReduceOp.MAX)
        padded = []
        for sets in embeddings:
            padded.append(pad(sets, (0, 0, 0, int(size) - sets.shape[1])))
        return torch.cat(padded)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options, for the model card."""
        columns = {"num_positives": self.num_positives, "gather_across_devices": self.gather_across_devices}
        return self._config | columns

    @property
    def citation(self) -> str:
        """BibTeX of the loss's paper for the model card; of pytorch-metric-learning's for its losses."""
        papers = {module.paper for module in self.loss.modules() if hasattr(module, "paper")}
        papers = papers or {"Musgrave et al. 2020, PyTorch Metric Learning"}
        return "\n".join(f"@misc{{vl_plugins_{i}, note={{{paper}}}}}" for i, paper in enumerate(sorted(papers)))


class CachedRetrievalLoss(host.CachedLossMixin, RetrievalLoss):
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

    def _value(self, columns: list[Column], rows: Any) -> Tensor:
        call: Any = CachedCall(self)
        value = host.CachedLossMixin.forward_cached(call, columns, rows)
        if call.value.requires_grad:
            value = value + call.value - call.value.detach()
        return value

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """Return the loss of embeddings, of each column in mini-batches, and of ``labels``, which are :class:`Rows`.

        With ``with_backward``, the embeddings get their gradients, and the value keeps its graph to the parameters of
        the loss alone.
        """
        value = self._loss_of([self._join(column) for column in reps], labels)
        if not with_backward:
            return value
        embeddings = list(chain.from_iterable(reps))
        parameters = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(value, embeddings + parameters, allow_unused=True)
        for rows, gradient in zip(embeddings, gradients, strict=False):
            rows.grad = gradient
        value = value.detach()
        for parameter, gradient in zip(parameters, gradients[len(embeddings) :], strict=True):
            if gradient is not None:
                value = value + (gradient * (parameter - parameter.detach())).sum()  # adds 0 to the value
        return value

    def embed_minibatch(self, sentence_feature, begin, end, with_grad, copy_random_state, random_state=None):
        column = host.create_minibatch(sentence_feature, begin, end)
        with random_state or nullcontext(), torch.set_grad_enabled(with_grad):
            state = host.RandContext(*column.values()) if copy_random_state else None
            if self.compares_sets:
                return self._embed_sets(self.model, [column])["sentence_embedding"][0], state
            return self.model(column)["sentence_embedding"], state

    def get_config_dict(self) -> dict[str, Any]:
        return super().get_config_dict() | {"mini_batch_size": self.mini_batch_size}


class CachedCall:
    """Stands for a cached loss in one call of the host, and keeps the value with its graph, which the host cuts off.

    The value is that of ``MatryoshkaLoss`` if it has replaced ``calculate_loss``, so its weights count.
    """

    value: Tensor

    def __init__(self, loss: CachedRetrievalLoss):
        self.loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        self.value = self.loss.calculate_loss(reps, labels, with_backward=with_backward)
        return self.value


def _takes_ids(loss: Any) -> bool:
    """Return whether a loss is of this package, and so are the parts of one that has parts."""
    if isinstance(loss, Warmup):
        return _takes_ids(loss.first) and _takes_ids(loss.then)
    return isinstance(getattr(loss, "base", loss), PairLoss)
