"""A metric loss in the place of open_clip's ClipLoss."""

from argparse import Namespace
from typing import Any

from torch import Tensor, nn

from vl_plugins.distributed import DistributedLoss
from vl_plugins.errors import UserError
from vl_plugins.integrations.cross_modal import CrossModalLoss, create_loss_and_miner
from vl_plugins.integrations.open_clip.data import Steps
from vl_plugins.losses.triplet import HardestNegativeLoss
from vl_plugins.numerics import eager
from vl_plugins.registry import losses_with_scale

__all__ = ["TwoTowerLoss", "build_loss"]


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Image to text and text to image are added, see :class:`~vl_plugins.integrations.cross_modal.CrossModalLoss`. With
    several processes, each computes the loss of the joined batch. The gradients, which data parallelism averages, are
    those of one process with the joined batch.

    Args:
        name: the loss is logged as ``<name>_loss``.
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
        self.name, self.learned_scale, self.steps = name, learned_scale, steps or Steps()
        self.loss: Any = loss
        compared = CrossModalLoss(loss, miner, own_rows=local_loss)
        self.compare, self.compares_own_rows = DistributedLoss(compared), compared.has_independent_pairs

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
        """Return the loss; with ``output_dict`` as ``{"<name>_loss": loss}``.

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
        options: dict[str, Any] = {"scale": logit_scale} if self.learned_scale else {}
        if hasattr(self.loss, "regularization"):
            options |= {"slots": image_slots, "ref_slots": text_slots}
        loss = self._compare(image_features, text_features, options)
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                loss = loss + 0 * unused.sum()
        return {f"{self.name}_loss": loss} if output_dict else loss

    @eager
    def _compare(self, images: Tensor, texts: Tensor, options: dict[str, Any]) -> Tensor:
        for module in self.loss.modules():
            if isinstance(module, HardestNegativeLoss):
                module.step = self.steps.number
        ids = self.steps.image_ids
        loss = self.compare(images, None if ids is None else ids.to(images.device), texts, **options)
        if not loss.isfinite():  # waits for the GPU
            raise UserError(f"step {self.steps.number}: the loss is {loss.item():g}")
        return loss


def build_loss(args: Namespace, steps: Steps | None = None) -> TwoTowerLoss:
    """Build the loss of ``--loss`` with its miner, reducer and distance.

    Args:
        args: the launcher's options.
        steps: of the training.

    Raises:
        UserError: an unknown name or option, or a loss with trainable parameters.
        ValueError: a hyper-parameter out of its range.
    """
    options, makes_sets = {"name": args.loss, **args.loss_kwargs}, args.head == "set"
    learned_scale = options.get("scale") == "learned"
    if learned_scale:
        del options["scale"]
    kinds = [kind for kind in ("miner", "reducer", "distance") if getattr(args, kind)]
    chosen = {kind: {"name": getattr(args, kind), **getattr(args, f"{kind}_kwargs")} for kind in kinds}
    loss, miner = create_loss_and_miner(options, sets=makes_sets, **chosen)
    if learned_scale and not hasattr(getattr(loss, "base", loss), "scale"):
        raise UserError(f"loss {args.loss!r} has no scale; losses that have one: {', '.join(losses_with_scale())}")
    # With a set head the parameters of the distance belong to the model.
    if set(loss.parameters()) - set(loss.distance.parameters() if makes_sets else ()):
        raise UserError(f"loss {args.loss!r} has trainable parameters, which open_clip's optimizer does not update")
    return TwoTowerLoss(args.loss.rpartition(":")[2], loss, miner, learned_scale, args.local_loss, steps)
