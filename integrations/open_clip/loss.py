"""A metric loss in the place of open_clip's ClipLoss."""

import inspect

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import Tensor, distributed, nn

from vl_plugins.distributed import DistributedLoss, all_gather_rows, world_size
from vl_plugins.errors import UserError
from vl_plugins.integrations.cross_modal import (
    check_compares_sets,
    check_takes_references,
    compares_sets,
    cross_modal_loss,
    regularization,
    without_regularization,
)
from vl_plugins.integrations.open_clip.batch_record import BatchRecord
from vl_plugins.integrations.open_clip.non_finite import check_finite
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.losses import PairLoss
from vl_plugins.losses.triplet import HardestNegativeLoss
from vl_plugins.numerics import eager, full_precision
from vl_plugins.registry import create, create_loss, find_loss, format_options, options_of

__all__ = ["TwoTowerLoss", "build_loss", "create_pair_loss", "describe"]


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Image to text and text to image are added, or image to text only if the loss has an attribute ``symmetric`` that is
    False, see :func:`~vl_plugins.integrations.cross_modal.cross_modal_loss`. Regularization, as in ``smooth_chamfer``,
    is computed once and logged apart.

    With several processes, each computes the loss of the joined batch. The gradients, which data parallelism averages,
    are those of one process with the joined batch.

    Args:
        name: the loss's name; the term is logged as ``<name>_loss``.
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)`` for each direction.
        learned_scale: pass the model's logit scale to the loss as ``scale``.
        local_loss: compare only this process's images and texts with those of all processes, if
            :attr:`compares_own_rows`.
        record: of the training's batches: the step, by which ``warmup_steps`` count, and the image ids.
    """

    def __init__(
        self,
        name: str,
        loss: nn.Module,
        miner: nn.Module | None = None,
        learned_scale: bool = False,
        local_loss: bool = False,
        record: BatchRecord | None = None,
    ):
        super().__init__()
        self.name = name
        self.loss = loss
        self.pair_loss = without_regularization(loss)
        self.own_rows_loss = DistributedLoss(self.pair_loss)
        self.miner = miner
        self.learned_scale = learned_scale
        self.local_loss = local_loss
        self.record = record

    @property
    def compares_own_rows(self) -> bool:
        """Whether ``local_loss`` is set and the loss allows it; otherwise each process compares the joined batch."""
        has_rows = isinstance(self.pair_loss, PairLoss) and self.pair_loss.has_independent_pairs
        return self.local_loss and has_rows and self.miner is None

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        image_slots: Tensor | None = None,
        text_slots: Tensor | None = None,
        image_ids: Tensor | None = None,
    ) -> dict[str, Tensor] | Tensor:
        """Return the loss; with ``output_dict`` as ``{"<name>_loss": loss}``, with the terms of the regularization.

        Args:
            image_features: (B, D), or sets (B, K, D).
            text_features: (k * B, D) or (k * B, K, D), the k captions of an image side by side.
            logit_scale: 0-D or (1,), already exponentiated.
            logit_bias: 0-D or (1,), or None; not used.
            image_slots: (B, K, D), from which the sets were made; for the regularization.
            text_slots: (k * B, K, D).
            image_ids: (B,), integers, equal for the same image in any process: its texts are positives there too. Those
                of the record by default; without one all images are different.

        Raises:
            ValueError: texts or image ids that do not fit the images.
            NonFiniteLossError: the loss is NaN or infinite.
        """
        features = image_features, text_features
        terms = eager()(self._terms, *features, image_slots, text_slots, image_ids, logit_scale)
        eager()(check_finite, terms, *features, self.record)
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                terms[f"{self.name}_loss"] = terms[f"{self.name}_loss"] + 0 * unused.sum()
        return terms if output_dict else sum(terms.values(), start=logit_scale.new_zeros(()))

    def _terms(self, images, texts, image_slots, text_slots, image_ids, logit_scale) -> dict[str, Tensor]:
        labels = self._labels(images, texts, image_ids)
        options = {"scale": logit_scale} if self.learned_scale else {}
        if self.record is not None:
            for module in self.loss.modules():
                if isinstance(module, HardestNegativeLoss):
                    module.step = self.record.step
        terms = {}
        with torch.autocast(images.device.type, enabled=False):
            if self.compares_own_rows:
                loss = self.own_rows_loss(images, labels[0], texts, labels[1], **options)
                terms[f"{self.name}_loss"] = loss
                if self.pair_loss is self.loss:
                    return terms
            images, texts, *labels, image_slots, text_slots = all_gather_rows(
                images, texts, *labels, image_slots, text_slots
            )
            images, texts = full_precision(images, texts)  # the scale multiplies rounding errors
            if not terms:
                sides = images, labels[0], texts, labels[1]
                terms[f"{self.name}_loss"] = cross_modal_loss(self.pair_loss, *sides, self.miner, **options)
            return terms | regularization(self.loss, images, texts, image_slots, text_slots)

    def _labels(self, images: Tensor, texts: Tensor, image_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the labels of this process's images and texts, equal for the same image in any process."""
        number = len(images)
        if len(texts) % number if number else len(texts):
            raise ValueError(f"each image must have the same number of texts, got {len(texts)} for {number} images")
        if image_ids is None and self.record is not None:
            image_ids = self.record.image_ids
        if image_ids is None:  # all different
            image_ids = torch.arange(number) + (distributed.get_rank() << 32 if world_size() > 1 else 0)
        if len(image_ids) != number:
            raise ValueError(f"image_ids must be one for each of {number} images, got {len(image_ids)}")
        labels = image_ids.to(images.device)
        return labels, labels.repeat_interleave(len(texts) // max(1, number))


def create_pair_loss(options: PluginOptions) -> BaseMetricLossFunction:
    """Return the pytorch-metric-learning loss of ``--loss``; sets are compared by smooth-Chamfer similarity by default.

    Raises:
        UserError: an unknown name or option, or a loss with trainable parameters.
        ValueError: a hyper-parameter out of its range.
    """
    assert options.loss is not None
    kwargs = dict(options.loss_kwargs)
    if _learned_scale(options):
        del kwargs["scale"]
    for kind in ("reducer", "distance"):
        name = getattr(options, kind)
        if name is not None:
            if kind in kwargs:
                raise UserError(f"--{kind} and {kind}= in --loss-kwargs both name a {kind}: give one of them")
            kwargs[kind] = create(kind, name, **getattr(options, f"{kind}_kwargs"))
    makes_sets = options.head == "set"
    loss = create_loss(options.loss, **kwargs)
    check_takes_references(loss)
    pair_loss = without_regularization(loss)
    takes_scale = "scale" in inspect.signature(pair_loss.forward).parameters and hasattr(pair_loss, "scale")
    if _learned_scale(options) and not takes_scale:
        raise UserError(f"--loss-kwargs scale=learned: loss {options.loss!r} has no scale in its call")
    if makes_sets and "distance" not in kwargs and not compares_sets(loss):
        loss = create_loss(options.loss, **kwargs, distance="smooth_chamfer")
    if makes_sets:
        check_compares_sets(loss)
    # With a set head the parameters of the distance belong to the model.
    if set(loss.parameters()) - set(loss.distance.parameters() if makes_sets else ()):
        raise UserError(f"loss {options.loss!r} has trainable parameters, which open_clip's optimizer does not update")
    return loss


def build_loss(options: PluginOptions, **training) -> TwoTowerLoss:
    """Build the loss of ``--loss`` with its miner.

    Args:
        options: the launcher's flags.
        training: other arguments of :class:`TwoTowerLoss`, such as ``local_loss``.

    Raises:
        UserError, ValueError: as :func:`create_pair_loss`.
    """
    assert options.loss is not None
    loss = create_pair_loss(options)
    miner = None
    if options.miner is not None:
        miner_distance = {"distance": loss.distance} if options.head == "set" else {}
        miner = create("miner", options.miner, **{**miner_distance, **options.miner_kwargs})
    name = options.loss.rpartition(":")[2]
    return TwoTowerLoss(name, loss, miner, _learned_scale(options), **training)


def _learned_scale(options: PluginOptions) -> bool:
    return options.loss_kwargs.get("scale") == "learned"


def describe(options: PluginOptions) -> str:
    """Return the loss with its options and defaults in one line: ``unified(margin=0.2, scale=50.0, ...)``."""
    assert options.loss is not None
    defaults, of_all = options_of(find_loss(options.loss)), options_of(BaseMetricLossFunction)
    own = {
        name: value for name, value in defaults.items() if name not in of_all and value is not inspect.Parameter.empty
    }
    parts = [f"{options.loss}({format_options(own | options.loss_kwargs)})"]
    for kind in ("miner", "reducer", "distance"):
        name = getattr(options, kind)
        if name is not None:
            parts.append(f"{name}({format_options(getattr(options, f'{kind}_kwargs'))})")
    return ", ".join(parts)
