"""Shards of numbered images: image i is red by i, and its captions are ``"i/0"``, ``"i/1"``, ..."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import fsspec
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import PILToTensor

from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage

transform = PILToTensor()


class NumberTokenizer:
    """Turns the caption ``"image/number"`` into a row ``[image, number]``."""

    def __call__(self, texts):
        texts = [texts] if isinstance(texts, str) else texts
        return torch.tensor([[int(number) for number in text.split("/")] for text in texts])


tokenizer = NumberTokenizer()


def write_captioned(folder, captions_of_images, samples_per_shard=4, dataset="numbered", groups=None):
    """Write images whose red channel is their number; return the shards."""
    groups = groups or [None] * len(captions_of_images)
    root = folder / f"{dataset}_root"
    root.mkdir()
    images = []
    for index, captions in enumerate(captions_of_images):
        Image.new("RGB", (4, 4), (index, 0, 0)).save(root / f"{index}.png")
        ids = tuple(10 * index + number for number in range(len(captions)))
        image = CaptionedImage(index, f"{index}.png", tuple(captions), ids, "train", dataset, f"{index}.png")
        images.append(replace(image, group=groups[index]))
    out = folder / dataset
    write_shards(images, root, out, samples_per_shard=samples_per_shard)
    return sorted(map(str, out.glob("*.tar")))


def write_numbered(folder, captions_per_image, **options):
    """Write images with so many captions ``"image/number"``; return the shards."""
    captions = [[f"{index}/{number}" for number in range(count)] for index, count in enumerate(captions_per_image)]
    return write_captioned(folder, captions, **options)


def in_memory(shards, monkeypatch):
    """Copy shards with their index behind URLs that fsspec opens; return the URLs."""
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(type(files), "store", {})
    for file in Path(shards[0]).parent.iterdir():
        files.pipe_file(f"/bucket/numbered/{file.name}", file.read_bytes())
    return [f"memory://bucket/numbered/{Path(shard).name}" for shard in shards]


def replace_member(shard, name, content):
    """Rewrite a shard with other content of one member; None leaves the member out."""
    with tarfile.open(shard) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    assert name in [member.name for member, _ in members]
    with tarfile.open(shard, "w") as tar:
        for member, data in members:
            data = content if member.name == name else data
            if data is not None:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def png_of_noise():
    stream = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def load(reader, workers=0, **options):
    return list(DataLoader(reader, batch_size=None, num_workers=workers, **options))


def numbers_of(images):
    return images[:, 0, 0, 0].long()


def read_images(batches):
    return [number for images, *_ in batches for number in numbers_of(images).tolist()]


def read_captions(batches):
    return {tuple(row) for _, texts, *_ in batches for row in texts.tolist()}
