"""Our readers in open_clip's ``get_data``: several captions per image for training, all of them for validation."""

import contextlib
import itertools
import logging
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import pandas
from open_clip_train import data as host_data
from open_clip_train.data import DataInfo
from open_clip_train.distributed import is_master, world_info_from_env
from torch import Tensor

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
from vl_plugins.data.index import find_index
from vl_plugins.data.randomness import derived_seed, seed_everything
from vl_plugins.data.records import LINES
from vl_plugins.data.rows import read_rows
from vl_plugins.data.shard_names import expand_braces
from vl_plugins.data.table_collection import TableCollection, check_exists
from vl_plugins.errors import UserError, number, user_errors
from vl_plugins.integrations.open_clip.flags import IMAGE_KEY, OURS, SAMPLE_KEYS, check_refusals, flag, options_given
from vl_plugins.integrations.open_clip.host import READS_SAMPLE_KEYS, batch_of, images_of, is_logged, texts_of
from vl_plugins.integrations.open_clip.steps import Steps, pad_id_of, token_ids

ROWS_COUNTED = 100_000  # of a table, to find out whether images have several captions
# What open_clip does with several captions of an image.
READ_BY_HOST = {
    "shards": "reads the first one only: --captions-per-image random, or all, reads them all",
    "table": "reads each as another image, so that they are negatives of each other: --captions-per-image random, or "
    "all, reads them as captions of one image",
    "val_data": "ranks pairs, where other captions of an image are wrong: --captions-per-image random ranks images",
}
# What our batches have after images and texts.
IDS = ("labels", "ref_ids", "matching_ids")

__all__ = ["get_data", "read_splits"]


class TrainingData:
    """Training data as open_clip's trainer takes them, which note the steps and their images.

    With our reader, all random numbers are seeded at the start of each epoch, so that a resumed run repeats them. With
    open_clip's, they go on as without us.

    Args:
        data: of either reader; batches of ours are images, texts, labels and ids.
        steps: where to note them.
        args: open_clip's options.
        pad_id: token that open_clip's reader fills up texts with, which gives ids of its texts; None for no ids.
        look_at_start: is called with the images and texts of the first batch, before it is trained on.
    """

    def __init__(
        self,
        data: DataInfo,
        steps: Steps,
        args: Namespace,
        pad_id: int | None = None,
        look_at_start: Callable[[Tensor, Tensor], None] | None = None,
    ):
        self.look_at_start = look_at_start
        self.data, self.steps, self.args, self.epoch, self.pad_id = data, steps, args, 0, pad_id
        self.dataloader, self.is_ours = self, isinstance(data.sampler, CaptionSampler)
        self.num_batches, self.num_samples = data.dataloader.num_batches, data.dataloader.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.data.set_epoch(epoch)
        if self.is_ours:
            self.data.sampler.set_epoch(epoch)
            seed_everything(derived_seed(self.args.seed, self.args.rank, epoch))

    def __iter__(self) -> Iterator[Any]:
        per_step = self.steps.batches_per_step
        steps_per_epoch = self.num_batches // per_step
        self.steps.batches.clear()
        for index, batch in enumerate(read_batches("--train-data", self.data.dataloader)):
            step = index // per_step
            self.steps.number = self.epoch * steps_per_epoch + step
            self.steps.is_logged = is_logged(step, steps_per_epoch, self.args)
            if self.is_ours:
                images, texts, *labels = batch
                self.steps.batches.append(dict(zip(IDS, labels, strict=True)))
                batch = batch_of(images, texts)
            elif self.pad_id is not None:
                self.steps.batches.append({"ref_ids": token_ids(texts_of(batch), self.pad_id)})
            if self.look_at_start is not None:
                self.look_at_start(images_of(batch), texts_of(batch))
                self.look_at_start = None
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
    if missing and "*" in missing[0]:
        raise UserError(
            f"{option} {pattern}: open_clip's reader takes no names with *: write {{000000..000009}}, or add "
            "--captions-per-image first, which asks for our reader"
        )
    if missing:
        raise UserError(f"{option} {pattern}: {len(missing)} of {len(shards)} shards do not exist: {missing[0]}")


def read_splits(args: Namespace) -> dict[str, Collection]:
    """Return the splits that our readers serve, ``"train_data"`` and ``"val_data"``, and check them.

    With ``--captions-per-image`` ours read all data, except validation data of a program (``pipe:``). Without it,
    open_clip reads everything.

    Raises:
        UserError: data are missing or damaged, or a flag is given that the reader of the data does not have.
    """
    is_ours = args.captions_per_image is not None and args.dataset_type != "synthetic"
    splits: dict[str, Collection] = {}
    for split in ("train_data", "val_data"):
        path = getattr(args, split)
        if not path:
            continue
        with user_errors(f"{flag(split)} {path}"):
            if is_ours and not (split == "val_data" and path.startswith("pipe:")):
                splits[split] = _read_split(split, path, args)
            elif args.head == "set" and split == "val_data":
                raise UserError("--head set: open_clip cannot validate sets: add --captions-per-image random")
            else:
                _check_host_data(split, path, args)
    if splits.keys() == {"train_data", "val_data"}:
        shared = set(splits["train_data"].shards) & set(splits["val_data"].shards)
        if shared:
            raise UserError(
                f"--train-data and --val-data share {min(shared)}: a model is not validated on its training"
            )
    _check_flags(args, splits)
    return splits


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


def _check_host_data(split: str, path: str, args: Namespace) -> None:
    """Raise ``UserError`` if data for open_clip's own readers do not exist, or lack a column."""
    if _is_table(path, args):
        if not os.path.exists(path):
            raise UserError(f"{flag(split)} {path}: there is no such file")
        check_columns(flag(split), path, pandas.read_csv(path, sep=args.csv_separator, nrows=0).columns, args)
    elif host_data.get_dataset_fn(path, args.dataset_type) is host_data.get_wds_dataset:
        check_shards(flag(split), path)
        if split == "train_data":
            _check_counts(path, args)


def _check_counts(path: str, args: Namespace) -> None:
    """Raise ``UserError`` for what open_clip's reader of shards would find wrong after the model is built."""
    samples = args.train_num_samples
    if samples is None:
        try:
            samples, _ = host_data.get_dataset_size(path)
        except KeyError as error:
            raise UserError(
                f"--train-data {path}: its sizes.json has no number of samples of {error}: add --train-num-samples N"
            ) from error
    if not samples:
        raise UserError(
            f"--train-data {path}: open_clip does not know how many samples these shards have, because there is no "
            "sizes.json: add --train-num-samples N, or --captions-per-image first, which reads them by our reader"
        )
    shards = len(host_data.expand_urls(path)[0])
    _, _, world_size = world_info_from_env()
    workers = args.workers * world_size
    if not args.dataset_resampled and shards < workers:
        raise UserError(
            f"--train-data {path}: open_clip needs a shard for each worker of each process, {workers} in all, and "
            f"these are {shards}: lower --workers, or add --dataset-resampled, or --captions-per-image first, which "
            "reads them by our reader"
        )


def _check_flags(args: Namespace, splits: Mapping[str, Collection]) -> None:
    """Raise ``UserError`` for a flag of reading that the reader of the training data does not have."""
    options = options_given(args)
    if "train_data" in splits:
        check_refusals(args, "--captions-per-image")
        for name in ("shuffle_window", "train_num_samples"):
            if name in options:
                with user_errors(flag(name)):
                    number(name, getattr(args, name), least=1, kind=int)
        return
    ours = OURS if READS_SAMPLE_KEYS else (*OURS, *SAMPLE_KEYS)
    for name in ours:
        if name in options:
            raise UserError(
                f"{flag(name)} is for our reader: add --train-data and --captions-per-image random, first or all"
            )


def _is_table(path: str, args: Namespace) -> bool:
    return host_data.get_dataset_fn(path, args.dataset_type) is host_data.get_csv_dataset


def most_captions(path: str, args: Namespace) -> int:
    """Return the number of captions of the image with the most, as far as a table or a written index shows it."""
    with contextlib.suppress(UserError, OSError):  # which are for open_clip to find
        if _is_table(path, args):
            _, rows = read_rows(path, args.csv_separator)
            first_rows = itertools.islice(rows, ROWS_COUNTED)
            counts = Counter(row.values.get(args.csv_img_key) for row in first_rows)
            return max(counts.values(), default=1)
        shards = expand_braces(path.partition("::")[0])
        if shards[0].endswith(".tar") and ":" not in shards[0]:
            index = find_index(shards[0])
            return 1 if index is None else max(index[0].counts, default=1)
    return 1


def _log_unread_captions(args: Namespace, splits: Mapping[str, Collection]) -> None:
    """Log what open_clip's reader does with several captions of an image."""
    for split in ("train_data", "val_data"):
        path = getattr(args, split)
        if not path or split in splits:
            continue
        most = most_captions(path, args)
        if most > 1:
            kind = "table" if _is_table(path, args) else "shards"
            consequence = READ_BY_HOST.get(split, READ_BY_HOST[kind])
            logging.info(f"{path}: images have up to {most} captions, and open_clip {consequence}")


def get_data(
    args: Namespace,
    preprocess_fns: tuple[Callable, Callable],
    epoch: int = 0,
    tokenizer: Callable | None = None,
    *,
    host_get_data: Callable,
    splits: dict[str, Collection],
    steps: Steps,
    leaves_out_equal_captions: bool | None = None,
    look_at_start: Callable[[Tensor, Tensor], None] | None = None,
    **options: Any,
) -> dict[str, DataInfo]:
    """Return the data of the trainer, in place of ``open_clip_train.data.get_data``.

    Args:
        args, preprocess_fns, epoch, tokenizer, options: as open_clip gives them.
        host_get_data: open_clip's function.
        splits: of :func:`read_splits`.
        steps: of the training.
        leaves_out_equal_captions: whether the loss takes equal captions of several images for no negatives; by default,
            if it is one of ``--loss``.
        look_at_start: of :class:`TrainingData`.
    """
    if leaves_out_equal_captions is None:
        leaves_out_equal_captions = args.loss is not None
    host_args = copy(args)
    for split in splits:
        setattr(host_args, split, None)
    data = host_get_data(host_args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **options)
    if "train_data" in splits:
        data["train"] = _training_data(
            args, splits["train_data"], preprocess_fns[0], tokenizer, leaves_out_equal_captions
        )
    if "train" in data and data["train"].dataloader.num_batches < args.accum_freq:
        batches = data["train"].dataloader.num_batches
        raise UserError(
            f"--accum-freq {args.accum_freq}: an epoch has {batches} batches in each process, so no step would be taken"
        )
    if args.loss and is_master(args):
        _log_unread_captions(args, splits)
    if "train" in data and ("train_data" in splits or args.loss):
        has_texts = args.loss and args.dataset_type != "synthetic"  # whose texts are all equal
        pad_id = pad_id_of(tokenizer) if has_texts else None
        data["train"] = TrainingData(data["train"], steps, args, pad_id, look_at_start)
    if "val_data" in splits:
        data["val"] = _validation_data(args, splits["val_data"], preprocess_fns[1], tokenizer)
    return data


def _training_data(
    args: Namespace, collection: Collection, transform: Callable, tokenizer: Any, leaves_out_equal_captions: bool
) -> DataInfo:
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
        line += collection.describe_equal_captions(are_negatives=not leaves_out_equal_captions)
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


def _validation_data(args: Namespace, collection: Collection, transform: Callable, tokenizer: Any) -> DataInfo:
    dataset = ShardDataset(collection, transform, tokenizer, max_image_pixels=args.max_image_pixels)
    # FSDP's processes encode together, so all encode everything.
    shared = {} if getattr(args, "fsdp", False) else {"rank": args.rank, "world_size": args.world_size}
    loader = evaluation_loader(dataset, args.batch_size, workers=args.workers, **shared)
    loader.num_samples = len(dataset)  # for wandb
    return DataInfo(loader)
