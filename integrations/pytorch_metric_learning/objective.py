"""Towers, loss and miner as one module."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.data.randomness import seed_everything
from vl_plugins.distances import OrderSimilarity
from vl_plugins.distributed import DistributedLoss
from vl_plugins.encoders import Vocabulary, encode_in_chunks
from vl_plugins.errors import MALFORMED_CONTENT, UserError, one_of
from vl_plugins.integrations.components import create_loss_and_miner, create_miner, takes_one_set
from vl_plugins.integrations.pytorch_metric_learning.config import Config, StageConfig, config_errors
from vl_plugins.integrations.pytorch_metric_learning.two_towers import TwoTowers, build_towers
from vl_plugins.losses.cross_modal import CrossModalLoss
from vl_plugins.losses.statistics import latest_statistics
from vl_plugins.registry import create

__all__ = ["Objective", "build_objective"]


class Objective(nn.Module):
    """A batch to its loss: a module for ``DistributedDataParallel``, which has to see all parameters.

    Each process computes the loss of the joined batch. The mean of their gradients is that of one process with it.

    Args:
        towers: the model.
        loss, miner, one_set: see :class:`~vl_plugins.losses.CrossModalLoss`.
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

    def forward(self, images: Tensor, texts: Tensor, labels: Tensor, *ids: Tensor) -> Tensor:
        """Return the loss of this process's images (B, ...), their k * B texts side by side, and labels (B,).

        Args:
            images, texts, labels, ids: of a batch of :class:`~vl_plugins.data.ShardDataset`.
        """
        chunk_size, captions = self.chunk_size, len(texts) // len(images)
        images, image_slots = encode_in_chunks(self.towers.image, images, chunk_size)
        texts, text_slots = encode_in_chunks(self.towers.text, texts, chunk_size and chunk_size * captions)
        return self.compare(images, labels, texts, **self._options(image_slots, text_slots, ids))

    def _options(self, image_slots: Tensor | None, text_slots: Tensor | None, ids: Sequence[Tensor]) -> dict[str, Any]:
        """Return the slots of sets, and the ids of texts, as a loss takes them.

        A loss of one set takes no ids, because its classes are the labels.
        """
        options: dict[str, Any] = {}
        if image_slots is not None:
            options = {"slots": image_slots, "ref_slots": text_slots}
        if not self.compare.loss.one_set:
            options |= zip(("ref_ids", "matching_ids"), ids, strict=False)
        return options

    @property
    def loss(self) -> Any:
        """The loss, with its parameters."""
        return self.compare.loss.loss

    def statistics(self) -> dict[str, Tensor]:
        """Return those of the latest batch, see :mod:`vl_plugins.losses.statistics`; {} if the loss collects none."""
        return latest_statistics(self.loss)

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts of the towers and the ``"loss"``."""
        return {**self.towers.parts(), "loss": self.loss}

    @torch.no_grad()
    def try_batch(self, images: Tensor, texts: Tensor, labels: Tensor, *ids: Tensor) -> None:
        """Encode and compare a few images, each with one text, for what is wrong only when it is called.

        Nothing is changed: the towers are in evaluation mode, and the loss, which may have a queue, is a copy.

        Raises:
            UserError: a tower does not take its inputs, or the loss or miner not the embeddings of both.
        """
        self.eval()
        with config_errors("image"):
            images, image_slots = self.towers.image(images)
        with config_errors("text"):
            texts, text_slots = self.towers.text(texts)
        options = self._options(image_slots, text_slots, ids)
        compare = copy.deepcopy(self.compare.loss)
        key, expected = "loss", MALFORMED_CONTENT
        if compare.miner is not None:
            key = "loss and miner"
        if not type(self.loss).__module__.startswith(("vl_plugins.", "pytorch_metric_learning.")):
            expected = ()  # errors of a loss of the user's own are bugs, which keep their traceback
        with config_errors(key, expected):
            try:
                loss = compare(images, labels, None, texts, labels.clone(), **options)
            except ValueError as error:
                if takes_one_set(error):
                    raise UserError("it compares one set of embeddings: add one_set: true") from error
                raise
            if not isinstance(loss, Tensor) or loss.ndim > 0:
                raise UserError("loss: its reducer returns no single number")

    def set_mode(self, stage: StageConfig) -> None:
        """Prepare the training of a stage: frozen parts have no gradient and are in evaluation mode."""
        modules = self.parts()
        for name in [*stage.freeze, *stage.lr_scale]:
            one_of("part", name, modules)
        frozen: set[nn.Parameter] = set()
        for name in stage.freeze:
            frozen.update(modules[name].parameters())
        for parameter in self._trainable:
            parameter.requires_grad_(parameter not in frozen)
        self.train()
        for name, module in modules.items():
            module.train(name not in stage.freeze)
            if stage.freeze_batchnorm and name.endswith("trunk"):
                module.apply(_keep_statistics)


def _keep_statistics(module: nn.Module) -> None:
    """Leave the running statistics of a batch norm as they are, and normalize by them."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.eval()


def build_objective(config: Config, vocabulary: Vocabulary | None = None, *, pretrained: bool = True) -> Objective:
    """Return the :class:`Objective` of a configuration, on the CPU, with weights by its seed.

    Args:
        config: what to build; sets are compared by smooth-Chamfer by default.
        vocabulary: words of a text trunk ``gru``; by default those of the training captions.
        pretrained: whether to load pretrained weights and word vectors; otherwise all are random.

    Raises:
        UserError: an unknown name or option, or a wrong value; the message begins with its key.
    """
    seed_everything(config.seed)  # of the parameters of the loss
    sets = config.head is not None
    components = {}
    for kind in ("reducer", "distance"):
        specification = getattr(config, kind)
        if specification is not None:
            with config_errors(kind):
                components[kind] = create(kind, specification)
    with config_errors("loss"):
        loss, _ = create_loss_and_miner(config.loss, sets=sets, **components)
    with config_errors("miner"):
        miner = create_miner(config.miner, loss, sets)
    towers = build_towers(config, vocabulary, pretrained=pretrained)
    # Vectors are compared by cosine in retrieval, whatever the loss compares, but for order embeddings.
    distance = getattr(loss, "distance", None)
    if sets or isinstance(distance, OrderSimilarity):
        towers.similarity = distance
    return Objective(towers, loss, miner, config.one_set, config.data.images_per_chunk)
