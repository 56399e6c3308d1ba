"""Bytes of shards and of ``sizes.json`` from every source, on toy scenes and real pictures.

Of shuffled shards, whose order differs, the samples are compared.
"""

import csv
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from common import Cases, flatten, run, vl_plugins

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path("hf").absolute()), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
SIZE = ("--samples-per-shard", 16)
TOY = ("--annotations", "toy/dataset_toy.json", "--images", "toy", "--dataset-name", "toy")
OFFICIAL = [f"captions_{split}2017.json" for split in ("train", "val")]
SOURCES = {
    "coco": {
        "defaults": (*TOY, *SIZE),
        "all captions": (*TOY, *SIZE, "--txt", "all"),
        "resize": (*TOY, *SIZE, "--resize", 32),
        "seed": (*TOY, *SIZE, "--seed", 3),
        "splits": (*TOY, "--split", "test", "val"),
        "two workers": (*TOY, "--samples-per-shard", 5, "--workers", 2),
        "other name": (*TOY[:4], *SIZE, "--dataset-name", "my-scenes"),
        "restval": ("--annotations", "restval.json", *TOY[2:], *SIZE),
        "restval apart": ("--annotations", "restval.json", *TOY[2:], *SIZE, "--leave-restval"),
        "groups": ("--annotations", "restval.json", *TOY[2:], *SIZE, "--group-key", "place"),
        "annotation ids": (*TOY, *SIZE, "--coco-annotations", *OFFICIAL, "captions_test2017.json"),
        "missing ids": (*TOY, *SIZE, "--coco-annotations", *OFFICIAL),
        "features": (*TOY[:2], "--features", "features", "--dataset-name", "toy", *SIZE),
        "skip": ("--annotations", "broken.json", *TOY[2:], *SIZE, "--on-error", "skip"),
        "raise": ("--annotations", "broken.json", *TOY[2:], *SIZE),
    },
    "flickr30k": {
        "defaults": (*TOY[:2], "--images", "flat", *SIZE),
        "toy": (*TOY[:2], "--images", "flat", *TOY[4:], *SIZE, "--seed", 1, "--txt", "all"),
        "features": (*TOY[:2], "--features", "features_by_name", *SIZE),
    },
    "coco-captions": {
        "defaults": ("--annotations", *OFFICIAL, "--images", "official", *SIZE),
        "one split": ("--annotations", *OFFICIAL, "--images", "official", "--split", "val2017", "--group-key", "place"),
        "resize": ("--annotations", OFFICIAL[1], "--images", "official", "--resize", 24, "--quality", 60),
    },
    "table": {
        "csv": ("--annotations", "table.csv", "--images", "toy", *SIZE),
        "tsv": ("--annotations", "table.tsv", "--images", "toy", "--dataset-name", "toy", "--group-key", "place"),
        "jsonl": ("--annotations", "table.jsonl", "--images", "toy", *SIZE, "--seed", 5),
        "columns": (
            *("--annotations", "columns.csv", "--images", "toy", "--delimiter", ";", "--image-column", "file"),
            *("--caption-column", "first", "second", "--id-column", "number", "--split-name", "mine"),
        ),
        "features": ("--annotations", "table.csv", "--features", "features", *SIZE),
        "wrong column": ("--annotations", "table.csv", "--images", "toy", "--image-column", "nothing"),
    },
    "hugging-face": {
        "lists": ("hf_lists", *SIZE),
        "split column": ("hf_splits", *SIZE, "--dataset-name", "toy", "--split", "test"),
        "rows": ("hf_rows", *SIZE, "--id-column", "number", "--txt", "all"),
        "folder of images": ("hf_folder", "--resize", 32),
        "caption lines": ("hf_lines", "--caption-lines", "--group-key", "place"),
    },
}
REAL = {
    "defaults": (),
    "resize": ("--resize", 40, "--quality", 80, "--samples-per-shard", 200, "--seed", 2),
    "all captions": ("--txt", "all", "--split", "val", "--dataset-name", "stamps"),
}


def write_sources() -> None:
    """Write the toy scenes and other forms of their annotations."""
    vl_plugins("toy", "--out", "toy", "--train", 40, "--val", 10, "--test", 6, "--seed", 7)
    document = json.loads(Path("toy/dataset_toy.json").read_text())
    images = document["images"]
    for folder in ("features", "features_by_name"):
        Path(folder).mkdir()
    for number, image in enumerate(images):
        values = np.random.default_rng(number).normal(size=(1 + number % 4, 3)).astype(("<f4", "<f2")[number % 2])
        np.save(f"features/{image['cocoid']}.npy", values)
        np.save(f"features_by_name/{Path(image['filename']).stem}.npy", values)
    changed = [image | {"place": f"p{number // 3}"} for number, image in enumerate(images)]
    for number, image in enumerate(changed):
        image["split"] = "restval" if image["split"] == "train" and number % 4 == 0 else image["split"]
    Path("restval.json").write_text(json.dumps(document | {"images": changed}))
    Path("toy/cut.png").write_bytes(Path("toy", images[0]["filepath"], images[0]["filename"]).read_bytes()[:100])
    broken = [dict(image) for image in images]
    broken[3] |= {"filename": "cut.png", "filepath": ""}
    broken[5] |= {"filename": "none.png"}
    Path("broken.json").write_text(json.dumps(document | {"images": broken}))
    Path("flat").mkdir()
    for image in images:  # where Flickr30K has them
        shutil.copy(Path("toy", image["filepath"], image["filename"]), "flat")
    for first, split in ((9000, "train"), (5000, "val"), (1000, "test")):
        part = [image for image in images if image["split"] == split]
        folder = Path("official", f"{split}2017")
        shutil.copytree(Path("toy", part[0]["filepath"]), folder)
        captions = [(image["cocoid"], sentence["raw"]) for image in part for sentence in image["sentences"]]
        official = {
            "images": [{"id": i["cocoid"], "file_name": i["filename"], "place": i["cocoid"] % 5} for i in part],
            "annotations": [
                {"id": first - number, "image_id": image, "caption": caption}
                for number, (image, caption) in enumerate(captions)
            ],
        }
        Path(f"captions_{split}2017.json").write_text(json.dumps(official))
    write_tables(images)
    write_hugging_face(images)


def write_tables(images: list[dict]) -> None:
    rows = [
        {"image": f"{image['filepath']}/{image['filename']}", "caption": sentence["raw"], "split": image["split"]}
        | {"image_id": image["cocoid"], "place": image["cocoid"] // 4}
        for image in images
        for sentence in image["sentences"]
    ]
    for file, delimiter in (("table.csv", ","), ("table.tsv", "\t")):
        with open(file, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    Path("table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open("columns.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=";")
        writer.writerow(["number", "file", "first", "second"])
        for image in images[:20]:
            texts = [sentence["raw"] for sentence in image["sentences"]]
            writer.writerow([image["imgid"], f"{image['filepath']}/{image['filename']}", texts[0], "été;\n" + texts[1]])


def write_hugging_face(images: list[dict]) -> None:
    import datasets

    items = []
    for image in images:
        data = Path("toy", image["filepath"], image["filename"]).read_bytes()
        texts = [sentence["raw"] for sentence in image["sentences"]]
        items.append({"image": {"bytes": data, "path": image["filename"]}, "texts": texts, **image})
    tables = {
        "hf_lists": [{"image": i["image"], "caption": i["texts"], "image_id": i["cocoid"]} for i in items],
        "hf_splits": [{"image": i["image"], "caption": i["texts"], "split": i["split"]} for i in items],
        "hf_rows": [
            {"image": i["image"], "caption": i["texts"][k], "number": i["cocoid"]} for k in range(5) for i in items
        ],
        "hf_lines": [
            {"image": i["image"], "caption": "\n".join(i["texts"]), "image_id": i["imgid"], "place": i["split"]}
            for i in items
        ],
    }
    for folder, rows in tables.items():
        Path(folder).mkdir()
        table = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
        table.to_parquet(f"{folder}/train-00000-of-00001.parquet")
    Path("hf_folder").mkdir()
    with open("hf_folder/metadata.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file_name", "caption_0", "caption_1"])
        for number, item in enumerate(items[:9]):
            Path(f"hf_folder/{number}.png").write_bytes(item["image"]["bytes"])
            writer.writerow([f"{number}.png", *item["texts"][:2]])


def add_files(found: Cases, source: str, case: str, folder: Path) -> None:
    """Add the bytes of shards and sizes in a folder, or of all files in one of pictures."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix == ".tar" or source == "toy":
            name = file.relative_to(folder).as_posix().replace("/", ":")
            found.add(f"tars {source}/{case}", **{name: file.read_bytes()})
        elif file.name == "sizes.json":
            found.add(f"sizes {source}/{case}", **{file.name: file.read_bytes()})


def add_samples(found: Cases, source: str, case: str, folder: Path) -> None:
    """Add the samples of all shards in a folder, in the order of their contents, without keys."""
    samples = defaultdict(list)
    for file in folder.glob("*.tar"):
        with tarfile.open(file) as archive:
            for member in archive:
                samples[member.name.partition(".")[0]].append(archive.extractfile(member).read())
    hashes = sorted(hashlib.sha256(b"".join(members)).hexdigest() for members in samples.values())
    found.add(f"samples {source}/{case}", hashes="\n".join(hashes).encode())


def convert(found: Cases, source: str, case: str, arguments: tuple, name: str = "") -> None:
    """Write the shards of a source twice, the second time over the first, and read them again."""
    name, out = name or source, Path("out", name or source, case)
    workers = () if "--workers" in arguments else ("--workers", 1)
    command = ("shards", source, *arguments, "--out", out, *workers)
    statuses = [vl_plugins(*command)[0]]
    is_shuffled = "--seed" in arguments
    if statuses == [0]:  # a run that fails leaves the shards before
        (add_samples if is_shuffled else add_files)(found, name, case, out)
    statuses.append(vl_plugins(*command)[0])
    found.add(f"again {name}/{case}", statuses=statuses)
    for action in ("verify", "info") if statuses == [0, 0] else ():
        status, output = vl_plugins("shards", action, out, "--json")
        values = flatten(json.loads(output)) if output.startswith("{") and action == "info" else {}
        values = {key: value for key, value in values.items() if not re.search("places|source", key)}
        if is_shuffled:
            values = {key: value for key, value in values.items() if not re.search("bytes|example", key)}
        floats = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        found.add(f"{action} {name}/{case}", status=status, **values | floats)


def cases(found: Cases, arguments) -> None:
    write_sources()
    add_files(found, "toy", "scenes", Path("toy"))
    for source, variants in SOURCES.items():
        for case, options in variants.items():
            convert(found, source, case, options)
    real = Path(os.environ["VL_PLUGINS_REAL_DATA"])
    if not (real / "dataset_stamps.json").is_file():
        print(f"compare: no real pictures in {real}; set VL_PLUGINS_REAL_DATA", file=sys.stderr)
        return
    for case, options in REAL.items():
        sources = ("--annotations", real / "dataset_stamps.json", "--images", real)
        convert(found, "coco", case, (*sources, *options), "stamps")


if __name__ == "__main__":
    run(cases)
