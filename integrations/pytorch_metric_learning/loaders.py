"""Loaders of a training: batches for training and evaluation, and a few images for trial calls."""

import logging

from torch import Tensor
from torch.utils.data import DataLoader

from vl_plugins.data import CaptionSampler, Draw, ShardDataset, evaluation_loader, read_collection, training_loader
from vl_plugins.data.records import as_rule
from vl_plugins.integrations.pytorch_metric_learning.config import Config, config_errors
from vl_plugins.integrations.pytorch_metric_learning.two_towers import TwoTowers

logger = logging.getLogger(__name__)

__all__ = ["make_training_loader", "make_validation_loader", "trial_batch"]

TRIAL_IMAGES = 4


def make_training_loader(config: Config, towers: TwoTowers) -> DataLoader:
    """Return a loader of the batches of this process.

    Raises:
        UserError: the shards cannot be read, or an option of ``data`` is wrong.
    """
    data = config.data
    if data.on_read_error is not None:
        logger.warning("data.on_read_error is called data.on_error now")
    if data.allow_duplicate_captions is not None:
        logger.warning("data.allow_duplicate_captions has no effect: equal captions of several images are no negatives")
    dataset = _dataset(config, data.train, towers, is_train=True)
    with config_errors("data"):
        sampler = CaptionSampler(
            dataset.collection,
            data.images_per_step,
            captions_per_image=data.captions_per_image,
            seed=config.seed,
            samples_per_epoch=data.samples_per_epoch,
            shuffle_window=data.shuffle_window,
        )
        if logger.isEnabledFor(logging.INFO):  # in the first process; the captions are sorted for it
            collection = dataset.collection
            equal = collection.describe_equal_captions(are_negatives=config.one_set)
            logger.info(f"{data.train}: {collection.describe()}; {sampler.describe()}{equal}")
        return training_loader(dataset, sampler, workers=data.workers, prefetch_factor=data.prefetch_factor)


def make_validation_loader(config: Config, towers: TwoTowers, rank: int, world_size: int) -> DataLoader | None:
    """Return a loader of the evaluation batches of this process, or None without ``data.val``.

    Raises:
        UserError: the shards cannot be read, or their first image.
    """
    data = config.data
    if not data.val:
        return None
    dataset = _dataset(config, data.val, towers, is_train=False)
    dataset[0]  # raises an error before training
    return evaluation_loader(dataset, data.batch_size, workers=data.workers, rank=rank, world_size=world_size)


def trial_batch(dataset: ShardDataset) -> tuple[Tensor, ...]:
    """Return a batch of the first few images, each with its first caption.

    Raises:
        UserError: they cannot be read.
    """
    draws = [Draw(image, (0,)) for image in range(min(TRIAL_IMAGES, len(dataset)))]
    with config_errors("data"):
        return dataset.collate(dataset.__getitems__(draws))


def _dataset(config: Config, shards: str, towers: TwoTowers, *, is_train: bool) -> ShardDataset:
    transform = towers.image.trunk.image_transform(is_train)
    data = config.data
    on_error = (data.on_read_error or data.on_error) if is_train else "raise"
    with config_errors("data"):
        rule = as_rule(data.caption_lines, data.caption_fields)
        return ShardDataset(
            read_collection(shards, on_error, rule, keep_index=data.keep_index),
            transform,
            towers.tokenizer,
            inputs=data.inputs,
            on_error=on_error,
            max_errors=data.max_errors,
            max_image_pixels=data.max_image_pixels,
        )
