"""Training of two towers on Hugging Face accelerate: stages, several processes, mixed precision, checkpoints."""

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, ProjectConfiguration, send_to_device
from omegaconf import OmegaConf
from timm.layers import convert_sync_batchnorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm

from vl_plugins.data import CaptionSampler, ShardDataset, evaluation_loader, training_loader
from vl_plugins.data.files import write_complete, write_file
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.errors import UserError
from vl_plugins.integrations.encoding import validate
from vl_plugins.integrations.loading import read_torch_file
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import FORMAT, VERSION, describe, load_objective
from vl_plugins.integrations.pytorch_metric_learning.config import Config, StageConfig
from vl_plugins.integrations.pytorch_metric_learning.objective import build_objective, make_optimizer, make_scheduler
from vl_plugins.retrieval import format_metrics_table

__all__ = ["Run", "make_accelerator"]

logger = logging.getLogger(__name__)

LATEST, BEST, RESULTS, SETTINGS = "latest.pt", "best.pt", "results.jsonl", "config.yaml"
# open_clip's names of the precision in which accelerate runs a model.
PRECISIONS = {"no": "fp32", "bf16": "amp_bf16", "fp16": "amp"}


def make_accelerator(
    precision: str | None = None,
    folder: str | os.PathLike | None = None,
    device: str | None = None,
    report_to: Sequence[str] = (),
) -> Accelerator:
    """Join the processes of ``torchrun`` or ``accelerate launch``, if any.

    Args:
        precision: of the models: ``"fp32"``, ``"bf16"`` or ``"fp16"``; by default that of ``accelerate launch``.
        folder: of the run, where trackers write.
        device: ``"cpu"`` or ``"cuda"``; by default a GPU if there is one.
        report_to: trackers of accelerate, such as ``"tensorboard"`` and ``"wandb"``.

    Raises:
        UserError: the device is not there or has no such precision, or accelerate is set to shard the model.
    """
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=device == "cpu",
        log_with=list(report_to) or None,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder and os.path.join(folder, "logs")),
        kwargs_handlers=[
            # An embedder that pools otherwise leaves the pooling of its trunk without gradients.
            DistributedDataParallelKwargs(static_graph=True),
            InitProcessGroupKwargs(timeout=timedelta(hours=12)),  # the others wait while the first one evaluates
        ],
    )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:  # accelerate would train without a scaler
        raise UserError(f"--precision fp16: not on the device {accelerator.device.type}; use bf16 or fp32")
    if device == "cuda" and accelerator.device.type != "cuda":
        raise UserError("--device cuda: torch finds no GPU")
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise UserError(f"accelerate launch is set to {kind.value}, which is not supported")
    return accelerator


class Run:
    """A training with its folder: metrics and checkpoints after each epoch, from which it can be resumed.

    The folder holds ``config.yaml``, ``results.jsonl`` with the metrics of each epoch (of
    :func:`vl_plugins.integrations.encoding.validate`), ``logs/`` of trackers, ``latest.pt`` with the whole state, and
    ``best.pt``, the model with the best RSUM. The first process evaluates and writes; nothing is written before
    training starts. Random numbers of an epoch depend on seed, epoch and process alone.

    Args:
        config: what to train.
        folder: where to write; new unless ``resume`` is set.
        accelerator: of :func:`make_accelerator`.
        resume: continue after the last complete epoch of ``latest.pt``, or start if there is none. The configuration
            may change, for example to more epochs; a warning lists the changes.

    Raises:
        UserError: the configuration or the data are wrong, or the folder holds another run.
    """

    def __init__(
        self, config: Config, folder: str | os.PathLike, accelerator: Accelerator | None = None, *, resume: bool = False
    ):
        self.config, self.folder = config, Path(folder)
        self.accelerator = accelerator or make_accelerator()
        self._saved = self._read_latest(resume)
        self.history: list[dict[str, Any]] = self._saved.get("history", [])
        self.objective = load_objective(config, self._saved) if self._saved else build_objective(config)
        if self.accelerator.num_processes > 1 and self.accelerator.device.type == "cuda":
            self.objective.towers = convert_sync_batchnorm(self.objective.towers)
        self.objective.to(self.accelerator.device)
        self.loader, self.validation = self._loaders()
        for stage in config.schedule:
            self._start(stage, epochs=1)  # for errors of later stages

    def train(self) -> list[dict[str, Any]]:
        """Train the epochs that are left of all stages; return the metrics of each epoch, in the first process."""
        steps = len(self.history) * len(self.loader)
        # After a kill, TensorBoard drops the steps that are repeated.
        options = {"tensorboard": {"purge_step": steps}, "wandb": {"name": self.folder.name, "dir": str(self.folder)}}
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / SETTINGS, OmegaConf.to_yaml(OmegaConf.create(asdict(self.config))).encode())
        self.accelerator.init_trackers("vl_plugins", init_kwargs=options)
        last = 0
        for number, stage in enumerate(self.config.schedule, 1):
            first, last = last, last + stage.epochs
            if len(self.history) < last:
                epochs = f"epochs {len(self.history) + 1} to {last}, frozen: {', '.join(stage.freeze) or 'nothing'}"
                logger.info(f"stage {number} of {len(self.config.schedule)}: {epochs}")
                self._train_stage(stage, first, last)
        self.accelerator.end_training()
        return self.history

    def _start(self, stage: StageConfig, epochs: int) -> tuple[Optimizer, LRScheduler, int]:
        self.objective.set_mode(stage)
        optimizer = make_optimizer(stage, self.objective)
        return optimizer, *make_scheduler(stage, optimizer, len(self.loader), epochs)

    def _train_stage(self, stage: StageConfig, first: int, last: int) -> None:
        optimizer, scheduler, interval = self._start(stage, len(self.history) - first)
        if self._saved and len(self.history) > first:  # a new stage has a new optimizer
            saved, groups = self._saved["optimizer"], optimizer.state_dict()["param_groups"]
            if [group["part"] for group in groups] != [group["part"] for group in saved["param_groups"]]:
                raise UserError("--resume: this stage trains other parts than before; use a new --out")
            # Rates and other options are those of the configuration, which may have changed.
            optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        model, prepared = self.accelerator.prepare(self.objective, optimizer)
        if self._saved and self.accelerator.scaler is not None and self._saved["scaler"]:
            self.accelerator.scaler.load_state_dict(self._saved["scaler"])
        self._saved = {}
        while len(self.history) < last:
            self._train_epoch(stage, model, prepared, scheduler, interval)
            self.history.append(self._evaluate())
            if self.accelerator.is_main_process:
                self._write(optimizer)
        self.accelerator.free_memory()

    def _train_epoch(self, stage: StageConfig, model: Any, optimizer: Any, scheduler: Any, interval: int) -> None:
        accelerator, epoch = self.accelerator, len(self.history) + 1
        self.objective.set_mode(stage)
        self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        seed_everything(derived_seed(self.config.seed, epoch, accelerator.process_index))
        bar = tqdm(self.loader, desc=f"epoch {epoch}", disable=not accelerator.is_main_process)
        for step, batch in enumerate(bar, (epoch - 1) * len(self.loader)):
            loss = model(*send_to_device(batch, accelerator.device))
            accelerator.backward(loss)
            if (stage.clip_grad_norm or 0) > 0:
                accelerator.clip_grad_norm_(self.objective.towers.parameters(), stage.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if step % self.config.log_every == 0:
                rates = {f"lr/{group['part']}": group["lr"] for group in optimizer.param_groups}
                accelerator.log({"train/loss": loss.item(), **rates}, step=step)
            if (step + 1) % interval == 0:
                scheduler.step()
        if not loss.isfinite():
            raise UserError(f"the loss is {loss.item()} at the end of epoch {epoch}")

    def _evaluate(self) -> dict[str, Any]:
        """Return the number of an epoch and, in the first process, its metrics."""
        epoch, metrics = len(self.history) + 1, {}
        if self.validation is not None and self.accelerator.is_main_process:
            precision = PRECISIONS[self.accelerator.mixed_precision]
            metrics = validate(self.objective.towers.eval(), self.validation, self.accelerator.device, precision)
            logger.info(format_metrics_table({f"epoch {epoch}": metrics}))
            values = {f"val/{name}": value for name, value in metrics.items()}
            self.accelerator.log(values, step=epoch * len(self.loader) - 1)
        return {**metrics, "epoch": epoch}

    def _write(self, optimizer: Optimizer) -> None:
        row, scaler = self.history[-1], self.accelerator.scaler
        model = {"epoch": row["epoch"], "metrics": row, **describe(self.config, self.objective)}
        training = {"history": self.history, "optimizer": optimizer.state_dict()}
        files = {LATEST: model | training | {"scaler": scaler and scaler.state_dict()}}
        if "rsum" in row and row is max(self.history, key=lambda other: other.get("rsum", -math.inf)):
            files = {BEST: model, **files}
        for name, content in files.items():
            with write_complete(self.folder / name) as stream:
                torch.save(content, stream)
        write_file(self.folder / RESULTS, "".join(f"{json.dumps(row)}\n" for row in self.history).encode())

    def _read_latest(self, resume: bool) -> dict[str, Any]:
        """Return the content of ``latest.pt``, or nothing for a new run; warn of changes since."""
        file = self.folder / LATEST
        if not file.exists():
            return {}
        if not resume:
            raise UserError(f"{self.folder} holds an earlier run; give another folder with --out, or --resume")
        saved = read_torch_file(file)
        if not isinstance(saved, dict) or (saved.get("format"), saved.get("version")) != (FORMAT, VERSION):
            raise UserError(
                f"{file} is not of this version; one of 0.2 can be evaluated, but not resumed: use a new --out"
            )
        # An earlier version may have had fewer options.
        earlier: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), saved["config"]))
        before = asdict(earlier)
        changed = [name for name, value in asdict(self.config).items() if value != before[name]]
        if changed and self.accelerator.is_main_process:
            logger.warning(f"resuming after epoch {saved['epoch']} with changes in: {', '.join(changed)}")
        return saved

    def _loaders(self) -> tuple[DataLoader, DataLoader | None]:
        data = self.config.data
        training = self._dataset(data.train, is_train=True)
        sampler = CaptionSampler(
            training.collection,
            data.batch_size,
            captions_per_image=data.captions_per_image,
            seed=self.config.seed,
            distinct_captions=not data.allow_duplicate_captions,
        )
        classes = getattr(self.objective.loss, "num_classes", None)
        if classes is not None and (found := int(training.collection.labels.max()) + 1) > classes:
            raise UserError(f"loss: num_classes must be at least {found}, since each image is a class; got {classes}")
        validation = None
        if data.val:
            dataset = self._dataset(data.val, is_train=False)
            validation = evaluation_loader(dataset, data.batch_size, workers=data.workers)
        return training_loader(training, sampler, workers=data.workers), validation

    def _dataset(self, shards: str, *, is_train: bool) -> ShardDataset:
        towers, data = self.objective.towers, self.config.data
        transform = towers.image.trunk.image_transform(is_train)
        dataset = ShardDataset(
            shards,
            transform,
            towers.tokenizer,
            inputs=data.inputs,
            on_error=data.on_read_error,
            max_image_pixels=data.max_image_pixels,
        )
        dataset[0]  # raises an error before training, also with "skip"
        return dataset
