"""Validation during training: image-text retrieval over all captions, in place of open_clip's one-caption metric."""

import copy
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip_train.distributed import is_master

from vl_plugins.data.storage import error_text
from vl_plugins.integrations.command_lines import message
from vl_plugins.integrations.encoding import encode_batches
from vl_plugins.integrations.open_clip.data import AllCaptions
from vl_plugins.integrations.open_clip.host import OpenCLIP3
from vl_plugins.retrieval import format_metrics_table
from vl_plugins.retrieval.encoding import join, validation_metrics
from vl_plugins.retrieval.names import percent_names
from vl_plugins.utils.errors import UserError

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

    Metrics go where open_clip's go, in a record of their own under the names of
    :func:`vl_plugins.retrieval.names.percent_names`. The zero-shot ImageNet evaluation stays open_clip's.

    A training goes on when its validation data cannot be read any more: the error is logged and added to ``errors``.

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
        found = _metrics(host.evaluated_model(model), data["val"].dataloader, args)
        if is_master(args):
            _log(found, epoch)
            _report({**percent_names(found), "epoch": epoch}, data, epoch, args, tb_writer)
    except UserError as error:
        if "train" not in data:
            raise
        errors.append(error)
        logging.error(f"Eval Epoch: {epoch} {message(error)}")
        return metrics
    except ValueError as error:
        raise UserError(f"validation after epoch {epoch}: {error}") from error
    return {**metrics, **percent_names(found)} if is_master(args) else metrics


def _metrics(model: torch.nn.Module, batches: Iterable, args: Namespace) -> dict[str, float]:
    similarity = getattr(model, "similarity", None)  # of sets
    if similarity is not None:
        similarity = copy.deepcopy(similarity).cpu().compute_mat
    # On the CPU, where they are: open_clip lets GPUs round products to TF32, which moves ranks.
    return validation_metrics(join(encode_batches(model, batches, args.device, args.precision)), similarity)


def _log(found: Mapping[str, float], epoch: int) -> None:
    logging.info(f"Eval Epoch: {epoch} {found['num_samples']} images, {found['num_captions']} captions")
    for line in format_metrics_table({f"epoch {epoch}": found}).splitlines():
        logging.info(line)
    if "image_circular_variance" in found:
        logging.info(
            f"Circular variance of the sets: images {found['image_circular_variance']:.4g}, "
            f"captions {found['caption_circular_variance']:.4g}"
        )


def _report(metrics: Mapping[str, float], data: Mapping[str, Any], epoch: int, args: Namespace, tb_writer) -> None:
    """Write metrics to results.jsonl, TensorBoard and wandb, each as open_clip's own evaluation does."""
    log_data = {f"val/{name}": value for name, value in metrics.items()}
    if args.save_logs:
        if tb_writer is not None:
            for name, value in log_data.items():
                tb_writer.add_scalar(name, value, epoch)
        file = Path(args.checkpoint_path) / "results.jsonl"
        try:
            with file.open("a") as results:
                results.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {file}: {error_text(error)}") from error
    if args.wandb:
        import wandb

        step = None
        if "train" in data:
            step = data["train"].dataloader.num_batches // args.accum_freq * epoch
        wandb.log({**log_data, "epoch": epoch}, step=step)
