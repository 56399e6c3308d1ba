"""A metric loss in the place of open_clip's ClipLoss."""

import inspect
from argparse import Namespace

import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction
from torch import Tensor, nn

from vl_plugins.distributed import DistributedLoss, all_gather_rows
from vl_plugins.errors import UserError
from vl_plugins.integrations.cross_modal import (
    check_compares_sets,
    check_takes_references,
    compares_sets,
    cross_modal_loss,
    regularization,
    without_regularization,
)
from vl_plugins.integrations.open_clip.data import Steps
from vl_plugins.losses.triplet import HardestNegativeLoss
from vl_plugins.numerics import eager, full_precision
from vl_plugins.registry import create, create_loss

__all__ = ["TwoTowerLoss", "build_loss"]


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
        local_loss: compare only this process's images and texts with those of all processes, if the loss allows it.
        steps: the step, by which ``warmup_steps`` count, and the image ids; without ids all images are different.

    Attributes:
        compares_own_rows: True if ``local_loss`` is set and the loss allows it.
    """

    def __init__(
        self,
        name: str,
        loss: nn.Module,
        miner: nn.Module | None = None,
        learned_scale: bool = False,
        local_loss: bool = False,
        steps: Steps | None = None,
    ):
        super().__init__()
        self.name, self.loss, self.miner = name, loss, miner
        pair_loss = without_regularization(loss)
        self.compares_own_rows = local_loss and miner is None and getattr(pair_loss, "has_independent_pairs", False)
        self.pair_loss = DistributedLoss(pair_loss if self.compares_own_rows else _BothDirections(pair_loss, miner))
        self.learned_scale, self.steps = learned_scale, steps or Steps()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        image_slots: Tensor | None = None,
        text_slots: Tensor | None = None,
    ) -> dict[str, Tensor] | Tensor:
        """Return the loss; with ``output_dict`` as ``{"<name>_loss": loss}``, with the terms of the regularization.

        Args:
            image_features: (B, D), or sets (B, K, D).
            text_features: (k * B, D) or (k * B, K, D), the k captions of an image side by side.
            logit_scale: 0-D or (1,), already exponentiated.
            logit_bias: 0-D or (1,), or None; not used.
            image_slots: (B, K, D), from which the sets were made; for the regularization.
            text_slots: (k * B, K, D).

        Raises:
            ValueError: texts or image ids that do not fit the images.
            UserError: the loss is NaN or infinite.
        """
        sides = image_features, text_features, image_slots, text_slots
        terms = eager()(self._terms, *sides, {"scale": logit_scale} if self.learned_scale else {})
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                terms[f"{self.name}_loss"] = terms[f"{self.name}_loss"] + 0 * unused.sum()
        return terms if output_dict else sum(terms.values(), start=logit_scale.new_zeros(()))

    def _terms(self, images: Tensor, texts: Tensor, image_slots, text_slots, options) -> dict[str, Tensor]:
        for module in self.loss.modules():
            if isinstance(module, HardestNegativeLoss):
                module.step = self.steps.number
        ids = self.steps.image_ids
        labels = None if ids is None else ids.to(images.device)
        with torch.autocast(images.device.type, enabled=False):
            terms = {f"{self.name}_loss": self.pair_loss(images, labels, texts, **options)}
            if without_regularization(self.loss) is not self.loss:
                images, texts, *slots = all_gather_rows(images, texts, image_slots, text_slots)
                terms |= regularization(self.loss, *full_precision(images, texts), *slots)
        if not torch.stack([term.detach().isfinite().all() for term in terms.values()]).all():  # waits for the GPU
            values = ", ".join(f"{name} {term.item():g}" for name, term in terms.items())
            raise UserError(f"step {self.steps.number}: the loss is not finite ({values})")
        return terms


class _BothDirections(nn.Module):
    """:func:`~vl_plugins.integrations.cross_modal.cross_modal_loss` with the arguments of a loss."""

    def __init__(self, loss: nn.Module, miner: nn.Module | None):
        super().__init__()
        self.loss, self.miner = loss, miner

    def forward(self, images, labels, indices_tuple, texts, text_labels, **options) -> Tensor:
        return cross_modal_loss(self.loss, images, labels, texts, text_labels, self.miner, **options)


def build_loss(args: Namespace, steps: Steps | None = None) -> TwoTowerLoss:
    """Build the loss of ``--loss`` with its miner, reducer and distance.

    Sets are compared by smooth-Chamfer similarity if no other distance is given.

    Args:
        args: the launcher's options.
        steps: of the training.

    Raises:
        UserError: an unknown name or option, or a loss with trainable parameters.
        ValueError: a hyper-parameter out of its range.
    """
    options = dict(args.loss_kwargs)
    learned_scale = options.get("scale") == "learned"
    if learned_scale:
        del options["scale"]
    for kind in ("reducer", "distance"):
        name = getattr(args, kind)
        if name is not None:
            if kind in options:
                raise UserError(f"--{kind} and {kind}= in --loss-kwargs both name a {kind}: give one of them")
            options[kind] = create(kind, name, **getattr(args, f"{kind}_kwargs"))
    makes_sets = args.head == "set"
    loss: BaseMetricLossFunction = create_loss(args.loss, **options)
    check_takes_references(loss)
    if learned_scale:
        pair_loss = without_regularization(loss)
        if "scale" not in inspect.signature(pair_loss.forward).parameters or not hasattr(pair_loss, "scale"):
            raise UserError(f"--loss-kwargs scale=learned: loss {args.loss!r} has no scale in its call")
    if makes_sets:
        if "distance" not in options and not compares_sets(loss):
            loss = create_loss(args.loss, **options, distance="smooth_chamfer")
        check_compares_sets(loss)
    # With a set head the parameters of the distance belong to the model.
    if set(loss.parameters()) - set(loss.distance.parameters() if makes_sets else ()):
        raise UserError(f"loss {args.loss!r} has trainable parameters, which open_clip's optimizer does not update")
    miner = None
    if args.miner is not None:
        mined_by = {"distance": loss.distance} if makes_sets else {}
        miner = create("miner", args.miner, **{**mined_by, **args.miner_kwargs})
    name = args.loss.rpartition(":")[2]
    return TwoTowerLoss(name, loss, miner, learned_scale, args.local_loss, steps)
