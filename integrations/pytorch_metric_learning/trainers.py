"""Trainers of pytorch-metric-learning for images and texts."""

import math
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from pytorch_metric_learning.trainers import BaseTrainer, MetricLossOnly
from pytorch_metric_learning.utils import common_functions
from torch import Tensor

from vl_plugins.data.sampler import CaptionSampler, training_loader
from vl_plugins.errors import UserError
from vl_plugins.integrations.cross_modal import check_takes_references, cross_modal_loss
from vl_plugins.integrations.pytorch_metric_learning.config import MODEL_PARTS
from vl_plugins.integrations.pytorch_metric_learning.models import embeddings_and_slots
from vl_plugins.integrations.pytorch_metric_learning.processes import Processes

__all__ = ["CrossModalTrainer", "ShardTrainer", "ShardedMetricLossOnly"]


class ShardTrainer(BaseTrainer):
    """Mixin for trainers on images and texts: on shards, in several processes and in mixed precision.

    Batches are ``images, texts, labels``, one label for each image and k texts side by side for each.
    For shards, ``dataset`` is a :class:`vl_plugins.data.ShardDataset` and ``sampler`` a
    :class:`vl_plugins.data.CaptionSampler`, whose batch size counts. A training that starts at a later epoch then reads
    the same batches as one that never stopped.

    With several ``processes`` each reads its own batch, all of one size, and computes the loss of all of them. A miner
    that draws at random draws in each process, and gradients are the means over these draws.

    Args:
        processes: one process in single precision by default.
        clip_grad_norm: largest norm of the gradient of all models together; None or 0 for no limit.
        args, options: of the other trainer.

    Raises:
        UserError: while training, a loss that is not finite.
    """

    dataloader: Any
    dataloader_iter: Iterator | None
    iterations_per_epoch: int | None

    def __init__(
        self, *args: Any, processes: Processes | None = None, clip_grad_norm: float | None = None, **options: Any
    ):
        self.processes = processes or Processes()
        self.clip_grad_norm = clip_grad_norm
        super().__init__(*args, **options)

    def train(self, start_epoch: int = 1, num_epochs: int = 1) -> None:
        """Train the epochs ``start_epoch`` to ``num_epochs``."""
        self._start_epoch = start_epoch
        self.processes.copy_parameters(self._modules())
        try:
            super().train(start_epoch, num_epochs)
        finally:
            # Loader processes that persist end with the last reference to their loader.
            self.dataloader = self.dataloader_iter = None

    def initialize_dataloader(self) -> None:
        if not isinstance(self.sampler, CaptionSampler):
            super().initialize_dataloader()
            return
        self.dataloader = training_loader(
            self.dataset, self.sampler, workers=self.dataloader_num_workers, collate_fn=self.collate_fn
        )
        self.iterations_per_epoch = self.iterations_per_epoch or len(self.dataloader)
        self.dataloader_iter = self._batches((self._start_epoch - 1) * self.iterations_per_epoch)

    def _batches(self, steps_before: int) -> Iterator:
        passes, steps = divmod(steps_before, len(self.dataloader))
        for number in count(passes):
            self.sampler.set_epoch(number)
            yield from islice(self.dataloader, steps, None)
            steps = 0

    def _modules(self) -> list[torch.nn.Module]:
        return [*self.models.values(), *self.loss_funcs.values()]

    def get_batch(self) -> tuple[tuple[Any, Any], Tensor]:
        """Return this process's images and texts, and the labels of the images of all processes."""
        self.dataloader_iter, batch = common_functions.try_next_on_generator(self.dataloader_iter, self.dataloader)
        images, texts, labels = self.data_and_label_getter(batch)
        labels = common_functions.process_label(labels, self.label_hierarchy_level, self.label_mapper)
        if isinstance(texts, Tensor) and texts.ndim == 3 and not texts.is_floating_point():
            texts = texts.flatten(0, 1)  # token ids of k texts an item, as torch's default collate stacks them
        return (images, texts), self.processes.gather(labels.to(self.data_device))

    def backward(self) -> None:
        loss = self.losses["total_loss"]
        value = float(loss.detach())
        if not math.isfinite(value):
            raise UserError(f"the loss is {value} at step {self.get_global_iteration()} of epoch {self.epoch}")
        self.processes.backward(loss, self._modules(), self.optimizers.values())
        # Hooks and the progress bar would keep the graph, and torch would warn.
        self.losses.update({name: torch.as_tensor(value).detach() for name, value in self.losses.items()})

    def clip_gradients(self) -> None:
        super().clip_gradients()
        if self.clip_grad_norm:
            parameters = [parameter for model in self.models.values() for parameter in model.parameters()]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)

    def step_optimizers(self) -> None:
        self.processes.step(self.optimizers.values())  # those of frozen parts have no gradients

    def modify_schema(self) -> None:
        super().modify_schema()
        # Nothing is missing without them: some parts are identities, and frozen ones have no optimizer.
        self.schema["models"].important = self.schema["optimizers"].important = []
        self.schema["mining_funcs"].keys = ["tuple_miner"]


class CrossModalTrainer(ShardTrainer):
    """Two towers: images are compared with texts, both ways, by a loss that takes ``ref_emb``.

    Hooks, the loss tracker, learning rate schedulers, gradient clippers and ``freeze_these`` are those of
    pytorch-metric-learning's ``BaseTrainer``, by these names:

    - ``models``: ``image_trunk`` and ``text_trunk``; optionally ``image_embedder``, ``text_embedder``, ``image_head``
      and ``text_head``. The last one of a tower returns embeddings (B, D), sets (B, K, D), the ``pooled`` features of
      :class:`vl_plugins.modules.TowerFeatures`, or the dict of a :class:`vl_plugins.modules.SetHead`.
    - ``loss_funcs``: any names. Each receives all embeddings, see
      :func:`vl_plugins.integrations.cross_modal.cross_modal_loss`; ``loss_weights`` are their factors.
    - ``mining_funcs``: ``tuple_miner``, which mines texts for images and images for texts.
    - ``dataset``: a :class:`vl_plugins.data.ShardDataset`, with a ``CaptionSampler`` as ``sampler``; or one whose
      batches are ``images, texts, labels``, or made so by ``data_and_label_getter``.
      There may be k texts for each image, side by side: ``texts[k * i : k * i + k]`` are those of ``images[i]``. Or
      token ids (B, k, L), as torch's default ``collate_fn`` stacks items with texts (k, L).

    ``dtype`` is for images; texts are token ids. ``freeze_trunk_batchnorm`` is for both trunks.

    Raises:
        UserError: a loss takes no ``ref_emb``.
        AssertionError: unknown or missing names, as in pytorch-metric-learning.
    """

    def custom_setup(self) -> None:
        for loss in self.loss_funcs.values():
            check_takes_references(loss)

    def modify_schema(self) -> None:
        super().modify_schema()
        self.schema["models"].keys = list(MODEL_PARTS)
        self.schema["models"].essential = ["image_trunk", "text_trunk"]
        self.schema["loss_funcs"].keys = list(self.loss_funcs)

    def initialize_models(self) -> None:
        for part in MODEL_PARTS:
            self.models.setdefault(part, torch.nn.Identity())

    def calculate_loss(self, curr_batch: tuple[tuple[Any, Any], Tensor]) -> None:
        (images, texts), labels = curr_batch
        image_embeddings, image_slots = self._encode("image", images, self.dtype)
        text_embeddings, text_slots = self._encode("text", texts, None)
        text_labels = labels.repeat_interleave(len(text_embeddings) // len(image_embeddings))
        for name, loss in self.loss_funcs.items():
            if self.loss_weights.get(name, 0) > 0:
                self.losses[name] = cross_modal_loss(
                    loss,
                    image_embeddings,
                    labels,
                    text_embeddings,
                    text_labels,
                    miner=self.mining_funcs.get("tuple_miner"),
                    image_slots=image_slots,
                    text_slots=text_slots,
                )

    def _encode(self, tower: str, inputs: Any, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings of the batches of all processes, and their slots if there are any."""
        output = common_functions.to_device(inputs, device=self.data_device, dtype=dtype)
        with self.processes.forward_pass():
            for part in ("trunk", "embedder", "head"):
                output = self.models[f"{tower}_{part}"](output)
        embeddings, slots = embeddings_and_slots(output)
        return self.processes.gather(embeddings), None if slots is None else self.processes.gather(slots)

    def maybe_freeze_trunk_batchnorm(self) -> None:
        if self.freeze_trunk_batchnorm:
            for name in ("image_trunk", "text_trunk"):
                self.models[name].apply(common_functions.set_layers_to_eval("BatchNorm"))


class ShardedMetricLossOnly(ShardTrainer, MetricLossOnly):
    """pytorch-metric-learning's ``MetricLossOnly`` on images and texts as one set of embeddings.

    Everything of one label is positive, two captions of one image too. ``models["trunk"]`` takes batches of either.
    """

    def get_batch(self) -> tuple[tuple[Any, Any], Tensor]:
        (images, texts), labels = super().get_batch()
        return (images, texts), torch.cat([labels, labels.repeat_interleave(len(texts) // len(images))])

    def compute_embeddings(self, data: tuple[Any, Any]) -> Tensor:
        """Return the embeddings of the images of all processes, then those of the texts."""
        images, texts = data
        with self.processes.forward_pass():
            sides = super().compute_embeddings(images), super().compute_embeddings(texts)
        return torch.cat([self.processes.gather(embeddings) for embeddings in sides])
