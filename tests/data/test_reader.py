import argparse
import io
import logging
import pickle
import random
import re
import tarfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from operator import lt
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from pytorch_metric_learning.losses import NTXentLoss
from torch.utils.data import DataLoader
from torchvision.transforms import PILToTensor

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.captions import parse_captions_per_image
from vl_plugins.data.randomness import random_states
from vl_plugins.data.reader import evaluation_pipeline, training_pipeline
from vl_plugins.data.shard_files import expand_shards
from vl_plugins.data.shard_info import ShardInfo, check_first_sample, read_shard_info
from vl_plugins.data.shards import write_shards
from vl_plugins.data.storage import Folder
from vl_plugins.data.training_batches import SharedEpoch
from vl_plugins.integrations.command_lines import message
from vl_plugins.utils.errors import UserError

# More workers than cores are on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

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


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """24 images with 5 captions each in 6 shards."""
    return write_numbered(tmp_path_factory.mktemp("even"), [5] * 24)


@pytest.fixture(scope="module")
def uneven_shards(tmp_path_factory):
    """22 images with 5, 6 or 7 captions in 4 shards."""
    return write_numbered(tmp_path_factory.mktemp("uneven"), [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2, samples_per_shard=6)


def draw(image):
    """Stand in for an augmentation, which may draw from any generator."""
    return torch.tensor([torch.rand(()), np.random.rand(), random.random()])  # noqa: NPY002


def test_augmentation_depends_on_seed_epoch_and_image_alone(shards):
    found = {}
    for seed, epoch, workers in ((0, 0, 0), (0, 0, 2), (0, 1, 0), (1, 0, 0)):
        reader = training_pipeline(shards, draw, tokenizer, 4, seed=seed, epoch=epoch, with_labels=True, with_keys=True)
        drawn = {}
        for images, _, labels, keys in DataLoader(reader, batch_size=None, num_workers=workers):
            assert len(images) == len(labels) == len(keys)
            drawn |= dict(zip(keys, map(tuple, images.tolist()), strict=True))
        assert len(drawn) == len(set(drawn.values())) == 24
        assert found.setdefault((seed, epoch), drawn) == drawn
    assert len({values for drawn in found.values() for values in drawn.values()}) == 3 * 24


def test_generators_are_left_as_they_are(shards):
    before = random_states()
    list(training_pipeline(shards, draw, tokenizer, 4))
    assert str(random_states()) == str(before)


def numbers_of(images):
    return images[:, 0, 0, 0].long()


def read_images(batches):
    return [number for images, *_ in batches for number in numbers_of(images).tolist()]


def read_captions(batches):
    return {tuple(row) for _, texts, *_ in batches for row in texts.tolist()}


def load(reader, workers=0, **options):
    return list(DataLoader(reader, batch_size=None, num_workers=workers, **options))


class TestCaptionsPerImage:
    @pytest.mark.parametrize("value", ["random", "first", "all"])
    def test_words(self, value):
        assert parse_captions_per_image(value) == value

    def test_numbers(self):
        assert parse_captions_per_image("3") == parse_captions_per_image(3) == 3

    @pytest.mark.parametrize("value", ["0", "some", "", "1.5", None])
    def test_anything_else(self, value):
        with pytest.raises(UserError, match="must be 'random', 'first', 'all' or a positive number, got"):
            parse_captions_per_image(value)


class TestExpandShards:
    def test_braces_and_several_patterns(self, toy_shards):
        pattern = f"{toy_shards}/toy-train-{{000000..000002}}.tar::{toy_shards}/toy-val-000001.tar"
        names = ["toy-train-000000", "toy-train-000001", "toy-train-000002", "toy-val-000001"]
        assert expand_shards(pattern) == [f"{toy_shards}/{name}.tar" for name in names]

    def test_missing_shards_are_named_and_counted(self, toy_shards):
        with pytest.raises(UserError) as raised:
            expand_shards(f"{toy_shards}/toy-val-{{000000..000009}}.tar")
        assert str(raised.value) == (
            f"7 of 10 shards do not exist: {toy_shards}/toy-val-000003.tar; "
            f"{toy_shards} holds toy-test-000000.tar ... toy-val-000002.tar (14 files)"
        )

    def test_empty_folder(self, tmp_path):
        with pytest.raises(UserError, match=r"1 of 1 shards do not exist: .*none.tar; .* holds no .tar files"):
            expand_shards(f"{tmp_path}/none.tar")

    @pytest.mark.parametrize("pattern", ["", "::", []])
    def test_no_shards(self, pattern):
        with pytest.raises(UserError, match="names no shards"):
            expand_shards(pattern)

    def test_malformed(self):
        with pytest.raises(UserError, match=r"cannot expand the shard pattern 'a-\{0\.\.3\.tar'"):
            expand_shards("a-{0..3.tar")

    @pytest.mark.parametrize("scheme", ["https", "gs", "ais"])
    def test_urls_that_programs_read_are_not_checked(self, scheme):
        assert expand_shards(f"{scheme}://host/{{0..1}}.tar") == [f"{scheme}://host/0.tar", f"{scheme}://host/1.tar"]

    def test_urls_stay_words_of_a_command_line(self):
        """webdataset opens https:// by a shell, with the URL between quotes."""
        with pytest.raises(
            UserError, match=r"^the URL https://host/'; touch made'\.tar contains a quote: write it as %27"
        ):
            expand_shards("https://host/'; touch made'.tar")

    def test_a_shard_counts_once(self, toy_shards, monkeypatch):
        monkeypatch.chdir(toy_shards)
        with pytest.raises(UserError, match=r"toy-val-000000\.tar is listed more than once"):
            expand_shards("toy-val-000000.tar::./toy-val-000000.tar")


class TestShardInfo:
    def test_counts(self, uneven_shards):
        assert read_shard_info(uneven_shards) == ShardInfo(22, 122, 5, 7)
        assert read_shard_info(uneven_shards[-1]) == ShardInfo(4, 22, 5, 7)

    def test_several_splits_and_folders(self, toy_shards, uneven_shards):
        pattern = "::".join([f"{toy_shards}/toy-val-{{000000..000002}}.tar", *uneven_shards])
        assert read_shard_info(pattern) == ShardInfo(24 + 22, 24 * 5 + 122, 5, 7)

    def test_foreign_shards(self, tmp_path, shards):
        (tmp_path / "x.tar").touch()
        assert read_shard_info(f"{tmp_path}/x.tar") is None
        assert read_shard_info(["https://host/x.tar", *shards]) is None

    def test_a_shard_that_the_manifest_does_not_list(self, tmp_path):
        shard = write_numbered(tmp_path, [1])[0]
        other = shard.replace("000000", "000007")
        (tmp_path / other).touch()
        with pytest.raises(UserError, match=r"manifest.json does not list numbered-train-000007.tar"):
            read_shard_info(other)


class TestTraining:
    def test_batches_are_what_open_clips_step_takes(self, shards):
        reader = training_pipeline(shards, transform, tokenizer, 8)
        batches = list(reader)
        assert len(batches) == len(reader) == 3
        for images, texts in batches:
            assert images.shape == (8, 3, 4, 4)
            assert texts.shape == (8, 2)
            assert torch.equal(texts[:, 0], numbers_of(images))

    @pytest.mark.parametrize("batch_size", [1, 6])
    @pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 3), (2, 0), (2, 2)])
    def test_every_image_once_per_epoch_when_counts_divide(self, shards, batch_size, world_size, workers):
        readers = [
            training_pipeline(shards, transform, tokenizer, batch_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        batches = [load(reader, workers) for reader in readers]
        assert {len(of_rank) for of_rank in batches} == {24 // (batch_size * world_size)} == {len(readers[0])}
        assert sorted(read_images(batch for of_rank in batches for batch in of_rank)) == list(range(24))

    @pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 8), (3, 2)])
    def test_more_streams_than_shards_and_a_remainder(self, uneven_shards, world_size, workers):
        images = []
        for rank in range(world_size):
            reader = training_pipeline(uneven_shards, transform, tokenizer, 2, rank=rank, world_size=world_size)
            assert len(reader) == 22 // (2 * world_size)
            images += read_images(load(reader, workers))
        assert len(images) == len(set(images)) == len(reader) * 2 * world_size

    def test_images_left_over_are_others_in_every_epoch(self, tmp_path):
        (shard,) = write_numbered(tmp_path, [1] * 20, samples_per_shard=100)
        reader = training_pipeline(shard, transform, tokenizer, 9)
        left_over = set()
        for epoch in range(10):
            reader.set_epoch(epoch)
            left_over |= set(range(20)) - set(read_images(reader))
        assert len(left_over) > 10

    def test_shards_come_in_another_order_in_every_epoch(self, shards):
        reader = training_pipeline(shards, transform, tokenizer, 24, shuffle_buffer=1)
        orders = set()
        for epoch in range(5):
            reader.set_epoch(epoch)
            shard_of = [number // 4 for number in read_images(reader)]
            orders.add(tuple(shard for shard, following in pairwise(shard_of) if shard != following))
        assert len(orders) == 5
        assert all(any((following - shard) % 6 != 1 for shard, following in pairwise(order)) for order in orders)

    def test_one_shard_for_all_workers(self, tmp_path):
        (shard,) = write_numbered(tmp_path, [1] * 20, samples_per_shard=100)
        images = read_images(load(training_pipeline(shard, transform, tokenizer, 5), workers=3))
        assert sorted(images) == list(range(20))

    def test_a_seeded_run_repeats_exactly(self, shards):
        def run(seed, workers):
            reader = training_pipeline(shards, transform, tokenizer, 4, seed=seed)
            epochs = []
            for epoch in range(2):
                reader.set_epoch(epoch)
                epochs.append([(read_images([batch]), batch[1].tolist()) for batch in load(reader, workers)])
            return epochs

        first = run(seed=1, workers=2)
        assert run(seed=1, workers=2) == first
        assert first[0] != first[1]
        assert run(seed=2, workers=2) != first

    def test_order_within_an_epoch_is_shuffled(self, shards):
        images = read_images(training_pipeline(shards, transform, tokenizer, 24))
        assert images != sorted(images)
        neighbours = sum(abs(one - other) == 1 for one, other in pairwise(images))
        assert neighbours < 8

    def test_the_shuffle_buffer_fills_while_samples_are_drawn(self, tmp_path):
        """One of 100 starts with 5 samples and takes 3 for each sample drawn: the first batch need not wait for all."""
        shards = write_numbered(tmp_path, [1] * 240, samples_per_shard=240)
        reader = training_pipeline(shards, transform, tokenizer, 1, shuffle_buffer=100, with_labels=True)
        labels = [label.item() for _, _, label in reader]
        assert sorted(labels) == list(range(240))
        # An epoch begins anywhere in the shard.
        ahead = [[(label - start) % 240 - drawn for drawn, label in enumerate(labels)] for start in range(240)]
        read = [min(5 + 2 * drawn, 100) for drawn in range(240)]
        orders = [found for found in ahead if all(map(lt, found, read))]
        assert orders
        assert max(orders[0]) > 90

    def test_the_caption_depends_on_seed_epoch_and_image_only(self, shards):
        def captions(seed=0, epoch=0, workers=0, batch_size=4, **options):
            reader = training_pipeline(shards, transform, tokenizer, batch_size, seed=seed, epoch=epoch, **options)
            return read_captions(load(reader, workers))

        chosen = captions()
        assert len(chosen) == 24
        assert captions(workers=2) == captions(workers=3, batch_size=8) == chosen
        ranks = [captions(rank=rank, world_size=2) for rank in range(2)]
        assert ranks[0] | ranks[1] == chosen
        assert captions(epoch=1) != chosen
        assert captions(seed=1) != chosen

    def test_every_caption_is_chosen_over_the_epochs(self, shards):
        reader = training_pipeline(shards, transform, tokenizer, 24)
        seen = Counter()
        for epoch in range(60):
            reader.set_epoch(epoch)
            seen.update(read_captions(reader))
        assert len(seen) == 24 * 5
        by_number = Counter()
        for (_, number), count in seen.items():
            by_number[number] += count
        assert sum(by_number.values()) == 60 * 24
        assert all(230 < count < 350 for count in by_number.values()), by_number

    def test_a_number_of_captions(self, uneven_shards):
        ((images, texts),) = training_pipeline(uneven_shards, transform, tokenizer, 22, captions_per_image=3)
        texts = texts.view(22, 3, 2)
        assert torch.equal(texts[:, :, 0], numbers_of(images)[:, None].expand(22, 3)), (
            "captions of an image are adjacent"
        )
        assert {len(set(row)) for row in texts[:, :, 1].tolist()} == {3}, "different ones"
        assert any(row != sorted(row) for row in texts[:, :, 1].tolist())

    def test_a_larger_number_than_an_image_has(self, shards):
        ((_, texts),) = training_pipeline(shards, transform, tokenizer, 24, captions_per_image=7)
        for row in texts.view(24, 7, 2)[:, :, 1].tolist():
            assert sorted(row[:5]) == [0, 1, 2, 3, 4]
            assert row[5:] == row[:2]

    def test_all_captions_in_source_order(self, uneven_shards):
        ((images, texts),) = training_pipeline(uneven_shards, transform, tokenizer, 22, captions_per_image="all")
        assert texts.shape == (22 * 7, 2)
        counts = [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2
        for image, rows in zip(numbers_of(images).tolist(), texts.view(22, 7, 2).tolist(), strict=True):
            assert rows == [[image, number % counts[image]] for number in range(7)]

    def test_all_with_a_given_number(self, uneven_shards):
        ((_, texts),) = training_pipeline(
            uneven_shards, transform, tokenizer, 22, captions_per_image="all", num_captions=8
        )
        assert texts.shape == (22 * 8, 2)
        too_few = training_pipeline(uneven_shards, transform, tokenizer, 22, captions_per_image="all", num_captions=6)
        with pytest.raises(UserError, match=r"numbered-train-000000\d\d has 7 captions, but num_captions is 6"):
            list(too_few)

    def test_first_caption(self, shards):
        ((_, texts),) = training_pipeline(shards, transform, tokenizer, 24, captions_per_image="first")
        assert texts.shape == (24, 2)
        assert texts[:, 1].unique().tolist() == [0]

    def test_labels_tell_images_apart_in_every_epoch(self, shards, uneven_shards):
        reader = training_pipeline([*shards, *uneven_shards], transform, tokenizer, 46, with_labels=True)
        for epoch in range(2):
            reader.set_epoch(epoch)
            ((images, _, labels),) = reader
            assert labels.dtype == torch.int64
            assert sorted(labels.tolist()) == list(range(46))
            assert torch.equal(numbers_of(images), torch.where(labels < 24, labels, labels - 24))

    def test_num_samples_shortens_the_epoch(self, shards, caplog):
        reader = training_pipeline(shards, transform, tokenizer, 4, num_samples=9)
        images = read_images(reader)
        assert len(images) == len(set(images)) == 8
        assert len(training_pipeline(shards, transform, tokenizer, 4, num_samples=100)) == 6
        assert "an epoch has the 24 images of the shards, not 100" in caplog.text

    def test_workers_that_persist_see_the_epoch(self, shards):
        epoch = SharedEpoch()
        reader = training_pipeline(shards, transform, tokenizer, 4, epoch=epoch)
        loader = DataLoader(reader, batch_size=None, num_workers=2, persistent_workers=True)
        epochs = []
        for number in (0, 1, 0):
            epoch.set_value(number)
            epochs.append(read_images(loader))
        assert epochs[0] == epochs[2] != epochs[1]

    def test_spawned_workers(self, toy_shards):
        pattern = f"{toy_shards}/toy-train-{{000000..000007}}.tar"
        # Spawned workers import what they unpickle, and cannot import this module; `list` keeps the texts as they are.
        reader = training_pipeline(pattern, transform, list, 16, captions_per_image=2)
        batches = load(reader, workers=1, multiprocessing_context="spawn")
        assert [(images.shape, len(texts)) for images, texts in batches] == [((16, 3, 64, 64), 32)] * 4
        for (images, texts), (same_images, same_texts) in zip(batches, reader, strict=True):
            assert torch.equal(images, same_images)
            assert texts == same_texts

    def test_a_pickled_reader_reads_the_same(self, shards):
        reader = training_pipeline(shards, transform, tokenizer, 4, epoch=3)
        assert read_images(pickle.loads(pickle.dumps(reader))) == read_images(reader)

    def test_a_webdataset_pipeline_takes_it_as_its_source(self, shards):
        reader = training_pipeline(shards, transform, tokenizer, 4)
        loader = webdataset.WebLoader(reader, batch_size=None, num_workers=0)
        assert read_images(loader) == read_images(reader)


class TestTrainingWithoutSizes:
    """Shards without sizes.json, such as those of others behind a URL."""

    @pytest.fixture
    def urls(self, shards):
        return [f"pipe:cat {shard}" for shard in shards]

    @pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 2), (2, 3), (3, 8)])
    def test_whole_shards_are_shared_out(self, urls, world_size, workers):
        images = []
        for rank in range(world_size):
            reader = training_pipeline(
                urls, transform, tokenizer, 2, num_samples=24, rank=rank, world_size=world_size, with_labels=True
            )
            batches = load(reader, workers)
            assert len(batches) == len(reader) == 12 // world_size
            for batch in batches:
                assert len(set(read_images([batch]))) == len(set(batch[2].tolist())) == 2
            images += read_images(batches)
        assert sorted(images) == list(range(24))

    def test_workers_with_too_few_images_repeat_theirs(self, urls):
        reader = training_pipeline(urls, transform, tokenizer, 4, num_samples=48)
        assert Counter(read_images(load(reader, 2))) == dict.fromkeys(range(24), 2)

    def test_what_is_needed(self, urls):
        with pytest.raises(
            UserError, match=r"number of images in pipe:.* is not known: give the number of samples of an epoch, or put"
        ):
            training_pipeline(urls, transform, tokenizer, 4)
        with pytest.raises(UserError, match=r"6 shards of unknown size cannot be shared by 8 processes"):
            training_pipeline(urls, transform, tokenizer, 1, num_samples=24, world_size=8)
        with pytest.raises(UserError, match=r"'all' needs a manifest.json beside the shards, or num_captions"):
            training_pipeline(urls, transform, tokenizer, 1, num_samples=24, captions_per_image="all")

    def test_gray_samples_with_txt_only(self, tmp_path):
        stream = io.BytesIO()
        Image.new("L", (4, 4), 200).save(stream, format="JPEG")
        with webdataset.TarWriter(str(tmp_path / "x.tar")) as tar:
            for index in range(4):
                sample = {"jpeg": stream.getvalue(), "txt": f"{index}/7", "json": b'{"caption": "another"}'}
                tar.write({"__key__": f"{index}", **sample})
        ((images, texts),) = training_pipeline(f"{tmp_path}/x.tar", transform, tokenizer, 4, num_samples=4)
        assert torch.equal(images, torch.full((4, 3, 4, 4), 200))
        assert sorted(texts.tolist()) == [[index, 7] for index in range(4)]

    def test_pictures_with_too_many_pixels_are_left_out(self, tmp_path, caplog):
        shard = str(tmp_path / "x.tar")
        with webdataset.TarWriter(shard) as tar:
            for width in (4, 5, 6, 5):
                stream = io.BytesIO()
                Image.new("RGB", (width, 4)).save(stream, format="PNG")
                # Without pixels: a header is all that is read of a picture that is too large.
                content = stream.getvalue() if width < 6 else stream.getvalue()[:45]
                tar.write({"__key__": f"{width}-{tar.tarstream.offset}", "png": content, "txt": "0/0"})
        options = {"num_samples": 3, "max_image_pixels": 20, "allow_duplicate_captions": True}
        widths = [batch[0].shape[3] for batch in training_pipeline(shard, transform, tokenizer, 1, **options)]
        assert sorted(widths) == [4, 5, 5]
        (warning,) = caplog.messages
        assert "6 x 4 pixels are more than max_image_pixels 20" in warning
        with pytest.raises(UserError, match=r"cannot read sample 6-\d+ of .*6 x 4 pixels are more than"):
            list(training_pipeline(shard, transform, tokenizer, 1, **options, on_error="raise"))


class TestRemoteShards:
    """Behind a URL that fsspec opens; what is in memory stands for what is in a bucket."""

    @pytest.fixture
    def urls(self, shards, monkeypatch):
        """The shards of the same name, with their index."""
        files = fsspec.filesystem("memory")
        monkeypatch.setattr(type(files), "store", {})
        for file in Path(shards[0]).parent.iterdir():
            files.pipe_file(f"/bucket/numbered/{file.name}", file.read_bytes())
        return [f"memory://bucket/numbered/{Path(shard).name}" for shard in shards]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_they_are_read_as_local_ones(self, urls, shards, workers):
        for captions in ("random", "all"):
            batches = [
                load(training_pipeline(where, transform, tokenizer, 4, captions_per_image=captions), workers)
                for where in (urls, shards)
            ]
            for (images, texts), (expected_images, expected_texts) in zip(*batches, strict=True):
                assert torch.equal(images, expected_images)
                assert torch.equal(texts, expected_texts)

    def test_sections_of_few_shards_are_shared(self, urls):
        images = []
        for rank in range(2):
            reader = training_pipeline(urls[:2], transform, tokenizer, 1, rank=rank, world_size=2)
            images += read_images(load(reader, workers=3))
        assert sorted(images) == list(range(8))

    @pytest.mark.parametrize("workers", [0, 3])
    def test_evaluation(self, urls, workers):
        reader = evaluation_pipeline(urls, transform, tokenizer, 5)
        assert read_images(load(reader, workers)) == list(range(24))
        assert len(reader) == 5

    def test_info_and_first_sample(self, urls):
        assert read_shard_info("memory://bucket/numbered/numbered-train-{000000..000005}.tar") == ShardInfo(
            24, 120, 5, 5
        )
        check_first_sample(urls[0])
        fsspec.filesystem("memory").pipe_file("/bucket/numbered/numbered-train-000000.tar", bytes(1024))
        with pytest.raises(UserError, match=r"shard memory://bucket/.*-000000\.tar holds no samples"):
            check_first_sample(urls[0])

    def test_missing_shards_are_found_by_one_listing(self, urls, monkeypatch):
        listings = []
        names = Folder.names
        monkeypatch.setattr(Folder, "names", lambda folder: listings.append(folder.location) or names(folder))
        assert expand_shards(urls) == urls
        assert listings == ["memory://bucket/numbered"]
        with pytest.raises(UserError) as raised:
            expand_shards("memory://bucket/numbered/numbered-train-{000004..000009}.tar")
        assert str(raised.value) == (
            "4 of 6 shards do not exist: memory://bucket/numbered/numbered-train-000006.tar; "
            "memory://bucket/numbered holds numbered-train-000000.tar ... numbered-train-000005.tar (6 files)"
        )
        with pytest.raises(UserError, match=r"memory://bucket/nothing holds no \.tar files"):
            expand_shards("memory://bucket/nothing/x.tar")

    def test_a_missing_package_is_named(self):
        with pytest.raises(UserError, match=r"cannot use abfs://bucket: .*adlfs"):
            expand_shards("abfs://bucket/{0..1}.tar")

    def test_a_shard_that_the_index_does_not_list(self, urls):
        files = fsspec.filesystem("memory")
        files.pipe_file("/bucket/numbered/numbered-train-000007.tar", bytes(1024))
        other = "memory://bucket/numbered/numbered-train-000007.tar"
        with pytest.raises(
            UserError, match=r"memory://bucket/numbered/sizes\.json does not list numbered-train-000007"
        ):
            training_pipeline(other, transform, tokenizer, 4)
        with pytest.raises(
            UserError, match=r"memory://bucket/numbered/manifest\.json does not list numbered-train-000007"
        ):
            read_shard_info(other)

    def test_shards_of_others(self, urls):
        files = fsspec.filesystem("memory")
        for name in ("sizes.json", "manifest.json"):
            files.rm_file(f"/bucket/numbered/{name}")
        assert read_shard_info(urls) is None
        with pytest.raises(UserError, match=r"number of images in memory://.* is not known"):
            training_pipeline(urls, transform, tokenizer, 4)
        assert sorted(read_images(training_pipeline(urls, transform, tokenizer, 4, num_samples=24))) == list(range(24))

    def test_a_shard_that_vanishes(self, urls, caplog):
        reader = training_pipeline(urls, transform, tokenizer, 4)
        fsspec.filesystem("memory").rm_file("/bucket/numbered/numbered-train-000002.tar")
        assert set(read_images(reader)) == set(range(24)) - {8, 9, 10, 11}
        assert f"leaving out shard {urls[2]}, which cannot be read" in caplog.text

    def test_file_urls_are_local(self, shards):
        urls = [f"file://{shard}" for shard in shards]
        assert read_shard_info(urls) == ShardInfo(24, 120, 5, 5)
        assert sorted(read_images(load(training_pipeline(urls, transform, tokenizer, 4), 2))) == list(range(24))
        with pytest.raises(UserError, match=r"1 of 1 shards do not exist: file://.*none\.tar; .* holds numbered-train"):
            expand_shards(f"file://{Path(shards[0]).parent}/none.tar")


class TestDuplicateCaptions:
    """Captions are ``"text/number"`` here, so that ``texts[:, 0]`` is the text; the image's number is its color."""

    @staticmethod
    def write(folder, texts, **options):
        """Write images with these texts: an int for one caption, a list for several."""
        captions = [texts_of if isinstance(texts_of, list) else [texts_of] for texts_of in texts]
        return write_captioned(folder, [[f"{text}/0" for text in texts_of] for texts_of in captions], **options)

    @pytest.fixture
    def paired(self, tmp_path):
        """24 images; those next to each other say the same."""
        return self.write(tmp_path, [index // 2 for index in range(24)])

    @staticmethod
    def assert_distinct(batches, captions_per_image=1):
        assert batches
        for images, texts, *_ in batches:
            of_image = texts[:, 0].view(len(images), captions_per_image).tolist()
            assert sum(len(set(texts)) for texts in of_image) == len(set().union(*of_image))
            assert len(set(read_images([(images,)]))) == len(images)

    @pytest.mark.parametrize(
        ("captions", "shuffle_buffer"), [("random", 1), ("random", 5000), ("first", 1), ("all", 5000), (1, 5000)]
    )
    def test_they_do_not_meet_and_every_image_occurs_once(self, paired, captions, shuffle_buffer, caplog):
        reader = training_pipeline(
            paired, transform, tokenizer, 4, captions_per_image=captions, shuffle_buffer=shuffle_buffer
        )
        left_out = 0
        for epoch in range(10):
            reader.set_epoch(epoch)
            caplog.clear()
            batches = list(reader)
            assert len(batches) == len(reader) == 6
            self.assert_distinct(batches)
            images = set(read_images(batches))
            missing = 24 - len(images)
            assert (f"images left out of epoch {epoch} by worker 0: {missing}, such as" in caplog.text) is (missing > 0)
            left_out += missing
        # With twelve texts twice each, the last batch of four cannot always be made.
        assert left_out <= 10

    @pytest.mark.parametrize("world_size", [1, 2])
    @pytest.mark.parametrize("workers", [0, 7])
    def test_with_several_captions_every_image_occurs_once_in_any_case(self, tmp_path, world_size, workers, caplog):
        texts = [[0, 1, 100 + index] for index in range(24)]
        shards = self.write(tmp_path, texts, samples_per_shard=9)
        for captions in ("random", 2):
            images = []
            for rank in range(world_size):
                reader = training_pipeline(
                    *(shards, transform, tokenizer, 4), captions_per_image=captions, rank=rank, world_size=world_size
                )
                batches = load(reader, workers)
                assert len(batches) == len(reader) == 6 // world_size
                self.assert_distinct(batches, captions_per_image=2 if captions == 2 else 1)
                images += read_images(batches)
            assert sorted(images) == list(range(24))
        assert not caplog.text

    def test_captions_that_do_not_collide_stay_as_they_are(self, tmp_path):
        shards = self.write(tmp_path, [[0, 1, 2, 100 + index, 200 + index] for index in range(24)])

        def captions(batch_size):
            reader = training_pipeline(shards, transform, tokenizer, batch_size, with_labels=True)
            pairs = [pair for _, texts, labels in reader for pair in zip(labels.tolist(), texts.tolist(), strict=True)]
            return {image: text for image, (text, _) in pairs}

        alone = captions(1)
        assert {text for text in alone.values() if text < 100} == {0, 1, 2}
        together = captions(8)
        assert set(together) == set(alone) == set(range(24))
        changed = {image for image in alone if alone[image] != together[image]}
        assert len(changed) < 12
        assert all(alone[image] < 100 for image in changed)

    def test_a_seeded_run_repeats_exactly(self, tmp_path):
        shards = self.write(tmp_path, [[index // 3, 50, 100 + index] for index in range(24)], samples_per_shard=9)

        def run(workers):
            reader = training_pipeline(shards, transform, tokenizer, 4, captions_per_image=2)
            epochs = []
            for epoch in range(3):
                reader.set_epoch(epoch)
                batches = load(reader, workers)
                self.assert_distinct(batches, captions_per_image=2)
                epochs.append([(read_images([batch]), batch[1].tolist()) for batch in batches])
            return epochs

        for workers in (0, 2):
            first = run(workers)
            assert run(workers) == first
            assert first[0] != first[1]

    def test_captions_of_an_image_stay_adjacent(self, tmp_path):
        shards = self.write(tmp_path, [[index // 2, 100 + index, 200 + index] for index in range(24)])
        reader = training_pipeline(shards, transform, tokenizer, 6, captions_per_image="all")
        batches = list(reader)
        self.assert_distinct(batches, captions_per_image=3)
        for images, texts in batches:
            rows = texts[:, 0].view(6, 3)
            numbers = numbers_of(images)
            assert torch.equal(rows, torch.stack([numbers // 2, 100 + numbers, 200 + numbers], dim=1))

    def test_captions_of_one_image_may_coincide(self, tmp_path):
        shards = self.write(tmp_path, [[index, index] for index in range(4)])
        ((images, texts),) = training_pipeline(shards, transform, tokenizer, 4, captions_per_image="all")
        assert torch.equal(texts[:, 0], numbers_of(images).repeat_interleave(2))

    @pytest.mark.parametrize("captions", ["random", "first", "all", 1])
    def test_too_many_to_tell_apart(self, tmp_path, captions):
        shards = self.write(tmp_path, [7] * 8)
        reader = training_pipeline(shards, transform, tokenizer, 2, captions_per_image=captions)
        with pytest.raises(UserError) as raised:
            list(reader)
        assert re.fullmatch(
            r"no batch of 2 images with different captions can be made of .*-000000\.tar and 1 more: the last try "
            r"ended with 1, and '7/0' for one is a caption of several images; .* --allow-duplicate-captions .*",
            str(raised.value),
        )

    @pytest.mark.parametrize("captions", ["first", "all"])
    def test_other_captions_are_not_shown_where_they_were_not_asked_for(self, tmp_path, captions):
        shards = self.write(tmp_path, [[7, 100 + index] for index in range(8)])
        with pytest.raises(UserError, match="no batch of 2 images with different captions"):
            list(training_pipeline(shards, transform, tokenizer, 2, captions_per_image=captions))

    def test_other_captions_differ_from_all_others_as_a_tokenizer_sees_them(self, tmp_path):
        shards = write_captioned(tmp_path, [["A dog.", "a  dog.", "A DOG.", f"Dog {index}."] for index in range(8)])
        reader = training_pipeline(shards, transform, list, 8)
        for epoch in range(10):
            reader.set_epoch(epoch)
            ((_, texts),) = reader
            assert len({" ".join(text.lower().split()) for text in texts}) == 8

    def test_too_many_to_tell_apart_in_a_worker(self, paired):
        reader = training_pipeline(paired, transform, tokenizer, 24)
        with pytest.raises(UserError) as raised:
            load(reader, workers=1)
        assert message(raised.value).startswith("no batch of 24 images with different captions can be made of ")

    def test_with_one_image_in_a_batch_there_is_nothing_to_tell_apart(self, tmp_path):
        shards = self.write(tmp_path, [7] * 8)
        assert sorted(read_images(training_pipeline(shards, transform, tokenizer, 1))) == list(range(8))

    def test_they_may_be_allowed(self, tmp_path):
        shards = self.write(tmp_path, [7] * 8)
        reader = training_pipeline(shards, transform, tokenizer, 4, allow_duplicate_captions=True)
        assert sorted(read_images(reader)) == list(range(8))

    @pytest.mark.parametrize("shuffle_buffer", [1, 5000])
    def test_images_that_find_no_place_are_counted_once_per_epoch_and_worker(self, tmp_path, shuffle_buffer, caplog):
        """Eight may wait with the small buffer, so that some are left out before the first batch."""
        shards = self.write(tmp_path, [0] * 12 + list(range(1, 13)))
        reader = training_pipeline(shards, transform, tokenizer, 8, shuffle_buffer=shuffle_buffer)
        batches = list(reader)
        self.assert_distinct(batches)
        assert len(batches) == 3, "as many steps as other processes"
        images = Counter(read_images(batches))
        assert len(images.keys() & set(range(12))) == 3, "one in a batch"
        assert set(images) >= set(range(12, 24))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert re.fullmatch(
            r"images left out of epoch 0 by worker 0: 9, such as numbered-train-000000\d\d\. No batch .* such as "
            r"'0/0'; --allow-duplicate-captions \(allow_duplicate_captions=True\) lets such images meet",
            record.message,
        )

    def test_a_worker_whose_share_is_not_enough_takes_images_of_the_others(self, tmp_path):
        """Each of three workers has one batch; two say 0, and any others can take the place of one of them."""
        shards = self.write(tmp_path, [0, 0, *range(2, 12)], samples_per_shard=100)
        reader = training_pipeline(shards, transform, tokenizer, 4)
        together = 0
        for epoch in range(20):
            reader.set_epoch(epoch)
            batches = load(reader, workers=3)
            assert len(batches) == 3
            self.assert_distinct(batches)
            together += len(set(read_images(batches))) < 12
        assert together

    def test_processes_do_not_take_each_other_s_images(self, tmp_path):
        shards = self.write(tmp_path, [0, 0, 0, 0, *range(4, 24)], samples_per_shard=100)
        for epoch in range(10):
            images = []
            for rank in range(2):
                reader = training_pipeline(*(shards, transform, tokenizer, 4), epoch=epoch, rank=rank, world_size=2)
                images.append(set(read_images(load(reader, workers=3))))
            assert images[0].isdisjoint(images[1])

    def test_samples_that_wait_are_not_decoded(self, tmp_path, monkeypatch):
        shards = self.write(tmp_path, [0] * 20 + list(range(1, 21)))
        opened = Counter()
        open_image = Image.open

        def counting(stream):
            opened["now"] += 1
            return open_image(stream)

        monkeypatch.setattr(Image, "open", counting)
        reader = training_pipeline(shards, transform, tokenizer, 10, shuffle_buffer=1)
        batches = iter(reader)
        next(batches)
        assert opened["now"] == 10


class TestGroups:
    """Images 3i, 3i + 1 and 3i + 2 are group i; every image has captions of its own."""

    @staticmethod
    def write(folder, number=24, group_of=lambda index: index // 3, dataset="grouped", captions=None):
        captions = captions or [[f"{index}/{number}" for number in range(3)] for index in range(number)]
        groups = [group_of(index) for index in range(number)]
        return write_captioned(folder, captions, dataset=dataset, groups=groups)

    @staticmethod
    def meetings(batches):
        """Count the batches in which images of a group meet."""
        groups = [[number // 3 for number in read_images([batch])] for batch in batches]
        return sum(len(set(batch)) < len(batch) for batch in groups)

    @pytest.mark.parametrize(("captions", "workers"), [("random", 2), ("first", 0), ("all", 0), (2, 0)])
    def test_apart(self, tmp_path, captions, workers):
        options = {"captions_per_image": captions, "num_captions": 3}
        met = {}
        for dataset, group_of in (("without", lambda index: None), ("grouped", lambda index: index // 3)):
            shards = self.write(tmp_path, 48, group_of, dataset)
            reader = training_pipeline(shards, transform, tokenizer, 6, **options)
            met[dataset] = 0
            for epoch in range(5):
                reader.set_epoch(epoch)
                batches = load(reader, workers)
                assert len(batches) == 8
                met[dataset] += self.meetings(batches)
        assert met["without"] > 20
        assert met["grouped"] == 0

    def test_labels_of_images_kept_apart_are_their_positions(self, tmp_path):
        reader = training_pipeline(self.write(tmp_path), transform, tokenizer, 4, with_labels=True)
        assert sorted(label for *_, labels in reader for label in labels.tolist()) == list(range(24))

    def test_positives_have_one_label_in_every_shard_worker_process_and_epoch(self, tmp_path):
        def group_of(index):
            return None if index >= 18 else index % 6  # in different shards

        shards = self.write(tmp_path, 24, group_of)
        label_of = {}
        for rank in range(2):
            reader = training_pipeline(
                *(shards, transform, tokenizer, 4), with_labels=True, same_group="positive", rank=rank, world_size=2
            )
            for epoch in range(4):
                reader.set_epoch(epoch)
                for images, _, labels in load(reader, workers=2):
                    assert labels.dtype == torch.int64
                    for number, label in zip(read_images([(images,)]), labels.tolist(), strict=True):
                        assert label_of.setdefault(number, label) == label
        assert len(label_of) == 24
        assert [label_of[number] for number in range(18, 24)] == list(range(18, 24)), "those without a group"
        assert all(label_of[number] == label_of[number % 6] < 0 for number in range(18))
        assert len({label_of[number] for number in range(6)}) == 6

    def test_labels_are_of_the_group_of_one_data_set(self, tmp_path):
        shards = self.write(tmp_path, 3) + self.write(tmp_path, 3, dataset="other")
        ((_, _, labels),) = training_pipeline(shards, transform, tokenizer, 6, with_labels=True, same_group="positive")
        assert sorted(Counter(labels.tolist()).values()) == [3, 3]

    def test_positives_may_share_their_captions(self, tmp_path):
        """As several pictures of one object do; with all captions they could never meet otherwise."""
        captions = [[f"{index // 3}/{number}" for number in range(3)] for index in range(12)]
        shards = self.write(tmp_path, 12, captions=captions)
        options = {"captions_per_image": "all", "with_labels": True}
        ((_, texts, labels),) = training_pipeline(shards, transform, tokenizer, 12, **options, same_group="positive")
        same_text = texts[:, None, 0] == texts[None, :, 0]
        text_labels = labels.repeat_interleave(3)
        assert torch.equal(same_text, text_labels[:, None] == text_labels)
        with pytest.raises(UserError, match="no batch of 12 images with different"):
            list(training_pipeline(shards, transform, tokenizer, 12, **options))

    def test_a_group_too_large(self, tmp_path, caplog):
        shards = self.write(tmp_path, 24, lambda index: "x" if index < 12 else None)
        batches = list(training_pipeline(shards, transform, tokenizer, 8))
        assert len(batches) == 3
        assert sum(number < 12 for number in read_images(batches)) == 3, "one in a batch"
        assert re.search(
            r"images left out of epoch 0 by worker 0: 9, .* another image does not have the same group, such as 'x'; "
            r"--same-group positive \(same_group='positive'\) lets such images meet",
            caplog.text,
        )

    def test_positive_needs_groups_and_labels(self, tmp_path, shards):
        with pytest.raises(UserError, match=r"same_group 'positive' needs shards with groups: .*--group-key"):
            training_pipeline(shards, transform, tokenizer, 4, with_labels=True, same_group="positive")
        with pytest.raises(UserError, match="same_group 'positive' needs with_labels=True"):
            training_pipeline(self.write(tmp_path), transform, tokenizer, 4, same_group="positive")
        with pytest.raises(UserError, match=r"unknown same_group 'postive' \(did you mean 'positive'"):
            training_pipeline(shards, transform, tokenizer, 4, same_group="postive")


class TestTrainingErrors:
    def test_batch_larger_than_the_data(self, shards):
        with pytest.raises(UserError, match=r"24 images make no full batch of 13 for each of 2 .*can be at most 12"):
            training_pipeline(shards, transform, tokenizer, 13, rank=0, world_size=2)

    def test_shard_listed_twice(self, shards):
        with pytest.raises(UserError, match="more than once"):
            training_pipeline([*shards, shards[0]], transform, tokenizer, 4)

    def test_batch_size(self, shards):
        with pytest.raises(UserError, match="batch_size must be at least 1, got 0"):
            training_pipeline(shards, transform, tokenizer, 0)

    def test_an_error_of_the_transform_is_not_taken_for_a_damaged_sample(self, shards):
        with pytest.raises(ZeroDivisionError):
            list(training_pipeline(shards, lambda image: 1 / 0, tokenizer, 4))


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


class TestDamage:
    @pytest.fixture
    def shards(self, tmp_path):
        return write_numbered(tmp_path, [5] * 12)

    @pytest.mark.parametrize(
        ("member", "content", "reason"),
        [
            ("png", b"\x89PNG", "cannot identify image"),
            ("png", png_of_noise()[:2000], "image file is truncated"),
            ("png", None, "has no image; expected one of jpg, png, webp, jpeg"),
            ("json", b"{", "JSONDecodeError"),
            ("json", b'{"captions": []}', "'captions' must be a list of strings, got"),
        ],
    )
    def test_a_damaged_sample(self, shards, caplog, member, content, reason):
        replace_member(shards[1], f"numbered-train-00000005.{member}", content)
        reader = training_pipeline(shards, transform, tokenizer, 2)
        batches = list(reader)
        assert len(batches) == 6, "as many steps as other processes"
        assert set(read_images(batches)) == set(range(12)) - {5}
        assert all(len(set(read_images([batch]))) == 2 for batch in batches)
        assert f"sample numbered-train-00000005 of {shards[1]}, which cannot be read" in caplog.text
        assert reason in caplog.text
        with pytest.raises(UserError, match=r"cannot read sample numbered-train-00000005 of .*-000001.tar"):
            list(evaluation_pipeline(shards, transform, tokenizer, 2))

    @pytest.mark.parametrize("length", [0, 700, 5000, 3 * 3072])
    def test_a_cut_off_shard(self, shards, caplog, length):
        with open(shards[1], "r+b") as stream:
            stream.truncate(length)
        images = read_images(training_pipeline(shards, transform, tokenizer, 2))
        assert len(images) == 12
        assert {0, 1, 2, 3, 8, 9, 10, 11} <= set(images) < set(range(12))
        assert [record.levelno for record in caplog.records if shards[1] in record.message][:1] == [logging.WARNING]
        with pytest.raises(UserError, match=r"cannot read .*-000001.tar"):
            list(evaluation_pipeline(shards, transform, tokenizer, 2))

    def test_what_cannot_be_read_may_be_an_error(self, shards):
        with pytest.raises(UserError, match="on_error must be 'skip' or 'raise', got 'stop'"):
            training_pipeline(shards, transform, tokenizer, 2, on_error="stop")
        assert len(read_images(training_pipeline(shards, transform, tokenizer, 2, on_error="raise"))) == 12
        replace_member(shards[1], "numbered-train-00000005.png", b"\x89PNG")
        reader = training_pipeline(shards, transform, tokenizer, 2, on_error="raise")
        with pytest.raises(UserError, match=r"^cannot read sample numbered-train-00000005 of .*-000001\.tar: Unident"):
            list(reader)
        replace_member(shards[1], "numbered-train-00000005.json", b"{")
        with pytest.raises(UserError, match=r"^cannot read sample numbered-train-00000005 of .*-000001\.tar: JSONDec"):
            list(reader)
        Path(shards[1]).write_bytes(b"")
        with pytest.raises(UserError, match=r"^cannot read shard .*-000001\.tar: ReadError\('empty file'\)"):
            list(reader)

    def test_an_error_in_a_worker(self, shards):
        skipping, raising = (
            training_pipeline(shards, transform, tokenizer, 2, on_error=on_error) for on_error in ("skip", "raise")
        )
        Path(shards[1]).unlink()
        Path(shards[1]).mkdir()
        images = read_images(load(skipping, workers=3))
        assert (len(images), set(images)) == (12, {0, 1, 2, 3, 8, 9, 10, 11})
        with pytest.raises(UserError) as raised:
            load(raising, workers=1)
        assert message(raised.value).startswith(f"cannot read shard {shards[1]}: IsADirectoryError")
        assert "\n" not in message(raised.value)

    def test_each_place_is_reported_once_in_an_epoch(self, shards, caplog):
        for index in range(4):
            replace_member(shards[1], f"numbered-train-{4 + index:08d}.json", b"{")
            replace_member(shards[2], f"numbered-train-{8 + index:08d}.png", b"")
        reader = training_pipeline(shards, transform, tokenizer, 2)
        for epoch in range(2):
            reader.set_epoch(epoch)
            caplog.clear()
            assert Counter(read_images(reader)) == dict.fromkeys(range(4), 3), "three passes"
            *messages, last = caplog.messages
            places = [re.match(r"leaving out sample numbered-train-(\d+) of ", message) for message in messages]
            assert last.startswith(f"epoch {epoch}, worker 0: 4 of 12 images were shown, the other 8 were repeats")
            assert sorted(int(place[1]) for place in places) == list(range(4, 12))

    @pytest.mark.parametrize("sized", [True, False])
    def test_a_shard_cut_between_two_members(self, shards, caplog, sized):
        if not sized:
            (Path(shards[1]).parent / "sizes.json").unlink()
        with tarfile.open(shards[1]) as tar:
            third = tar.getmembers()[6]
        assert third.name == "numbered-train-00000006.json"
        with open(shards[1], "r+b") as stream:
            stream.truncate(third.offset + 100)
        options = {} if sized else {"num_samples": 12}
        images = read_images(training_pipeline(shards, transform, tokenizer, 2, **options))
        assert set(images) == {0, 1, 2, 3, 4, 8, 9, 10, 11}, "5 may be incomplete"
        assert (
            f"leaving out the end of shard {shards[1]}, which cannot be read: ReadError('it is cut off" in caplog.text
        )
        # Of a shard with sizes the part after the cut may be read first.
        place = r"(the end of )?shard" if sized else "the end of shard"
        with pytest.raises(UserError, match=rf"^cannot read {place} .*-000001\.tar: ReadError\('it is cut off"):
            list(training_pipeline(shards, transform, tokenizer, 2, on_error="raise", **options))
        with pytest.raises(UserError, match=r"cannot read the end of shard .*-000001\.tar: ReadError\('it is cut off"):
            list(evaluation_pipeline(shards, transform, tokenizer, 2))

    def test_a_shard_with_fewer_samples_than_its_index_says(self, shards, caplog):
        sizes = Path(shards[1]).parent / "sizes.json"
        sizes.write_text(sizes.read_text().replace('"numbered-train-000001.tar": 4', '"numbered-train-000001.tar": 6'))
        reader = training_pipeline(shards, transform, tokenizer, 2)
        assert len(reader) == 7
        images = read_images(reader)
        assert (len(images), set(images)) == (14, set(range(12)))
        assert "it ends after 4 samples, expected 6" in caplog.text
        with pytest.raises(
            UserError, match=r"cannot read the end of shard .*: ValueError\('it ends after 4 samples, exp"
        ):
            list(training_pipeline(shards, transform, tokenizer, 2, on_error="raise"))
        with pytest.raises(UserError, match="it ends after 4 samples, expected 6"):
            list(evaluation_pipeline(shards, transform, tokenizer, 2))

    def test_what_an_epoch_did_not_read_is_said_at_its_end(self, shards, tmp_path, monkeypatch):
        workers = 2
        Path(shards[1]).write_bytes(b"")
        replace_member(shards[2], "numbered-train-00000008.json", b"{")
        reader = training_pipeline(shards, transform, tokenizer, 2)
        # Of all workers, whose log is not this process's.
        monkeypatch.setattr(
            logging.getLogger("vl_plugins.data.training_batches"), "handlers", [logging.FileHandler(tmp_path / "log")]
        )
        assert set(read_images(load(reader, workers))) == {0, 1, 2, 3, 9, 10, 11}
        said = re.findall(
            r"^epoch 0, worker \d: (\d+) of (\d+) images were shown, the other (\d+) were repeats, because of (.+)$",
            (tmp_path / "log").read_text(),
            re.MULTILINE,
        )
        assert [sum(int(numbers[place]) for numbers in said) for place in range(3)] == [7, 12, 5]
        assert len(said) <= workers
        for _, _, _, places in said:
            assert re.match(
                r"(the end of )?shard .*-000001\.tar|sample numbered-train-00000008 of .*-000002\.tar", places
            )
            assert re.search(r"ReadError\('empty file'\)|JSONDecodeError", places)

    def test_nothing_is_said_of_a_whole_epoch(self, shards, caplog):
        for index in range(8):
            replace_member(shards[index // 4], f"numbered-train-{index:08d}.json", b'{"captions": ["0/0"]}')
        reader = training_pipeline(shards, transform, tokenizer, 2)
        assert len(read_images(reader)) == 12
        assert "images left out of epoch" in caplog.text
        assert "repeats" not in caplog.text

    def test_an_index_that_says_fewer_samples_leaves_nothing_out_of_an_evaluation(self, shards):
        sizes = Path(shards[1]).parent / "sizes.json"
        sizes.write_text(sizes.read_text().replace('"numbered-train-000001.tar": 4', '"numbered-train-000001.tar": 3'))
        with pytest.raises(UserError, match=r"the end of shard .*-000001.tar: .*it ends after 4 samples, expected 3"):
            list(evaluation_pipeline(shards, transform, tokenizer, 2))

    def test_the_first_sample(self, shards):
        check_first_sample(shards[0])
        replace_member(shards[0], "numbered-train-00000000.png", png_of_noise()[:2000])
        with pytest.raises(
            UserError, match=r"^cannot read sample numbered-train-00000000 of .*: OSError\('image file is"
        ):
            check_first_sample(shards[0])
        replace_member(shards[0], "numbered-train-00000000.json", b'{"captions": []}')
        with pytest.raises(
            UserError, match=r"^cannot read sample numbered-train-00000000 of .*'captions' must be a list"
        ):
            check_first_sample(shards[0])
        Path(shards[0]).write_bytes(bytes(1024))
        with pytest.raises(UserError, match=r"^shard .*-000000\.tar holds no samples$"):
            check_first_sample(shards[0])
        check_first_sample(f"pipe:cat {shards[0]}")

    def test_nothing_left(self, shards):
        for shard in shards:
            open(shard, "wb").close()
        with pytest.raises(UserError, match=r"no full batch of 2 can be read from .*-000000.tar"):
            list(training_pipeline(shards, transform, tokenizer, 2))

    def test_sizes_that_do_not_list_a_shard(self, shards, tmp_path):
        (tmp_path / "numbered" / "sizes.json").write_text("{}")
        with pytest.raises(UserError, match=r"sizes.json does not list numbered-train-000000.tar"):
            training_pipeline(shards, transform, tokenizer, 2)


class TestEvaluation:
    @pytest.mark.parametrize("workers", [0, 1, 7])
    def test_every_image_and_caption_once_in_source_order(self, uneven_shards, workers):
        reader = evaluation_pipeline(uneven_shards, transform, tokenizer, 4)
        batches = load(reader, workers)
        assert len(batches) == len(reader) == 6
        assert [len(images) for images, *_ in batches] == [4, 4, 4, 4, 4, 2]
        assert read_images(batches) == list(range(22))
        counts = [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2
        expected = [[image, number] for image in range(22) for number in range(counts[image])]
        assert torch.cat([texts for _, texts, *_ in batches]).tolist() == expected
        assert torch.cat([positions for *_, positions in batches]).tolist() == list(range(22))
        for images, texts, image_of_caption, positions in batches:
            assert torch.equal(numbers_of(images)[image_of_caption], texts[:, 0])
            assert image_of_caption.dtype == positions.dtype == torch.int64

    def test_first_captions_only(self, uneven_shards):
        batches = list(evaluation_pipeline(uneven_shards, transform, tokenizer, 22, max_captions=5))
        ((_, texts, image_of_caption, _),) = batches
        assert texts[:, 1].tolist() == [0, 1, 2, 3, 4] * 22
        assert image_of_caption.bincount().tolist() == [5] * 22

    def test_positions_go_on_over_several_sets(self, shards, uneven_shards):
        reader = evaluation_pipeline([*uneven_shards, *shards], transform, tokenizer, 8)
        assert torch.cat([batch[3] for batch in reader]).tolist() == list(range(46))

    def test_every_process_reads_everything(self, shards, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert read_images(evaluation_pipeline(shards, transform, tokenizer, 8)) == list(range(24))
        assert len(training_pipeline(shards, transform, tokenizer, 4)) == 3

    def test_length_is_unknown_without_sizes(self, shards):
        reader = evaluation_pipeline([f"pipe:cat {shard}" for shard in shards], transform, tokenizer, 5)
        with pytest.raises(TypeError, match=r"sizes.json"):
            len(reader)
        assert len(list(reader)) == 5

    @pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1, "max_captions": 0}])
    def test_numbers_out_of_range(self, shards, options):
        with pytest.raises(UserError, match="must be at least 1, got 0"):
            evaluation_pipeline(shards, transform, tokenizer, **options)


class TestPytorchMetricLearning:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_loss_takes_the_batches_of_a_plain_loader(self, shards, workers):
        reader = training_pipeline(shards, transform, tokenizer, 8, captions_per_image=3, with_labels=True)
        encode_image, encode_text = torch.nn.Linear(48, 5), torch.nn.Embedding(200, 5)
        optimizer = torch.optim.SGD([*encode_image.parameters(), *encode_text.parameters()], lr=0.1)
        loss = NTXentLoss(temperature=0.1)
        values = []
        for images, texts, labels in DataLoader(reader, batch_size=None, num_workers=workers):
            assert torch.equal(numbers_of(images), labels)
            text_labels = labels.repeat_interleave(3)
            assert torch.equal(texts[:, 0], text_labels)
            image_embeddings = encode_image(images.flatten(1) / 255)
            text_embeddings = encode_text(texts[:, 0] * 5 + texts[:, 1])
            value = loss(image_embeddings, labels, ref_emb=text_embeddings, ref_labels=text_labels)
            optimizer.zero_grad()
            value.backward()
            assert encode_image.weight.grad.any()
            assert encode_text.weight.grad.any()
            optimizer.step()
            values.append(value.item())
        assert len(values) == 3
        assert all(0 < value < 20 for value in values)


class TestStockOpenClip:
    """open_clip's own reader takes the shards as they are."""

    @staticmethod
    def arguments(**options):
        defaults = {
            "train_num_samples": None,
            "val_num_samples": None,
            "train_data_upsampling_factors": None,
            "seed": 0,
            "workers": 0,
            "world_size": 1,
        }
        return argparse.Namespace(**(defaults | options))

    def test_training(self, shards):
        from open_clip_train.data import get_wds_dataset

        folder = shards[0].rpartition("/")[0]
        args = self.arguments(train_data=f"{folder}/numbered-train-{{000000..000005}}.tar", batch_size=8)
        loader = get_wds_dataset(args, transform, is_train=True, tokenizer=tokenizer).dataloader
        assert (loader.num_samples, loader.num_batches) == (24, 3)
        batches = list(loader)
        assert sorted(read_images(batches)) == list(range(24))
        assert read_captions(batches) == {(image, 0) for image in range(24)}

    def test_validation(self, shards):
        from open_clip_train.data import get_wds_dataset

        folder = shards[0].rpartition("/")[0]
        args = self.arguments(val_data=f"{folder}/numbered-train-{{000000..000005}}.tar", batch_size=10)
        loader = get_wds_dataset(args, transform, is_train=False, tokenizer=tokenizer).dataloader
        assert read_images(loader) == list(range(24))
