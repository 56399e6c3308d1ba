"""A metric loss in the place of open_clip's ClipLoss."""

import functools
import logging

import torch
from open_clip.loss import gather_features
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import nn

from vl_plugins.components import create_component
from vl_plugins.distances.base import SetDistance
from vl_plugins.errors import UserError
from vl_plugins.functional import circular_variance
from vl_plugins.functional.precision import full_precision
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.cross_modal import one_direction, pair_loss_of
from vl_plugins.losses.hardest_negative import HardestNegativeLoss
from vl_plugins.options import REQUIRED, constructor_options, format_options
from vl_plugins.registry import create_loss, loss_options

__all__ = ["TwoTowerLoss", "build_loss", "create_pair_loss", "describe"]

LEARNED = "learned"


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Both directions are trained, image to text and text to image. A loss that adds them itself says so with an attribute
    ``symmetric``, as all of ours do, and is called once on the whole batch. A miner chooses pairs for one direction at
    a time, and ``local_loss`` has other candidates in each: there, as for any other loss, each direction is one call
    and the two are added. Where the option ``symmetric`` is False it is image to text only.

    With several processes the features are gathered by open_clip's own function, so ``local_loss`` and
    ``gather_with_grad`` scale the gradients exactly as they do for ClipLoss. With ``local_loss`` a loss sees the
    positive pairs of its own process only; sig_ms and lin_ms of ``goal`` compare a pair with those.

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
    ):
        super().__init__()
        self.name = name
        self.loss = loss
        self.pair_loss = pair_loss_of(loss)
        self.miner = miner
        self.learned_scale = learned_scale
        self.local_loss = local_loss and world_size > 1
        self.gather_with_grad = gather_with_grad
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod
        self.log_every = log_every
        self.calls = 0
        self._labels: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        adds_directions = hasattr(self.pair_loss, "symmetric")
        self.text_to_image = getattr(self.pair_loss, "symmetric", True)
        self.one_call = adds_directions and miner is None and not self.local_loss
        if adds_directions and not self.one_call:
            self.pair_loss.symmetric = False

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor,
        logit_bias: torch.Tensor | None = None,
        output_dict: bool = False,
        image_slots: torch.Tensor | None = None,
        text_slots: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """Return the loss, where ``output_dict`` is set as ``{"<name>_loss": loss}`` with the regularization's terms.

        Args:
            image_features: (B, D), or sets (B, K, D).
            text_features: (k * B, D) or (k * B, K, D), the k captions of an image side by side.
            logit_scale: 0-D or (1,), already exponentiated.
            logit_bias: 0-D or (1,), or None. No loss of ours uses it.
            image_slots: (B, K, D), from which the sets were made; for the regularization.
            text_slots: (k * B, K, D).
        """
        # Half-precision similarities times a scale of 50 would be off by 0.2 in the exponent. Our losses see to that
        # themselves, and some of their kernels multiply half-precision features exactly.
        if self.miner is not None or not isinstance(self.pair_loss, PairLoss):
            image_features, text_features = full_precision(image_features, text_features)
        with torch.autocast(image_features.device.type, enabled=False):
            terms = self._terms(image_features, text_features, logit_scale, image_slots, text_slots)
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
    ) -> dict[str, torch.Tensor]:
        all_images, all_texts = self._gather(images, texts, self.local_loss)
        if not self.local_loss:
            images, texts = all_images, all_texts
        image_labels, text_labels = self._labels_of(
            images, texts, first_image=self.rank * len(images) if self.local_loss else 0
        )
        all_image_labels, all_text_labels = self._labels_of(all_images, all_texts)

        if self.learned_scale:
            self.pair_loss.scale = logit_scale
        try:
            if self.one_call:
                loss = self.pair_loss(images, image_labels, ref_emb=texts, ref_labels=text_labels)
            else:
                compare = functools.partial(one_direction, self.pair_loss, self.miner)
                loss = compare(images, image_labels, all_texts, all_text_labels)
                if self.text_to_image:
                    loss = loss + compare(texts, text_labels, all_images, all_image_labels)
        finally:
            if self.learned_scale:
                self.pair_loss.scale = None  # hold no graph between steps
        terms = {f"{self.name}_loss": loss}
        if self.pair_loss is not self.loss:
            if self.local_loss:
                all_images, all_texts = self._gather(images, texts, local_loss=False)
            if image_slots is not None:
                image_slots, text_slots = self._gather(image_slots, text_slots, local_loss=False)
            terms |= self.loss.regularization(*full_precision(all_images, all_texts), image_slots, text_slots)
        return terms

    def _labels_of(
        self, images: torch.Tensor, texts: torch.Tensor, first_image: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The same tensors in each step: the pairs of labels that a loss knows already it need not search.
        key = len(images), len(texts), first_image, images.device
        if key not in self._labels:
            if len(self._labels) == 4:  # batches of ever new sizes
                self._labels.clear()
            self._labels[key] = _labels(images, texts, first_image)
        return self._labels[key]

    def _gather(
        self, of_images: torch.Tensor, of_texts: torch.Tensor, local_loss: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.world_size == 1:
            return of_images, of_texts
        return gather_features(
            of_images,
            of_texts,
            local_loss=local_loss,
            gather_with_grad=self.gather_with_grad,
            rank=self.rank,
            world_size=self.world_size,
            use_horovod=self.use_horovod,
        )

    @torch.no_grad()
    def _log_variance(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        if self.log_every and self.calls % self.log_every == 0:
            of_images, of_texts = (circular_variance(sets).mean().item() for sets in (images, texts))
            logging.info(f"Circular variance of the sets: images {of_images:.4g}, texts {of_texts:.4g}")
        self.calls += 1


def _labels(images: torch.Tensor, texts: torch.Tensor, first_image: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Label images by position, and each text by its image: (B,) and (k * B,)."""
    captions_per_image, remainder = divmod(len(texts), max(len(images), 1))
    if remainder:
        raise ValueError(
            f"text_features must hold the same number of captions for each image: "
            f"got {len(texts)} texts for {len(images)} images"
        )
    labels = torch.arange(first_image, first_image + len(images), device=images.device)
    return labels, labels.repeat_interleave(captions_per_image)


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


def build_loss(
    options: PluginOptions,
    local_loss: bool = False,
    gather_with_grad: bool = False,
    rank: int = 0,
    world_size: int = 1,
    use_horovod: bool = False,
    accum_freq: int = 1,
    steps_before: int = 0,
    log_every_n_steps: int = 0,
    loss: BaseMetricLossFunction | None = None,
) -> TwoTowerLoss:
    """Build the loss that the launcher's flags ask for.

    ``accum_freq`` is open_clip's number of batches in a training step. ``steps_before`` is the number of steps that the
    model has been trained for: a resumed run goes on with the loss's warm-up where it was. ``loss`` is that of
    :func:`create_pair_loss`, where it was created before.

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
    )
    pair_loss = two_towers.pair_loss
    if isinstance(pair_loss, HardestNegativeLoss):
        pair_loss.calls_per_step = accum_freq * (1 if two_towers.one_call or not two_towers.text_to_image else 2)
        pair_loss.training_calls = steps_before * pair_loss.calls_per_step
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
