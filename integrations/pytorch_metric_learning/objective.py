"""Towers, loss and miner as one module, and the optimizer and schedule of a stage."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from vl_plugins.data.randomness import seed_everything
from vl_plugins.distributed import DistributedLoss
from vl_plugins.encoders import Vocabulary, encode_in_chunks
from vl_plugins.errors import one_of, user_errors
from vl_plugins.integrations.cross_modal import CrossModalLoss, create_loss_and_miner
from vl_plugins.integrations.pytorch_metric_learning.config import Config, StageConfig, split
from vl_plugins.integrations.pytorch_metric_learning.two_towers import TwoTowers, build_towers

__all__ = ["Objective", "Schedule", "build_objective", "make_optimizer"]


class Objective(nn.Module):
    """A batch to its loss: a module for ``DistributedDataParallel``, which has to see all parameters.

    Each process computes the loss of the joined batch. The mean of their gradients is that of one process with it.

    Args:
        towers: the model.
        loss: of pytorch-metric-learning or of this package.
        miner: chooses pairs, in both directions.
        one_set: compare images and texts as one set, for losses without ``ref_emb``.
        chunk_size: images that are encoded at a time, with their texts; None for all.
    """

    def __init__(
        self,
        towers: TwoTowers,
        loss: nn.Module,
        miner: Any = None,
        one_set: bool = False,
        chunk_size: int | None = None,
    ):
        super().__init__()
        self.towers, self.chunk_size = towers, chunk_size
        self.compare = DistributedLoss(CrossModalLoss(loss, miner, one_set))
        self._trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of this process's images (B, ...), their k * B texts side by side, and labels (B,)."""
        chunk_size, captions = self.chunk_size, len(texts) // len(images)
        images, image_slots = encode_in_chunks(self.towers.image, images, chunk_size)
        texts, text_slots = encode_in_chunks(self.towers.text, texts, chunk_size and chunk_size * captions)
        slots = {} if image_slots is None else {"slots": image_slots, "ref_slots": text_slots}
        return self.compare(images, labels, texts, **slots)

    @property
    def loss(self) -> Any:
        """The loss, with its parameters."""
        return self.compare.loss.loss

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts of the towers and the ``"loss"``."""
        return {**self.towers.parts(), "loss": self.loss}

    def set_mode(self, stage: StageConfig) -> None:
        """Prepare the training of a stage: frozen parts have no gradient and are in evaluation mode.

        Raises:
            UserError: ``freeze`` or ``lr_scale`` has a part that the model does not have.
        """
        parts = self.parts()
        for name in (*stage.freeze, *stage.lr_scale):
            one_of("part", name, parts)
        frozen = {parameter for name in stage.freeze for parameter in parts[name].parameters()}
        for parameter in self._trainable:
            parameter.requires_grad_(parameter not in frozen)
        self.train()
        for name, part in parts.items():
            part.train(name not in stage.freeze)
            for module in part.modules() if stage.freeze_batchnorm and name.endswith("trunk") else ():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()


def build_objective(config: Config, vocabulary: Vocabulary | None = None, *, pretrained: bool = True) -> Objective:
    """Return the :class:`Objective` of a configuration; sets are compared by smooth-Chamfer by default.

    Args:
        config: what to build.
        vocabulary, pretrained: see :func:`~vl_plugins.integrations.pytorch_metric_learning.two_towers.build_towers`.

    Raises:
        UserError: an unknown name or option, an option out of its range, or parts that do not fit each other.
    """
    seed_everything(config.seed)  # of the parameters of the loss
    chosen = {kind: getattr(config, kind) for kind in ("miner", "reducer", "distance")}
    with user_errors("loss or miner"):
        loss, miner = create_loss_and_miner(config.loss, sets=config.head is not None, **chosen)
    towers = build_towers(config, vocabulary, pretrained=pretrained)
    towers.similarity = loss.distance if config.head is not None else None
    return Objective(towers, loss, miner, config.one_set, config.data.chunk_size)


def make_optimizer(stage: StageConfig, objective: Objective) -> Optimizer:
    """Return the optimizer of what :meth:`Objective.set_mode` left trainable; each part is a group.

    Raises:
        UserError: an unknown class or a wrong option, or nothing to train.
    """
    name, options = split(stage.optimizer)
    groups = []
    for part, module in objective.parts().items():
        if trained := [parameter for parameter in module.parameters() if parameter.requires_grad]:
            groups.append({"params": trained, "part": part})
    with user_errors(f"optimizer {name!r}"):
        optimizer: Optimizer = getattr(torch.optim, name)(groups, **options)
    for group in optimizer.param_groups:
        group["lr"] *= stage.lr_scale.get(group["part"], 1)
    return optimizer


class Schedule:
    """The learning rate scheduler of a stage; without one, the rate is constant.

    It has no state to save: :meth:`replay` repeats its steps, so a schedule that was changed continues as if it had
    been that from the beginning.

    Args:
        stage: names the class, its options and ``by``.
        optimizer: of the stage, before its first step.
        steps_per_epoch: for schedules by iteration.

    Attributes:
        by: when it steps: after each ``"epoch"`` or ``"iteration"``, or after each epoch by the RSUM, ``"plateau"``.
        mismatch: a warning if its length is not that of the stage.

    Raises:
        UserError: an unknown class, a wrong option, or an unknown ``by``.
    """

    def __init__(self, stage: StageConfig, optimizer: Optimizer, steps_per_epoch: int):
        name, options = split(stage.lr_scheduler or {"name": "ConstantLR", "factor": 1})
        self.steps_per_epoch, self.mismatch = steps_per_epoch, ""
        self.by = one_of("value of lr_scheduler.by", options.pop("by", "epoch"), ("epoch", "iteration"))
        if name == "ReduceLROnPlateau":
            self.by, options = "plateau", {"mode": "max", **options}
        with user_errors(f"lr_scheduler {name!r}"):
            self.scheduler = getattr(lr_scheduler, name)(optimizer, **options)
        length = stage.epochs * (steps_per_epoch if self.by == "iteration" else 1)
        given = options.get("T_max", options.get("total_steps", length))
        if given != length:
            self.mismatch = f"lr_scheduler {name}: it has {given} steps (by {self.by}), but the stage has {length}"

    def step(self, after: str, rsum: float | None = None) -> None:
        """Step after an ``"epoch"`` or an ``"iteration"``; ``rsum`` is that of the epoch."""
        if after == "epoch" and self.by == "plateau":
            self.scheduler.step(rsum)
        elif after == self.by:
            self.scheduler.step()

    def replay(self, history: list[dict[str, float]]) -> None:
        """Repeat the steps of epochs, given their metrics."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not made these steps
            for metrics in history:
                for _ in range(self.steps_per_epoch):
                    self.step("iteration")
                self.step("epoch", metrics.get("rsum"))
