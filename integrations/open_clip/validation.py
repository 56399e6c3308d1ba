"""Validation during training: image-text retrieval over all captions, in open_clip's own reports."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from open_clip_train import train

from vl_plugins.data import ShardDataset, read_batches
from vl_plugins.integrations.encoding import validate

__all__ = ["evaluate"]

ZERO_SHOT = "zero_shot_eval_all" if hasattr(train, "zero_shot_eval_all") else "zero_shot_eval"  # of 4.x, of 3.x


def evaluate(
    model: Any, data: Mapping[str, Any], epoch: int, args: Namespace, *, host_evaluate: Callable, **options: Any
) -> dict[str, float]:
    """Evaluate in place of open_clip's ``evaluate``, which reports our metrics with those of its zero-shot evaluation.

    Args:
        model, data, epoch, args, options: as open_clip gives them; a task in 4.x in place of the model.
        host_evaluate: open_clip's function.

    Raises:
        UserError: the data cannot be read, or an embedding is not finite.
    """
    if "val" not in data or not isinstance(getattr(data["val"].dataloader, "dataset", None), ShardDataset):
        return host_evaluate(model, data, epoch, args, **options)
    host_zero_shot = getattr(train, ZERO_SHOT)

    def zero_shot_and_retrieval(*given: Any, **more: Any) -> dict[str, float]:
        metrics = host_zero_shot(*given, **more)
        if not args.val_frequency or (epoch % args.val_frequency and epoch != args.epochs):
            return metrics
        unwrapped = model.get_trainable_module() if hasattr(model, "get_trainable_module") else model
        unwrapped = getattr(unwrapped, "module", unwrapped)
        batches = read_batches("--val-data", data["val"].dataloader)
        found = validate(unwrapped, batches, args.device, args.precision)
        return {**metrics, **found, "epoch": epoch}

    rest = {name: split for name, split in data.items() if name != "val"}
    with mock.patch.object(train, ZERO_SHOT, zero_shot_and_retrieval):
        return host_evaluate(model, rest, epoch, args, **options)
