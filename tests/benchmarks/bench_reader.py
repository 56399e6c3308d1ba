"""Images per second of our training reader against open_clip's own on the same shards.

    python tests/benchmarks/bench_reader.py [--images 384] [--rounds 7]

Both make the same number of batches of 64 with the same tokenizer and image transform. ``open_clip`` is
``open_clip_train.data.get_wds_dataset``. ``ours, same captions`` reads shards in which every caption occurs twice;
``ours, unchecked`` has ``allow_duplicate_captions``, so that the difference is the cost of keeping them apart. In each
round every reader reads one epoch, forwards in one round and backwards in the next. The table shows the median of
images per second and, for each round's rate divided by open_clip's in that round, median, least and most.

With 0 loader workers a rate is of processor time, which other programs on the machine disturb less; with 2 workers it
is of wall time. Pictures of 640 x 480 are about 100 KB each. The cheap transform makes a tensor without looking at the
picture, and with small pictures there is little to decode either: what remains is the reader's own work.
"""

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
from open_clip_train.data import get_wds_dataset
from PIL import Image
from torch.utils.data import DataLoader

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.reader import training_pipeline
from vl_plugins.data.shards import write_shards
from vl_plugins.utils.tables import align_columns

BATCH_SIZE = 64
SHARDS = 8
DIFFERENT_IMAGES = 50
HOST = "open_clip"


def write_pictures(folder: Path, count: int, size: tuple[int, int], *, repeated: bool) -> str:
    """Write shards of JPEGs with five captions each; return their pattern."""
    root = folder / "images"
    root.mkdir(parents=True)
    generator = np.random.default_rng(0)
    width, height = size
    contents = []
    for _ in range(DIFFERENT_IMAGES):
        smooth = Image.fromarray(generator.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8))
        noisy = np.asarray(smooth.resize(size)) + generator.normal(0, 12, (height, width, 3))
        stream = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
        contents.append(stream.getvalue())
    images = []
    for index in range(count):
        name = f"{index:012d}.jpg"
        (root / name).write_bytes(contents[index % DIFFERENT_IMAGES])
        said = index // 2 if repeated else index
        captions = tuple(f"Caption {number} of the picture with the number {said}." for number in range(5))
        ids = tuple(5 * index + number for number in range(5))
        images.append(CaptionedImage(index, name, captions, ids, "train", "bench", name))
    write_shards(images, root, folder / "shards", samples_per_shard=-(-count // SHARDS))
    return f"{folder}/shards/bench-train-{{000000..{SHARDS - 1:06d}}}.tar"


def cheap(image: Image.Image) -> torch.Tensor:
    return torch.zeros(3, 1, 1)


def loader_of_host(shards: str, transform, tokenizer, workers: int):
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


def our_loader(shards: str, transform, tokenizer, workers: int, **options) -> DataLoader:
    reader = training_pipeline(shards, transform, tokenizer, BATCH_SIZE, rank=0, world_size=1, **options)
    return DataLoader(reader, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def rates(loaders: dict, images: int, rounds: int, clock) -> dict[str, list[float]]:
    """Return images per second by loader and round."""
    found = {name: [] for name in loaders}
    # The first round starts the workers and fills the file cache.
    for number in range(rounds + 1):
        for name in list(loaders)[:: 1 if number % 2 else -1]:
            started = clock()
            read = sum(len(batch) for batch, _ in loaders[name])
            seconds = clock() - started
            assert read == images, f"{name} read {read} of {images} images"
            if number:
                found[name].append(images / seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=384, help="a multiple of 128, so that no reader repeats any")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.images % (2 * BATCH_SIZE):
        parser.error(f"--images must be a multiple of {2 * BATCH_SIZE}")

    torch.set_num_threads(1)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    augmentation = open_clip.image_transform(224, is_train=True)
    rows = [("pictures", "transform", "workers", "reader", "images/s", "ratio", "least", "most")]
    with tempfile.TemporaryDirectory() as folder:
        for size, transforms in (
            ((640, 480), {"open_clip's, 224": augmentation, "cheap": cheap}),
            ((32, 32), {"cheap": cheap}),
        ):
            unique, repeated = (
                write_pictures(Path(folder, f"{size[0]}-{kind}"), arguments.images, size, repeated=kind == "repeated")
                for kind in ("unique", "repeated")
            )
            for transform_name, transform in transforms.items():
                for workers, clock in ((0, time.process_time), (2, time.perf_counter)):
                    options = {"transform": transform, "tokenizer": tokenizer, "workers": workers}
                    found = rates(
                        {
                            HOST: loader_of_host(unique, **options),
                            "ours": our_loader(unique, **options),
                            "ours, same captions": our_loader(repeated, **options),
                            "ours, unchecked": our_loader(unique, **options, allow_duplicate_captions=True),
                        },
                        arguments.images,
                        arguments.rounds,
                        clock,
                    )
                    for name, of_rounds in found.items():
                        ratios = [ours / host for ours, host in zip(of_rounds, found[HOST], strict=True)]
                        summary = (statistics.median(ratios), min(ratios), max(ratios))
                        rows.append(
                            (
                                f"{size[0]} x {size[1]}",
                                transform_name,
                                str(workers),
                                name,
                                f"{statistics.median(of_rounds):,.0f}",
                                *(("", "", "") if name == HOST else (f"{ratio:.2f}" for ratio in summary)),
                            )
                        )
    print("\n".join("  ".join(row) for row in align_columns(rows)))


if __name__ == "__main__":
    main()
