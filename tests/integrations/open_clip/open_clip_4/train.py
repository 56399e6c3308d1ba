"""``open_clip_train.train``: an epoch of training, and the evaluation of a task."""

import json
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from open_clip import get_input_dtype
from open_clip_train.distributed import is_master
from open_clip_train.precision import get_autocast
from open_clip_train.train import get_clip_metrics

from tests.integrations.open_clip.open_clip_4.task import total

__all__ = ["TrainState", "evaluate", "restore_train_state_counters", "train_one_epoch"]


@dataclass
class TrainState:
    task: Any
    optimizer: Any = None
    scaler: Any = None
    scheduler: Any = None
    epoch: int = 0
    global_step: int = 0
    samples_seen: int = 0


def restore_train_state_counters(state, metadata, data, args):
    for name, value in (metadata or {}).items():
        setattr(state, name, value)


def autocast_of(args):
    return nullcontext if args.fsdp else get_autocast(args.precision, device_type=torch.device(args.device).type)


def train_one_epoch(state, data, args, tb_writer=None):
    task, optimizer = state.task, state.optimizer
    task.train()
    data["train"].set_epoch(state.epoch)
    loader = data["train"].dataloader
    steps = loader.num_batches // args.accum_freq
    batches = []
    for index, batch in enumerate(loader):
        step = steps * state.epoch + index // args.accum_freq
        if not args.skip_scheduler:
            state.scheduler(step)
        batches.append(task.prepare_batch(batch, args.device, get_input_dtype(args.precision)))
        if len(batches) < args.accum_freq:
            continue
        optimizer.zero_grad()
        one_step = train_on_one if args.accum_freq == 1 else train_on_several
        losses, of_model = one_step(task, batches, autocast_of(args))
        if args.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(task.trainable_module.parameters(), args.grad_clip_norm)
        optimizer.step()
        task.clamp_logit_scale()
        state.global_step = step + 1
        state.samples_seen += sum(map(task.batch_size, batches)) * args.world_size
        batches = []
        shown = {name: value.detach().clone() for name, value in losses.items()}
        if args.distributed:
            for value in shown.values():
                torch.distributed.all_reduce(value)
                value /= args.world_size
        if is_master(args):
            terms = " ".join(f"{name.capitalize()}: {value.item():#.5g}" for name, value in shown.items())
            scale = of_model["logit_scale"].item()
            logging.getLogger("open_clip_train.train").info(f"Train Epoch: {state.epoch} Scale: {scale:.3f} {terms}")


def train_on_one(task, batches, autocast):
    (batch,) = batches
    with autocast():
        losses, of_model = task(batch)
    losses["loss"].backward()
    return losses, of_model


def train_on_several(task, batches, autocast):
    """Take gradients of one batch at a time, beside the features that the others have without any."""
    with torch.no_grad(), autocast():
        outputs = [task.trainable_module(**batch) for batch in batches]
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        module = task.trainable_module
        waits = not last and isinstance(module, torch.nn.parallel.DistributedDataParallel)
        with module.no_sync() if waits else nullcontext():
            with autocast():
                output = module(**batch)
                alone = {name: output.pop(name) for name in ("logit_scale", "logit_bias") if name in output}
                of_all = [*outputs[:index], output, *outputs[index + 1 :]]
                joined = {name: torch.cat([of_one[name] for of_one in of_all]) for name in output}
                losses, of_model = task.compute_accum_loss(joined, alone, batches)
            losses["loss"] = total(losses)
            losses["loss"].backward()
    return losses, of_model


def evaluate(task, data, epoch, args, tb_writer=None, tokenizer=None):
    """Compare each picture with each first caption; pictures and captions are those of the batches."""
    if not (is_master(args) or (args.fsdp and args.distributed)):
        return {}
    task.eval()
    if "val" not in data or not args.val_frequency or (epoch % args.val_frequency and epoch != args.epochs):
        return {}
    assert not args.fsdp, "not in the stand-in"
    outputs = []
    with torch.inference_mode(), autocast_of(args)():
        for batch in data["val"].dataloader:
            outputs.append(task(task.prepare_batch(batch, args.device, get_input_dtype(args.precision))))
    images, texts = (torch.cat([output[f"{key}_features"] for output in outputs]) for key in ("image", "text"))
    metrics = get_clip_metrics(images, texts, outputs[-1]["logit_scale"].mean())
    metrics = {name: float(value) for name, value in metrics.items()} | {"epoch": epoch, "num_samples": len(images)}
    if args.save_logs:
        with (Path(args.checkpoint_path) / "results.jsonl").open("a") as results:
            results.write(json.dumps(metrics) + "\n")
    return metrics
