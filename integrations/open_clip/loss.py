"""A metric loss in the place of open_clip's ClipLoss."""

import contextlib
import copy
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.distributed import DistributedLoss
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.components import create_loss_and_miner
from vl_plugins.integrations.open_clip.data import Steps
from vl_plugins.losses.cross_modal import CrossModalLoss
from vl_plugins.losses.siglip import SigLIPLoss
from vl_plugins.losses.warmup import Warmup
from vl_plugins.numerics import eager
from vl_plugins.registry import losses_with_scale

__all__ = ["LEARNED", "TwoTowerLoss", "build_loss"]

LEARNED = "learned"  # of --loss-kwargs scale: the model's own


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Image to text and text to image are added, see :class:`~vl_plugins.losses.CrossModalLoss`. With several processes,
    each computes the loss of the joined batch, or with ``local_loss`` that of its own rows. The gradients, which data
    parallelism averages, are those of one process with the joined batch.

    Args:
        name: the loss is logged as ``<name>_loss``.
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)`` for each direction.
        learned_scale: pass the model's logit scale to the loss as ``scale``. With ``--accum-freq N``, open_clip
            computes the loss of the whole batch N times, each time with the graph of one part of the images and texts.
            The scale and a learned similarity are in every one of the N graphs, so their gradient would be N times too
            large. They are constants in all passes but the last.
        local_loss: compare only this process's images and texts with those of all processes, if the loss allows it.
        steps: the step, by which ``warmup_steps`` count, and its labels; without them all images are different.

    Attributes:
        compares_own_rows: True if ``local_loss`` is set and the loss allows it.
    """

    def __init__(
        self,
        name: str,
        loss: Any,
        miner: nn.Module | None = None,
        learned_scale: bool = False,
        local_loss: bool = False,
        steps: Steps | None = None,
    ):
        super().__init__()
        self.name, self.learned_scale, self.steps = name, learned_scale, steps or Steps()
        self.loss: Any = loss
        self.compares_own_rows = local_loss and miner is None and getattr(loss, "compares_own_rows", False)
        self.compare: nn.Module = CrossModalLoss(loss, miner)
        if self.compares_own_rows:
            self.loss.gather_across_devices = True
        else:
            self.compare = DistributedLoss(self.compare)

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
            ValueError: texts or labels that do not fit the images.
            UserError: the loss is NaN or infinite.
        """
        is_last_pass = self.steps.count_pass()
        options: dict[str, Any] = {}
        if self.learned_scale:
            options["scale"] = logit_scale if is_last_pass else logit_scale.detach()
        if hasattr(self.loss, "regularization"):
            options |= {"slots": image_slots, "ref_slots": text_slots}
        constants = () if is_last_pass else tuple(self.loss.parameters())
        with _as_constants(constants):
            loss = self._compare(image_features, text_features, options)
        # A parameter without a gradient makes DistributedDataParallel fail at the second step.
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                loss = loss + 0 * unused.sum()
        return {f"{self.name}_loss": loss} if output_dict else loss

    @eager
    def _compare(self, images: Tensor, texts: Tensor, options: dict[str, Any]) -> Tensor:
        for module in self.loss.modules():
            if isinstance(module, Warmup):
                module.step = self.steps.number
        for name, values in self.steps.labels.items():
            options[name] = values.to(images.device)
        loss = self.compare(images, ref_emb=texts, **options)
        if not loss.isfinite():  # waits for the GPU
            raise UserError(f"step {self.steps.number}: the loss is {loss.item():g}")
        return loss


@contextlib.contextmanager
def _as_constants(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leave parameters out of the graph that the block records."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def build_loss(args: Namespace, steps: Steps | None = None) -> TwoTowerLoss:
    """Build the loss of ``--loss`` with its miner, reducer and distance.

    A loss of this package that has a scale takes the model's own, unless ``--loss-kwargs`` gives one.

    Args:
        args: the launcher's options.
        steps: of the training.

    Raises:
        UserError: an unknown name or option, or a loss with trainable parameters.
        ValueError: a hyper-parameter out of its range.
    """
    options, makes_sets = {"name": args.loss, **args.loss_kwargs}, args.head == "set"
    scale = options.pop("scale", None)
    if scale not in (None, LEARNED):
        options["scale"] = scale
    kinds = [kind for kind in ("miner", "reducer", "distance") if getattr(args, kind)]
    chosen = {kind: {"name": getattr(args, kind), **getattr(args, f"{kind}_kwargs")} for kind in kinds}
    loss, miner = create_loss_and_miner(options, sets=makes_sets, **chosen)
    compared = getattr(loss, "base", loss)
    has_scale = hasattr(compared, "scale")
    if scale == LEARNED and not has_scale:
        raise UserError(f"loss {args.loss!r} has no scale; losses that have one: {', '.join(losses_with_scale())}")
    if any(isinstance(module, SigLIPLoss) for module in loss.modules()):
        raise UserError(
            "loss 'siglip' learns a scale and a bias, which --loss does not train: use open_clip's --siglip"
        )
    learned_scale = scale == LEARNED or (scale is None and "scale" in getattr(compared, "numbers", ()))
    # With a set head the parameters of the distance belong to the model.
    if set(loss.parameters()) - set(loss.distance.parameters() if makes_sets else ()):
        raise UserError(f"loss {args.loss!r} has trainable parameters, which open_clip's optimizer does not update")
    if ":" not in args.loss:
        with user_errors(f"--loss {args.loss}: its first call", *MALFORMED_CONTENT):
            _try(loss, miner, makes_sets, learned_scale)
    return TwoTowerLoss(args.loss.rpartition(":")[2], loss, miner, learned_scale, args.local_loss, steps)


def _try(loss: nn.Module, miner: Any, makes_sets: bool, learned_scale: bool) -> None:
    """Compute the loss of a few random embeddings, which raises an error if its parts do not work together.

    Components of pytorch-metric-learning use some of their options only when they are called. A loss of the user's own
    is not tried: it may need the real embeddings, and its errors are bugs, which keep their traceback.
    """
    loss, miner = copy.deepcopy((loss, miner))
    embeddings_shape = (4, 2, 8) if makes_sets else (4, 8)
    with torch.random.fork_rng(devices=[]):
        images, texts = torch.randn(2, *embeddings_shape)
        options: dict[str, Any] = {"slots": images, "ref_slots": texts} if hasattr(loss, "regularization") else {}
        if learned_scale:
            options["scale"] = torch.tensor(10.0)
        labels = torch.arange(len(images))
        CrossModalLoss(loss, miner)(images, labels, None, texts, labels.clone(), **options)
