"""Images per second of ``write_shards`` against a plain ``webdataset.TarWriter`` loop over the same files.

    python tests/benchmarks/bench_writer.py [--images 4000] [--rounds 5]

The loop reads each file and writes it with its captions into shards of the same size; it checks nothing and hashes
nothing. Every round times the loop, one worker and two workers in turn, and the table shows the median over the rounds
and the ratio of each round's rates. With one worker everything happens in this process, so its processor time is
compared too, which other programs on the machine disturb less than wall time.
"""

import argparse
import io
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.shards import write_shards
from vl_plugins.utils.tables import align_columns

SAMPLES_PER_SHARD = 1000
DIFFERENT_IMAGES = 200


def make_images(root: Path, count: int) -> list[CaptionedImage]:
    """Write JPEG files of 640 x 480 pixels and about 100 KB, as COCO's larger ones are."""
    generator = np.random.default_rng(0)
    contents = []
    for _ in range(DIFFERENT_IMAGES):
        smooth = Image.fromarray(generator.integers(0, 255, (30, 40, 3), dtype=np.uint8)).resize((640, 480))
        noisy = np.asarray(smooth) + generator.normal(0, 12, (480, 640, 3))
        stream = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
        contents.append(stream.getvalue())
    images = []
    for index in range(count):
        name = f"COCO_train2014_{index:012d}.jpg"
        (root / name).write_bytes(contents[index % DIFFERENT_IMAGES])
        captions = tuple(f"Caption {number} of the picture with the number {index}." for number in range(5))
        ids = tuple(5 * index + number for number in range(5))
        images.append(CaptionedImage(index, name, captions, ids, "train", "coco", name))
    return images


def write_plainly(images: list[CaptionedImage], root: Path, out: Path) -> None:
    # Here, because worker processes import what this file imports, and this imports torch.
    import webdataset

    out.mkdir()
    for start in range(0, len(images), SAMPLES_PER_SHARD):
        with webdataset.TarWriter(str(out / f"{start // SAMPLES_PER_SHARD:06d}.tar")) as tar:
            for index, image in enumerate(images[start : start + SAMPLES_PER_SHARD], start):
                metadata = {"image_id": image.image_id, "captions": image.captions, "caption_ids": image.caption_ids}
                data = (root / image.file).read_bytes()
                tar.write({"__key__": f"{index:08d}", "jpg": data, "txt": image.captions[0], "json": metadata})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "images")
        root.mkdir()
        images = make_images(root, arguments.images)
        out = Path(folder, "shards")
        writers = {
            "TarWriter loop": lambda: write_plainly(images, root, out),
            "1 worker": lambda: write_shards(images, root, out, workers=1),
            "2 workers": lambda: write_shards(images, root, out, workers=2),
        }
        wall, processor = ({name: [] for name in writers} for _ in range(2))
        for _ in range(arguments.rounds + 1):
            for name, write in writers.items():
                started = time.perf_counter(), time.process_time()
                write()
                wall[name].append(time.perf_counter() - started[0])
                processor[name].append(time.process_time() - started[1])
                shutil.rmtree(out)
        rows = [("", "images/s", "ratio of rates", "least", "most", "ratio of processor time")]
        for name in writers:
            # The first round warms up the file cache.
            ratios = [plain / ours for plain, ours in zip(wall["TarWriter loop"][1:], wall[name][1:], strict=True)]
            cpu = [
                plain / ours for plain, ours in zip(processor["TarWriter loop"][1:], processor[name][1:], strict=True)
            ]
            rows.append(
                (
                    name,
                    f"{arguments.images / statistics.median(wall[name][1:]):,.0f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f}",
                    f"{max(ratios):.2f}",
                    "" if name == "2 workers" else f"{statistics.median(cpu):.2f}",
                )
            )
        print(json.dumps({"images": arguments.images, "rounds": arguments.rounds}))
        print("\n".join("  ".join(row) for row in align_columns(rows)))


if __name__ == "__main__":
    main()
