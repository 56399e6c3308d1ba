"""Training of two towers on Hugging Face accelerate: stages, several processes, mixed precision, checkpoints."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast, send_to_device
from omegaconf import OmegaConf
from timm.layers import convert_sync_batchnorm
from torch.optim import Optimizer
from tqdm import tqdm

from vl_plugins.data import read_batches
from vl_plugins.data.files import write_file
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.encoding import validate
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import describe, load_objective, write_checkpoint
from vl_plugins.integrations.pytorch_metric_learning.config import Config
from vl_plugins.integrations.pytorch_metric_learning.loaders import (
    make_training_loader,
    make_validation_loader,
    trial_batch,
)
from vl_plugins.integrations.pytorch_metric_learning.objective import build_objective
from vl_plugins.integrations.pytorch_metric_learning.resuming import State, in_first_process, read_state
from vl_plugins.integrations.pytorch_metric_learning.stages import Stage, remaining_stages
from vl_plugins.retrieval import format_metrics_table

__all__ = ["Run", "make_accelerator"]

logger = logging.getLogger(__name__)

LATEST, BEST, RESULTS, SETTINGS = "latest.pt", "best.pt", "results.jsonl", "config.yaml"
# Endings of metrics of which a low value is good.
LOWER_IS_BETTER = ("_rank", "negative_similarity")
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
        device: ``"cpu"`` or ``"cuda"``; by default a GPU if there is one. Several processes without a GPU train on the
            CPU.
        report_to: trackers of accelerate, such as ``"tensorboard"`` and ``"wandb"``.

    Raises:
        UserError: the device is not there or has no such precision, or accelerate is set to shard the model.
    """
    if device is None and _started_processes() > 1 and not torch.cuda.is_available():
        device = "cpu"  # accelerate joins processes on the CPU only if it is told to
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=device == "cpu",
        log_with=list(report_to) or None,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder and os.path.join(folder, "logs")),
        kwargs_handlers=[
            # An embedder that pools otherwise leaves the pooling of its trunk without gradients.
            DistributedDataParallelKwargs(static_graph=True)
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


def _started_processes() -> int:
    """Return how many processes torchrun, accelerate launch or a cluster started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


class Run:
    """A training with its folder: metrics and checkpoints after each epoch, from which it can be resumed.

    The folder holds ``config.yaml``, ``results.jsonl`` with the metrics of each epoch (of
    :func:`vl_plugins.integrations.encoding.validate`), its mean ``train_loss`` and, if the loss has ``collect_stats``,
    its mean :mod:`~vl_plugins.losses.statistics`, ``logs/`` of trackers, ``latest.pt`` with the whole state, and
    ``best.pt``, the best model by ``best_metric`` of the configuration. All processes evaluate their share; the first
    one reads what is resumed, and writes. Nothing is written before training starts. Random numbers of an epoch depend
    on seed, epoch and process alone.

    Args:
        config: what to train.
        folder: where to write; new unless ``resume`` is set.
        accelerator: of :func:`make_accelerator`.
        resume: continue after the last complete epoch of ``latest.pt``, or start if there is none. The configuration
            may change, for example to more epochs; a warning lists the changes.

    Raises:
        UserError: the configuration or the data are wrong, the folder holds another run, or the accelerator has not
            joined the processes that were started.
    """

    def __init__(
        self, config: Config, folder: str | os.PathLike, accelerator: Accelerator | None = None, *, resume: bool = False
    ):
        self.config, self.folder = config, Path(folder)
        self.accelerator = accelerator or make_accelerator()
        started = _started_processes()
        if started > 1 and self.accelerator.num_processes == 1:
            raise UserError(
                f"{started} processes were started, but this one trains alone: use --device cpu "
                "(make_accelerator(device='cpu')), or start them with torchrun or accelerate launch"
            )
        file = self.folder / LATEST
        state = in_first_process(self.accelerator, lambda: read_state(self.folder, file, resume))
        if state is None:
            state = State()
            self.objective = build_objective(config)
        else:
            self._warn_of_changes(state)
            with user_errors(f"{file} does not fit the configuration", *MALFORMED_CONTENT):
                self.objective = load_objective(config, state.model)
                if self.accelerator.scaler is not None and state.scaler:
                    self.accelerator.scaler.load_state_dict(state.scaler)
        self.epoch, self.history = state.epoch, state.history
        if self.accelerator.num_processes > 1 and self.accelerator.device.type == "cuda":
            self.objective.towers = convert_sync_batchnorm(self.objective.towers)
        self.objective.to(self.accelerator.device)
        if config.data.images_per_step * self.accelerator.num_processes == 1:
            raise UserError("data.batch_size: a loss compares images, and there is only one; give at least 2")
        self.loader = make_training_loader(config, self.objective.towers)
        self._try_batch(self.loader.dataset)
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.validation = make_validation_loader(config, self.objective.towers, rank, world_size)
        self.stages = remaining_stages(config, self.objective, len(self.loader), self.epoch, state.optimizer)

    def train(self) -> list[dict[str, Any]]:
        """Train the epochs that are left of all stages; return the metrics of each epoch, in the first process."""
        steps = self.epoch * len(self.loader)
        # After a kill, TensorBoard drops the steps that are repeated.
        options = {"tensorboard": {"purge_step": steps}, "wandb": {"name": self.folder.name, "dir": str(self.folder)}}
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / SETTINGS, OmegaConf.to_yaml(OmegaConf.create(asdict(self.config))).encode())
        with user_errors("--report-to", *MALFORMED_CONTENT):
            self.accelerator.init_trackers("vl_plugins", init_kwargs=options)
        if self.config.validate_first and not self.history:
            self.history.append({**self._evaluate(), "epoch": 0})
            self._write_results()
        while self.stages:
            self._train_stage(self.stages.pop(0))
        self.accelerator.end_training()
        return self.history

    def _try_batch(self, dataset: Any) -> None:
        classes = getattr(self.objective.loss, "num_classes", None)
        images = int(dataset.collection.labels.max()) + 1
        if classes is not None and images > classes:
            raise UserError(f"loss: num_classes must be at least {images}, since each image is a class; got {classes}")
        batch = send_to_device(trial_batch(dataset), self.accelerator.device)
        self.objective.try_batch(*batch)

    def _train_stage(self, stage: Stage) -> None:
        frozen = ", ".join(stage.config.freeze) or "nothing"
        epochs = f"epochs {self.epoch + 1} to {stage.last}"
        logger.info(f"stage {stage.number} of {len(self.config.schedule)}: {epochs}, frozen: {frozen}")
        self.objective.set_mode(stage.config)
        model, optimizer = self.accelerator.prepare(self.objective, stage.optimizer)
        while self.epoch < stage.last:
            self.epoch += 1
            means = self._train_epoch(stage, model, optimizer)
            self.history.append({**self._evaluate(), "epoch": self.epoch, **means})
            self._write_checkpoints(stage.optimizer)
            self._write_results()
        self.accelerator.free_memory()

    def _train_epoch(self, stage: Stage, model: Any, optimizer: Any) -> dict[str, float]:
        """Train an epoch; return means over its steps of the loss and its statistics.

        They are those of the batches of all processes, because each process compares all rows.
        """
        accelerator, epoch = self.accelerator, self.epoch
        self.objective.set_mode(stage.config)
        self.loader.batch_sampler.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        seed_everything(derived_seed(self.config.seed, epoch, accelerator.process_index))
        batches = read_batches("data.train", self.loader)
        bar = tqdm(batches, desc=f"epoch {epoch}", total=len(self.loader), disable=not accelerator.is_main_process)
        totals: dict[str, Any] = {}
        for step, batch in enumerate(bar, (epoch - 1) * len(self.loader)):
            loss = model(*send_to_device(batch, accelerator.device))
            accelerator.backward(loss)
            if (stage.config.clip_grad_norm or 0) > 0:
                accelerator.clip_grad_norm_(self.objective.towers.parameters(), stage.config.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            values = {"loss": loss.detach(), **self.objective.statistics()}
            for name, value in values.items():
                totals[name] = totals.get(name, 0) + value.double()
            if step % self.config.log_every == 0:
                logged = {f"train/{name}": value.item() for name, value in values.items()}
                for group in optimizer.param_groups:
                    logged[f"lr/{group['part']}"] = group["lr"]
                accelerator.log(logged, step=step)
            if (step + 1) % stage.interval == 0:
                stage.scheduler.step()
        if not loss.isfinite():
            raise UserError(f"the loss is {loss.item()} at the end of epoch {epoch}")
        means = {}
        for name, total in totals.items():
            means[name] = total.item() / len(self.loader)
        return {"train_loss": means.pop("loss"), **means}

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics in the first process, {} without validation data and in the others."""
        if self.validation is None:
            return {}
        towers = self.objective.towers.eval()
        for buffer in towers.buffers():  # such as statistics of batch norm, of each process's own batches
            broadcast(buffer)
        batches = read_batches("data.val", self.validation)
        precision = PRECISIONS[self.accelerator.mixed_precision]
        metrics = validate(towers, batches, self.accelerator.device, precision, gather=True)
        if metrics:
            logger.info(format_metrics_table({f"epoch {self.epoch}": metrics}))
            values = {f"val/{name}": value for name, value in metrics.items()}
            self.accelerator.log(values, step=max(0, self.epoch * len(self.loader) - 1))
        return metrics

    def _write_results(self) -> None:
        if self.accelerator.is_main_process:
            lines = [f"{json.dumps(row)}\n" for row in self.history]
            write_file(self.folder / RESULTS, "".join(lines).encode())

    def _write_checkpoints(self, optimizer: Optimizer) -> None:
        if not self.accelerator.is_main_process:
            return
        model = {"epoch": self.epoch, "metrics": self.history[-1], **describe(self.config, self.objective)}
        if self._is_best():
            write_checkpoint(self.folder / BEST, model)
        state = State(self.epoch, optimizer.state_dict(), None, self.history, model)
        if self.accelerator.scaler is not None:
            state.scaler = self.accelerator.scaler.state_dict()
        state.save(self.folder / LATEST)

    def _is_best(self) -> bool:
        """Return whether the latest epoch is better than all before it; False without validation."""
        metric = self.config.best_metric
        values = []
        for row in self.history:
            if row["epoch"] > 0 and metric in row:  # epoch 0 trained nothing
                values.append(row[metric])
        if metric not in self.history[-1]:
            return False
        if metric.endswith(LOWER_IS_BETTER):
            return values.index(min(values)) == len(values) - 1
        return values.index(max(values)) == len(values) - 1

    def _warn_of_changes(self, state: State) -> None:
        # An earlier version may have had fewer options.
        earlier: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), state.model["config"]))
        before = asdict(earlier)
        changed = []
        for name, value in asdict(self.config).items():
            if value != before[name]:
                changed.append(name)
        if changed and self.accelerator.is_main_process:
            logger.warning(f"resuming after epoch {state.epoch} with changes in: {', '.join(changed)}")
