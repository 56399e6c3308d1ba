"""What the losses of hardest negatives share: a warm-up without mining, and a warning when the model collapses."""

import warnings
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vl_plugins.kernels.pairs import compare_all, pairs_of_others
from vl_plugins.kernels.vectors import compare, pair_similarities
from vl_plugins.losses.base import TripletLoss
from vl_plugins.utils.checks import integer

__all__ = ["HardestNegativeLoss"]

# Similar embeddings of different items are normal at the first steps of a model trained from scratch.
COLLAPSED_STEPS = 100
CHECK_EVERY = 10  # reading a value off the accelerator waits for it
TOLERANCE = 0.05


class HardestNegativeLoss(TripletLoss):
    """A triplet loss that mines: by itself it compares each positive with the hardest negative of its anchor.

    Early in training the hardest negative is often wrong for most pairs, and the model can collapse: all embeddings
    become the same, and the loss stays at its value for that, 2 * margin for each pair of a triplet loss. Counting all
    negatives for the first epoch or so helps, as VSE++ and its successors are trained. The losses warn, once, when they
    have been at that value for a hundred steps.

    Args:
        margin: see :class:`~vl_plugins.losses.base.TripletLoss`.
        warmup_steps: number of calls in training mode, with gradients enabled, during which all negatives of an anchor
            count, and are summed up, on all similarities whatever the ``backend``. Given triplets and
            evaluation are not affected.
        kwargs: see :class:`~vl_plugins.losses.base.PairLoss`.

    Attributes:
        training_calls: number of these calls so far, a 0-D buffer.
    """

    kernels_of_formulas: ClassVar[Mapping[str, str]] = {
        **TripletLoss.kernels_of_formulas,
        "mined_losses": "hardest_losses",
    }

    def __init__(self, margin: float = 0.2, warmup_steps: int = 0, **kwargs):
        super().__init__(margin=margin, **kwargs)
        self.warmup_steps = integer("warmup_steps", warmup_steps, least=0)
        self.register_buffer("training_calls", torch.tensor(0))
        self._collapsed_calls = 0
        self._has_warned = False

    def mined_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, *, mining: str, symmetric: bool
    ) -> Tensor:
        """Return the loss of each positive pair as :meth:`pair_losses` does, ``mining`` is "hardest" or "all"."""
        raise NotImplementedError

    def collapsed_losses(self, positive_similarities: Tensor) -> Tensor:
        """Return the loss of pairs in one direction, (M,), if the hardest negative were as similar as the positive."""
        raise NotImplementedError

    def hardest_losses(self, x: Tensor, y: Tensor, x_labels: Tensor, y_labels: Tensor, **options) -> Tensor:
        """Return what :meth:`mined_losses` does for the hardest negatives, by :mod:`vl_plugins.kernels`."""
        raise NotImplementedError

    def pair_losses(
        self, similarities: Tensor, positive_mask: Tensor, negative_mask: Tensor, *, symmetric: bool
    ) -> Tensor:
        in_training, mining = self._next_step()
        losses = self.mined_losses(similarities, positive_mask, negative_mask, mining=mining, symmetric=symmetric)
        if in_training and mining == "hardest":
            self._watch(losses.detach(), lambda: similarities.detach()[positive_mask], symmetric)
        return losses

    def embedding_losses(
        self,
        x: Tensor,
        y: Tensor,
        x_labels: Tensor,
        y_labels: Tensor,
        *,
        normalize: bool,
        same_set: bool,
        symmetric: bool,
        pairs: tuple[Tensor, Tensor],
        backend: str,
    ) -> Tensor:
        of_all = {"normalize": normalize, "same_set": same_set}
        in_training, mining = self._next_step()
        if mining == "all":
            similarities, *masks = compare_all(x, y, x_labels, y_labels, **of_all)
            return self.mined_losses(similarities, *masks, mining=mining, symmetric=symmetric)
        losses = self.hardest_losses(
            x, y, x_labels, y_labels, symmetric=symmetric, pairs=pairs, backend=backend, **of_all
        )
        if in_training:

            def positive_similarities() -> Tensor:
                positives = pairs_of_others(*pairs) if same_set else pairs
                return pair_similarities(compare(x, y, x_labels, y_labels, positives, normalize=normalize))

            self._watch(losses.detach(), positive_similarities, symmetric)
        return losses

    def _next_step(self) -> tuple[bool, str]:
        """Return whether this call is one of a training step, and its mining."""
        in_training = self.training and torch.is_grad_enabled()
        return in_training, "all" if in_training and self._advance() else "hardest"

    @torch.compiler.disable
    def _advance(self) -> bool:
        """Count a call of a training step; return whether it is one of the warm-up."""
        self.training_calls += 1
        return bool(self.training_calls <= self.warmup_steps)

    @torch.compiler.disable
    def _watch(self, losses: Tensor, positive_similarities: Callable[[], Tensor], symmetric: bool) -> None:
        if self._has_warned or self.training_calls % CHECK_EVERY or len(losses) == 0:
            return
        collapsed = self.collapsed_losses(positive_similarities()) * (2 if symmetric else 1)
        # Of every pair, because a mean can have any value for other reasons.
        if (losses - collapsed).abs().mean() >= TOLERANCE * collapsed.mean():
            self._collapsed_calls = 0
            return
        self._collapsed_calls += CHECK_EVERY
        if self._collapsed_calls >= COLLAPSED_STEPS:
            self._has_warned = True
            warnings.warn(
                f"{type(self).__name__} has been {losses.mean():.4g} per pair for {COLLAPSED_STEPS} steps, its value "
                "when all embeddings are the same: the model seems to have collapsed. Train the first epoch without "
                "mining (warmup_steps), or with the Unified loss, or lower the learning rate.",
                RuntimeWarning,
                stacklevel=1,  # between here and the user's code are only modules calling modules
            )
