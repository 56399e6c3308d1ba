"""Images per second of our training reader and of open_clip's on the same shards.

    python -m benchmarks.reader [--size 640 480] [--transform open_clip] [--workers 0]

Both read an epoch of the same images in batches of 64, with the same tokenizer and image transform. The peer is
``open_clip_train.data.get_wds_dataset``. ``ours, repeated captions`` reads shards in which every caption occurs twice,
and ``ours, unchecked`` has ``allow_duplicate_captions``; the difference is the cost of keeping equal captions apart.
Without workers, time is processor time, otherwise wall time. ``--transform none`` makes a tensor without looking at the
picture, which leaves the reader's own work, above all with ``--size 32 32``.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import open_clip
import torch
from open_clip_train.data import get_wds_dataset
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.measurement import print_table, time_rounds
from benchmarks.pictures import make_pictures
from vl_plugins.data.shards import write_shards
from vl_plugins.data.training_batches import TrainingPipeline

BATCH_SIZE = 64
SHARDS = 8


def no_transform(image: Image.Image) -> torch.Tensor:
    return torch.zeros(3, 1, 1)


def make_shards(folder: Path, number: int, size: tuple[int, int], *, repeat_captions: bool) -> str:
    """Write shards; return their pattern."""
    images = make_pictures(folder / "images", number, size, repeat_captions=repeat_captions)
    write_shards(images, folder / "images", folder / "shards", samples_per_shard=-(-number // SHARDS))
    return f"{folder}/shards/bench-train-{{000000..{SHARDS - 1:06d}}}.tar"


def open_clip_loader(shards: str, transform, tokenizer, workers: int) -> Iterable:
    args = argparse.Namespace(
        train_data=shards,
        train_num_samples=None,
        train_data_upsampling_factors=None,
        batch_size=BATCH_SIZE,
        workers=workers,
        world_size=1,
        seed=0,
    )
    return get_wds_dataset(args, transform, is_train=True, tokenizer=tokenizer).dataloader


def our_loader(shards: str, transform, tokenizer, workers: int, **options) -> Iterable:
    reader = TrainingPipeline(shards, transform, tokenizer, BATCH_SIZE, rank=0, world_size=1, **options)
    return DataLoader(reader, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def read(loader: Iterable, number: int) -> None:
    """Read an epoch, and check that it has all images."""
    found = sum(len(images) for images, _ in loader)
    if found != number:
        raise ValueError(f"read {found} of {number} images")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=384, help="a multiple of 128, so that no reader repeats any")
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--transform", choices=("open_clip", "none"), default="open_clip")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    if arguments.images % (2 * BATCH_SIZE):
        parser.error(f"--images must be a multiple of {2 * BATCH_SIZE}")

    torch.set_num_threads(1)
    transform = open_clip.image_transform(224, is_train=True) if arguments.transform == "open_clip" else no_transform
    common = {"transform": transform, "tokenizer": open_clip.get_tokenizer("ViT-B-32"), "workers": arguments.workers}
    with tempfile.TemporaryDirectory() as folder:
        unique, repeated = (
            make_shards(Path(folder, str(repeat)), arguments.images, tuple(arguments.size), repeat_captions=repeat)
            for repeat in (False, True)
        )
        loaders = {
            "open_clip": open_clip_loader(unique, **common),
            "ours": our_loader(unique, **common),
            "ours, repeated captions": our_loader(repeated, **common),
            "ours, unchecked": our_loader(unique, **common, allow_duplicate_captions=True),
        }
        epochs = {name: partial(read, loader, arguments.images) for name, loader in loaders.items()}
        clock = time.perf_counter if arguments.workers else time.process_time
        seconds = time_rounds(epochs, arguments.rounds, clock)
    width, height = arguments.size
    title = f"{width} x {height}, transform: {arguments.transform}, workers: {arguments.workers}"
    print_table(title, seconds, "open_clip", items=arguments.images)


if __name__ == "__main__":
    main()
