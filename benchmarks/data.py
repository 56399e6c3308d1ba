"""Time and memory of reading and writing shards.

    python -m benchmarks.data            # against open_clip's reader and webdataset's writer
    python -m benchmarks.data --growth   # from a table to the first batch, at three sizes

Times are processor times. Readers and writers are compared in one process, in turn, and ratios are of the same round.
It needs Linux.
"""

import argparse
import contextlib
import csv
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import torch
import webdataset
from open_clip_train.data import get_wds_dataset
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measurement import print_rows, print_table, time_rounds
from vl_plugins.data import CaptionSampler, ShardDataset, read_collection, training_loader
from vl_plugins.data.caption_table import read_table
from vl_plugins.data.writer import write_shards

BATCH_SIZE = 64
SAMPLES_PER_SHARD = 1000
CAPTIONS = 5
DIFFERENT_PICTURES = 20


def make_pictures(folder: Path, number: int, size: tuple[int, int] = (640, 480)) -> Path:
    """Write ``pictures``, links to a few JPEG files, and return ``table.csv`` of them with five captions each.

    Files of (640, 480) have about 100 KB, as COCO's larger ones.
    """
    (folder / "pictures").mkdir(parents=True)
    generator = np.random.default_rng(0)
    width, height = size
    for index in range(DIFFERENT_PICTURES):
        smooth = Image.fromarray(generator.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8))
        noisy = np.asarray(smooth.resize(size)) + generator.normal(0, 12, (height, width, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.jpg", quality=85)
    with open(folder / "table.csv", "w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["image", "caption"])
        for index in range(number):
            os.symlink(f"../{index % DIFFERENT_PICTURES}.jpg", folder / f"pictures/{index:08d}.jpg")
            captions = [f"Caption {caption} of the picture with the number {index}." for caption in range(CAPTIONS)]
            table.writerows([f"{index:08d}.jpg", caption] for caption in captions)
    return folder / "table.csv"


def write(folder: Path, samples_per_shard: int = SAMPLES_PER_SHARD) -> str:
    """Write the shards of a table in ``folder``; return their pattern."""
    shutil.rmtree(folder / "shards", ignore_errors=True)
    images, options = read_table(folder / "table.csv"), {"samples_per_shard": samples_per_shard, "workers": 1}
    written = write_shards(images, folder / "pictures", folder / "shards", **options)
    return f"{folder}/shards/table-train-{{000000..{len(written.shards) - 1:06d}}}.tar"


def write_plainly(folder: Path) -> None:
    """Write the pictures of a table with webdataset; nothing is checked, and there are no hashes and no index."""
    shutil.rmtree(folder / "shards", ignore_errors=True)
    captions = defaultdict(list)
    with open(folder / "table.csv", newline="") as stream:
        for row in csv.DictReader(stream):
            captions[row["image"]].append(row["caption"])
    (folder / "shards").mkdir()
    # It prints the name of each shard; early versions have no option for that.
    quiet = contextlib.redirect_stdout(sys.stderr)
    with quiet, webdataset.ShardWriter(f"{folder}/shards/%06d.tar", maxcount=SAMPLES_PER_SHARD) as shards:
        for index, (file, texts) in enumerate(captions.items()):
            data = (folder / "pictures" / file).read_bytes()
            metadata = {"image_id": index, "captions": texts}
            shards.write({"__key__": f"{index:08d}", "jpg": data, "txt": texts[0], "json": metadata})


def no_tokens(texts: str | Sequence[str]) -> Tensor:
    return torch.zeros(1 if isinstance(texts, str) else len(texts), 77, dtype=torch.int64)


def our_loader(shards: str | Sequence[Path], transform: Callable) -> DataLoader:
    dataset = ShardDataset(shards, transform, no_tokens)
    return training_loader(dataset, CaptionSampler(dataset.collection, BATCH_SIZE), workers=0)


def open_clip_loader(shards: str, transform: Callable) -> Iterable:
    arguments = argparse.Namespace(train_data=shards, batch_size=BATCH_SIZE, workers=0, world_size=1, seed=0)
    arguments.train_num_samples = arguments.train_data_upsampling_factors = None
    return get_wds_dataset(arguments, transform, is_train=True, tokenizer=no_tokens).dataloader


def read(loader: Iterable, number: int) -> None:
    """Read an epoch, and check that it has all images."""
    found = sum(len(images) for images, *_ in loader)
    if found != number:
        raise ValueError(f"read {found} of {number} images")


def measure_reading(folder: Path, number: int, rounds: int) -> None:
    """Compare an epoch with open_clip's, without workers."""
    number -= number % (2 * BATCH_SIZE)  # so that no reader repeats any
    make_pictures(folder, number)
    shards, transform = write(folder, number // 8), open_clip.image_transform(224, is_train=True)
    loaders = {"open_clip": open_clip_loader(shards, transform), "ours": our_loader(shards, transform)}
    seconds = time_rounds({name: partial(read, loader, number) for name, loader in loaders.items()}, rounds)
    print_table(f"reading {number:,}", seconds, "open_clip")


def measure_writing(folder: Path, number: int, rounds: int) -> None:
    """Compare the way from a table to shards with a loop of webdataset's writer."""
    make_pictures(folder, number)
    writers = {"ShardWriter": partial(write_plainly, folder), "ours": partial(write, folder)}
    seconds = time_rounds(writers, rounds)
    print_table(f"writing {number:,}", seconds, "ShardWriter")


# Prints the processor time of a command, and its peak memory in MB. Its workers are threads. The peak of `getrusage`
# would be that of the process that starts it, if this is larger.
RUN = """
import re, sys, time
from vl_plugins.cli import main
status = main(sys.argv[1:])
print(time.process_time(), 1.024e-3 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
sys.exit(status)
"""


def run_command(*arguments: str | Path) -> tuple[str, str]:
    """Run ``vl-plugins``; return its processor time in seconds and its peak memory in MB."""
    output = subprocess.check_output([sys.executable, "-c", RUN, *map(str, arguments)], text=True)
    seconds, peak = map(float, output.splitlines()[-1].split())
    return f"{seconds:.1f}", f"{peak:,.0f}"


def measure_growth(folder: Path, sizes: Sequence[int]) -> None:
    """Print processor time and peak memory of commands, and the start of an epoch, at several sizes."""
    rows = [["images", "table, s", "MB", "info, s", "MB", "names, s", "first batch, s", "bytes an image"]]
    for number in sizes:
        root, shards = folder / str(number), folder / str(number) / "shards"
        options = ["--annotations", make_pictures(root, number, (64, 48)), "--images", root / "pictures"]
        commands = [run_command("shards", "table", *options, "--out", shards), run_command("shards", "info", shards)]
        started = time.process_time()
        collection = read_collection(sorted(shards.glob("*.tar")))
        if len(collection.captions) != CAPTIONS * number:
            raise ValueError("captions are missing")
        named = time.process_time()
        loader = our_loader(sorted(shards.glob("*.tar")), open_clip.image_transform(224, is_train=True))
        next(iter(loader))
        first, held = time.process_time(), len(pickle.dumps((loader.dataset, loader.batch_sampler)))
        epoch = [f"{named - started:.2f}", f"{first - named:.2f}", f"{held / number:.1f}"]
        rows.append([f"{number:,}", *commands[0], *commands[1], *epoch])
        shutil.rmtree(root)
    print_rows(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all numbers of images")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)

    def scaled(number: int) -> int:
        return max(2 * BATCH_SIZE, round(arguments.scale * number))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.growth:
            measure_growth(folder, [scaled(number) for number in (5_000, 50_000, 500_000)])
        else:
            measure_reading(folder / "reading", scaled(384), arguments.rounds)
            measure_writing(folder / "writing", scaled(20_000), arguments.rounds)


if __name__ == "__main__":
    main()
