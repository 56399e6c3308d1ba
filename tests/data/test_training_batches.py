import io
import logging
import pickle
import random
import re
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from tests.helpers.numbered_shards import (
    in_memory,
    load,
    numbers_of,
    png_of_noise,
    read_captions,
    read_images,
    replace_member,
    tokenizer,
    transform,
    write_captioned,
    write_numbered,
)
from vl_plugins.data.randomness import random_states
from vl_plugins.data.training_batches import TrainingPipeline
from vl_plugins.errors import UserError, message

# More workers than cores are on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

UNEVEN = [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """24 images with 5 captions each in 6 shards."""
    return write_numbered(tmp_path_factory.mktemp("even"), [5] * 24)


@pytest.fixture(scope="module")
def uneven_shards(tmp_path_factory):
    """22 images with 5, 6 or 7 captions in 4 shards."""
    return write_numbered(tmp_path_factory.mktemp("uneven"), UNEVEN, samples_per_shard=6)


def read(shards, batch_size, workers=0, **options):
    """Return the batches of an epoch."""
    return load(TrainingPipeline(shards, transform, tokenizer, batch_size, **options), workers)


def read_epochs(reader, number, workers=0):
    """Yield the batches of each epoch."""
    for epoch in range(number):
        reader.set_epoch(epoch)
        yield load(reader, workers)


class TestEpochs:
    @pytest.mark.parametrize(("batch_size", "world_size", "workers"), [(6, 1, 0), (1, 1, 3), (6, 2, 0), (3, 2, 2)])
    def test_every_image_once_over_processes_and_workers(self, shards, batch_size, world_size, workers):
        images = []
        for rank in range(world_size):
            reader = TrainingPipeline(shards, transform, tokenizer, batch_size, rank=rank, world_size=world_size)
            batches = load(reader, workers)
            assert len(batches) == len(reader) == 24 // (batch_size * world_size)
            for pictures, texts in batches:
                assert pictures.shape == (batch_size, 3, 4, 4)
                assert torch.equal(texts[:, 0], numbers_of(pictures))
            images += read_images(batches)
        assert sorted(images) == list(range(24))

    @pytest.mark.parametrize(("world_size", "workers"), [(1, 8), (3, 2)])
    def test_more_streams_than_shards_and_a_remainder(self, uneven_shards, world_size, workers):
        images = []
        for rank in range(world_size):
            batches = read(uneven_shards, 2, workers, rank=rank, world_size=world_size)
            assert len(batches) == 22 // (2 * world_size)
            images += read_images(batches)
        assert len(images) == len(set(images)) == 22 // (2 * world_size) * 2 * world_size

    def test_images_left_over_are_others_in_every_epoch(self, tmp_path):
        (shard,) = write_numbered(tmp_path, [1] * 20, samples_per_shard=100)
        epochs = read_epochs(TrainingPipeline(shard, transform, tokenizer, 9), 10)
        assert len(set().union(*(set(range(20)).difference(read_images(batches)) for batches in epochs))) > 10

    def test_shards_come_in_another_order_in_every_epoch(self, shards):
        reader = TrainingPipeline(shards, transform, tokenizer, 24, shuffle_buffer=1)
        orders = set()
        for batches in read_epochs(reader, 5):
            shard_of = [number // 4 for number in read_images(batches)]
            orders.add(tuple(shard for shard, following in pairwise(shard_of) if shard != following))
        assert len(orders) == 5
        assert all(any((following - shard) % 6 != 1 for shard, following in pairwise(order)) for order in orders)

    def test_images_are_shuffled(self, shards):
        images = read_images(read(shards, 24))
        assert sum(abs(one - other) == 1 for one, other in pairwise(images)) < 8

    def test_a_seeded_run_repeats_exactly(self, shards):
        def run(seed):
            reader = TrainingPipeline(shards, transform, tokenizer, 4, seed=seed)
            return [[(read_images([batch]), batch[1].tolist()) for batch in load] for load in read_epochs(reader, 2, 2)]

        first = run(seed=1)
        assert run(seed=1) == first
        assert first[0] != first[1]
        assert run(seed=2) != first

    def test_workers_that_persist_see_the_epoch(self, shards):
        reader = TrainingPipeline(shards, transform, tokenizer, 4, epoch=1)
        loader = DataLoader(reader, batch_size=None, num_workers=2, persistent_workers=True)
        epochs = [read_images(loader)]
        for number in (0, 1):
            reader.set_epoch(number)
            epochs.append(read_images(loader))
        assert epochs[0] == epochs[2] != epochs[1]

    def test_spawned_workers_and_pickled_copies_read_the_same(self, toy_shards):
        # Spawned workers import what they unpickle; `list` keeps the texts as they are.
        reader = TrainingPipeline(f"{toy_shards}/toy-train-{{000000..000007}}.tar", transform, list, 8, epoch=3)
        spawned = load(reader, workers=1, multiprocessing_context="spawn")
        assert len(spawned) == 8
        for batches in (spawned, pickle.loads(pickle.dumps(reader))):
            for (images, texts), (same_images, same_texts) in zip(batches, reader, strict=True):
                assert torch.equal(images, same_images)
                assert texts == same_texts

    def test_num_samples_shortens_the_epoch(self, shards, caplog):
        images = read_images(read(shards, 4, num_samples=9))
        assert len(images) == len(set(images)) == 8
        assert len(read(shards, 4, num_samples=100)) == 6
        assert "an epoch has the 24 images of the shards, not 100" in caplog.text

    def test_the_process_is_that_of_the_environment(self, shards, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert read_images(read(shards, 4)) == read_images(read(shards, 4, rank=1, world_size=2))

    def test_labels_are_positions_and_keys_come_last(self, shards, uneven_shards):
        options = {"with_labels": True, "with_keys": True, "allow_duplicate_captions": True}
        reader = TrainingPipeline([*shards, *uneven_shards], transform, tokenizer, 46, **options)
        for ((images, _, labels, keys),) in read_epochs(reader, 2):
            assert labels.dtype == torch.int64
            assert sorted(labels.tolist()) == list(range(46))
            numbers = torch.where(labels < 24, labels, labels - 24)
            assert torch.equal(numbers_of(images), numbers)
            assert keys == [f"numbered-train-{number:08d}" for number in numbers.tolist()]


def draw(image):
    """Stand in for an augmentation, which may draw from any generator."""
    return torch.tensor([torch.rand(()), np.random.rand(), random.random()])  # noqa: NPY002


def test_captions_and_augmentation_depend_on_seed_epoch_and_image_alone(shards):
    before = random_states()
    found = {}
    for seed, epoch, workers, batch_size in ((0, 0, 0, 4), (0, 0, 2, 8), (0, 1, 0, 4), (1, 0, 0, 4)):
        options = {"seed": seed, "epoch": epoch, "with_keys": True}
        drawn = {}
        for numbers, texts, keys in load(TrainingPipeline(shards, draw, tokenizer, batch_size, **options), workers):
            drawn |= zip(keys, zip(map(tuple, numbers.tolist()), map(tuple, texts.tolist()), strict=True), strict=True)
        assert len(drawn) == 24
        assert found.setdefault((seed, epoch), drawn) == drawn
    assert len({numbers for drawn in found.values() for numbers, _ in drawn.values()}) == 3 * 24
    assert len({tuple(sorted(text for _, text in drawn.values())) for drawn in found.values()}) == 3
    assert str(random_states()) == str(before), "the generators themselves go on as before"


class TestCaptionsPerImage:
    def test_random(self, shards):
        counts = Counter()
        for batches in read_epochs(TrainingPipeline(shards, transform, tokenizer, 24), 60):
            counts.update(number for _, number in read_captions(batches))
        assert counts.total() == 60 * 24
        assert all(230 < counts[number] < 350 for number in range(5))

    def test_a_number(self, uneven_shards):
        ((images, texts),) = read(uneven_shards, 22, captions_per_image=6)
        texts = texts.view(22, 6, 2)
        assert torch.equal(texts[:, :, 0], numbers_of(images)[:, None].expand(22, 6)), "those of an image are adjacent"
        assert any(row != sorted(row) for row in texts[:, :, 1].tolist())
        for image, row in zip(numbers_of(images).tolist(), texts[:, :, 1].tolist(), strict=True):
            assert len(set(row)) == min(UNEVEN[image], 6)
            assert row[5] == row[0] or UNEVEN[image] > 5, "one with fewer repeats them in turn"

    def test_all_in_source_order(self, uneven_shards):
        ((images, texts),) = read(uneven_shards, 22, captions_per_image="all")
        for image, rows in zip(numbers_of(images).tolist(), texts.view(22, 7, 2).tolist(), strict=True):
            assert rows == [[image, number % UNEVEN[image]] for number in range(7)]

    def test_first(self, shards):
        assert read_captions(read(shards, 24, captions_per_image="first")) == {(image, 0) for image in range(24)}


class TestWithoutSizes:
    """Shards without sizes.json, such as those of others behind a URL."""

    @pytest.fixture
    def urls(self, shards):
        return [f"pipe:cat {shard}" for shard in shards]

    @pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 3), (3, 8)])
    def test_whole_shards_are_shared_out(self, urls, world_size, workers):
        images = []
        for rank in range(world_size):
            batches = read(urls, 2, workers, num_samples=24, rank=rank, world_size=world_size, with_labels=True)
            assert len(batches) == 12 // world_size
            assert all(len(set(labels.tolist())) == 2 for *_, labels in batches)
            images += read_images(batches)
        assert sorted(images) == list(range(24))

    def test_workers_with_too_few_images_repeat_theirs(self, urls):
        assert Counter(read_images(read(urls, 4, 2, num_samples=48))) == dict.fromkeys(range(24), 2)

    def test_what_is_needed(self, urls):
        for options, reason in (
            ({}, r"number of images in pipe:.* is not known: give num_samples, or put"),
            ({"num_samples": 24, "world_size": 8}, "6 shards of unknown size cannot be shared by 8 processes"),
            (
                {"num_samples": 24, "captions_per_image": "all"},
                r"'all' needs a manifest.json beside the shards; give a number",
            ),
        ):
            with pytest.raises(UserError, match=reason):
                TrainingPipeline(urls, transform, tokenizer, 1, **options)

    def test_gray_samples_with_txt_only(self, tmp_path):
        stream = io.BytesIO()
        Image.new("L", (4, 4), 200).save(stream, format="JPEG")
        with webdataset.TarWriter(str(tmp_path / "x.tar")) as tar:
            for index in range(4):
                sample = {"jpeg": stream.getvalue(), "txt": f"{index}/7", "json": b'{"caption": "another"}'}
                tar.write({"__key__": f"{index}", **sample})
        ((images, texts),) = read(f"{tmp_path}/x.tar", 4, num_samples=4)
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
        assert sorted(batch[0].shape[3] for batch in read(shard, 1, **options)) == [4, 5, 5]
        (warning,) = caplog.messages
        assert "6 x 4 pixels are more than max_image_pixels 20" in warning


class TestRemoteShards:
    """Behind a URL that fsspec opens; what is in memory stands for what is in a bucket."""

    @pytest.fixture
    def urls(self, shards, monkeypatch):
        return in_memory(shards, monkeypatch)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_they_are_read_as_local_ones(self, urls, shards, workers):
        remote, local = (read(where, 4, workers, captions_per_image="all") for where in (urls, shards))
        for (images, texts), (expected_images, expected_texts) in zip(remote, local, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(texts, expected_texts)

    def test_a_shard_that_vanishes(self, urls, caplog):
        reader = TrainingPipeline(urls, transform, tokenizer, 4)
        fsspec.filesystem("memory").rm_file("/bucket/numbered/numbered-train-000002.tar")
        assert set(read_images(reader)) == set(range(24)) - {8, 9, 10, 11}
        assert f"leaving out shard {urls[2]}, which cannot be read" in caplog.text


class TestDuplicateCaptions:
    """Captions are ``"text/0"`` here, so that ``texts[:, 0]`` is the text; the image's number is its color."""

    @staticmethod
    def write(folder, texts, **options):
        """Write images with these texts: an int for one caption, a list for several."""
        captions = [image if isinstance(image, list) else [image] for image in texts]
        return write_captioned(folder, [[f"{text}/0" for text in image] for image in captions], **options)

    @staticmethod
    def assert_distinct(batches, captions_per_image=1):
        for images, texts, *_ in batches:
            texts_of_images = texts[:, 0].view(len(images), captions_per_image).tolist()
            assert sum(len(set(texts)) for texts in texts_of_images) == len(set().union(*texts_of_images))
            assert len(set(read_images([(images,)]))) == len(images)

    @pytest.mark.parametrize("captions", ["random", "first", "all", 2])
    @pytest.mark.parametrize("shuffle_buffer", [1, 5000])
    def test_they_do_not_meet(self, tmp_path, captions, shuffle_buffer, caplog):
        """Images next to each other have the same two captions."""
        pairs = self.write(tmp_path, [[index // 2, 100 + index // 2] for index in range(24)])
        options = {"captions_per_image": captions, "shuffle_buffer": shuffle_buffer}
        left_out = 0
        for batches in read_epochs(TrainingPipeline(pairs, transform, tokenizer, 4, **options), 10):
            assert len(batches) == 6
            self.assert_distinct(batches, captions_per_image=2 if captions in ("all", 2) else 1)
            left_out += 24 - len(set(read_images(batches)))
        assert left_out <= 10, "the last batch of four cannot always be made"
        reported = [int(count) for count in re.findall(r"images left out .*: (\d+), as", caplog.text)]
        assert sum(reported) == left_out

    def test_captions_of_one_image_may_coincide(self, tmp_path):
        shards = self.write(tmp_path, [[index, index] for index in range(4)])
        ((images, texts),) = read(shards, 4, captions_per_image="all")
        assert torch.equal(texts[:, 0], numbers_of(images).repeat_interleave(2))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_too_many_to_tell_apart(self, tmp_path, workers):
        with pytest.raises(UserError) as raised:
            read(self.write(tmp_path, [7] * 8), 2, workers)
        assert re.match(
            r"no batch of 2 images with different captions can be made of 2 shards such as .*-000000\.tar: the caption "
            "'7/0' belongs to several images; .* allow_duplicate_captions",
            message(raised.value),
        )

    def test_they_may_be_allowed(self, tmp_path):
        images = read_images(read(self.write(tmp_path, [7] * 8), 4, allow_duplicate_captions=True))
        assert sorted(images) == list(range(8))

    @pytest.mark.parametrize("shuffle_buffer", [1, 5000])
    def test_images_that_find_no_place_are_counted_once_per_epoch_and_worker(self, tmp_path, shuffle_buffer, caplog):
        """Eight may wait with the small buffer, so that some are left out before the first batch."""
        shards = self.write(tmp_path, [0] * 12 + list(range(1, 13)))
        batches = read(shards, 8, shuffle_buffer=shuffle_buffer)
        self.assert_distinct(batches)
        assert len(batches) == 3, "as many steps as other processes"
        images = set(read_images(batches))
        assert len(images & set(range(12))) == 3, "one in a batch"
        assert images >= set(range(12, 24))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert re.fullmatch(
            r"epoch 0, worker 0: images left out that share captions or groups: 9, as numbered-train-000000\d\d",
            record.message,
        )

    def test_a_worker_repeats_images_of_its_process_only(self, tmp_path):
        """Each of three workers has one batch; four images say 0, and any others can take the place of one of them."""
        shards = self.write(tmp_path, [0, 0, 0, 0, *range(4, 24)], samples_per_shard=100)
        repeated = 0
        for epoch in range(10):
            images = []
            for rank in range(2):
                batches = read(shards, 4, 3, epoch=epoch, rank=rank, world_size=2)
                assert len(batches) == 3
                self.assert_distinct(batches)
                images.append(set(read_images(batches)))
                repeated += 12 - len(images[rank])
            assert images[0].isdisjoint(images[1])
        assert repeated

    def test_samples_that_wait_are_not_decoded(self, tmp_path, monkeypatch):
        shards = self.write(tmp_path, [0] * 20 + list(range(1, 21)))
        opened = []
        open_image = Image.open
        monkeypatch.setattr(Image, "open", lambda stream: opened.append(stream) or open_image(stream))
        next(iter(TrainingPipeline(shards, transform, tokenizer, 10, shuffle_buffer=1)))
        assert len(opened) == 10


class TestGroups:
    @staticmethod
    def write(folder, groups, dataset="grouped", captions=None):
        captions = captions or [[f"{index}/{number}" for number in range(3)] for index in range(len(groups))]
        return write_captioned(folder, captions, dataset=dataset, groups=groups)

    @pytest.mark.parametrize(("captions", "workers"), [("random", 2), ("all", 0)])
    def test_apart(self, tmp_path, captions, workers):
        met = {}
        for dataset, groups in (("without", [None] * 48), ("grouped", [index // 3 for index in range(48)])):
            shards = self.write(tmp_path, groups, dataset)
            reader = TrainingPipeline(shards, transform, tokenizer, 6, captions_per_image=captions, with_labels=True)
            met[dataset] = 0
            for batches in read_epochs(reader, 5, workers):
                assert len(batches) == 8
                for images, _, labels in batches:
                    assert torch.equal(labels, numbers_of(images)), "their positions"
                    met[dataset] += len(set((labels // 3).tolist())) < 6
        assert met["without"] > 20
        assert met["grouped"] == 0

    def test_positives_have_one_label_in_every_shard_worker_process_and_epoch(self, tmp_path):
        groups = [None if index >= 18 else index % 6 for index in range(24)]  # in different shards
        shards = self.write(tmp_path, groups)
        label_of = {}
        for rank in range(2):
            options = {"with_labels": True, "same_group": "positive", "rank": rank, "world_size": 2}
            for batches in read_epochs(TrainingPipeline(shards, transform, tokenizer, 4, **options), 4, workers=2):
                for images, _, labels in batches:
                    assert labels.dtype == torch.int64
                    for number, label in zip(read_images([(images,)]), labels.tolist(), strict=True):
                        assert label_of.setdefault(number, label) == label
        assert len(label_of) == 24
        assert [label_of[number] for number in range(18, 24)] == list(range(18, 24)), "those without a group"
        assert all(label_of[number] == label_of[number % 6] < 0 for number in range(18))
        assert len({label_of[number] for number in range(6)}) == 6

    def test_labels_are_of_the_group_of_one_data_set(self, tmp_path):
        captions = [["0/0"], ["1/0"], ["2/0"]], [["3/0"], ["4/0"], ["5/0"]]
        shards = self.write(tmp_path, [0] * 3, "one", captions[0]) + self.write(tmp_path, [0] * 3, "other", captions[1])
        ((_, _, labels),) = read(shards, 6, with_labels=True, same_group="positive")
        assert sorted(Counter(labels.tolist()).values()) == [3, 3]

    def test_positives_may_share_their_captions(self, tmp_path):
        """As several pictures of one object do; with all captions they could never meet otherwise."""
        captions = [[f"{index // 3}/{number}" for number in range(3)] for index in range(12)]
        shards = self.write(tmp_path, [index // 3 for index in range(12)], captions=captions)
        options = {"captions_per_image": "all", "with_labels": True}
        ((_, texts, labels),) = read(shards, 12, **options, same_group="positive")
        text_labels = labels.repeat_interleave(3)
        assert torch.equal(texts[:, None, 0] == texts[:, 0], text_labels[:, None] == text_labels)
        with pytest.raises(UserError, match="no batch of 12 images with different"):
            read(shards, 12, **options)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (
                {"batch_size": 13, "world_size": 2},
                "24 images make no full batch of 13 for each of 2 .*can be at most 12",
            ),
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"on_error": "stop"}, "unknown on_error 'stop'"),
            ({"same_group": "postive"}, r"unknown same_group 'postive' \(did you mean 'positive'"),
            ({"same_group": "positive"}, "same_group 'positive' needs with_labels=True"),
            (
                {"same_group": "positive", "with_labels": True},
                "same_group 'positive' needs shards with groups: .*--group-key",
            ),
        ],
    )
    def test_arguments(self, shards, options, reason):
        with pytest.raises(UserError, match=reason):
            TrainingPipeline(shards, transform, tokenizer, **{"batch_size": 4} | options)

    def test_an_error_of_the_transform_is_not_taken_for_a_damaged_sample(self, shards):
        with pytest.raises(ZeroDivisionError):
            list(TrainingPipeline(shards, lambda image: 1 / 0, tokenizer, 4))


class TestDamage:
    @pytest.fixture
    def shards(self, tmp_path):
        return write_numbered(tmp_path, [5] * 12)

    @pytest.mark.parametrize(
        ("member", "content", "reason"),
        [
            ("png", b"\x89PNG", "cannot identify image"),
            ("png", png_of_noise()[:2000], "image file is truncated"),
            ("png", None, "it has no images; expected jpg or png or webp or jpeg"),
            ("json", b"{", "its json is not valid JSON"),
            ("json", b'{"captions": []}', "'captions' must be a list of strings, got"),
        ],
    )
    def test_a_damaged_sample(self, shards, caplog, member, content, reason):
        replace_member(shards[1], f"numbered-train-00000005.{member}", content)
        batches = read(shards, 2)
        assert len(batches) == 6, "as many steps as other processes"
        assert set(read_images(batches)) == set(range(12)) - {5}
        assert all(len(set(read_images([batch]))) == 2 for batch in batches)
        assert f"leaving out sample numbered-train-00000005 of {shards[1]}, which cannot be read" in caplog.text
        assert reason in caplog.text
        with pytest.raises(
            UserError, match=rf"^cannot read sample numbered-train-00000005 of .*-000001\.tar: .*{reason}"
        ):
            read(shards, 2, on_error="raise")

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
        assert set(read_images(read(shards, 2, **options))) == {0, 1, 2, 3, 4, 8, 9, 10, 11}, "5 may be incomplete"
        assert f"leaving out the end of shard {shards[1]}, which cannot be read: ReadError('it is cut" in caplog.text

    def test_a_shard_with_fewer_samples_than_its_index_says(self, shards, caplog):
        sizes = Path(shards[1]).parent / "sizes.json"
        sizes.write_text(sizes.read_text().replace('"numbered-train-000001.tar": 4', '"numbered-train-000001.tar": 6'))
        images = read_images(read(shards, 2))
        assert (len(images), set(images)) == (14, set(range(12)))
        assert "it ends before sample 4, expected 6" in caplog.text
        with pytest.raises(UserError, match=r"cannot read the end of shard .*: it ends before sample 4"):
            read(shards, 2, on_error="raise")

    def test_an_error_in_a_worker(self, shards):
        readers = [TrainingPipeline(shards, transform, tokenizer, 2, on_error=rule) for rule in ("skip", "raise")]
        Path(shards[1]).unlink()
        Path(shards[1]).mkdir()
        images = read_images(load(readers[0], workers=3))
        assert (len(images), set(images)) == (12, {0, 1, 2, 3, 8, 9, 10, 11})
        with pytest.raises(UserError) as raised:
            load(readers[1], workers=1)
        assert message(raised.value).startswith(f"cannot read shard {shards[1]}: IsADirectoryError")
        assert "\n" not in message(raised.value)

    def test_each_place_is_reported_once_in_an_epoch(self, shards, caplog):
        for index in range(4):
            replace_member(shards[1], f"numbered-train-{4 + index:08d}.json", b"{")
            replace_member(shards[2], f"numbered-train-{8 + index:08d}.png", b"")
        for batches in read_epochs(TrainingPipeline(shards, transform, tokenizer, 2), 2):
            assert Counter(read_images(batches)) == dict.fromkeys(range(4), 3), "three passes"
            places = [re.match(r"leaving out sample numbered-train-(\d+) of ", message) for message in caplog.messages]
            assert sorted(int(place[1]) for place in places) == list(range(4, 12))
            caplog.clear()

    def test_nothing_left(self, shards):
        for shard in shards:
            open(shard, "wb").close()
        with pytest.raises(UserError, match=r"no full batch of 2 can be read from 3 shards such as .*-000000.tar"):
            read(shards, 2)

    def test_sizes_that_do_not_list_a_shard(self, shards, tmp_path):
        (tmp_path / "numbered" / "sizes.json").write_text("{}")
        with pytest.raises(UserError, match=r"sizes.json does not list numbered-train-000000.tar"):
            TrainingPipeline(shards, transform, tokenizer, 2)
