"""A metric loss in the place of open_clip's ClipLoss."""

import torch
from open_clip.loss import gather_features
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import nn

from vl_plugins.components import create_component
from vl_plugins.errors import UserError
from vl_plugins.functional.precision import full_precision
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.losses.hardest_negative import HardestNegativeLoss
from vl_plugins.options import REQUIRED, constructor_options, format_options
from vl_plugins.registry import create_loss, loss_options

__all__ = ["TwoTowerLoss", "build_loss", "describe"]

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

    Args:
        name: the loss's name; the term is logged as ``<name>_loss``.
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        miner: gives the ``indices_tuple`` of one direction, or None.
        learned_scale: use the model's logit scale as the loss's ``scale``.
        local_loss, gather_with_grad, rank, world_size, use_horovod: as in ``open_clip.ClipLoss``.
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
    ):
        super().__init__()
        self.name = name
        self.loss = loss
        self.miner = miner
        self.learned_scale = learned_scale
        self.local_loss = local_loss and world_size > 1
        self.gather_with_grad = gather_with_grad
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod
        adds_directions = hasattr(loss, "symmetric")
        self.text_to_image = getattr(loss, "symmetric", True)
        self.one_call = adds_directions and miner is None and not self.local_loss
        if adds_directions and not self.one_call:
            loss.symmetric = False

    def forward(
        self,
        image_features: torch.Tensor,
        text_features: torch.Tensor,
        logit_scale: torch.Tensor,
        logit_bias: torch.Tensor | None = None,
        output_dict: bool = False,
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """Return the loss, as ``{"<name>_loss": loss}`` where ``output_dict`` is set.

        Args:
            image_features: (B, D).
            text_features: (k * B, D), the k captions of an image side by side.
            logit_scale: 0-D or (1,), already exponentiated.
            logit_bias: 0-D or (1,), or None. No loss of ours uses it.
        """
        # Half-precision similarities times a scale of 50 would be off by 0.2 in the exponent.
        with torch.autocast(image_features.device.type, enabled=False):
            loss = self._loss(*full_precision(image_features, text_features), logit_scale)
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                loss = loss + 0 * unused.sum()
        return {f"{self.name}_loss": loss} if output_dict else loss

    def _loss(self, images: torch.Tensor, texts: torch.Tensor, logit_scale: torch.Tensor) -> torch.Tensor:
        all_images, all_texts = images, texts
        if self.world_size > 1:
            all_images, all_texts = gather_features(
                images,
                texts,
                local_loss=self.local_loss,
                gather_with_grad=self.gather_with_grad,
                rank=self.rank,
                world_size=self.world_size,
                use_horovod=self.use_horovod,
            )
            if not self.local_loss:
                images, texts = all_images, all_texts
        image_labels, text_labels = _labels(
            images, texts, first_image=self.rank * len(images) if self.local_loss else 0
        )
        all_image_labels, all_text_labels = _labels(all_images, all_texts)

        if self.learned_scale:
            self.loss.scale = logit_scale
        try:
            if self.one_call:
                return self.loss(images, image_labels, ref_emb=texts, ref_labels=text_labels)
            loss = self._one_direction(images, image_labels, all_texts, all_text_labels)
            if self.text_to_image:
                loss = loss + self._one_direction(texts, text_labels, all_images, all_image_labels)
            return loss
        finally:
            if self.learned_scale:
                self.loss.scale = None  # hold no graph between steps

    def _one_direction(self, queries, query_labels, candidates, candidate_labels) -> torch.Tensor:
        pairs = None
        if self.miner is not None:
            pairs = self.miner(queries, query_labels, candidates, candidate_labels)
        return self.loss(queries, query_labels, pairs, candidates, candidate_labels)


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


def build_loss(
    options: PluginOptions,
    local_loss: bool = False,
    gather_with_grad: bool = False,
    rank: int = 0,
    world_size: int = 1,
    use_horovod: bool = False,
    accum_freq: int = 1,
    steps_before: int = 0,
) -> TwoTowerLoss:
    """Build the loss that the launcher's flags ask for.

    ``accum_freq`` is open_clip's number of batches in a training step. ``steps_before`` is the number of steps that the
    model has been trained for: a resumed run goes on with the loss's warm-up where it was.

    Raises:
        UserError: an unknown name or option, or a loss that has parameters of its own.
        ValueError: a hyper-parameter out of its range.
    """
    kwargs = dict(options.loss_kwargs)
    learned_scale = kwargs.get("scale") == LEARNED
    if learned_scale:
        if "scale" not in loss_options(options.loss):
            raise UserError(f"--loss-kwargs scale=learned: loss {options.loss!r} has no scale")
        del kwargs["scale"]
    if options.reducer is not None:
        if "reducer" in kwargs:
            raise UserError("--reducer and reducer= in --loss-kwargs both name a reducer: give one of them")
        kwargs["reducer"] = create_component("reducer", options.reducer, **options.reducer_kwargs)
    loss = create_loss(options.loss, **kwargs)
    if next(loss.parameters(), None) is not None:
        raise UserError(
            f"loss {options.loss!r} has trainable parameters of its own, which open_clip's optimizer would never update"
        )
    miner = create_component("miner", options.miner, **options.miner_kwargs) if options.miner is not None else None
    two_towers = TwoTowerLoss(
        options.loss, loss, miner, learned_scale, local_loss, gather_with_grad, rank, world_size, use_horovod
    )
    if isinstance(loss, HardestNegativeLoss):
        loss.calls_per_step = accum_freq * (1 if two_towers.one_call or not two_towers.text_to_image else 2)
        loss.training_calls = steps_before * loss.calls_per_step
    return two_towers


def describe(options: PluginOptions) -> str:
    """Write the loss in force in one line, its own defaults included: ``unified(margin=0.2, scale=50.0, ...)``."""
    of_every_loss = constructor_options(BaseMetricLossFunction)
    defaults = {
        name: value
        for name, value in loss_options(options.loss).items()
        if name not in of_every_loss and value is not REQUIRED
    }
    parts = [f"{options.loss}({format_options({**defaults, **options.loss_kwargs})})"]
    if options.miner is not None:
        parts.append(f"{options.miner}({format_options(options.miner_kwargs)})")
    if options.reducer is not None:
        parts.append(f"{options.reducer}({format_options(options.reducer_kwargs)})")
    return ", ".join(parts)
