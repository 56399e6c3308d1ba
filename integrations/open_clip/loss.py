"""A metric loss in the place of open_clip's ClipLoss."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.reducers import MeanReducer
from torch import nn

from vl_plugins.distances.base import SetDistance
from vl_plugins.distributed import Ring
from vl_plugins.functional import circular_variance
from vl_plugins.functional.precision import full_precision
from vl_plugins.integrations.open_clip.gathering import JoinedBatch, Processes
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.cross_modal import one_direction, pair_loss_of
from vl_plugins.losses.hardest_negative import HardestNegativeLoss
from vl_plugins.registry import (
    REQUIRED,
    constructor_options,
    create_component,
    create_loss,
    format_options,
    loss_options,
)
from vl_plugins.utils.eager import eager
from vl_plugins.utils.errors import UserError

__all__ = ["TwoTowerLoss", "build_loss", "create_pair_loss", "describe"]

LEARNED = "learned"


class Labels(NamedTuple):
    """Of images (N,) and texts (k * N,) of all processes, and of those of this one."""

    images: torch.Tensor
    texts: torch.Tensor
    own_images: torch.Tensor
    own_texts: torch.Tensor


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Both directions are trained, image to text and text to image. A loss that adds them itself says so with an attribute
    ``symmetric``, as all of ours do, and is called once on the whole batch. A miner chooses pairs for one direction at
    a time; there, as for any other loss, each direction is one call and the two are added. Where the option
    ``symmetric`` is False it is image to text only.

    With several processes the features are gathered by open_clip's own function, and gradients are those of ClipLoss:
    with ``gather_with_grad`` those of one process with the joined batch, without it these divided by ``world_size``.
    ``local_loss`` saves time, each process compares its own images and texts with the gathered ones, where that gives
    the same, see :meth:`~vl_plugins.losses.base.PairLoss.adds_up_over_rows`. Any other loss is computed of the joined
    batch in each process. Without ``gather_with_grad`` a ``local_loss`` has no gradient for the others' negatives, as
    that of ClipLoss; its direction is not the loss's.

    A loss with regularization, as ``smooth_chamfer``, has it computed once for both directions, on all features, and
    logged apart.

    Args:
        name: the loss's name; the term is logged as ``<name>_loss``.
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``; or, where it has a method
            ``regularization``, its ``base`` is.
        miner: gives the ``indices_tuple`` of one direction, or None.
        learned_scale: use the model's logit scale as the loss's ``scale``.
        local_loss, gather_with_grad, rank, world_size, use_horovod: as in ``open_clip.ClipLoss``.
        log_every: log the circular variance of embedding sets at each so many calls; 0 for never.
        image_ids: returns the ``image_ids`` of a call that is given none, or None.
        ring: through which processes compare their features instead of gathering them; gradients are those of
            ``gather_with_grad``. Of one of our losses that can, averaged by ``MeanReducer``.
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
        use_horovod: bool = False,
        log_every: int = 0,
        image_ids: Callable[[], torch.Tensor | None] = lambda: None,
        ring: Ring | None = None,
    ):
        super().__init__()
        self.name = name
        self.loss = loss
        self.pair_loss = pair_loss_of(loss)
        self.miner = miner
        self.learned_scale = learned_scale
        self.gather_with_grad = gather_with_grad
        self.processes = Processes(gather_with_grad, rank, world_size, use_horovod)
        self.through_ring = ring is not None and world_size > 1
        if self.through_ring:
            self.pair_loss.ring = ring
        adds_up = isinstance(self.pair_loss, PairLoss) and self.pair_loss.adds_up_over_rows()
        self.by_rows = local_loss and world_size > 1 and miner is None and adds_up and not self.through_ring
        self.log_every = log_every
        self.image_ids = image_ids
        self.calls = 0
        self._labels: dict[tuple, Labels] = {}
        adds_directions = hasattr(self.pair_loss, "symmetric")
        self.text_to_image = getattr(self.pair_loss, "symmetric", True)
        self.one_call = adds_directions and miner is None and not self.by_rows
        if adds_directions and not self.one_call:
            self.pair_loss.symmetric = False

    def continue_after(self, steps: int) -> None:
        """Go on with the loss's warm-up as after so many steps of training."""
        if isinstance(self.pair_loss, HardestNegativeLoss):
            self.pair_loss.training_calls = steps * self.pair_loss.calls_per_step

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor,
        logit_bias: torch.Tensor | None = None,
        output_dict: bool = False,
        image_slots: torch.Tensor | None = None,
        text_slots: torch.Tensor | None = None,
        image_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """Return the loss, where ``output_dict`` is set as ``{"<name>_loss": loss}`` with the regularization's terms.

        Args:
            image_features: (B, D), or sets (B, K, D).
            text_features: (k * B, D) or (k * B, K, D), the k captions of an image side by side.
            logit_scale: 0-D or (1,), already exponentiated.
            logit_bias: 0-D or (1,), or None. No loss of ours uses it.
            image_slots: (B, K, D), from which the sets were made; for the regularization.
            text_slots: (k * B, K, D).
            image_ids: (B,), integers on the CPU, equal for the same image in any process: its texts are positives there
                too. Without them all are different images.

        Raises:
            ValueError: tensors that do not fit each other, or those of another process.
        """
        # Half-precision similarities times a scale of 50 would be off by 0.2 in the exponent. Our losses see to that
        # themselves, and some of their kernels multiply half-precision features exactly.
        if self.miner is not None or not isinstance(self.pair_loss, PairLoss):
            image_features, text_features = full_precision(image_features, text_features)
        batch = eager()(self._join, len(image_features), len(text_features), image_ids)
        with torch.autocast(image_features.device.type, enabled=False):
            terms = self._terms(image_features, text_features, logit_scale, image_slots, text_slots, batch)
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                terms[f"{self.name}_loss"] = terms[f"{self.name}_loss"] + 0 * unused.sum()
        if image_features.ndim == 3:
            self._log_variance(image_features, text_features)
        return terms if output_dict else sum(terms.values())

    def _terms(
        self,
        images: torch.Tensor,
        texts: torch.Tensor,
        logit_scale: torch.Tensor,
        image_slots: torch.Tensor | None,
        text_slots: torch.Tensor | None,
        batch: JoinedBatch,
    ) -> dict[str, torch.Tensor]:
        joined = (images, texts) if self.through_ring else self.processes.gather(images, texts, batch)
        labels = eager()(self._labels_of, batch, images.device)
        options = {"scale": logit_scale} if self.learned_scale else {}
        loss = self._loss(images, texts, *joined, labels, options)
        if (self.by_rows or self.through_ring) and batch.share != 1:
            loss = loss * batch.share
        terms = {f"{self.name}_loss": loss}
        if self.pair_loss is not self.loss:
            if image_slots is not None:
                image_slots, text_slots = self.processes.gather(image_slots, text_slots, batch)
            terms |= self.loss.regularization(*full_precision(*joined), image_slots, text_slots)
        return terms

    def _loss(
        self,
        images: torch.Tensor,
        texts: torch.Tensor,
        all_images: torch.Tensor,
        all_texts: torch.Tensor,
        labels: Labels,
        options: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        if self.through_ring:
            return self.pair_loss(images, labels.own_images, ref_emb=texts, ref_labels=labels.own_texts, **options)
        if self.one_call:
            return self.pair_loss(all_images, labels.images, ref_emb=all_texts, ref_labels=labels.texts, **options)
        compare = functools.partial(one_direction, self.pair_loss, self.miner, **options)
        image_labels, text_labels = labels.images, labels.texts
        if self.by_rows:
            image_labels, text_labels = labels.own_images, labels.own_texts
            if not self.gather_with_grad:  # none for candidates of this process either, as in ClipLoss
                all_images, all_texts = all_images.detach(), all_texts.detach()
        else:
            images, texts = all_images, all_texts
        loss = compare(images, image_labels, all_texts, labels.texts)
        if self.text_to_image:
            loss = loss + compare(texts, text_labels, all_images, labels.images)
        return loss

    def _join(self, num_images: int, num_texts: int, image_ids: torch.Tensor | None) -> JoinedBatch:
        return self.processes.join(num_images, num_texts, self.image_ids() if image_ids is None else image_ids)

    def _labels_of(self, batch: JoinedBatch, device: torch.device) -> Labels:
        # The same tensors in each step: the pairs of labels that a loss knows already it need not search.
        key = batch.sizes, batch.captions_per_image, device
        if batch.labels is not None:
            return self._make_labels(batch, device)
        if key not in self._labels:
            if len(self._labels) == 4:  # batches of ever new sizes
                self._labels.clear()
            self._labels[key] = self._make_labels(batch, device)
        return self._labels[key]

    def _make_labels(self, batch: JoinedBatch, device: torch.device) -> Labels:
        numbers = torch.arange(sum(batch.sizes)) if batch.labels is None else torch.from_numpy(batch.labels)
        images = numbers.to(device)
        texts = images.repeat_interleave(batch.captions_per_image)
        rank, k = self.processes.rank, batch.captions_per_image
        start = sum(batch.sizes[:rank])
        stop = start + batch.sizes[rank]
        return Labels(images, texts, images[start:stop].clone(), texts[k * start : k * stop].clone())

    @torch.no_grad()
    def _log_variance(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        if self.log_every and self.calls % self.log_every == 0:
            of_images, of_texts = (circular_variance(sets).mean().item() for sets in (images, texts))
            logging.info(f"Circular variance of the sets: images {of_images:.4g}, texts {of_texts:.4g}")
        self.calls += 1


def create_pair_loss(options: PluginOptions) -> BaseMetricLossFunction:
    """Return the pytorch-metric-learning loss that the launcher's flags ask for.

    Sets are compared by smooth-Chamfer similarity unless the flags name another.

    Raises:
        UserError: an unknown name or option, or a loss that has parameters of its own.
        ValueError: a hyper-parameter out of its range.
    """
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
    if makes_sets and "distance" not in kwargs and not isinstance(loss.distance, SetDistance):
        loss = create_loss(options.loss, **kwargs, distance="smooth_chamfer")
    if makes_sets and not isinstance(loss.distance, SetDistance):
        raise UserError(
            f"--head set: {type(loss.distance).__name__} does not compare sets; "
            "give --distance smooth_chamfer, chamfer, mil or match_probability"
        )
    # With a set head those of the distance belong to the model.
    learned_with_the_model = set(loss.distance.parameters()) if makes_sets else set()
    _check_backend(options, loss)
    if options.exchange == "ring":
        _check_ring(options, loss)
    if set(loss.parameters()) - learned_with_the_model:
        raise UserError(
            f"loss {options.loss!r} has trainable parameters of its own, which open_clip's optimizer would never update"
        )
    return loss


def _check_backend(options: PluginOptions, loss: BaseMetricLossFunction) -> None:
    """Refuse a backend that could not be used, before training starts."""
    backend = getattr(loss, "backend", None)
    if backend in (None, "functional") or not isinstance(loss, PairLoss):
        return
    problem = loss.kernel_problem()
    if problem is None and options.miner is not None:
        problem = f"{options.miner} chooses the pairs"
    if problem is not None:
        raise UserError(f"--loss-kwargs backend={backend} cannot be used, because {problem}: leave it out")


def _check_ring(options: PluginOptions, loss: BaseMetricLossFunction) -> None:
    """Refuse a ring that could not be used, before training starts."""
    problem = None
    if options.miner is not None:
        problem = f"{options.miner} chooses the pairs"
    elif not isinstance(loss, PairLoss):
        problem = f"{type(loss).__name__} needs all features at once"
    elif type(loss.reducer) is not MeanReducer or loss.embedding_regularizer is not None:
        problem = "each process averages its own pairs, by MeanReducer and without a regularizer"
    else:
        ring, loss.ring = loss.ring, Ring()
        problem = loss.kernel_problem()
        loss.ring = ring
    if problem is not None:
        raise UserError(f"--exchange ring cannot be used, because {problem}: leave it out")


def build_loss(
    options: PluginOptions,
    local_loss: bool = False,
    gather_with_grad: bool = False,
    rank: int = 0,
    world_size: int = 1,
    use_horovod: bool = False,
    accum_freq: int = 1,
    log_every_n_steps: int = 0,
    loss: BaseMetricLossFunction | None = None,
    image_ids: Callable[[], torch.Tensor | None] = lambda: None,
) -> TwoTowerLoss:
    """Build the loss that the launcher's flags ask for.

    ``accum_freq`` is the number of batches in a training step. ``loss`` is that of :func:`create_pair_loss`, where
    it was created before. ``image_ids`` tells those of the images of a call.

    Raises:
        UserError: an unknown name or option, or a loss that has parameters of its own.
        ValueError: a hyper-parameter out of its range.
    """
    if loss is None:
        loss = create_pair_loss(options)
    miner = None
    if options.miner is not None:
        of_sets = {"distance": loss.distance} if options.head == "set" else {}
        miner = create_component("miner", options.miner, **{**of_sets, **options.miner_kwargs})
    two_towers = TwoTowerLoss(
        options.loss,
        loss,
        miner,
        _learned_scale(options),
        local_loss,
        gather_with_grad,
        rank,
        world_size,
        use_horovod,
        log_every=log_every_n_steps * accum_freq,
        image_ids=image_ids,
        ring=Ring() if options.exchange == "ring" else None,
    )
    pair_loss = two_towers.pair_loss
    if isinstance(pair_loss, HardestNegativeLoss):
        pair_loss.calls_per_step = accum_freq * (1 if two_towers.one_call or not two_towers.text_to_image else 2)
    return two_towers


def _learned_scale(options: PluginOptions) -> bool:
    return options.loss_kwargs.get("scale") == LEARNED


def describe(options: PluginOptions) -> str:
    """Write the loss in force in one line, its own defaults included: ``unified(margin=0.2, scale=50.0, ...)``."""
    of_every_loss = constructor_options(BaseMetricLossFunction)
    defaults = {
        name: value
        for name, value in loss_options(options.loss, **options.loss_kwargs).items()
        if name not in of_every_loss and value is not REQUIRED
    }
    parts = [f"{options.loss}({format_options({**defaults, **options.loss_kwargs})})"]
    for kind in ("miner", "reducer", "distance"):
        name = getattr(options, kind)
        if name is not None:
            parts.append(f"{name}({format_options(getattr(options, f'{kind}_kwargs'))})")
    return ", ".join(parts)
