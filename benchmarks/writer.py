"""Images per second of ``write_shards`` and of a plain loop with ``webdataset.TarWriter`` over the same files.

    python -m benchmarks.writer [--images 4000] [--workers 1]

The loop reads each file and writes it with its captions into shards of the same size; it checks nothing and computes no
hashes. With one worker everything happens in this process and time is processor time, otherwise it is wall time.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.pictures import make_pictures
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage

SAMPLES_PER_SHARD = 1000


def write_plainly(images: Sequence[CaptionedImage], root: Path, out: Path) -> None:
    # Here, as in main, because worker processes import this file and these import torch.
    import webdataset

    out.mkdir()
    for start in range(0, len(images), SAMPLES_PER_SHARD):
        with webdataset.TarWriter(str(out / f"{start // SAMPLES_PER_SHARD:06d}.tar")) as tar:
            for index, image in enumerate(images[start : start + SAMPLES_PER_SHARD], start):
                metadata = {"image_id": image.image_id, "captions": image.captions, "caption_ids": image.caption_ids}
                data = (root / image.file).read_bytes()
                tar.write({"__key__": f"{index:08d}", "jpg": data, "txt": image.captions[0], "json": metadata})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    from benchmarks.measurement import print_table, time_rounds

    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder, "images"), Path(folder, "shards")
        images = make_pictures(root, arguments.images, tuple(arguments.size))
        writers = {
            "TarWriter loop": partial(write_plainly, images, root, out),
            "write_shards": partial(write_shards, images, root, out, workers=arguments.workers),
        }
        clock = time.process_time if arguments.workers == 1 else time.perf_counter
        seconds = time_rounds(writers, arguments.rounds, clock, clean_up=partial(shutil.rmtree, out))
    title = f"{arguments.images:,} images, workers: {arguments.workers}"
    print_table(title, seconds, "TarWriter loop", items=arguments.images)


if __name__ == "__main__":
    main()
