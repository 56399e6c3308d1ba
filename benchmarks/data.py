"""Time and memory of reading and writing shards.

    python -m benchmarks.data            # against open_clip's reader and webdataset's writer, and large numbers
    python -m benchmarks.data --growth   # a table, its shards, and their epochs, at three sizes
    python -m benchmarks.data --remote   # images per second over HTTP, with 50 ms a request, and over S3

Times are processor times. Readers and writers are compared in one process, in turn, and ratios are of the same round.
It needs Linux.
"""

import argparse
import csv
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import fsspec
import numpy as np
import open_clip
import torch
import webdataset
from open_clip_train.data import get_wds_dataset
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measurement import print_table, time_rounds
from tests.helpers.servers import http_server, s3_server
from vl_plugins.data import CaptionSampler, Collection, ShardDataset, read_collection, training_loader
from vl_plugins.data.caption_table import read_table
from vl_plugins.data.index import make_index, write_index
from vl_plugins.data.samples import Record
from vl_plugins.data.writer import write_shards

BATCH_SIZE = 64
SAMPLES_PER_SHARD = 1000
CAPTIONS = 5
DIFFERENT_PICTURES = 20
PICTURE_BYTES = 100_000
DELAY = 0.05


def captions_of(image: int) -> list[str]:
    return [f"Caption {number} of the picture with the number {image}." for number in range(CAPTIONS)]


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
            table.writerows([f"{index:08d}.jpg", caption] for caption in captions_of(index))
    return folder / "table.csv"


def make_shards(folder: Path, number: int, samples_per_shard: int) -> str:
    """Write shards; return their pattern."""
    images = read_table(make_pictures(folder, number))
    written = write_shards(images, folder / "pictures", folder / "shards", samples_per_shard=samples_per_shard)
    return f"{folder}/shards/table-train-{{000000..{len(written.shards) - 1:06d}}}.tar"


def make_indexes(folder: Path, number: int) -> str:
    """Write the indexes of made-up images, beside empty files as long as their shards; return the pattern."""
    starts = range(0, number, SAMPLES_PER_SHARD)
    folder.mkdir()
    for shard, start in enumerate(starts):
        file = folder / f"made-train-{shard:06d}.tar"
        images = range(start, min(start + SAMPLES_PER_SHARD, number))
        records = [
            Record(f"made-{image:08d}", captions_of(image), image, [f"{image}#{number}" for number in range(CAPTIONS)])
            for image in images
        ]
        places = [PICTURE_BYTES * place for place in range(len(images))]
        size = PICTURE_BYTES * len(images)
        write_index(str(file), make_index(records, places, [PICTURE_BYTES] * len(images), size=size))
        with open(file, "wb") as stream:
            stream.truncate(size)
    return f"{folder}/made-train-{{000000..{len(starts) - 1:06d}}}.tar"


def no_transform(image: Image.Image) -> Tensor:
    return torch.zeros(3, 1, 1)


def no_tokens(texts: str | Sequence[str]) -> Tensor:
    return torch.zeros(1 if isinstance(texts, str) else len(texts), 77, dtype=torch.int64)


def our_loader(shards: str | Collection, transform: Callable, workers: int = 0, **options) -> DataLoader:
    dataset = ShardDataset(shards, transform, no_tokens)
    return training_loader(dataset, CaptionSampler(dataset.collection, BATCH_SIZE, **options), workers=workers)


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
    shards = make_shards(folder, number, number // 8)
    transform = open_clip.image_transform(224, is_train=True)
    loaders = {"open_clip": open_clip_loader(shards, transform), "ours": our_loader(shards, transform)}
    seconds = time_rounds({name: partial(read, loader, number) for name, loader in loaders.items()}, rounds)
    print_table(f"reading {number:,}", seconds, "open_clip")


def write_plainly(folder: Path) -> None:
    """Write the pictures of a table with webdataset; nothing is checked, and there are no hashes and no index."""
    captions = defaultdict(list)
    with open(folder / "table.csv", newline="") as stream:
        for row in csv.DictReader(stream):
            captions[row["image"]].append(row["caption"])
    (folder / "shards").mkdir()
    with webdataset.ShardWriter(f"{folder}/shards/%06d.tar", maxcount=SAMPLES_PER_SHARD, verbose=0) as shards:
        for index, (file, texts) in enumerate(captions.items()):
            data = (folder / "pictures" / file).read_bytes()
            metadata = {"image_id": index, "captions": texts}
            shards.write({"__key__": f"{index:08d}", "jpg": data, "txt": texts[0], "json": metadata})


def write(folder: Path) -> None:
    write_shards(read_table(folder / "table.csv"), folder / "pictures", folder / "shards", workers=1)


def measure_writing(folder: Path, number: int, rounds: int) -> None:
    """Compare the way from a table to shards with a loop of webdataset's writer."""
    make_pictures(folder, number)
    writers = {"ShardWriter": partial(write_plainly, folder), "ours": partial(write, folder)}
    seconds = time_rounds(writers, rounds, clean_up=partial(shutil.rmtree, folder / "shards"))
    print_table(f"writing {number:,}", seconds, "ShardWriter")


def measure_names(folder: Path, number: int) -> None:
    """Print how long reading names and captions takes."""
    shards = make_indexes(folder, number)
    started = time.process_time()
    collection = read_collection(shards)
    if len(collection.captions) != CAPTIONS * number or len(collection.keys) != number:
        raise ValueError("names are missing")
    print(f"names and captions of {number:,} images: {time.process_time() - started:.2f} s", flush=True)


def measure_worker(folder: Path, numbers: Sequence[int]) -> None:
    """Print by how much the memory of a worker grows while it reads one file."""
    for place, number in enumerate(numbers):
        shards = make_shards(folder / str(place), number, number)
        dataset = ShardDataset(shards, no_transform, no_tokens)
        sampler = CaptionSampler(dataset.collection, BATCH_SIZE)
        found = list(training_loader(dataset, sampler, workers=1, collate_fn=lambda items: memory("RssAnon")))
        size = int(dataset.collection.sizes.sum())
        print(f"a worker that reads {size / 1e6:,.0f} MB grows by {max(found) - found[0]:.1f} MB", flush=True)


def memory(name: str) -> float:
    """Return an entry of this process in ``/proc``, in MB."""
    return 1.024e-3 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure_epoch(shards: str, transform: Callable | None = None) -> tuple[float, float]:
    """Return the processor time until the first batch, read with a transform or only drawn, and bytes an image."""
    started = time.process_time()
    dataset = ShardDataset(shards, transform or no_transform, no_tokens)
    sampler = CaptionSampler(dataset.collection, BATCH_SIZE)
    next(iter(sampler if transform is None else training_loader(dataset, sampler)))
    seconds = time.process_time() - started
    return seconds, len(pickle.dumps((dataset, sampler))) / len(dataset)


# Prints the processor time of a command, and its peak memory in MB. Its workers are threads. The peak of `getrusage`
# would be that of the process that starts it, if this is larger.
RUN = """
import re, sys, time
from vl_plugins.cli import main
status = main(sys.argv[1:])
print(time.process_time(), 1.024e-3 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
sys.exit(status)
"""


def run_command(*arguments: str | Path) -> tuple[float, float]:
    """Run ``vl-plugins``; return its processor time in seconds and its peak memory in MB."""
    output = subprocess.check_output([sys.executable, "-c", RUN, *map(str, arguments)], text=True)
    return tuple(map(float, output.splitlines()[-1].split()))


class TimedCalls:
    """Passes calls on to an object, and adds up their processor time."""

    def __init__(self, inner: Any):
        self.inner, self.seconds = inner, 0.0

    def __enter__(self) -> "TimedCalls":
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Callable:
        def call(*arguments: Any) -> Any:
            started = time.process_time()
            result = getattr(self.inner, name)(*arguments)
            self.seconds += time.process_time() - started
            return self if result is self.inner else result

        return call


def measure_table(folder: Path, number: int) -> None:
    """Print the processor time of reading a table, that of DuckDB apart."""
    table, connect, connections = make_pictures(folder, number), duckdb.connect, []

    def timed_connect(**options: Any) -> TimedCalls:
        connections.append(TimedCalls(connect(**options)))
        return connections[-1]

    with mock.patch("duckdb.connect", timed_connect):
        started = time.process_time()
        if sum(1 for _ in read_table(table)) != number:
            raise ValueError("images are missing")
        seconds = time.process_time() - started
    inside = sum(connection.seconds for connection in connections)
    print(f"{CAPTIONS * number:,} rows of a table: {inside:.1f} s in DuckDB, {seconds - inside:.1f} s in Python")


def measure_growth(folder: Path, sizes: Sequence[int]) -> None:
    """Print processor time and peak memory of commands, and the start of an epoch, at several sizes."""
    print_row("images", "table, s", "MB", "info, s", "MB", "first batch, s", "bytes an image")
    for number in sizes:
        root, shards = folder / str(number), folder / str(number) / "shards"
        table = make_pictures(root, number, (64, 48))
        options = ["--annotations", table, "--images", root / "pictures", "--out", shards]
        commands = [run_command("shards", "table", *options), run_command("shards", "info", shards)]
        last = (number - 1) // SAMPLES_PER_SHARD
        epoch = measure_epoch(f"{shards}/table-train-{{000000..{last:06d}}}.tar", no_transform)
        print_row(f"{number:,}", *(f"{value:,.1f}" for pair in (*commands, epoch) for value in pair))
        shutil.rmtree(root)


def measure_remote(folder: Path, number: int) -> None:
    """Print images per second with two workers, from servers in this process."""
    local = make_shards(folder, number, max(1, number // 8))
    names = os.path.basename(local)
    with http_server(folder / "shards", DELAY) as (http, _), s3_server() as s3:
        fsspec.filesystem("s3").put(f"{folder}/shards/", f"{s3}/shards/", recursive=True)
        collections = [read_collection(f"{place}/{names}") for place in (f"{folder}/shards", http, f"{s3}/shards")]
        print_row("images per second", "local", f"HTTP, {1e3 * DELAY:.0f} ms", "S3")
        for window in (None, number // 4):
            rates = []
            for collection in collections:
                loader = our_loader(collection, no_transform, workers=2, shuffle_window=window)
                started = time.perf_counter()
                images = sum(len(images) for images, *_ in loader)
                rates.append(f"{images / (time.perf_counter() - started):,.0f}")
            print_row("all shuffled" if window is None else f"window of {window:,}", *rates)


def print_row(*cells: str) -> None:
    print(cells[0].ljust(18), *(cell.rjust(14) for cell in cells[1:]), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--remote", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all numbers of images")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def scaled(number: int) -> int:
            return max(2 * BATCH_SIZE, round(arguments.scale * number))

        if arguments.growth:
            measure_growth(folder, [scaled(number) for number in (5_000, 50_000, 500_000)])
            measure_table(folder / "rows", scaled(200_000))
        if arguments.remote:
            measure_remote(folder / "remote", scaled(4_096))
        if arguments.growth or arguments.remote:
            return
        measure_reading(folder / "reading", scaled(384), arguments.rounds)
        measure_writing(folder / "writing", scaled(20_000), arguments.rounds)
        measure_names(folder / "names", scaled(113_287))
        measure_worker(folder / "worker", [scaled(256), scaled(2_560)])
        number = scaled(2_000_000)
        seconds, size = measure_epoch(make_indexes(folder / "epoch", number))
        print(f"{number:,} images: {seconds:.1f} s until the first batch is drawn, {size:.1f} bytes an image")


if __name__ == "__main__":
    main()
