"""A metric loss in the place of open_clip's ClipLoss."""

import inspect
from argparse import Namespace

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
from vl_plugins.integrations.open_clip.data import Steps
from vl_plugins.losses import PairLoss
from vl_plugins.losses.triplet import HardestNegativeLoss
from vl_plugins.numerics import eager, full_precision
from vl_plugins.registry import create, create_loss

__all__ = ["NonFiniteLossError", "TwoTowerLoss", "build_loss"]

MOST_KEYS = 16  # in an error


class NonFiniteLossError(UserError):
    """The loss is NaN or infinite."""


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
        steps: the step, by which ``warmup_steps`` count, and the image ids; without ids all images are different.
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
        self.pair_loss = without_regularization(loss)
        self.own_rows_loss = DistributedLoss(self.pair_loss)
        self.learned_scale, self.local_loss, self.steps = learned_scale, local_loss, steps or Steps()

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
            NonFiniteLossError: the loss is NaN or infinite.
        """
        sides = image_features, text_features, image_slots, text_slots
        terms = self._terms(*sides, {"scale": logit_scale} if self.learned_scale else {})
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                terms[f"{self.name}_loss"] = terms[f"{self.name}_loss"] + 0 * unused.sum()
        return terms if output_dict else sum(terms.values(), start=logit_scale.new_zeros(()))

    @eager
    def _terms(self, images: Tensor, texts: Tensor, image_slots, text_slots, options) -> dict[str, Tensor]:
        labels = self._labels(images, texts)
        for module in self.loss.modules():
            if isinstance(module, HardestNegativeLoss):
                module.step = self.steps.number
        terms, own = {}, images
        with torch.autocast(images.device.type, enabled=False):
            if self.compares_own_rows:
                terms[f"{self.name}_loss"] = self.own_rows_loss(images, labels[0], texts, labels[1], **options)
            if not terms or self.pair_loss is not self.loss:
                joined = all_gather_rows(images, texts, *labels, image_slots, text_slots)
                images, texts = full_precision(*joined[:2])  # the scale multiplies rounding errors
                if not terms:
                    sides = images, joined[2], texts, joined[3]
                    terms[f"{self.name}_loss"] = cross_modal_loss(self.pair_loss, *sides, self.miner, **options)
                terms |= regularization(self.loss, images, texts, *joined[4:])
        self._check_finite(terms, own)
        return terms

    def _labels(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels of this process's images and texts, equal for the same image in any process."""
        number = len(images)
        if len(texts) % number if number else len(texts):
            raise ValueError(f"each image must have the same number of texts, got {len(texts)} for {number} images")
        labels = self.steps.image_ids
        if labels is None:  # all different
            labels = torch.arange(number) + (distributed.get_rank() << 32 if world_size() > 1 else 0)
        if len(labels) != number:
            raise ValueError(f"image ids must be one for each of {number} images, got {len(labels)}")
        labels = labels.to(images.device)
        return labels, labels.repeat_interleave(len(texts) // max(1, number))

    def _check_finite(self, terms: dict[str, Tensor], images: Tensor) -> None:
        """Raise ``NonFiniteLossError`` with the keys of the images; this waits for the GPU once."""
        if torch.stack([term.detach().isfinite().all() for term in terms.values()]).all():
            return
        values = ", ".join(f"{name} {term.item():g}" for name, term in terms.items())
        keys = self.steps.keys
        rows = (~images.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()
        named = [keys[row] for row in rows if row < len(keys)] or keys
        more = f" and {len(named) - MOST_KEYS} more" if len(named) > MOST_KEYS else ""
        raise NonFiniteLossError(
            f"step {self.steps.number}: the loss is not finite ({values}); {len(rows)} of {len(images)} image features "
            f"are not finite; keys of {'these' if rows else 'the batch'}: {', '.join(named[:MOST_KEYS])}{more}"
        )


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
