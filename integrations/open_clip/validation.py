"""Validation during training: image-text retrieval over all captions, in open_clip's own reports."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from open_clip.loss import ClipLoss
from open_clip_train import train

from vl_plugins.data import EvaluationBatch, ShardDataset, read_batches
from vl_plugins.integrations.encoding import encode_batches, retrieval_metrics
from vl_plugins.integrations.open_clip.flags import DEFAULT_METRIC
from vl_plugins.integrations.open_clip.host import ZERO_SHOT, trained_model

__all__ = ["evaluate", "metric_names"]

# Metrics of open_clip's zero-shot evaluation by its options.
ZERO_SHOT_NAMES = {"imagenet_val": "imagenet-zeroshot-val", "imagenet_v2": "imagenetv2-zeroshot-val"}


def evaluate(
    model: Any, data: Mapping[str, Any], epoch: int, args: Namespace, *, host_evaluate: Callable, **options: Any
) -> dict[str, float]:
    """Evaluate in place of open_clip's ``evaluate``, which reports our metrics with those of its zero-shot evaluation.

    All processes encode their share of our data. Without ``--loss``, vectors also have open_clip's ``clip_val_loss``,
    of images with their first captions. Without ``--captions-per-image``, open_clip's metrics of pairs stay as they
    are, but for an ``rsum`` where ``--save-best`` chooses by it.

    Args:
        model, data, epoch, args, options: as open_clip gives them; a task in 4.x in place of the model.
        host_evaluate: open_clip's function.

    Raises:
        UserError: the data cannot be read, or an embedding is not finite.
    """
    if "val" not in data or (args.captions_per_image is None and args.save_best != DEFAULT_METRIC):
        return host_evaluate(model, data, epoch, args, **options)
    if not isinstance(getattr(data["val"].dataloader, "dataset", None), ShardDataset):
        with mock.patch.object(train, "get_clip_metrics", _with_rsum(train.get_clip_metrics)):
            return host_evaluate(model, data, epoch, args, **options)
    metrics: dict[str, float] = {}
    if args.val_frequency and (epoch % args.val_frequency == 0 or epoch == args.epochs):
        metrics = {**_validate(trained_model(model), data["val"].dataloader, args), "epoch": epoch}
    host_zero_shot = getattr(train, ZERO_SHOT)

    def zero_shot_and_retrieval(*given: Any, **more: Any) -> dict[str, float]:
        return {**host_zero_shot(*given, **more), **metrics}

    splits = dict(data)
    del splits["val"]
    with mock.patch.object(train, ZERO_SHOT, zero_shot_and_retrieval):
        return host_evaluate(model, splits, epoch, args, **options)


def metric_names(args: Namespace) -> list[str]:
    """Return the names of the metrics that validations have in ``results.jsonl``, as far as the flags tell.

    Only names matter, so two pairs are measured in place of the data.
    """
    names: list[str] = []
    pairs = torch.eye(2)
    if args.val_data and args.val_frequency:
        if args.captions_per_image is None or args.val_data.startswith("pipe:"):
            names += _with_rsum(train.get_clip_metrics)(pairs, pairs, torch.ones([]))
            names.append("clip_val_loss")
        else:
            batch = EvaluationBatch(pairs, pairs, torch.arange(2), start=0)
            names += retrieval_metrics(torch.nn.Module(), [batch])
            if not args.loss:
                names.append("clip_val_loss")
    if args.zeroshot_frequency:
        for option, name in ZERO_SHOT_NAMES.items():
            if getattr(args, option):
                names += [f"{name}-top1", f"{name}-top5"]
    return [name for name in names if not name.startswith("num_")]


def _validate(model: Any, loader: Any, args: Namespace) -> dict[str, float]:
    """Return the metrics of the batches of all processes, in the first one; in others {}, or with FSDP the same."""
    model.eval()
    batches = read_batches("--val-data", loader)
    # FSDP's processes encode together, so all encode everything.
    gather = not getattr(args, "fsdp", False)
    encoded = encode_batches(model, batches, args.device, args.precision, gather=gather)
    if not encoded:
        return {}
    metrics = retrieval_metrics(model, encoded)
    if not args.loss and encoded[0].images.ndim == 2:
        scale = model.logit_scale.detach()
        if hasattr(scale, "full_tensor"):  # with FSDP
            scale = scale.full_tensor()
        metrics["clip_val_loss"] = clip_loss(encoded, scale.float().cpu().exp())
    return metrics


def clip_loss(encoded: Sequence[EvaluationBatch], logit_scale: torch.Tensor) -> float:
    """Return the mean over images of ``ClipLoss`` of batches, each image with its first caption."""
    losses = []
    for batch in sorted(encoded, key=lambda batch: batch.start):  # so that the sum is the same in any order
        captions = batch.image_of_caption.tolist()
        first_captions = [captions.index(image) for image in range(len(batch.images))]
        losses.append(ClipLoss()(batch.images, batch.texts[first_captions], logit_scale) * len(batch.images))
    images = sum(len(batch.images) for batch in encoded)
    return (torch.stack(losses).sum() / images).item()


def _with_rsum(host_metrics: Callable) -> Callable:
    """Let open_clip's metrics have the sum of their six recalls, in percent."""

    def metrics_with_rsum(*given: Any, **options: Any) -> dict[str, float]:
        metrics = host_metrics(*given, **options)
        recalls = [metrics[f"{way}_R@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        return {**metrics, "rsum": 100 * float(sum(recalls))}

    return metrics_with_rsum
