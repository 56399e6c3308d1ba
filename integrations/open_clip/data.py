"""Our shard reader in open_clip's ``get_data``: several captions per image for training, all of them for validation."""

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from open_clip_train.data import DataInfo
from open_clip_train.distributed import world_info_from_env

from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.data.shard_files import expand_shards
from vl_plugins.data.shard_info import check_first_sample, check_shards, read_shard_info
from vl_plugins.data.training_batches import TrainingPipeline, batch_loader
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
TRAINING_READER |= {"train_data_upsampling_factors": _ORDER}
"""Options of open_clip's readers that ours do not support, with what they do instead."""


class AllCaptions(DataInfo):
    """Validation data whose batches hold every caption of an image, for image-text retrieval."""


@dataclass(frozen=True)
class Reader:
    """The splits that our reader serves; open_clip's serves the others.

    Args:
        captions_per_image: of the training split, or None for open_clip's reader.
        validation: whether the validation split is read with all captions.
        allow_duplicate_captions: of the training split, as in
            :class:`vl_plugins.data.training_batches.TrainingPipeline`.
        same_group: likewise, ``"apart"`` or ``"positive"``.
        on_read_error: likewise, ``"skip"`` or ``"raise"``.
    """

    captions_per_image: str | int | None = None
    validation: bool = False
    allow_duplicate_captions: bool = False
    same_group: str = "apart"
    on_read_error: str = "skip"


def choose_reader(options: PluginOptions, args: Namespace) -> Reader:
    """Choose the reader of each split, and check the shards before training starts.

    Our reader serves the splits that ``vl-plugins shards`` wrote when ``--loss`` or ``--captions-per-image`` is given,
    and any training shards when ``--captions-per-image`` is given. With neither flag, open_clip reads everything; it
    also does the sampling with replacement of ``--dataset-resampled``.

    Args:
        options: the launcher's flags.
        args: open_clip's flags, as its parser returns them.

    Raises:
        UserError: a shard is missing or damaged, or a flag is given that the chosen reader does not support.
    """
    reader = _choose_training_reader(options, args)
    if is_shards(args.val_data, args.dataset_type):
        shards = expand_shards(args.val_data)
        asked = options.captions_per_image is not None or options.loss is not None
        if asked and read_shard_info(shards) is not None:
            _check_reader_options(args, "--val-data", VALIDATION_READER)
            check_shards(shards)
            return replace(reader, validation=True)
    return reader


def _choose_training_reader(options: PluginOptions, args: Namespace) -> Reader:
    requested = options.captions_per_image
    if requested is not None and args.dataset_resampled:
        raise UserError("--captions-per-image reads every image once in an epoch: give it without --dataset-resampled")
    if is_shards(args.train_data, args.dataset_type):
        shards = expand_shards(args.train_data)
        if requested is not None or (
            options.loss is not None and not args.dataset_resampled and read_shard_info(shards) is not None
        ):
            _check_reader_options(args, "--train-data", TRAINING_READER)
            check_first_sample(shards[0])
            reader = Reader(
                captions_per_image=requested or "random",
                allow_duplicate_captions=options.allow_duplicate_captions,
                same_group=options.same_group,
                on_read_error=options.on_read_error,
            )
            # Made once for its checks; nothing is read before it is iterated.
            _training_batches(args, reader, rank=0, world_size=world_info_from_env()[2])
            return reader
    elif requested is not None and args.train_data:
        raise UserError(f"--captions-per-image needs WebDataset shards (.tar), got --train-data {args.train_data}")
    for flag, default in (("allow_duplicate_captions", False), ("same_group", "apart"), ("on_read_error", "skip")):
        if getattr(options, flag) != default:
            raise UserError(
                f"{option_flag(flag)} is for training shards that the reader of vl_plugins reads, and here it "
                "reads none: give --captions-per-image too"
            )
    return Reader()


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
    if reader.captions_per_image is not None:
        host_args.train_data = None
    if reader.validation:
        host_args.val_data = None
    data = host_get_data(host_args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **version_options)
    if reader.captions_per_image is not None:
        data["train"] = _training_data(args, reader, preprocess_train, tokenizer, epoch)
        logging.info(f"Reading the training shards with captions per image: {reader.captions_per_image}")
    if reader.validation:
        data["val"] = _validation_data(args, preprocess_val, tokenizer)
    if "train" in data and record is not None:
        train = data["train"]
        loader = RecordedLoader(train.dataloader, record, None if reader.captions_per_image is None else host)
        data["train"] = RecordedData(loader, train.sampler, train.shared_epoch, seed=args.seed, rank=args.rank)
    return data


@dataclass
class RecordedData(DataInfo):
    """Training data that seed all random numbers at the start of each epoch, so that a resumed run repeats them."""

    seed: int = 0
    rank: int = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        record = self.dataloader.record
        record.first_step = epoch * (self.dataloader.num_batches // record.batches_per_step)
        seed_everything(derived_seed(self.seed, self.rank, epoch))


def _training_batches(args, reader, transform=None, tokenizer=None, epoch=0, *, rank, world_size):
    return TrainingPipeline(
        args.train_data,
        transform,
        tokenizer,
        args.batch_size,
        captions_per_image=reader.captions_per_image,
        seed=args.seed,
        epoch=epoch,
        num_samples=args.train_num_samples,
        max_image_pixels=getattr(args, "max_image_pixels", 0) or None,  # a flag of 4.x
        allow_duplicate_captions=reader.allow_duplicate_captions,
        same_group=reader.same_group,
        on_error=reader.on_read_error,
        with_labels=True,
        with_keys=True,
        rank=rank,
        world_size=world_size,
    )


def _training_data(args, reader, transform, tokenizer, epoch) -> DataInfo:
    batches = _training_batches(args, reader, transform, tokenizer, epoch, rank=args.rank, world_size=args.world_size)
    loader = batch_loader(batches, args.workers)
    loader.num_batches = len(batches)
    loader.num_samples = len(batches) * args.batch_size * args.world_size
    return DataInfo(loader, shared_epoch=batches.shared_epoch)


def _validation_data(args, transform, tokenizer) -> AllCaptions:
    reader = EvaluationReader(args.val_data, transform, tokenizer, args.batch_size)
    loader = batch_loader(reader, args.workers)
    info = read_shard_info(args.val_data)
    loader.num_samples = info.num_samples if info else None  # for the host's wandb
    return AllCaptions(loader)


def _check_reader_options(args: Namespace, split: str, not_supported: Mapping[str, str]) -> None:
    defaults = default_options()
    for name, instead in sorted(not_supported.items()):
        if getattr(args, name, None) != defaults.get(name):
            raise UserError(
                f"{option_flag(name)} is for open_clip's reader: that of vl_plugins, which reads {split} here, "
                f"{instead}; leave the flag out"
            )
