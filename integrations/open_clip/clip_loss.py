"""A loss in the place of ``ClipLoss``, where the launcher is not used: in forks of open_clip, and in your own loops."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vl_plugins.distributed import world_size
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, compares_one_set, create_parts
from vl_plugins.integrations.open_clip.steps import Steps, token_ids

__all__ = ["RetrievalClipLoss"]


class RetrievalClipLoss(TwoTowerLoss):
    """A loss by its name in the place of open_clip's ``ClipLoss``, for a fork of open_clip or a loop of your own.

    A fork of open_clip 3.x returns it from ``create_loss``; in 4.x, use ``CLIPTask(model, loss=...)``. It trains as
    ``--loss`` of the launcher does, with these differences:

    - The trainer does not say which texts are equal, unless it gives ``text``.
    - Parameters of the loss, such as proxies, are not in the trainer's optimizer.
    - A loss that is not finite is an error. With a GradScaler, which leaves out such steps, set ``loss.has_scaler =
      True``.

    Args:
        name: of ``vl-plugins losses``, or a class of pytorch-metric-learning.
        miner: of pytorch-metric-learning: a name, or a mapping of ``name`` and options.
        rank, world_size: as ``ClipLoss`` has them; what counts is torch's process group.
        local_loss, gather_with_grad, cache_labels: without effect, because gradients are always exact, and own rows
            are compared where the loss allows it.
        use_horovod: must be False.
        accum_freq: how often the trainer calls the loss in a step, open_clip's ``--accum-freq``.
        options: of the loss. Its scale and bias are the model's, unless ``scale`` and ``bias`` are given.

    Raises:
        UserError: an unknown name or option.
        ValueError: an option out of its range, or ``use_horovod``.
    """

    def __init__(
        self,
        name: str,
        *,
        miner: str | Mapping[str, Any] | None = None,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        accum_freq: int = 1,
        **options: Any,
    ):
        if use_horovod:
            raise ValueError("use_horovod must be False: losses of vl_plugins gather by torch.distributed")
        loss, chosen_miner, model_numbers = create_parts(name, options, miner)
        one_set = compares_one_set(loss, chosen_miner, options, model_numbers)
        steps = Steps(accum_freq)
        super().__init__(name.rpartition(":")[2], loss, chosen_miner, model_numbers, one_set=one_set, steps=steps)
        self.world_size = world_size
        self.calls = 0
        self.has_warned_of_text = False
        if next(self.parameters(), None) is not None:
            logging.warning(f"{name} has trained parameters, which open_clip's optimizer does not see: add them to it")

    def forward(
        self, *features: Any, text: Tensor | None = None, pad_id: int = 0, **named: Any
    ) -> dict[str, Tensor] | Tensor:
        """Return the loss, see :class:`TwoTowerLoss`.

        Args:
            features, named: ``image_features``, ``text_features``, ``logit_scale``, ``logit_bias=None``,
                ``output_dict=False``, as ``ClipLoss`` takes them.
            text: (k * B, L), the token rows. Texts with equal tokens are then no negatives of each other's images.
            pad_id: the token that fills up texts.
        """
        if self.world_size > 1 and world_size() == 1:
            raise ValueError(
                f"world_size is {self.world_size}, but torch.distributed has no process group: call "
                "torch.distributed.init_process_group() first"
            )
        self.steps.batches.clear()
        if text is not None:
            self.steps.batches.append({"ref_ids": token_ids(text.cpu(), pad_id)})
        elif not self.has_warned_of_text:
            self.has_warned_of_text = True
            logging.info("The loss gets no text=, so equal captions of several images of a batch are negatives")
        self.steps.number = self.calls // self.steps.batches_per_step
        self.calls += 1
        return super().forward(*features, **named)
