"""Shards of numbered images: image i is red by i, and its captions are ``"i/0"``, ``"i/1"``, ..."""

import io
import tarfile
from itertools import chain
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms import PILToTensor

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data import Collection
from vl_plugins.data.index import make_head, scan_shard, write_index
from vl_plugins.data.records import Record

transform = PILToTensor()


def tokenizer(texts):
    """Turn each caption ``"image/number"`` into a row ``[image, number]``."""
    return torch.tensor([[int(number) for number in text.split("/")] for text in texts])


def numbered(counts):
    """Return so many captions ``"image/number"`` for each image."""
    return [[f"{image}/{number}" for number in range(count)] for image, count in enumerate(counts)]


def write_captioned(folder, captions_of_images, images_per_shard=4, dataset="numbered", groups=None, index=True):
    """Write images whose red channel is their number, with or without an index; return the shards."""
    folder.mkdir(exist_ok=True)
    groups = groups or [None] * len(captions_of_images)
    samples = []
    for number, (captions, group) in enumerate(zip(captions_of_images, groups, strict=True)):
        texts = {"image_id": number, "captions": captions, "dataset": dataset, "split": "train", "group": group}
        picture = encode_picture((4, 4), color=(number, 0, 0), mode="RGB")
        samples.append([(f"{dataset}-{number:03}.png", picture), (f"{dataset}-{number:03}.json", texts)])
    shards = []
    for start in range(0, len(samples), images_per_shard):
        shards.append(str(folder / f"{dataset}-{len(shards):06}.tar"))
        members = chain(*samples[start : start + images_per_shard])
        Path(shards[-1]).write_bytes(encode_archive(members))
        if index:
            write_index(shards[-1], *scan_shard(shards[-1]))
    return shards


def write_numbered(folder, counts, **options):
    """Write images with so many captions ``"image/number"``; return the shards."""
    return write_captioned(folder, numbered(counts), **options)


def make_collection(captions_of_images, images_per_shard=4, dataset="numbered", groups=None):
    """Return the collection of images that are in no file."""
    groups = groups or [None] * len(captions_of_images)
    records = [
        Record(str(number), captions, number, [], dataset, "train", group)
        for number, (captions, group) in enumerate(zip(captions_of_images, groups, strict=True))
    ]
    shards = [records[start : start + images_per_shard] for start in range(0, len(records), images_per_shard)]
    heads = (make_head(shard, [0] * len(shard), [0] * len(shard), size=0) for shard in shards)
    return Collection([f"{number}.tar" for number in range(len(shards))], heads)


def replace_member(shard, name, content):
    """Rewrite a shard and its index with other content of one member; None leaves the member out."""
    with tarfile.open(shard) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    assert name in dict(members)
    members = [(member, content if member == name else data) for member, data in members]
    Path(shard).write_bytes(encode_archive((member, data) for member, data in members if data is not None))
    write_index(shard, *scan_shard(shard))


def png_of_noise():
    stream = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def numbers_of(images):
    return images[:, 0, 0, 0].tolist()
