"""Training from a configuration: its parts, its stages, and its folder."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from vl_plugins.data.collection import Collection, read_collection
from vl_plugins.data.dataset import ShardDataset, evaluation_loader
from vl_plugins.data.files import lock, remove_partial, write_file
from vl_plugins.data.randomness import derived_seed, random_states, seed_everything, set_random_states
from vl_plugins.data.sampler import CaptionSampler
from vl_plugins.encoders.vocabulary import Vocabulary
from vl_plugins.errors import UserError, require, user_errors
from vl_plugins.integrations.encoding import log_metrics, validate
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import (
    load_state_dicts,
    read_checkpoint,
    state_dicts,
    write_checkpoint,
)
from vl_plugins.integrations.pytorch_metric_learning.config import Config, parse_config
from vl_plugins.integrations.pytorch_metric_learning.models import TwoTowers, build_towers, needs_vocabulary
from vl_plugins.integrations.pytorch_metric_learning.parts import (
    build_optimizers,
    build_schedulers,
    loss_from_config,
    miner_from_config,
)
from vl_plugins.integrations.pytorch_metric_learning.processes import Processes
from vl_plugins.integrations.pytorch_metric_learning.trainers import (
    CrossModalTrainer,
    ShardedMetricLossOnly,
    ShardTrainer,
)

__all__ = ["LATEST", "Run", "build_trainer", "build_vocabulary"]

logger = logging.getLogger(__name__)

LATEST, BEST, RESULTS, SETTINGS = "latest.pt", "best.pt", "results.jsonl", "config.yaml"


def build_vocabulary(config: Config) -> Vocabulary | None:
    """Return the words of the training captions, or None for a text tower that has its own.

    Raises:
        UserError: ``data.train`` is missing or cannot be read, or no word is frequent enough.
    """
    if not needs_vocabulary(config):
        return None
    options = {"captions": read_collection(_training_shards(config)).captions, **config.text.vocabulary}
    with user_errors("text.vocabulary"):
        vocabulary = Vocabulary.from_captions(**options)
    logger.info(f"vocabulary: {len(vocabulary.words):,} words of the training captions")
    return vocabulary


def build_trainer(
    config: Config | Mapping[str, Any],
    *,
    stage: int = 0,
    towers: TwoTowers | None = None,
    dataset: Dataset | None = None,
    loss: nn.Module | None = None,
    device: str | torch.device = "cpu",
    processes: Processes | None = None,
    **options: Any,
) -> ShardTrainer:
    """Return the trainer of a stage, ready for ``trainer.train(num_epochs=...)``.

    Args:
        config: a configuration, or plain data for :func:`parse_config`.
        stage: number of the stage.
        towers: the models; by default those of the configuration.
        dataset: a ``ShardDataset``, read as the configuration says, or items ``image, text, label``; by default
            ``data.train``.
        loss: by default that of the configuration.
        device: where to train.
        processes: of :func:`start_processes`; by default one process in single precision.
        options: other arguments of the trainer, such as ``end_of_epoch_hook``.

    Raises:
        UserError: the configuration is wrong; the message says where.
    """
    if not isinstance(config, Config):
        config = parse_config(config)
    settings = config.stages[stage]
    if towers is None:
        towers = build_towers(config, build_vocabulary(config))
    if loss is None:
        loss = loss_from_config(config)
    miner = miner_from_config(config, loss)
    if config.head is not None:
        towers.compare_sets_by(loss.distance)
    towers.to(device)
    towers.unfreeze()
    loss.to(device)
    processes = processes or Processes()
    if dataset is None:
        dataset = _shard_dataset(config, read_collection(_training_shards(config)), towers, is_training=True)

    trainer: type[ShardTrainer] = CrossModalTrainer
    models: dict[str, nn.Module] = dict(towers.parts)
    if config.trainer == "MetricLossOnly":
        trainer, models = ShardedMetricLossOnly, {"trunk": towers}
    for part in settings.freeze:
        if part not in models:
            raise UserError(
                f"freeze has {part}, which trainer {config.trainer} does not have; its parts: {', '.join(models)}"
            )
    optimizers = build_optimizers(settings, {**models, "metric_loss": loss})
    given = {
        "models": models,
        "optimizers": optimizers,
        "batch_size": config.data.batch_size,
        "loss_funcs": {"metric_loss": loss},
        "mining_funcs": {} if miner is None else {"tuple_miner": miner},
        "dataset": dataset,
        "sampler": _sampler(config, dataset, processes) if isinstance(dataset, ShardDataset) else None,
        "data_device": torch.device(device),
        "lr_schedulers": build_schedulers(settings, optimizers),
        "clip_grad_norm": settings.clip_grad_norm,
        "freeze_these": tuple(settings.freeze),
        "freeze_trunk_batchnorm": settings.freeze_batchnorm,
        "dataloader_num_workers": config.data.workers,
        "processes": processes,
    }
    return trainer(**{**given, **options})


class Run:
    """A training with its folder: metrics and checkpoints after each epoch, which can be resumed.

    The folder holds ``config.yaml``, ``results.jsonl`` with the metrics of each epoch (of
    :func:`vl_plugins.integrations.encoding.validate`), ``tensorboard/``, ``latest.pt`` with the whole state, and
    ``best.pt``, the model with the best RSUM. One run at a time trains there. The first process evaluates and writes,
    and all read ``latest.pt``. Nothing is written before training starts.

    Args:
        config: what to train.
        folder: where to write; new unless ``resume`` is set.
        device: where to train.
        resume: continue from ``latest.pt``, or start if there is none. An unfinished epoch starts over.
        processes: of :func:`start_processes`; by default one process in single precision.

    Raises:
        UserError: the configuration or the data are wrong, or the folder holds another run or is in use.
    """

    def __init__(
        self,
        config: Config,
        folder: str | os.PathLike,
        *,
        device: str | torch.device = "cpu",
        resume: bool = False,
        processes: Processes | None = None,
    ):
        self.config = config
        self.folder = Path(folder)
        self.device = torch.device(device)
        self.processes = processes or Processes()
        begun = (self.folder / LATEST).exists()
        if begun and not resume:
            raise UserError(f"{self.folder} holds an earlier run; give another folder with --out, or --resume to go on")
        saved = self._read_latest() if begun else None
        self.loss = loss_from_config(config)
        miner_from_config(config, self.loss)  # for its errors
        train = read_collection(_training_shards(config))
        val = read_collection(config.data.val) if config.data.val else None
        self.vocabulary = build_vocabulary(config) if saved is None else saved["vocabulary"]
        self.towers = build_towers(config, self.vocabulary, pretrained=saved is None).to(self.device)
        self.epoch, self._steps = 0, 0
        self.best: float | None = None
        self._saved: Mapping[str, Any] | None = None  # until training goes on
        self._metrics: dict[str, float] = {}
        self._training = _shard_dataset(config, train, self.towers, is_training=True)
        self._validation = None
        if val is not None:
            dataset = _shard_dataset(config, val, self.towers, is_training=False)
            self._validation = evaluation_loader(dataset, config.data.batch_size, workers=config.data.workers)
        if saved is not None:
            self._go_on_from(saved)

    def train(self) -> dict[str, float]:
        """Train what is left of all stages; return the metrics of the last epoch, none without ``data.val``."""
        with contextlib.ExitStack() as stack:
            if self.processes.is_first:
                stack.enter_context(lock(self.folder / ".lock", str(self.folder)))
                self._writer = stack.enter_context(self._open())
            last = 0
            for number, stage in enumerate(self.config.stages):
                last += stage.epochs
                if self.epoch < last:
                    self._train_stage(number, last)
        return self._metrics

    def _train_stage(self, number: int, last: int) -> None:
        trainer = build_trainer(
            self.config,
            stage=number,
            towers=self.towers,
            dataset=self._training,
            loss=self.loss,
            device=self.device,
            processes=self.processes,
            end_of_iteration_hook=self._end_of_iteration,
            end_of_epoch_hook=self._end_of_epoch,
        )
        rank, scaler = self.processes.rank, self.processes.scaler
        if self._saved is not None:
            if self.epoch > last - self.config.stages[number].epochs:  # a new stage has new optimizers
                for kind in ("optimizers", "lr_schedulers"):
                    load_state_dicts(getattr(trainer, kind), self._saved[kind])
            if scaler is not None:
                scaler.load_state_dict(self._saved["scaler"])
            set_random_states([self._saved["random"], *self._saved.get("other_random", [])][rank])
            self._saved = None
        elif self.epoch == 0:
            seed_everything(self.config.seed if rank == 0 else derived_seed(self.config.seed, rank))
        frozen = f", frozen: {', '.join(trainer.freeze_these)}" if trainer.freeze_these else ""
        logger.info(f"stage {number + 1} of {len(self.config.stages)}: epochs {self.epoch + 1} to {last}{frozen}")
        trainer.train(start_epoch=self.epoch + 1, num_epochs=last)

    def _end_of_iteration(self, trainer: ShardTrainer) -> None:
        step = trainer.get_global_iteration()
        if step % self.config.log_every or not self.processes.is_first:
            return
        for name, value in trainer.losses.items():
            self._writer.add_scalar(f"train/{name}", float(value), step)
        for name, optimizer in trainer.optimizers.items():
            part = name.removesuffix("_optimizer")
            self._writer.add_scalar(f"lr/{part}", optimizer.param_groups[0]["lr"], step)

    def _end_of_epoch(self, trainer: ShardTrainer) -> None:
        self.epoch = trainer.epoch
        step = trainer.get_global_iteration()
        is_best = False
        if self._validation is not None:
            trainer.set_to_eval()
            metrics = None
            if self.processes.is_first:
                metrics = validate(self.towers, self._validation, self.device)
            metrics = self.processes.from_first(metrics)
            self._metrics = metrics
            trainer.step_lr_plateau_schedulers(metrics["rsum"])
            is_best = self.best is None or metrics["rsum"] > self.best
            self.best = metrics["rsum"] if is_best else self.best
            if self.processes.is_first:
                self._report(metrics, step)
        random, *other_random = self.processes.from_all(random_states())
        if self.processes.is_first:
            self._write_checkpoints(trainer, is_best, {"random": random, "other_random": other_random})

    def _write_checkpoints(self, trainer: ShardTrainer, is_best: bool, random: Mapping[str, Any]) -> None:
        scaler = self.processes.scaler
        model = {
            "epoch": self.epoch,
            "models": state_dicts(self.towers.parts),
            "loss_funcs": state_dicts(trainer.loss_funcs),
        }
        going_on = {
            "best": self.best,
            "steps": trainer.get_global_iteration() + 1,
            "optimizers": state_dicts(trainer.optimizers),
            "lr_schedulers": state_dicts(trainer.lr_schedulers),
            "scaler": None if scaler is None else scaler.state_dict(),
            "num_processes": self.processes.count,
            "precision": self.processes.precision,
        }
        if is_best:
            write_checkpoint(self.folder / BEST, self.config, self.vocabulary, {**model, "metrics": self._metrics})
        write_checkpoint(self.folder / LATEST, self.config, self.vocabulary, {**model, **going_on, **random})

    def _report(self, metrics: Mapping[str, float], step: int) -> None:
        log_metrics(metrics, self.epoch)
        for name, value in self._metrics.items():
            self._writer.add_scalar(f"val/{name}", value, step)
        self._rows.append({**self._metrics, "epoch": self.epoch})
        write_file(self.folder / RESULTS, "".join(f"{json.dumps(row)}\n" for row in self._rows).encode())

    def _open(self) -> Any:
        """Begin in the folder, or go on with what is in it; return a ``SummaryWriter``."""
        yaml = require("yaml", extra="pml")
        require("tensorboard", extra="pml")
        from torch.utils.tensorboard import SummaryWriter

        remove_partial(self.folder, "|".join(map(re.escape, (LATEST, BEST, RESULTS))))
        write_file(self.folder / SETTINGS, yaml.safe_dump(asdict(self.config), sort_keys=False).encode())
        results = self.folder / RESULTS
        rows = map(json.loads, results.read_text(encoding="utf-8").splitlines() if results.exists() else [])
        # An epoch without a checkpoint is trained again.
        self._rows = [row for row in rows if row["epoch"] <= self.epoch]
        return SummaryWriter(self.folder / "tensorboard", purge_step=self._steps)

    def _read_latest(self) -> dict[str, Any]:
        saved = read_checkpoint(self.folder / LATEST)
        before, now = asdict(saved["config"]), asdict(self.config)
        before |= {"precision": saved.get("precision", "fp32"), "number of processes": saved.get("num_processes", 1)}
        now |= {"precision": self.processes.precision, "number of processes": self.processes.count}
        for key, value in before.items():
            if value != now[key]:
                raise UserError(f"--resume: {key} is {now[key]!r}, but was {value!r} in {self.folder}; use a new --out")
        return saved

    def _go_on_from(self, saved: Mapping[str, Any]) -> None:
        load_state_dicts(self.towers.parts, saved["models"])
        self.loss.load_state_dict(saved["loss_funcs"]["metric_loss"])
        self.epoch, self.best, self._steps = saved["epoch"], saved["best"], saved["steps"]
        self._saved = saved
        logger.info(f"going on after epoch {self.epoch} of {self.config.epochs}")


def _training_shards(config: Config) -> str:
    if config.data.train is None:
        raise UserError("data.train is missing: the shards to train on; --train-data names them too")
    return config.data.train


def _shard_dataset(config: Config, collection: Collection, towers: TwoTowers, *, is_training: bool) -> ShardDataset:
    data = config.data
    transform = towers.image_transform(is_training)
    dataset = ShardDataset(collection, transform, towers.tokenizer, inputs=data.inputs, on_error=data.on_read_error)
    dataset[0]  # raises an error before training, also with "skip"
    return dataset


def _sampler(config: Config, dataset: ShardDataset, processes: Processes) -> CaptionSampler:
    return CaptionSampler(
        dataset.collection,
        config.data.batch_size,
        captions_per_image=config.data.captions_per_image,
        seed=config.seed,
        distinct_captions=not config.data.allow_duplicate_captions,
        rank=processes.rank,
        world_size=processes.count,
    )
