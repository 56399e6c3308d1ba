"""The evaluation reader, against the annotations that the shards were written from."""

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vl_plugins.data import decoding
from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.data.sources import read_karpathy
from vl_plugins.errors import UserError


def corner(image):
    return torch.tensor(image.getpixel((0, 0)))


def lengths(texts):
    """Stand in for a tokenizer."""
    return torch.tensor([[len(text)] for text in texts])


@pytest.fixture(scope="module")
def pattern(toy_shards):
    """Three shards of 8 images with 5 captions each."""
    return str(toy_shards / "toy-test-{000000..000002}.tar")


def in_source_order(batches):
    return sorted(batches, key=lambda batch: (batch.shard, batch.start))


def test_every_image_and_caption_once(pattern, toy_scenes):
    expected = [image for image in read_karpathy(toy_scenes / "dataset_toy.json", "coco") if image.split == "test"]
    reader = EvaluationReader(pattern, corner, lengths, 5)
    batches = in_source_order(reader)
    assert len(batches) == len(reader) == 6
    assert [(batch.shard, batch.start) for batch in batches] == [
        (shard, start) for shard in range(3) for start in (0, 5)
    ]
    records = [record for batch in batches for record in batch.records]
    assert [record.image_id for record in records] == [image.image_id for image in expected]
    for batch in batches:
        images = [next(image for image in expected if image.image_id == record.image_id) for record in batch.records]
        assert [record.captions for record in batch.records] == [list(image.captions) for image in images]
        assert [record.caption_ids for record in batch.records] == [list(image.caption_ids) for image in images]
        pictures = [Image.open(toy_scenes / image.file).convert("RGB") for image in images]
        assert torch.equal(batch.images, torch.stack([corner(picture) for picture in pictures]))
        assert torch.equal(batch.texts, lengths([caption for image in images for caption in image.captions]))
        assert batch.image_of_caption.tolist() == [index for index in range(len(images)) for _ in range(5)]


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_each_shard_is_read_once_and_batches_are_the_same(pattern, processes, workers, monkeypatch, tmp_path):
    read_samples = decoding.read_samples

    def recorded(shard, *options):
        with open(tmp_path / "opened", "a") as file:
            file.write(f"{shard}\n")
        return read_samples(shard, *options)

    expected = list(EvaluationReader(pattern, corner, lengths, 3))
    monkeypatch.setattr(decoding, "read_samples", recorded)
    batches = []
    for rank in range(processes):
        reader = EvaluationReader(pattern, corner, lengths, 3, rank=rank, world_size=processes)
        found = list(DataLoader(reader, batch_size=None, num_workers=workers))
        assert len(found) == len(reader)
        batches += found
    assert sorted((tmp_path / "opened").read_text().split()) == sorted(reader.shards)
    assert len(batches) == len(expected) == 9
    for batch, same in zip(in_source_order(batches), expected, strict=True):
        assert batch[3:] == same[3:]
        assert all(torch.equal(tensor, other) for tensor, other in zip(batch[:3], same[:3], strict=True))


def test_first_captions(pattern):
    (batch, *_) = EvaluationReader(pattern, corner, lengths, 8, max_captions=2)
    assert [len(record.captions) for record in batch.records] == [len(r.caption_ids) for r in batch.records] == [2] * 8
    assert batch.image_of_caption.tolist() == [index for index in range(8) for _ in range(2)]


def test_unknown_sizes(pattern):
    reader = EvaluationReader([f"pipe:cat {pattern.replace('{000000..000002}', '000001')}"], corner, lengths, 5)
    with pytest.raises(TypeError, match=r"sizes\.json"):
        len(reader)
    assert len(list(reader)) == 2


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1, "max_captions": 0}])
def test_numbers_out_of_range(pattern, options):
    with pytest.raises(UserError, match="must be at least 1, got 0"):
        EvaluationReader(pattern, corner, lengths, **options)
