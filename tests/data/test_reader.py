import argparse
import io
import logging
import pickle
import tarfile
from collections import Counter
from itertools import pairwise

import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import PILToTensor

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.reader import (
    ShardInfo,
    SharedEpoch,
    evaluation_pipeline,
    expand_shards,
    parse_captions_per_image,
    read_shard_info,
    training_pipeline,
)
from vl_plugins.data.shards import write_shards
from vl_plugins.errors import UserError

# More workers than cores are on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

transform = PILToTensor()


class NumberTokenizer:
    """Turns the caption ``"image/number"`` into a row ``[image, number]``."""

    def __call__(self, texts):
        texts = [texts] if isinstance(texts, str) else texts
        return torch.tensor([[int(number) for number in text.split("/")] for text in texts])


tokenizer = NumberTokenizer()


def write_numbered(folder, captions_per_image, samples_per_shard=4, dataset="numbered"):
    """Write images whose red channel is their number and whose captions are ``"image/number"``; return the shards."""
    root = folder / f"{dataset}_root"
    root.mkdir()
    images = []
    for index, count in enumerate(captions_per_image):
        Image.new("RGB", (4, 4), (index, 0, 0)).save(root / f"{index}.png")
        captions = tuple(f"{index}/{number}" for number in range(count))
        ids = tuple(10 * index + number for number in range(count))
        images.append(CaptionedImage(index, f"{index}.png", captions, ids, "train", dataset, f"{index}.png"))
    out = folder / dataset
    write_shards(images, root, out, samples_per_shard=samples_per_shard)
    return sorted(map(str, out.glob("*.tar")))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """24 images with 5 captions each in 6 shards."""
    return write_numbered(tmp_path_factory.mktemp("even"), [5] * 24)


@pytest.fixture(scope="module")
def uneven_shards(tmp_path_factory):
    """22 images with 5, 6 or 7 captions in 4 shards."""
    return write_numbered(tmp_path_factory.mktemp("uneven"), [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2, samples_per_shard=6)


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

    @pytest.mark.parametrize("value", ["0", "-1", "some", "", "1.5", "All", 0, None])
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

    def test_urls_are_not_checked(self):
        assert expand_shards("s3://bucket/{0..1}.tar") == ["s3://bucket/0.tar", "s3://bucket/1.tar"]


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

    @pytest.mark.parametrize("batch_size", [1, 4, 6])
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
            UserError, match=r"number of images in pipe:.* is not known: put a sizes.json beside it, or"
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


class TestDamage:
    @pytest.fixture
    def shards(self, tmp_path):
        return write_numbered(tmp_path, [5] * 12)

    @pytest.mark.parametrize(
        ("member", "content", "reason"),
        [
            ("png", b"\x89PNG", "cannot identify image"),
            ("png", None, "it has no image; expected one of jpg, png, webp, jpeg"),
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
    @pytest.mark.parametrize("workers", [0, 1, 2, 3, 7])
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
