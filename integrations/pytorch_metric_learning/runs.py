"""Training from a configuration: its parts, its stages, and its folder."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_metric_learning.trainers import BaseTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vl_plugins.data.randomness import random_states, seed_everything, set_random_states
from vl_plugins.data.reader import (
    TrainingPipeline,
    check_first_sample,
    evaluation_pipeline,
    training_pipeline,
)
from vl_plugins.data.shard_files import expand_shards
from vl_plugins.data.storage import Folder
from vl_plugins.data.vocabulary import Vocabulary, read_shard_captions
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import (
    load_states,
    read_checkpoint,
    states_of,
    write_checkpoint,
)
from vl_plugins.integrations.pytorch_metric_learning.config import Config, as_plain, parse_config
from vl_plugins.integrations.pytorch_metric_learning.evaluation import ACCURACY, evaluate_towers
from vl_plugins.integrations.pytorch_metric_learning.loss_and_miner import build_loss_of, build_miner_of
from vl_plugins.integrations.pytorch_metric_learning.models import TwoTowers, build_towers, needs_vocabulary
from vl_plugins.integrations.pytorch_metric_learning.optimization import build_optimizers, build_schedulers
from vl_plugins.integrations.pytorch_metric_learning.trainers import (
    CrossModalTrainer,
    ShardedMetricLossOnly,
    ShardedTwoStreamMetricLoss,
    clipper_of_all,
)
from vl_plugins.registry import construct
from vl_plugins.retrieval.metrics import format_metrics_table
from vl_plugins.retrieval.names import percent_names
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["LATEST", "Run", "build_trainer", "build_vocabulary", "dry_run"]

logger = logging.getLogger(__name__)

LATEST, BEST, RESULTS, SETTINGS = "latest.pt", "best.pt", "results.jsonl", "config.yaml"

# What may be another value when a run goes on, since it does not change what is computed.
MAY_CHANGE = ("log_every", "data.on_read_error")

# Samples; those of features are some times as large as encoded pictures.
SHUFFLE_BUFFERS = {"images": 5000, "features": 1000}

# Trainers of one model for both modalities: that model is all they can freeze.
ONE_MODEL = {"MetricLossOnly": ShardedMetricLossOnly, "TwoStreamMetricLoss": ShardedTwoStreamMetricLoss}


def _check_classes(loss: nn.Module, dataset: Any) -> None:
    """Raise ``UserError`` for a loss with fewer classes than labels: those of our reader are positions of images."""
    num_classes = getattr(loss, "num_classes", None)
    if num_classes is None or not isinstance(dataset, TrainingPipeline):
        return
    if dataset.sizes is None:
        raise UserError(f"loss: {type(loss).__name__} needs a sizes.json beside the shards, which numbers their images")
    images = sum(dataset.sizes)
    if num_classes < images:
        raise UserError(
            f"loss: for {type(loss).__name__} each of the {images} training images is a class of its own, but "
            f"num_classes is {num_classes}"
        )


def build_vocabulary(config: Config) -> Vocabulary | None:
    """Return the words of the training captions, or None for a text tower that has its own.

    Raises:
        UserError: ``data.train`` is missing or cannot be read, or no word is frequent enough.
    """
    if not needs_vocabulary(config):
        return None
    options = {"captions": read_shard_captions(_training_shards(config)), **config.text.vocabulary}
    vocabulary = construct("section", "text.vocabulary", Vocabulary.from_captions, options)
    logger.info(f"vocabulary: {len(vocabulary.words):,} words of the training captions")
    return vocabulary


def build_trainer(
    config: Config | Mapping[str, Any],
    *,
    stage: int = 0,
    towers: TwoTowers | None = None,
    dataset: Dataset | None = None,
    loss_funcs: Mapping[str, nn.Module] | None = None,
    mining_funcs: Mapping[str, nn.Module] | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> BaseTrainer:
    """Return the trainer of a stage, ready for ``trainer.train(num_epochs=...)``.

    Args:
        config: what :func:`parse_config` takes or gives.
        stage: number of the stage.
        towers: the models; built from the configuration if left out.
        dataset: a reader of shards, or items ``image, text, label``; ``data.train`` if left out.
        loss_funcs: built from the configuration if left out.
        mining_funcs: likewise.
        device: where to train.
        options: more of the trainer's own, such as ``end_of_epoch_hook``.

    Raises:
        UserError: something in the configuration is not right; the message names it.
    """
    if not isinstance(config, Config):
        config = parse_config(config)
    settings = config.stages[stage]
    if towers is None:
        towers = build_towers(config, build_vocabulary(config))
    if loss_funcs is None:
        loss_funcs = {"metric_loss": build_loss_of(config)}
    if mining_funcs is None:
        miner = build_miner_of(config, loss_funcs["metric_loss"])
        mining_funcs = {} if miner is None else {"tuple_miner": miner}
    if config.head is not None:
        towers.compare_sets_by(loss_funcs["metric_loss"].distance)
    towers.to(device)
    towers.unfreeze()
    for loss in loss_funcs.values():
        loss.to(device)
    if dataset is None:
        dataset = _training_data(config, towers)
    for loss in loss_funcs.values():
        _check_classes(loss, dataset)

    models: dict[str, nn.Module] = dict(towers.parts)
    trainer = CrossModalTrainer
    if config.trainer in ONE_MODEL:
        trainer = ONE_MODEL[config.trainer]
        models = {"trunk": towers}
        if settings.freeze or settings.lr_scale:
            raise UserError(
                f"trainer {config.trainer} trains one model, so it has no parts to freeze or to give another learning "
                "rate: CrossModalTrainer has"
            )
    for part in settings.freeze:
        if part not in models:
            raise UserError(f"freeze has {part}, which the model does not have; its parts: {', '.join(models)}")
    optimizers = build_optimizers(settings, {**models, **loss_funcs})
    given = {
        "models": models,
        "optimizers": optimizers,
        "batch_size": config.data.batch_size,
        "loss_funcs": dict(loss_funcs),
        "mining_funcs": dict(mining_funcs),
        "dataset": dataset,
        "data_device": torch.device(device),
        "lr_schedulers": build_schedulers(settings, optimizers),
        "gradient_clippers": None
        if settings.clip_grad_norm is None
        else clipper_of_all(models, settings.clip_grad_norm),
        "freeze_these": tuple(settings.freeze),
        "freeze_trunk_batchnorm": settings.freeze_batchnorm,
        "dataloader_num_workers": config.data.workers,
    }
    return trainer(**{**given, **options})


def dry_run(config: Config, device: str | torch.device = "cpu", batch_size: int = 2) -> None:
    """Build everything without pretrained weights, and do one step of each stage on made-up inputs.

    Raises:
        UserError: something in the configuration is not right; the message names it.
    """
    towers = build_towers(config, Vocabulary(tuple(f"word{number}" for number in range(100))), pretrained=False)
    inputs = [towers.parts[f"{tower}_trunk"].example_inputs(batch_size) for tower in ("image", "text")]
    loss = build_loss_of(config)
    for stage in range(len(config.stages)):
        trainer = build_trainer(
            config,
            stage=stage,
            towers=towers,
            dataset=_MadeUp(*inputs),
            loss_funcs={"metric_loss": loss},
            device=device,
            batch_size=batch_size,
            dataloader_num_workers=0,
        )
        trainer.train(num_epochs=1)


class _MadeUp(Dataset):
    """Items ``image, text, label``."""

    def __init__(self, images: Tensor, texts: Tensor):
        self.images, self.texts = images, texts

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.images[index], self.texts[index], index


class Run:
    """A training with its folder: metrics and checkpoints after each epoch, and going on where it was stopped.

    The folder holds ``config.yaml``, ``results.jsonl`` with a line for each epoch, named as by
    :func:`vl_plugins.retrieval.names.percent_names`, ``tensorboard/``, ``latest.pt`` with everything that going on
    needs, and ``best.pt``, the model with the best RSUM. One process at a time trains there. Nothing is written before
    training starts.

    Args:
        config: what to train.
        folder: where to; new unless ``resume`` is set.
        device: where to train.
        resume: go on from ``latest.pt``, or begin where there is none yet. An epoch that was not finished begins anew.

    Raises:
        UserError: something in the configuration or the data is not right, or the folder holds another run, also one
            that another process is training.
    """

    def __init__(
        self,
        config: Config,
        folder: str | os.PathLike,
        *,
        device: str | torch.device = "cpu",
        resume: bool = False,
    ):
        self.config = config
        self.folder = Path(folder)
        self.device = torch.device(device)
        self._files = Folder(self.folder)
        self._latest_time = self._time_of_latest()
        begun = self._latest_time is not None
        saved = self._read_latest() if resume and begun else None
        if begun and not resume:
            raise UserError(f"{self.folder} holds an earlier run; give another folder with --out, or --resume to go on")
        self.loss = build_loss_of(config)
        self.miner = build_miner_of(config, self.loss)
        for shards in (_training_shards(config), expand_shards(config.data.val) if config.data.val else []):
            for shard in shards[:1]:
                check_first_sample(shard, inputs=config.data.inputs)
        self.vocabulary = build_vocabulary(config) if saved is None else saved["vocabulary"]
        self.towers = build_towers(config, self.vocabulary, pretrained=saved is None).to(self.device)
        self.epoch, self.best = 0, None
        self._steps = 0
        self._saved: Mapping[str, Any] | None = None  # until training goes on
        self._validation = self._validation_data()
        if saved is not None:
            self._go_on_from(saved)

    def train(self) -> dict[str, float]:
        """Train what is left of all stages; return the metrics of the last epoch, none without ``data.val``."""
        self._files.make()
        with self._files.lock(wait=False):
            self._open()
            self._metrics: dict[str, float] = {}
            last = 0
            try:
                for number, stage in enumerate(self.config.stages):
                    last += stage.epochs
                    if self.epoch < last:
                        self._train_stage(number, last)
            finally:
                self._writer.close()
        return self._metrics

    def _train_stage(self, number: int, last: int) -> None:
        trainer = build_trainer(
            self.config,
            stage=number,
            towers=self.towers,
            loss_funcs={"metric_loss": self.loss},
            mining_funcs={} if self.miner is None else {"tuple_miner": self.miner},
            device=self.device,
            end_of_iteration_hook=self._end_of_iteration,
            end_of_epoch_hook=self._end_of_epoch,
        )
        if self._saved is not None:
            if self.epoch > last - self.config.stages[number].epochs:  # a stage that begins has optimizers of its own
                for kind in ("optimizers", "lr_schedulers"):
                    load_states(getattr(trainer, kind), self._saved[kind])
            set_random_states(self._saved["random"])
            self._saved = None
        elif self.epoch == 0:
            seed_everything(self.config.seed)
        frozen = f", frozen: {', '.join(trainer.freeze_these)}" if trainer.freeze_these else ""
        logger.info(f"stage {number + 1} of {len(self.config.stages)}: epochs {self.epoch + 1} to {last}{frozen}")
        trainer.train(start_epoch=self.epoch + 1, num_epochs=last)

    def _end_of_iteration(self, trainer: BaseTrainer) -> None:
        step = trainer.get_global_iteration()
        if step % self.config.log_every:
            return
        for name, value in trainer.losses.items():
            value = float(value)
            self._writer.add_scalar(f"train/{name}", value, step)
            if name == "total_loss" and not torch.tensor(value).isfinite():
                raise UserError(f"the loss is {value} at step {step} of epoch {trainer.epoch}")
        for name, optimizer in trainer.optimizers.items():
            part = name.removesuffix("_optimizer")
            self._writer.add_scalar(f"lr/{part}", optimizer.param_groups[0]["lr"], step)

    def _end_of_epoch(self, trainer: BaseTrainer) -> None:
        self.epoch = trainer.epoch
        step = trainer.get_global_iteration()
        is_best = False
        if self._validation is not None:
            trainer.set_to_eval()
            metrics = evaluate_towers(self.towers, self._validation, self.device, self.config.accuracy)
            self._metrics = percent_names(metrics)
            self._report(metrics, step)
            trainer.step_lr_plateau_schedulers(metrics["rsum"])
            is_best = self.best is None or metrics["rsum"] > self.best
            self.best = metrics["rsum"] if is_best else self.best
        model = {
            "epoch": self.epoch,
            "models": states_of(self.towers.parts),
            "loss_funcs": states_of(trainer.loss_funcs),
        }
        if is_best:
            write_checkpoint(self.folder / BEST, self.config, self.vocabulary, {**model, "metrics": self._metrics})
        write_checkpoint(
            self.folder / LATEST,
            self.config,
            self.vocabulary,
            {
                **model,
                "best": self.best,
                "steps": step + 1,
                "mining_funcs": states_of(trainer.mining_funcs),
                "optimizers": states_of(trainer.optimizers),
                "lr_schedulers": states_of(trainer.lr_schedulers),
                "random": random_states(),
            },
        )

    def _report(self, metrics: Mapping[str, float], step: int) -> None:
        logger.info(f"epoch {self.epoch}: {metrics['num_samples']} images, {metrics['num_captions']} captions")
        for line in format_metrics_table({f"epoch {self.epoch}": metrics}).splitlines():
            logger.info(line)
        for name, value in self._metrics.items():
            self._writer.add_scalar(name if name.startswith(ACCURACY) else f"val/{name}", value, step)
        self._rows.append({**self._metrics, "epoch": self.epoch})
        with self._files.write(RESULTS) as stream:
            stream.write("".join(f"{json.dumps(row)}\n" for row in self._rows).encode())

    def _time_of_latest(self) -> int | None:
        latest = self.folder / LATEST
        return latest.stat().st_mtime_ns if latest.exists() else None

    def _open(self) -> None:
        """Begin in the folder, or go on with what is in it."""
        yaml = require("yaml", extra="pml")
        require("tensorboard", extra="pml")
        from torch.utils.tensorboard import SummaryWriter

        if self._time_of_latest() != self._latest_time:
            raise UserError(
                f"{self.folder} has changed since this start; give another folder with --out, or --resume to go on"
            )
        self._files.remove_partial("|".join(map(re.escape, (LATEST, BEST, RESULTS, SETTINGS))))
        with self._files.write(SETTINGS) as stream:
            stream.write(yaml.safe_dump(as_plain(self.config), sort_keys=False).encode())
        results = self.folder / RESULTS
        rows = map(json.loads, results.read_text(encoding="utf-8").splitlines() if results.exists() else [])
        # What an epoch wrote that has no checkpoint comes again.
        self._rows = [row for row in rows if row["epoch"] <= self.epoch]
        self._writer = SummaryWriter(self.folder / "tensorboard", purge_step=self._steps)

    def _validation_data(self) -> DataLoader | None:
        data = self.config.data
        if data.val is None:
            return None
        pipeline = evaluation_pipeline(
            data.val,
            self.towers.image_transform(False),
            self.towers.tokenizer,
            data.batch_size,
            inputs=data.inputs,
        )
        return DataLoader(pipeline, batch_size=None, num_workers=data.workers)

    def _read_latest(self) -> dict[str, Any]:
        saved = read_checkpoint(self.folder / LATEST)
        before, now = (_flat(as_plain(config)) for config in (saved["config"], self.config))
        changed = [key for key in before | now if before.get(key) != now.get(key) and key not in MAY_CHANGE]
        if changed:
            key = changed[0]
            raise UserError(
                f"--resume: {key} is {now.get(key)!r}, but was {before.get(key)!r} in {self.folder}; "
                "a changed training is another one"
            )
        return saved

    def _go_on_from(self, saved: Mapping[str, Any]) -> None:
        load_states(self.towers.parts, saved["models"])
        self.loss.load_state_dict(saved["loss_funcs"]["metric_loss"])
        if self.miner is not None:
            self.miner.load_state_dict(saved["mining_funcs"]["tuple_miner"])
        self.epoch, self.best, self._steps = saved["epoch"], saved["best"], saved["steps"]
        self._saved = saved
        logger.info(f"going on after epoch {self.epoch} of {self.config.epochs}")


def _training_shards(config: Config) -> list[str]:
    if config.data.train is None:
        raise UserError("data.train is missing: the shards to train on; --train-data names them too")
    return expand_shards(config.data.train)


def _training_data(config: Config, towers: TwoTowers):
    data = config.data
    return training_pipeline(
        _training_shards(config),
        towers.image_transform(True),
        towers.tokenizer,
        data.batch_size,
        captions_per_image=data.captions_per_image,
        seed=config.seed,
        num_samples=data.num_samples,
        shuffle_buffer=data.shuffle_buffer or SHUFFLE_BUFFERS[data.inputs],
        with_labels=True,
        allow_duplicate_captions=data.allow_duplicate_captions,
        same_group=data.same_group,
        on_error=data.on_read_error,
        inputs=data.inputs,
    )


def _flat(content: Any, path: Sequence[str] = ()) -> dict[str, Any]:
    """Return plain data by dotted path."""
    if isinstance(content, (Mapping, list)) and content:
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        return {key: value for name, item in items for key, value in _flat(item, (*path, str(name))).items()}
    return {".".join(path): content}
