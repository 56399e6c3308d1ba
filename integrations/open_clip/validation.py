"""Validation during training: image-text retrieval over all captions, in place of open_clip's one-caption metric."""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip_train.distributed import is_master

from vl_plugins.data.files import file_errors
from vl_plugins.errors import UserError, message
from vl_plugins.integrations.encoding import log_metrics, validate
from vl_plugins.integrations.open_clip.data import AllCaptions
from vl_plugins.integrations.open_clip.host import OpenCLIP3

__all__ = ["evaluate"]


def evaluate(
    model: torch.nn.Module,
    data: Mapping[str, Any],
    epoch: int,
    args: Namespace,
    tb_writer=None,
    tokenizer=None,
    *,
    host: OpenCLIP3,
    host_evaluate: Callable,
    errors: list[UserError],
) -> dict[str, float]:
    """Evaluate in place of open_clip's ``evaluate``: retrieval over all captions where our reader reads ``val``.

    Metrics go where open_clip's go, recalls as fractions under its names. The zero-shot ImageNet evaluation stays
    open_clip's. If validation data cannot be read during a training, the error is logged and added to ``errors``, and
    the training goes on.

    Raises:
        UserError: an embedding is not finite; or, without training, the data cannot be read.
    """
    if not isinstance(data.get("val"), AllCaptions):
        return host_evaluate(model, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer)
    rest = {name: split for name, split in data.items() if name != "val"}
    metrics = host_evaluate(model, rest, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer)
    if not (is_master(args) or host.evaluates_together(args)) or not args.val_frequency:
        return metrics
    if epoch % args.val_frequency and epoch != args.epochs:
        return metrics
    model.eval()
    try:
        found = validate(host.evaluated_model(model), data["val"].dataloader, args.device, args.precision)
        if is_master(args):
            log_metrics(found, epoch)
            _report({**found, "epoch": epoch}, data, epoch, args, tb_writer)
    except UserError as error:
        if "train" not in data:
            raise
        errors.append(error)
        logging.error(f"Eval Epoch: {epoch} {message(error)}")
        return metrics
    except ValueError as error:
        raise UserError(f"validation after epoch {epoch}: {error}") from error
    return {**metrics, **found} if is_master(args) else metrics


def _report(metrics: Mapping[str, float], data: Mapping[str, Any], epoch: int, args: Namespace, tb_writer) -> None:
    """Write metrics to results.jsonl, TensorBoard and wandb, each as open_clip's own evaluation does."""
    log_data = {f"val/{name}": value for name, value in metrics.items()}
    if args.save_logs:
        if tb_writer is not None:
            for name, value in log_data.items():
                tb_writer.add_scalar(name, value, epoch)
        file = Path(args.checkpoint_path) / "results.jsonl"
        with file_errors("write", file), file.open("a") as results:
            results.write(json.dumps(metrics) + "\n")
    if args.wandb:
        import wandb

        step = None
        if "train" in data:
            step = data["train"].dataloader.num_batches // args.accum_freq * epoch
        wandb.log({**log_data, "epoch": epoch}, step=step)
