"""Our readers in open_clip's ``get_data``: several captions per image for training, all of them for validation."""

import logging
import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import pandas
import torch
from open_clip_train import data as host_data
from open_clip_train import main as trainer
from open_clip_train.data import DataInfo
from open_clip_train.distributed import is_master
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.data import (
    CaptionSampler,
    ShardDataset,
    evaluation_loader,
    read_batches,
    read_collection,
    training_loader,
)
from vl_plugins.data.caption_table import read_csv
from vl_plugins.data.captions import is_blank
from vl_plugins.data.files import read_bytes
from vl_plugins.data.index import Collection, expand_braces, make_head
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.data.samples import Record
from vl_plugins.errors import UserError, number, user_errors
from vl_plugins.integrations.open_clip.flags import NOT_OURS, flag, parse_args
from vl_plugins.numerics import NO_ID

__all__ = ["Steps", "get_data", "read_splits"]


class Steps:
    """The current training step and its images, which open_clip does not pass to its loss.

    Args:
        batches_per_step: open_clip's ``--accum-freq``.

    Attributes:
        number: of the step, from 0, over all epochs.
        batches: labels and ids of each batch of the step, as :class:`~vl_plugins.data.ShardDataset` makes them; none if
            open_clip's reader made the batches.
    """

    def __init__(self, batches_per_step: int = 1):
        self.number = 0
        self.batches: deque[Sequence[Tensor]] = deque(maxlen=batches_per_step)
        self.batches_per_step = batches_per_step
        self._step_of_passes = -1
        self._passes = 0

    @property
    def labels(self) -> dict[str, Tensor]:
        """The ``labels`` (B,), ``ref_ids`` and ``matching_ids`` of the step's images, as losses take them; or none."""
        if not self.batches:
            return {}
        labels, ref_ids, matching_ids = zip(*self.batches, strict=True)
        longest = max(ids.shape[1] for ids in matching_ids)
        padded = [pad(ids, (0, longest - ids.shape[1]), value=NO_ID) for ids in matching_ids]
        return {"labels": torch.cat(labels), "ref_ids": torch.cat(ref_ids), "matching_ids": torch.cat(padded)}

    def count_pass(self) -> bool:
        """Count a call of the loss; return whether it is the last one of the step.

        open_clip calls the loss ``batches_per_step`` times in a step, each time with the gradients of one batch.
        """
        if self.batches_per_step == 1:
            return True
        if self._step_of_passes != self.number:
            self._step_of_passes, self._passes = self.number, 0
        self._passes += 1
        return self._passes % self.batches_per_step == 0


class TrainingData:
    """Training data as open_clip's trainer takes them, which note the steps and their images.

    They seed all random numbers at the start of each epoch, so that a resumed run repeats them.

    Args:
        data: of either reader; batches of ours are images, texts, labels and ids.
        steps: where to note them.
        seed: of the process.
    """

    def __init__(self, data: DataInfo, steps: Steps, seed: tuple[int, ...]):
        self.data, self.steps, self.seed, self.epoch = data, steps, seed, 0
        self.dataloader, self.is_ours = self, isinstance(data.sampler, CaptionSampler)
        self.num_batches, self.num_samples = data.dataloader.num_batches, data.dataloader.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.data.set_epoch(epoch)
        if self.is_ours:
            self.data.sampler.set_epoch(epoch)
        seed_everything(derived_seed(*self.seed, epoch))

    def __iter__(self) -> Iterator[Any]:
        per_step = self.steps.batches_per_step
        self.steps.batches.clear()
        for index, batch in enumerate(read_batches("--train-data", self.data.dataloader)):
            self.steps.number = self.epoch * (self.num_batches // per_step) + index // per_step
            if self.is_ours:
                images, texts, *labels = batch
                self.steps.batches.append(labels)
                # A task of open_clip 4.x takes a mapping.
                batch = {"image": images, "text": texts} if hasattr(trainer, "create_task") else (images, texts)
            yield batch


class Table(Collection):
    """The images of open_clip's CSV data: rows of one image path are one image with several captions.

    Texts are texts, also ``NA`` and ``None``, which pandas takes for missing values. Rows without a path or a caption
    are left out.

    Args:
        file: path or URL.
        args: with open_clip's ``csv_separator``, ``csv_img_key`` and ``csv_caption_key``.

    Attributes:
        rows: number of rows.
        incomplete: lines of the rows that were left out.

    Raises:
        UserError: a row has more or fewer fields than there are columns, or there is no complete row.
    """

    def __init__(self, file: str, args: Namespace):
        captions: dict[str, list[str]] = {}
        self.rows, self.incomplete = 0, list[int]()
        table = read_csv(file, args.csv_separator)
        next(table)  # the names of the columns, which have been checked
        for line, values in table:
            if None in values:
                raise UserError(f"line {line}: {values[None]}")
            self.rows += 1
            path, caption = values[args.csv_img_key], values[args.csv_caption_key]
            if is_blank(path) or is_blank(caption):
                self.incomplete.append(line)
            else:
                captions.setdefault(path, []).append(caption)
        if not captions:
            raise UserError("it has no row with an image and a caption")
        records = []
        for path, texts in captions.items():
            ids = tuple(f"{path}#{number}" for number in range(len(texts)))
            records.append(Record(path, tuple(texts), path, ids))
        nowhere = [0] * len(records)
        super().__init__([file], [make_head(records, nowhere, nowhere, size=0)])
        self.records = records

    def describe(self) -> str:
        text = f"{self.rows:,} rows, {super().describe()}"
        if self.incomplete:
            lines = ", ".join(map(str, self.incomplete[:5]))
            text += f", left out for want of an image or a caption: {len(self.incomplete):,}, in lines {lines}"
        return text

    def read(self, images: Sequence[int]) -> list[bytes | Exception]:
        return [b"" for _ in images]

    def parse(self, image: int, data: bytes | Exception) -> tuple[Record, dict[str, bytes]]:
        return self.records[image], {"jpg": read_bytes(self.records[image].key)}


def check_columns(option: str, file: str, args: Namespace) -> None:
    """Raise ``UserError`` if a table lacks the columns of ``--csv-img-key`` and ``--csv-caption-key``."""
    columns = list(pandas.read_csv(file, sep=args.csv_separator, nrows=0).columns)
    for name in ("csv_img_key", "csv_caption_key"):
        if getattr(args, name) not in columns:
            raise UserError(
                f"{option} {file}: it has no column {getattr(args, name)!r}, only {', '.join(map(repr, columns))}; "
                f"name the columns by --csv-img-key and --csv-caption-key, and the separator, now "
                f"{args.csv_separator!r}, by --csv-separator"
            )


def check_shards(option: str, pattern: str) -> None:
    """Raise ``UserError`` if local shards for open_clip's own reader do not exist."""
    shards = [shard for part in pattern.split("::") for shard in expand_braces(part)]
    missing = [shard for shard in shards if ":" not in shard and not os.path.exists(shard)]  # no program or URL
    if missing:
        raise UserError(f"{option} {pattern}: {len(missing)} of {len(shards)} shards do not exist: {missing[0]}")


def read_splits(args: Namespace) -> dict[str, Collection]:
    """Return the splits that our readers serve, ``"train_data"`` and ``"val_data"``, and check them.

    With ``--loss`` or ``--captions-per-image`` ours read training shards and tables, and the shards to validate on if
    every image there has a list of captions, as ``vl-plugins shards`` writes them. open_clip reads everything else.

    Raises:
        UserError: data are missing or damaged, or a flag is given that our readers do not have.
    """
    found: dict[str, Collection] = {}
    for split in ("train_data", "val_data"):
        path = getattr(args, split)
        if not path:
            continue
        with user_errors(f"{flag(split)} {path}"):
            is_ours = bool(args.loss or args.captions_per_image)
            if is_ours and os.path.isdir(path):  # which open_clip knows nothing about
                args.dataset_type = "webdataset"
            reader = host_data.get_dataset_fn(path, args.dataset_type)
            if reader is host_data.get_csv_dataset:
                check_columns(flag(split), path, args)
            if not is_ours:
                if reader is host_data.get_wds_dataset:
                    check_shards(flag(split), path)
                continue
            if reader is host_data.get_wds_dataset:
                on_error = args.on_error if split == "train_data" else "raise"
                collection = read_collection(path, on_error, args.caption_lines)
                if split == "train_data" or not collection.only_txt:
                    found[split] = collection
            elif reader is host_data.get_csv_dataset:
                found[split] = Table(path, args)
            if args.head == "set" and split == "val_data" and split not in found:
                raise UserError(f"--val-data {path}: to validate sets, give shards of `vl-plugins shards`")
    if found.keys() == {"train_data", "val_data"}:
        shared = set(found["train_data"].shards) & set(found["val_data"].shards)
        if shared:
            raise UserError(
                f"--train-data and --val-data share {min(shared)}: a model is not validated on its training"
            )
    if "train_data" in found:
        defaults = vars(parse_args([]))
        for name in NOT_OURS:
            if getattr(args, name, None) != defaults.get(name):
                raise UserError(f"{flag(name)} is for open_clip's reader, but vl_plugins reads here; remove it")
        for name in ("shuffle_window", "train_num_samples"):
            value = getattr(args, name)
            if value is not None:
                with user_errors(flag(name)):
                    number(name, value, least=1, kind=int)
        args.captions_per_image = args.captions_per_image or "random"  # for params.txt, too
    elif args.shuffle_window is not None:
        raise UserError("--shuffle-window needs training data, and --loss or --captions-per-image")
    return found


def get_data(
    args: Namespace,
    preprocess_fns: tuple[Callable, Callable],
    epoch: int = 0,
    tokenizer: Callable | None = None,
    *,
    host_get_data: Callable,
    splits: dict[str, Collection],
    steps: Steps,
    **options: Any,
) -> dict[str, DataInfo]:
    """Return the data of the trainer, in place of ``open_clip_train.data.get_data``.

    Args:
        args, preprocess_fns, epoch, tokenizer, options: as open_clip gives them.
        host_get_data: open_clip's function.
        splits: of :func:`read_splits`.
        steps: of the training.
    """
    theirs = copy(args)
    for split in splits:
        setattr(theirs, split, None)
    data = host_get_data(theirs, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **options)
    if "train_data" in splits:
        data["train"] = _training_data(args, splits["train_data"], preprocess_fns[0], tokenizer)
    if "train" in data and data["train"].dataloader.num_batches < args.accum_freq:
        batches = data["train"].dataloader.num_batches
        raise UserError(
            f"--accum-freq {args.accum_freq}: an epoch has {batches} batches in each process, so no step would be taken"
        )
    if "train" in data and ("train_data" in splits or args.loss):
        data["train"] = TrainingData(data["train"], steps, (args.seed, args.rank))
    if "val_data" in splits:
        dataset = ShardDataset(splits["val_data"], preprocess_fns[1], tokenizer, max_image_pixels=args.max_image_pixels)
        loader = evaluation_loader(dataset, args.batch_size, workers=args.workers)
        loader.num_samples = len(dataset)  # for wandb
        data["val"] = DataInfo(loader)
    return data


def _training_data(args: Namespace, collection: Collection, transform: Callable, tokenizer: Any) -> DataInfo:
    if is_master(args) and collection.only_txt:
        logging.warning(
            f"{collection.only_txt} of {len(collection)} images in {args.train_data} have no list of captions: "
            "their txt is their only positive, and all else in a batch is negative"
        )
    sampler = CaptionSampler(
        collection,
        args.batch_size,
        captions_per_image=args.captions_per_image,
        seed=args.seed,
        samples_per_epoch=args.train_num_samples,
        shuffle_window=args.shuffle_window,
        rank=args.rank,
        world_size=args.world_size,
    )
    if is_master(args):
        line = f"{args.train_data}: {collection.describe()}; {sampler.describe()}"
        if isinstance(collection, Table) and collection.rows // sampler.global_batch != sampler.steps:
            line += f", where open_clip's own reader takes {collection.rows // sampler.global_batch:,}"
        logging.info(line)
    dataset = ShardDataset(
        collection,
        transform,
        tokenizer,
        on_error=args.on_error,
        max_errors=args.max_errors,
        max_image_pixels=args.max_image_pixels,
    )
    loader = training_loader(dataset, sampler, workers=args.workers)
    loader.num_batches = len(loader)
    loader.num_samples = len(sampler) * sampler.world_size
    return DataInfo(loader, sampler)
