"""Our readers in open_clip's ``get_data``: several captions per image for training, all of them for validation."""

import logging
import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    CaptionRule,
    CaptionSampler,
    Collection,
    Columns,
    ShardDataset,
    evaluation_loader,
    read_batches,
    read_collection,
    training_loader,
)
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.data.records import LINES
from vl_plugins.data.rows import read_rows
from vl_plugins.data.shard_names import expand_braces
from vl_plugins.data.table_collection import TableCollection, check_exists
from vl_plugins.errors import UserError, number, user_errors
from vl_plugins.integrations.open_clip.flags import IMAGE_KEY, NOT_OURS, SAMPLE_KEYS, flag, parse_args
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


def check_columns(option: str, file: str, names: Iterable[str], args: Namespace) -> None:
    """Raise ``UserError`` if a table lacks the columns of ``--csv-img-key`` and ``--csv-caption-key``."""
    names = list(names)
    for key in ("csv_img_key", "csv_caption_key"):
        if getattr(args, key) not in names:
            raise UserError(
                f"{option} {file}: it has no column {getattr(args, key)!r}, only {', '.join(map(repr, names))}; "
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

    With ``--loss`` or ``--captions-per-image`` ours read the training data, and the data to validate on if every image
    there has a list of captions, or they are no shards. open_clip reads everything else.

    Raises:
        UserError: data are missing or damaged, or a flag is given that the reader of the data does not have.
    """
    is_ours = bool(args.loss or args.captions_per_image) and args.dataset_type != "synthetic"
    found: dict[str, Collection] = {}
    for split in ("train_data", "val_data"):
        path = getattr(args, split)
        if not path:
            continue
        with user_errors(f"{flag(split)} {path}"):
            if is_ours:
                collection = _read_split(split, path, args)
                if not _is_for_host(split, path, collection):
                    found[split] = collection
            else:
                _check_host_data(split, path, args)
            if args.head == "set" and split == "val_data" and split not in found:
                raise UserError(f"--val-data {path}: to validate sets, give shards of `vl-plugins shards`")
    if found.keys() == {"train_data", "val_data"}:
        shared = set(found["train_data"].shards) & set(found["val_data"].shards)
        if shared:
            raise UserError(
                f"--train-data and --val-data share {min(shared)}: a model is not validated on its training"
            )
    _check_flags(args, found)
    if "train_data" in found:
        args.captions_per_image = args.captions_per_image or "random"  # for params.txt, too
    return found


def _read_split(split: str, path: str, args: Namespace) -> Collection:
    """Return training or validation data by our reader."""
    on_error = args.on_error if split == "train_data" else "raise"
    rule = _caption_rule(args)
    if args.dataset_type != "csv" and not path.endswith((".csv", ".tsv")):
        return read_collection(path, on_error, rule, keep_index=not args.no_index)
    check_exists(path)
    names, _ = read_rows(path, args.csv_separator)
    check_columns(flag(split), path, names, args)
    columns = Columns(args.csv_img_key, [args.csv_caption_key])
    return TableCollection(path, on_error, rule, columns, args.csv_separator)


def _caption_rule(args: Namespace) -> CaptionRule:
    """Return where the captions of shards are, by the flags of open_clip 4.x and our own."""
    if args.caption_fields and args.json_text_key:
        raise UserError(
            "--caption-fields takes each field for a caption, and --json-text-key one of them; give one flag"
        )
    pictures = () if args.image_key == IMAGE_KEY else _alternatives(args.image_key)
    return CaptionRule(
        lines=LINES[args.caption_lines],
        texts=_alternatives(args.text_key),
        fields=tuple(args.caption_fields) or _alternatives(args.json_text_key or ""),
        first_field=bool(args.json_text_key),
        pictures=pictures,
    )


def _alternatives(keys: str) -> tuple[str, ...]:
    """Return the parts of a flag such as ``"txt;caption"``."""
    return tuple(key.strip() for key in keys.split(";") if key.strip())


def _is_for_host(split: str, path: str, collection: Collection) -> bool:
    """Return whether open_clip validates on shards whose images have a single text each."""
    is_pattern_of_host = path.endswith(".tar") and "*" not in path and "?" not in path
    return split == "val_data" and bool(collection.only_txt) and is_pattern_of_host


def _check_host_data(split: str, path: str, args: Namespace) -> None:
    """Raise ``UserError`` if data for open_clip's own readers do not exist, or lack a column."""
    reader = host_data.get_dataset_fn(path, args.dataset_type)
    if reader is host_data.get_csv_dataset:
        check_columns(flag(split), path, pandas.read_csv(path, sep=args.csv_separator, nrows=0).columns, args)
    elif reader is host_data.get_wds_dataset:
        check_shards(flag(split), path)


def _check_flags(args: Namespace, splits: Mapping[str, Collection]) -> None:
    """Raise ``UserError`` for a flag of reading that the reader of the training data does not have."""
    defaults = vars(parse_args([]))
    given = [name for name in defaults if getattr(args, name, None) != defaults[name]]
    if "train_data" in splits:
        for name in set(NOT_OURS).intersection(given):
            raise UserError(f"{flag(name)} is for open_clip's reader, but vl_plugins reads here; remove it")
        for name in ("shuffle_window", "train_num_samples"):
            if name in given:
                with user_errors(flag(name)):
                    number(name, getattr(args, name), least=1, kind=int)
        return
    host_has_keys = hasattr(host_data, "JsonCaptionExtractor")  # 4.x
    ours = {"shuffle_window", "caption_fields", "no_index", *(() if host_has_keys else SAMPLE_KEYS)}
    for name in ours.intersection(given):
        raise UserError(f"{flag(name)} needs training data, and --loss or --captions-per-image")


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
        rows = getattr(collection, "rows", None)
        if rows is not None and rows // sampler.global_batch != sampler.steps:
            line += f", where open_clip's own reader takes {rows // sampler.global_batch:,}"
        line += collection.describe_equal_captions(are_negatives=not args.loss)
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
