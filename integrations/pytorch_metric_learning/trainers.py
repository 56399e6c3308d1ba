"""A trainer of pytorch-metric-learning for images and texts."""

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_metric_learning.trainers import BaseTrainer
from pytorch_metric_learning.utils import common_functions
from torch import Tensor

from vl_plugins.data import CaptionSampler
from vl_plugins.distributed import DistributedLoss
from vl_plugins.losses.cross_modal import CrossModalLoss

__all__ = ["CrossModalTrainer"]

MODELS = ("image_trunk", "image_embedder", "text_trunk", "text_embedder")


class CrossModalTrainer(BaseTrainer):
    """Compares images with texts, both ways, by losses that take ``ref_emb``; the rest is PML's ``BaseTrainer``.

    Hooks, the loss tracker, learning rate schedulers, gradient clippers and ``freeze_these`` go by these names:

    - ``models``: ``image_trunk`` and ``text_trunk``, optionally ``image_embedder`` and ``text_embedder``. The last one
      of a tower returns embeddings (B, D), or sets (B, K, D) for a loss that compares sets.
    - ``loss_funcs``: any names; ``loss_weights`` are their factors.
    - ``mining_funcs``: ``tuple_miner``, which mines texts for images and images for texts.
    - ``dataset``: batches are ``images, texts, labels``, with k texts of each image side by side, (k * B, ...), or as
      token ids (B, k, L); perhaps with ``ref_ids, matching_ids``, by which losses know more positives. For shards,
      ``dataset`` is a :class:`vl_plugins.data.ShardDataset`, ``collate_fn`` its ``collate``, and ``sampler`` a
      :class:`vl_plugins.data.CaptionSampler`, which is told the epoch.

    ``dtype`` is for images; texts are token ids. ``freeze_trunk_batchnorm`` is for both trunks.

    Raises:
        AssertionError: unknown or missing names, as in pytorch-metric-learning.
    """

    data_and_label_getter: Any

    def custom_setup(self) -> None:
        miner = self.mining_funcs.get("tuple_miner")
        self.compare = {name: DistributedLoss(CrossModalLoss(loss, miner)) for name, loss in self.loss_funcs.items()}
        self.data_and_label_getter = self.data_and_label_getter or _labels_apart

    def modify_schema(self) -> None:
        models, optimizers = self.schema["models"], self.schema["optimizers"]
        models.keys, models.essential = list(MODELS), ["image_trunk", "text_trunk"]
        models.important = optimizers.important = []  # optional: frozen or identity parts have no optimizer
        self.schema["loss_funcs"].keys = list(self.loss_funcs)

    def initialize_models(self) -> None:
        for name in MODELS:
            self.models.setdefault(name, torch.nn.Identity())

    def set_to_train(self) -> None:
        super().set_to_train()
        if isinstance(self.sampler, CaptionSampler):
            self.sampler.set_epoch(self.epoch)
            self.dataloader_iter = iter(self.dataloader)

    def calculate_loss(self, curr_batch: tuple[Sequence[Any], Tensor]) -> None:
        (images, texts, *ids), labels = curr_batch
        if texts.ndim == 3 and not texts.is_floating_point():
            texts = texts.flatten(0, 1)  # torch's default collate stacks the k texts of each image
        images, texts = self._encode("image", images, self.dtype), self._encode("text", texts, None)
        known_positives = {}
        for name, values in zip(("ref_ids", "matching_ids"), ids, strict=False):
            known_positives[name] = values.to(images.device)
        for name, compare in self.compare.items():
            if self.loss_weights.get(name, 0) > 0:
                self.losses[name] = compare(images, labels.to(images.device), texts, **known_positives)

    def _encode(self, side: str, inputs: Any, dtype: torch.dtype | None) -> Tensor:
        inputs = common_functions.to_device(inputs, device=self.data_device, dtype=dtype)
        return self.models[f"{side}_embedder"](self.models[f"{side}_trunk"](inputs))

    def maybe_freeze_trunk_batchnorm(self) -> None:
        if self.freeze_trunk_batchnorm:
            for name in ("image_trunk", "text_trunk"):
                self.models[name].apply(common_functions.set_layers_to_eval("BatchNorm"))


def _labels_apart(batch: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return images, texts and ids, if any, and the labels."""
    images, texts, labels, *ids = batch
    return [images, texts, *ids], labels
