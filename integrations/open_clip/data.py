"""Our shard reader in open_clip's ``get_data``: several captions per image for training, all of them for validation."""

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from open_clip_train.data import DataInfo
from open_clip_train.distributed import world_info_from_env

from vl_plugins.data.collection import Collection, read_collection
from vl_plugins.data.dataset import ShardDataset, evaluation_loader
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.data.sampler import CaptionSampler, training_loader
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.batch_record import BatchRecord, RecordedLoader
from vl_plugins.integrations.open_clip.host import OpenCLIP3, default_options
from vl_plugins.integrations.open_clip.names import is_shards
from vl_plugins.integrations.open_clip.options import PluginOptions, option_flag

__all__ = ["TRAINING_READER", "AllCaptions", "Reader", "choose_reader", "get_data"]

_CAPTIONS = "takes captions from the list 'captions' in json, or else from txt"
_PADDING = "pads all captions to the same length"
_ORDER = "reads every image once in an epoch"

VALIDATION_READER = dict.fromkeys(("json_text_key", "json_text_key_probs", "text_key"), _CAPTIONS)
VALIDATION_READER |= {"image_key": "takes images from jpg, jpeg, png or webp", "text_pad_multiple": _PADDING}
TRAINING_READER = VALIDATION_READER | dict.fromkeys(
    ("bucket_chunk", "bucket_pool", "bucket_prefetch_pools", "length_bucketing"), _PADDING
)
TRAINING_READER |= dict.fromkeys(("train_data_upsampling_factors", "train_num_samples"), _ORDER)
"""Options of open_clip's readers that ours does not support, with what it does instead."""


class AllCaptions(DataInfo):
    """Validation data whose batches hold every caption of an image, for image-text retrieval."""


@dataclass(frozen=True)
class Reader:
    """The splits that our reader serves; open_clip's serves the others.

    Args:
        captions_per_image: of the training split; None for open_clip's reader.
        make_sampler: returns what draws the training batches of a process, given its ``rank`` and the ``world_size``.
        validation: images that are validated on with all captions; None for open_clip's reader.
        on_read_error: of the training split, ``"skip"`` or ``"raise"``.
    """

    captions_per_image: str | None = None
    make_sampler: Callable[..., CaptionSampler] | None = None
    validation: Collection | None = None
    on_read_error: str = "skip"


def choose_reader(options: PluginOptions, args: Namespace) -> Reader:
    """Choose the reader of each split, and check the shards before training starts.

    With ``--loss`` or ``--captions-per-image``, our reader serves shards in which every image has a list of captions,
    such as those of ``vl-plugins shards``; with ``--captions-per-image`` it serves any training shards. With neither
    flag, open_clip reads everything; it also does the sampling with replacement of ``--dataset-resampled``.

    Args:
        options: the launcher's flags.
        args: open_clip's flags, as its parser returns them.

    Raises:
        UserError: a shard is missing or damaged, or a flag is given that the chosen reader does not support.
    """
    requested = options.captions_per_image
    if requested is not None and args.dataset_resampled:
        raise UserError("--captions-per-image reads every image once in an epoch: give it without --dataset-resampled")
    train = None if args.dataset_resampled else _read(args.train_data, options, args)
    if requested is not None and train is None and args.train_data:
        raise UserError(f"--captions-per-image needs WebDataset shards (.tar), got --train-data {args.train_data}")
    validation = _read(args.val_data, options, args)
    if validation is not None and validation.only_txt:
        validation = None
    if validation is not None:
        _check_split(validation, args, "--val-data", VALIDATION_READER)
    if train is not None and (requested is not None or not train.only_txt):
        _check_split(train, args, "--train-data", TRAINING_READER)
        captions_per_image = requested or "random"
        make_sampler = partial(
            CaptionSampler,
            train,
            args.batch_size,
            captions_per_image=captions_per_image,
            seed=args.seed,
            distinct_captions=not options.allow_duplicate_captions,
        )
        make_sampler(rank=0, world_size=world_info_from_env()[2])  # for its checks; the processes have not joined yet
        return Reader(captions_per_image, make_sampler, validation, options.on_read_error)
    for flag, default in (("allow_duplicate_captions", False), ("on_read_error", "skip")):
        if getattr(options, flag) != default:
            raise UserError(
                f"{option_flag(flag)} is for training shards that the reader of vl_plugins reads, and here it "
                "reads none: give --captions-per-image too"
            )
    return Reader(validation=validation)


def _read(path: str | None, options: PluginOptions, args: Namespace) -> Collection | None:
    """Return the images of shards that our reader may serve."""
    asked = options.captions_per_image is not None or options.loss is not None
    return read_collection(path) if asked and path is not None and is_shards(path, args.dataset_type) else None


def _check_split(collection: Collection, args: Namespace, split: str, not_supported: Mapping[str, str]) -> None:
    """Raise ``UserError`` for a flag that our reader does not support, or if the first image cannot be read."""
    defaults = default_options()
    for name, instead in sorted(not_supported.items()):
        if getattr(args, name, None) != defaults.get(name):
            raise UserError(
                f"{option_flag(name)} is for open_clip's reader: that of vl_plugins, which reads {split} here, "
                f"{instead}; leave the flag out"
            )
    ShardDataset(collection, _unchanged, _unchanged)[0]


def _unchanged(value: Any) -> Any:
    return value


def get_data(
    args: Namespace,
    preprocess_fns: tuple[Callable, Callable],
    epoch: int = 0,
    tokenizer: Callable | None = None,
    *,
    host: OpenCLIP3,
    host_get_data: Callable,
    reader: Reader,
    record: BatchRecord | None,
    **version_options: Any,
) -> dict[str, Any]:
    """Return the data of the trainer, in place of ``open_clip_train.data.get_data``.

    Args:
        args, preprocess_fns, epoch, tokenizer: as open_clip gives them.
        host: the installed version.
        host_get_data: open_clip's function.
        reader: the splits that our reader serves.
        record: of the training batches; None to train exactly as open_clip does, with its reader.
        version_options: other arguments of some versions of open_clip; passed on.
    """
    preprocess_train, preprocess_val = preprocess_fns
    host_args = copy(args)
    if reader.make_sampler is not None:
        host_args.train_data = None
    if reader.validation is not None:
        host_args.val_data = None
    data = host_get_data(host_args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **version_options)
    if reader.make_sampler is not None:
        sampler = reader.make_sampler(rank=args.rank, world_size=args.world_size)
        data["train"] = _training_data(args, sampler, reader.on_read_error, preprocess_train, tokenizer)
        logging.info(f"Reading the training shards with captions per image: {reader.captions_per_image}")
    if reader.validation is not None:
        data["val"] = _validation_data(args, reader.validation, preprocess_val, tokenizer)
    if "train" in data and record is not None:
        train = data["train"]
        loader = RecordedLoader(train.dataloader, record, None if reader.make_sampler is None else host)
        data["train"] = RecordedData(loader, train.sampler, train.shared_epoch, seed=args.seed, rank=args.rank)
    return data


@dataclass
class RecordedData(DataInfo):
    """Training data that seed all random numbers at the start of each epoch, so that a resumed run repeats them."""

    seed: int = 0
    rank: int = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if isinstance(self.sampler, CaptionSampler):
            self.sampler.set_epoch(epoch)
        record = self.dataloader.record
        record.first_step = epoch * (self.dataloader.num_batches // record.batches_per_step)
        seed_everything(derived_seed(self.seed, self.rank, epoch))


def _training_data(args, sampler, on_read_error, transform, tokenizer) -> DataInfo:
    max_pixels = getattr(args, "max_image_pixels", 0) or None  # a flag of 4.x
    dataset = ShardDataset(sampler.collection, transform, tokenizer, on_error=on_read_error, max_pixels=max_pixels)
    loader = training_loader(
        dataset,
        sampler,
        workers=args.workers,
        collate_fn=lambda items: (*dataset.collate(items), [item.key for item in items]),
    )
    loader.num_batches = len(loader)
    loader.num_samples = len(sampler) * sampler.world_size
    return DataInfo(loader, sampler)


def _validation_data(args, collection, transform, tokenizer) -> AllCaptions:
    loader = evaluation_loader(ShardDataset(collection, transform, tokenizer), args.batch_size, workers=args.workers)
    loader.num_samples = len(collection)  # for the host's wandb
    return AllCaptions(loader)
