"""Trainers of pytorch-metric-learning for images and texts."""

import math
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from pytorch_metric_learning.trainers import BaseTrainer, MetricLossOnly, TwoStreamMetricLoss
from pytorch_metric_learning.utils import common_functions
from torch import Tensor

from vl_plugins.data.reader import TrainingPipeline, batch_loader
from vl_plugins.integrations.cross_modal import check_takes_references, cross_modal_loss
from vl_plugins.integrations.pytorch_metric_learning.config import MODEL_PARTS
from vl_plugins.integrations.pytorch_metric_learning.models import embeddings_and_slots
from vl_plugins.integrations.pytorch_metric_learning.processes import Processes
from vl_plugins.utils.errors import UserError

__all__ = ["CrossModalTrainer", "ShardTrainer", "ShardedMetricLossOnly", "ShardedTwoStreamMetricLoss"]

MODEL_CLIPPER = "model_grad_clipper"


class ShardTrainer(BaseTrainer):
    """Mixin for trainers on images and texts: on shards, in several processes and in mixed precision.

    Batches are ``images, texts, labels``, one label for each image and k texts side by side for each.
    ``dataset`` may be a :class:`vl_plugins.data.reader.TrainingPipeline`. That yields batches, so ``batch_size``,
    ``sampler`` and ``collate_fn`` are not used with it. An epoch reads what the reader has for its number: training
    that starts at a later epoch sees the same batches as training that never stopped, also where
    ``iterations_per_epoch`` is not the length of the reader.

    With several ``processes`` each reads a batch of its own, all of one size, and computes the loss of all of them. A
    miner that draws at random draws in each process, and gradients are the means over these draws.

    ``gradient_clippers`` may hold a ``"model_grad_clipper"``, for what concerns all parts of the model.

    Raises:
        UserError: while training, a loss that is not finite.
    """

    def __init__(self, *args: Any, processes: Processes | None = None, **options: Any):
        self.processes = processes or Processes()
        super().__init__(*args, **options)

    def train(self, start_epoch: int = 1, num_epochs: int = 1) -> None:
        """Train the epochs ``start_epoch`` to ``num_epochs``."""
        self._start_epoch = start_epoch
        self.processes.copy_parameters(self._modules())
        try:
            super().train(start_epoch, num_epochs)
        finally:
            if isinstance(self.dataset, TrainingPipeline):
                # Loader processes that persist end with the last reference to their loader.
                self.dataloader = self.dataloader_iter = None

    def initialize_dataloader(self) -> None:
        if not isinstance(self.dataset, TrainingPipeline):
            super().initialize_dataloader()
            return
        # Its processes may serve all epochs: what they do follows from the seed and the epoch alone.
        self.dataloader = batch_loader(self.dataset, self.dataloader_num_workers)
        self.iterations_per_epoch = self.iterations_per_epoch or len(self.dataset)
        self.dataloader_iter = self._batches((self._start_epoch - 1) * self.iterations_per_epoch)

    def _batches(self, steps_before: int) -> Iterator[tuple[Tensor, ...]]:
        passes, steps = divmod(steps_before, len(self.dataset))
        for number in count(passes):
            self.dataset.set_epoch(number)
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

    def compute_embeddings(self, data: Any) -> Tensor:
        """Return the embeddings of the batches of all processes."""
        with self.processes.forward_pass():
            embeddings = super().compute_embeddings(data)
        return self.processes.gather(embeddings)

    def backward(self) -> None:
        loss = self.losses["total_loss"]
        value = float(loss.detach())
        if not math.isfinite(value):
            raise UserError(f"the loss is {value} at step {self.get_global_iteration()} of epoch {self.epoch}")
        self.processes.backward(loss, self._modules(), self.optimizers.values())

    def step_optimizers(self) -> None:
        self.processes.step(self.optimizers.values())  # those of frozen parts have no gradients

    def forward_and_backward(self) -> None:
        super().forward_and_backward()
        # For hooks and the progress bar, which would keep the graph, and at which torch warns.
        for name, value in self.losses.items():
            if isinstance(value, Tensor):
                self.losses[name] = value.detach()

    def modify_schema(self) -> None:
        super().modify_schema()
        # Nothing is missing without them: some parts pass on what they get, and frozen ones have no optimizer.
        self.schema["models"].important = self.schema["optimizers"].important = []
        self.schema["mining_funcs"].keys = ["tuple_miner"]
        part_clippers = self.schema["gradient_clippers"].keys
        self.schema["gradient_clippers"].keys = lambda s, d: [*part_clippers(s, d), MODEL_CLIPPER]


class CrossModalTrainer(ShardTrainer):
    """Two towers: images are compared with texts, both ways, by a loss that takes ``ref_emb``.

    Hooks, the loss tracker, learning rate schedulers, gradient clippers and ``freeze_these`` are those of
    pytorch-metric-learning's ``BaseTrainer``, by these names:

    - ``models``: ``image_trunk`` and ``text_trunk``; ``image_embedder``, ``text_embedder``, ``image_head`` and
      ``text_head`` pass on what they get if left out. What comes out last is a tensor (B, D), sets (B, K, D), or what
      our own modules make: :class:`vl_plugins.modules.TowerFeatures`, whose ``pooled`` counts, or the dict of a
      :class:`vl_plugins.modules.SetHead`.
    - ``loss_funcs``: any names. Each gets all embeddings, see
      :func:`vl_plugins.integrations.cross_modal.cross_modal_loss`; ``loss_weights`` are their factors.
    - ``mining_funcs``: ``tuple_miner``, which mines texts for images and images for texts.
    - ``dataset``: a reader of shards, made by :func:`vl_plugins.data.reader.training_pipeline` with
      ``with_labels=True``; or one whose items are ``image, text, label``, as for ``TwoStreamMetricLoss``.
      ``data_and_label_getter`` makes these three of a batch otherwise. There may be k texts for each image, side by
      side: ``texts[k * i : k * i + k]`` are those of ``images[i]`` and have its label. Or token ids
      (B, k, L), as torch's default ``collate_fn`` stacks items with texts (k, L).

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
        data, labels = curr_batch
        (image_embeddings, image_slots), (text_embeddings, text_slots) = self.compute_embeddings(data)
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

    def compute_embeddings(self, data: tuple[Any, Any]) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Return the embeddings of the images and of the texts of all processes, each with slots or None."""
        images, texts = data
        return self._encode("image", images, self.dtype), self._encode("text", texts, None)

    def _encode(self, tower: str, inputs: Any, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
        output = common_functions.to_device(inputs, device=self.data_device, dtype=dtype)
        with self.processes.forward_pass():
            for part in ("trunk", "embedder", "head"):
                output = self.models[f"{tower}_{part}"](output)
        return tuple(None if rows is None else self.processes.gather(rows) for rows in embeddings_and_slots(output))

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
        return torch.cat([super(ShardedMetricLossOnly, self).compute_embeddings(inputs) for inputs in data])


class ShardedTwoStreamMetricLoss(ShardTrainer, TwoStreamMetricLoss):
    """pytorch-metric-learning's ``TwoStreamMetricLoss``: images are one stream, texts the other, one for each image.

    ``models["trunk"]`` takes batches of either.
    """


def model_clipper(models: Mapping[str, torch.nn.Module], max_norm: float) -> dict[str, Any]:
    """Return ``gradient_clippers`` that keep the norm of the gradient of all models together below ``max_norm``."""
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    return {MODEL_CLIPPER: lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm)}
