"""One training step on made-up data: finds out whether a command line works before anything is read or downloaded."""

import contextlib
import functools
import logging
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from open_clip_train.data import DataInfo
from PIL import Image
from torch.utils.data import DataLoader

from vl_plugins.integrations.open_clip import host

__all__ = ["made_up", "trainer_without_data"]

BATCH_SIZE = 2  # the smallest with negatives
CAPTIONS = 5  # of an image, where all are asked for
PICTURE_SIZE = (256, 320)

# What open_clip would read, fetch, send or keep, by name of its options.
NOTHING_READ: dict[str, Any] = {
    "train_data": None,
    "val_data": None,
    "imagenet_val": None,
    "imagenet_v2": None,
    "resume": None,
    "pretrained": "",
    "pretrained_image": False,
    "report_to": "",
    "remote_sync": None,
    "copy_codebase": False,
    "dataset_type": "synthetic",  # to open_clip, that there is something to train on
    "epochs": 1,
    "warmup": 0,
    "batch_size": BATCH_SIZE,
    "logs": "none",  # no checkpoint
}


def made_up(options: Namespace, folder: str | Path) -> Namespace:
    """Return open_clip's options for one step on made-up data; model, loss, precision and optimizer stay.

    Args:
        options: as open_clip's ``parse_args`` returns them.
        folder: for open_clip's log and ``params.txt``.
    """
    changed = {
        **NOTHING_READ,
        # An absolute path, under which open_clip logs whatever `logs` is.
        "name": str(Path(folder).absolute() / "dry-run"),
    }
    if options.distill_pretrained is not None:
        changed["distill_pretrained"] = ""  # None would turn distillation off
    return Namespace(**{**vars(options), **changed})


@contextlib.contextmanager
def trainer_without_data(trainer: ModuleType, captions_per_image: str | int | None) -> Iterator[SimpleNamespace]:
    """Give the functions of ``open_clip_train.main`` that the launcher builds on, for one step that leaves no trace.

    Models have random weights, pictures are noise. Only errors are logged, and all that is written is gone afterwards.

    Args:
        trainer: ``open_clip_train.main``, not patched yet.
        captions_per_image: as ``--captions-per-image``.
    """
    # Before the launcher replaces them.
    of_host = dict(vars(trainer))
    parse_args, create_model = trainer.parse_args, trainer.create_model_and_transforms
    captions = {"all": CAPTIONS}.get(captions_per_image, captions_per_image)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        of_host |= {
            "parse_args": lambda argv: made_up(parse_args(argv), folder),
            "create_model_and_transforms": functools.partial(create_model, load_weights=False, pretrained_text=False),
            "get_data": functools.partial(_get_data, captions_per_image=captions if isinstance(captions, int) else 1),
        }
        yield SimpleNamespace(**of_host)


def _get_data(
    args, preprocess_fns, epoch=0, tokenizer=None, *, captions_per_image: int, **of_version
) -> dict[str, DataInfo]:
    """Stand in for open_clip's synthetic data, whose pairs are all the same: from them no loss has a gradient."""
    preprocess_train, _ = preprocess_fns
    generator = np.random.default_rng(args.seed)
    pictures = generator.integers(256, size=(BATCH_SIZE, *PICTURE_SIZE, 3), dtype=np.uint8)
    images = torch.stack([preprocess_train(Image.fromarray(picture)) for picture in pictures])
    texts = tokenizer([f"made-up caption {number}" for number in range(BATCH_SIZE * captions_per_image)])
    loader = DataLoader([host.adapter().as_batch((images, texts))] * args.accum_freq, batch_size=None)
    loader.num_batches = len(loader)
    loader.num_samples = len(loader) * BATCH_SIZE * args.world_size
    return {"train": DataInfo(loader)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log errors only, and undo open_clip's own set-up of logging."""
    loggers = [logging.root, *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    levels, handlers = [logger.level for logger in loggers], list(logging.root.handlers)
    try:
        with host.warnings_unsaid():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for handler in set(logging.root.handlers).difference(handlers):
            logging.root.removeHandler(handler)
            handler.close()
