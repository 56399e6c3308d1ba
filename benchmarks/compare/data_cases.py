"""Bytes of shards from every source, and what is read from them: collections, orders of epochs, batches."""

import argparse
import csv
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import Recorder, save_cases
from torch.utils.data import DataLoader
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import to_tensor

from vl_plugins.cli import main as vl_plugins
from vl_plugins.data import Draw, ShardDataset, evaluation_loader, read_collection

TOY = "--annotations toy/dataset_toy.json --images toy"
SOURCES = {
    "coco": f"coco {TOY} --samples-per-shard 16",
    "coco shuffled": f"coco {TOY} --samples-per-shard 16 --seed 3",
    "coco one split": f"coco {TOY} --split val --dataset-name other",
    "coco with damaged images": "coco --annotations damaged.json --images toy --samples-per-shard 16 --on-error skip",
    "flickr30k": "flickr30k --annotations flat.json --images toy/flat --samples-per-shard 16",
    "coco-captions": "coco-captions --annotations captions_val2017.json --images toy/flat",
    "table": "table --annotations table.csv --images toy/flat --samples-per-shard 16 --group-column place",
    "table split at random": "table --annotations table.jsonl --images toy/flat --val-fraction 0.2 --test-fraction 0.2",
    "features": "coco --annotations toy/dataset_toy.json --features features --samples-per-shard 16",
    "hugging-face": "hugging-face hub --samples-per-shard 16 --id-column number",
}


def write_sources() -> None:
    """Write toy scenes, and their annotations in other formats."""
    run_command(["toy", "--out", "toy", "--train", "40", "--val", "10", "--test", "6", "--seed", "7"])
    document = json.loads(Path("toy/dataset_toy.json").read_text())
    images = document["images"]
    Path("toy/flat").mkdir()
    Path("features").mkdir()
    rows = []
    for number, image in enumerate(images):
        picture = Path("toy", image["filepath"], image["filename"]).read_bytes()
        Path("toy/flat", image["filename"]).write_bytes(picture)
        features = np.random.default_rng(number).normal(size=(1 + number % 4, 3)).astype("<f4")
        np.save(f"features/{image['cocoid']}.npy", features)
        for sentence in image["sentences"]:
            row = {"image": image["filename"], "caption": sentence["raw"], "image_id": image["cocoid"]}
            rows.append(row | {"place": number // 4})
    Path("flat.json").write_text(json.dumps({**document, "images": [{**image, "filepath": ""} for image in images]}))
    with open("table.csv", "w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    Path("table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_official_captions(images[:9])
    write_hub_folder(images[:9])

    picture = Path("toy", images[0]["filepath"], images[0]["filename"]).read_bytes()
    Path("toy/cut.png").write_bytes(picture[:100])
    images[3] |= {"filename": "cut.png", "filepath": ""}
    images[5] |= {"filename": "missing.png"}
    Path("damaged.json").write_text(json.dumps(document))
    for file in Path().rglob("*"):
        os.utime(file, (0, 0))  # an index has the state of its sources


def write_official_captions(images: list[dict[str, Any]]) -> None:
    """Write captions as COCO's official files have them."""
    official: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    for image in images:
        official["images"].append({"id": image["cocoid"], "file_name": image["filename"]})
        for sentence in image["sentences"]:
            caption = {"id": 5000 - sentence["sentid"], "image_id": image["cocoid"], "caption": sentence["raw"]}
            official["annotations"].append(caption)
    Path("captions_val2017.json").write_text(json.dumps(official))


def write_hub_folder(images: list[dict[str, Any]]) -> None:
    """Write pictures and captions as a folder that Hugging Face's datasets reads."""
    Path("hub").mkdir()
    with open("hub/metadata.csv", "w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["file_name", "caption_0", "caption_1", "number"])
        for image in images:
            name = f"{image['cocoid']}.png"  # one with the name of a split would leave out the table
            Path("hub", name).write_bytes(Path("toy/flat", image["filename"]).read_bytes())
            captions = [sentence["raw"] for sentence in image["sentences"]]
            table.writerow([name, *captions[:2], image["cocoid"]])


def run_command(words: list[str]) -> None:
    """Run ``vl-plugins``."""
    status = vl_plugins(words)
    if status:
        raise RuntimeError(f"exit status {status} of vl-plugins {' '.join(words)}")


def shards_of(source: str) -> list[Path]:
    """Return the shards of a source, which are written when they are first needed."""
    folder = Path("shards", source)
    if not folder.exists():
        run_command(["shards", *SOURCES[source].split(), "--out", str(folder), "--workers", "1"])
    return sorted(folder.glob("*.tar"))


def bytes_of_shards(source: str) -> dict[str, Any]:
    folder = shards_of(source)[0].parent
    results = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            results[str(file.relative_to(folder))] = file.read_bytes()
    return results


def verified(source: str) -> dict[str, Any]:
    run_command(["shards", "verify", str(shards_of(source)[0].parent)])
    return {}


def collection(source: str) -> dict[str, Any]:
    images = read_collection(shards_of(source))
    results = {"labels": torch.as_tensor(images.labels), "image of caption": images.image_of_caption}
    for name in ("keys", "image_ids", "captions", "caption_ids", "splits"):
        results[name] = json.dumps(list(getattr(images, name)))
    return results


def tokens(texts: list[str]) -> torch.Tensor:
    """Return the characters of texts, padded with zeros."""
    rows = torch.zeros(len(texts), 200, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor([ord(character) for character in text])
    return rows


def crop(picture: Any) -> torch.Tensor:
    return to_tensor(RandomResizedCrop(24)(picture))


def batches(source: str, inputs: str, workers: int) -> dict[str, Any]:
    """Return batches of training, of images in their order, and those of an evaluation."""
    transform = torch.as_tensor if inputs == "features" else crop
    dataset = ShardDataset(shards_of(source), transform, tokens, inputs=inputs)
    draws = [Draw(image, [1, 0], (0, 1, image)) for image in range(len(dataset))]
    parts = [draws[start : start + 8] for start in range(0, len(draws), 8)]
    results = {}
    loader = DataLoader(dataset, batch_sampler=parts, collate_fn=dataset.collate, num_workers=workers)
    for number, (images, texts, labels, *_) in enumerate(loader):
        results |= {f"images {number}": images, f"texts {number}": texts, f"labels {number}": labels}
    torch.manual_seed(0)  # of the transform
    for batch in evaluation_loader(dataset, 10):
        for name, value in batch._asdict().items():
            results[f"evaluation {batch.start}, {name}"] = value
    return results


def run_cases(recorder: Recorder, arguments: argparse.Namespace) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(Path("hub_cache").absolute())
    write_sources()
    for source in SOURCES:
        recorder.run(f"shards/{source}", partial(bytes_of_shards, source))
        recorder.run(f"shards verify/{source}", partial(verified, source))
        recorder.run(f"collection/{source}", partial(collection, source))
    for workers in (0, 2):
        recorder.run(f"batches/pictures, {workers} workers", partial(batches, "coco", "images", workers))
        recorder.run(f"batches/features, {workers} workers", partial(batches, "features", "features", workers))


if __name__ == "__main__":
    save_cases(run_cases)
