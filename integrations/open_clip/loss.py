"""A metric loss in the place of open_clip's ClipLoss."""

import functools
import inspect

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import Tensor, nn

from vl_plugins.distributed.gathering import BatchGatherer, GlobalBatch
from vl_plugins.errors import UserError
from vl_plugins.integrations.cross_modal import (
    check_compares_sets,
    compares_sets,
    cross_modal_loss,
    regularization,
    without_regularization,
)
from vl_plugins.integrations.open_clip.batch_record import BatchRecord
from vl_plugins.integrations.open_clip.non_finite import check_finite
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.triplet import HardestNegativeLoss
from vl_plugins.numerics import full_precision
from vl_plugins.registry import constructor_options, create_component, create_loss, format_options, loss_options
from vl_plugins.utils.eager import eager

__all__ = ["TwoTowerLoss", "build_loss", "create_pair_loss", "describe"]


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Image to text and text to image are added, or image to text only if the loss has an attribute ``symmetric`` that is
    False, see :func:`~vl_plugins.integrations.cross_modal.cross_modal_loss`. Regularization, as in ``smooth_chamfer``,
    is computed once and logged apart.

    With several processes the features are gathered, and gradients are those of ClipLoss: with ``gather_with_grad``
    those of one process with the whole batch, otherwise these divided by ``world_size``. With ``local_loss`` a process
    compares only its own images and texts with the gathered ones, if the processes' losses average to that of the whole
    batch: for means over positive pairs that are independent of each other. Any other loss is computed of the whole
    batch in each process. As in ClipLoss, ``local_loss`` without ``gather_with_grad`` has no gradients of candidates,
    so the gradient has another direction.

    Args:
        name: the loss's name; the term is logged as ``<name>_loss``.
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)`` for each direction.
        learned_scale: pass the model's logit scale to the loss as ``scale``.
        local_loss, gather_with_grad, rank, world_size: as in ``open_clip.ClipLoss``.
        record: of the training's batches: the step, by which ``warmup_steps`` count, and the image ids.
    """

    def __init__(
        self,
        name: str,
        loss: nn.Module,
        miner: nn.Module | None = None,
        learned_scale: bool = False,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        rank: int = 0,
        world_size: int = 1,
        record: BatchRecord | None = None,
    ):
        super().__init__()
        self.name = name
        self.loss = loss
        self.pair_loss = without_regularization(loss)
        self.miner = miner
        self.learned_scale = learned_scale
        self.gatherer = BatchGatherer(gather_with_grad, rank, world_size)
        self.symmetric = getattr(self.pair_loss, "symmetric", True)
        adds_up = isinstance(self.pair_loss, PairLoss) and self.pair_loss.adds_up_over_rows()
        self.compares_own_rows = local_loss and world_size > 1 and miner is None and adds_up
        self.record = record
        if record is not None:
            for module in loss.modules():
                if isinstance(module, HardestNegativeLoss):
                    module.register_forward_pre_hook(functools.partial(_set_training_calls, record))

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
            image_ids: (B,), integers on the CPU, equal for the same image in any process: its texts are positives there
                too. Those of the record by default; without one all images are different.

        Raises:
            ValueError: tensors that do not fit each other, or those of another process.
            NonFiniteLossError: the loss is NaN or infinite.
        """
        batch = eager()(self._global_batch, image_features, text_features, image_ids)
        with torch.autocast(image_features.device.type, enabled=False):
            terms = self._terms(image_features, text_features, logit_scale, image_slots, text_slots, batch)
        eager()(check_finite, terms, image_features, text_features, self.record)
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                terms[f"{self.name}_loss"] = terms[f"{self.name}_loss"] + 0 * unused.sum()
        return terms if output_dict else sum(terms.values(), start=logit_scale.new_zeros(()))

    def _global_batch(self, images: Tensor, texts: Tensor, image_ids: Tensor | None) -> GlobalBatch:
        if image_ids is None and self.record is not None:
            image_ids = self.record.image_ids
        return self.gatherer.global_batch(len(images), len(texts), image_ids, device=images.device)

    def _terms(self, images, texts, logit_scale, image_slots, text_slots, batch: GlobalBatch) -> dict[str, Tensor]:
        all_images, all_texts = self.gatherer.features(images, texts, batch)
        options = {"scale": logit_scale} if self.learned_scale else {}
        if self.compares_own_rows:
            loss = self._loss_of_own_rows(images, texts, all_images, all_texts, batch, options)
        else:
            if self.miner is not None or not isinstance(self.pair_loss, PairLoss):
                all_images, all_texts = full_precision(all_images, all_texts)  # the scale multiplies rounding errors
            loss = cross_modal_loss(
                self.pair_loss, all_images, batch.image_labels, all_texts, batch.text_labels, self.miner, **options
            )
        terms = {f"{self.name}_loss": loss}
        if self.pair_loss is not self.loss:
            if image_slots is not None:
                image_slots, text_slots = self.gatherer.features(image_slots, text_slots, batch)
            all_images, all_texts = full_precision(all_images, all_texts)
            terms |= regularization(self.loss, all_images, all_texts, image_slots, text_slots)
        return terms

    def _loss_of_own_rows(self, images, texts, all_images, all_texts, batch: GlobalBatch, options) -> Tensor:
        rank, options = self.gatherer.rank, {**options, "symmetric": False}
        if not self.gatherer.gather_with_grad:  # as in ClipLoss, also where they are this process's own
            all_images, all_texts = all_images.detach(), all_texts.detach()
        own_labels = batch.image_labels.split(batch.image_counts)[rank]
        loss = self.pair_loss(images, own_labels, None, all_texts, batch.text_labels, **options)
        if self.symmetric:
            own_labels = batch.text_labels.split(batch.text_counts)[rank]
            loss = loss + self.pair_loss(texts, own_labels, None, all_images, batch.image_labels, **options)
        return loss * batch.pair_weight


def _set_training_calls(record: BatchRecord, loss: HardestNegativeLoss, args: tuple) -> None:
    # The loss counts calls: a step may have several, and a resumed training starts at 0.
    loss.training_calls.fill_(record.step)


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
        if "scale" not in loss_options(options.loss, **kwargs):
            raise UserError(f"--loss-kwargs scale=learned: loss {options.loss!r} has no scale")
    for kind in ("reducer", "distance"):
        name = getattr(options, kind)
        if name is not None:
            if kind in kwargs:
                raise UserError(f"--{kind} and {kind}= in --loss-kwargs both name a {kind}: give one of them")
            kwargs[kind] = create_component(kind, name, **getattr(options, f"{kind}_kwargs"))
    makes_sets = options.head == "set"
    loss = create_loss(options.loss, **kwargs)
    if _learned_scale(options) and "scale" not in inspect.signature(loss.forward).parameters:
        raise UserError(f"--loss-kwargs scale=learned: {type(loss).__name__} takes no scale in its call")
    if makes_sets and "distance" not in kwargs and not compares_sets(loss):
        loss = create_loss(options.loss, **kwargs, distance="smooth_chamfer")
    if makes_sets:
        check_compares_sets(loss)
    if isinstance(loss, PairLoss) and loss.backend is not None:
        problem = loss.kernel_problem() or (options.miner and f"{options.miner} chooses the pairs")
        if problem:
            raise UserError(f"--loss-kwargs backend={loss.backend} cannot be used, because {problem}: leave it out")
    # With a set head the parameters of the distance belong to the model.
    if set(loss.parameters()) - set(loss.distance.parameters() if makes_sets else ()):
        raise UserError(f"loss {options.loss!r} has trainable parameters, which open_clip's optimizer does not update")
    return loss


def build_loss(options: PluginOptions, **training) -> TwoTowerLoss:
    """Build the loss of ``--loss`` with its miner.

    Args:
        options: the launcher's flags.
        training: other arguments of :class:`TwoTowerLoss`, such as ``world_size``.

    Raises:
        UserError, ValueError: as :func:`create_pair_loss`.
    """
    assert options.loss is not None
    loss = create_pair_loss(options)
    miner = None
    if options.miner is not None:
        miner_distance = {"distance": loss.distance} if options.head == "set" else {}
        miner = create_component("miner", options.miner, **{**miner_distance, **options.miner_kwargs})
    return TwoTowerLoss(options.loss, loss, miner, _learned_scale(options), **training)


def _learned_scale(options: PluginOptions) -> bool:
    return options.loss_kwargs.get("scale") == "learned"


def describe(options: PluginOptions) -> str:
    """Return the loss with its options and defaults in one line: ``unified(margin=0.2, scale=50.0, ...)``."""
    assert options.loss is not None
    base_options = constructor_options(BaseMetricLossFunction)
    defaults = loss_options(options.loss, **options.loss_kwargs)
    kwargs = {name: value for name, value in defaults.items() if name not in base_options} | options.loss_kwargs
    parts = [f"{options.loss}({format_options(kwargs)})"]
    for kind in ("miner", "reducer", "distance"):
        name = getattr(options, kind)
        if name is not None:
            parts.append(f"{name}({format_options(getattr(options, f'{kind}_kwargs'))})")
    return ", ".join(parts)
