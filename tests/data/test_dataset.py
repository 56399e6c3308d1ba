"""Images and captions of shards by index, and the batches that loaders make of them."""

import io
import logging
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from PIL import Image
from torch.utils.data import DataLoader

from tests.helpers.archives import encode_archive, encode_picture
from tests.helpers.numbered_shards import numbers_of, png_of_noise, replace_member, tokenizer, transform, write_numbered
from tests.helpers.pictures import EPS, VAST, fail_to_decode, replace_ghostscript, vast_png
from tests.helpers.processes import in_processes
from vl_plugins.data import (
    CaptionSampler,
    Draw,
    ShardDataset,
    content_ids,
    evaluation_loader,
    read_batches,
    training_loader,
)
from vl_plugins.data.picture_formats import inspect_image
from vl_plugins.data.randomness import seed_everything
from vl_plugins.data.samples import decode_features
from vl_plugins.errors import UserError

# More workers than cores are on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """64 images with 5 captions each in 16 shards, the first six in two groups."""
    groups = ["a", "b"] * 3 + [None] * 58
    return write_numbered(tmp_path_factory.mktemp("shards"), [5] * 64, groups=groups)


@pytest.fixture
def own_shards(tmp_path):
    """Twelve images in three shards that a test may change."""
    return write_numbered(tmp_path, [5] * 12)


def batches_of(dataset, batch_size, epoch=0, workers=0, **options):
    sampler = CaptionSampler(dataset.collection, batch_size, **options)
    sampler.set_epoch(epoch)
    return list(training_loader(dataset, sampler, workers=workers))


def assert_equal(batches, others):
    assert len(batches) == len(others) > 0
    for batch, other in zip(batches, others, strict=True):
        assert all(torch.equal(tensor, same) for tensor, same in zip(batch, other, strict=True))


class TestItems:
    @pytest.mark.parametrize("has_index", [True, False])
    def test_a_number_is_an_image_with_all_its_captions(self, tmp_path, has_index):
        counts = [1, 3, 2, 2, 5, 1]
        dataset = ShardDataset(write_numbered(tmp_path, counts, index=has_index), transform, tokenizer)
        items = list(dataset)
        assert len(items) == len(dataset) == 6
        assert dataset[-1].index == 5
        for index, item in enumerate(items):
            assert torch.equal(item.image, transform(Image.new("RGB", (4, 4), (index, 0, 0))))
            assert item.captions == [f"{index}/{number}" for number in range(counts[index])]
            assert (item.label, item.index) == (index, index)
            assert (item.ids, item.other_ids) == (content_ids(item.captions), [])

    def test_a_draw_is_what_it_asks_for(self, shards):
        dataset = ShardDataset(shards, transform, tokenizer)
        item = dataset[Draw(9, [4, 0, 4])]
        assert (numbers_of(item.image[None]), item.captions) == ([9], ["9/4", "9/0", "9/4"])
        assert item.ids == content_ids(item.captions)
        assert item.other_ids == content_ids(["9/1", "9/2", "9/3"])
        assert [item.label for item in (dataset[5], dataset[4], dataset[6])] == [1, 0, 6]

    @pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_pictures_are_turned_as_viewers_show_them(self, tmp_path, orientation, image_format):
        """A red corner, top left, is where the orientation says; EXIF 6 is a camera that was turned left."""
        picture = Image.new("RGB", (32, 16), "blue")
        picture.paste("red", (0, 0, 8, 8))
        exif = Image.Exif()
        exif[274] = orientation
        stream = io.BytesIO()
        picture.save(stream, image_format, exif=exif, **{"lossless": True} if image_format == "WEBP" else {})
        extension = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[image_format]
        members = [(f"a.{extension}", stream.getvalue()), ("a.txt", "0/0")]
        (tmp_path / "x.tar").write_bytes(encode_archive(members))
        (item,) = ShardDataset(tmp_path / "x.tar", lambda image: image, tokenizer)
        is_on_its_side = orientation >= 5
        assert item.image.size == ((16, 32) if is_on_its_side else (32, 16))
        assert inspect_image(stream.getvalue())[1:] == item.image.size
        right, bottom = item.image.width - 3, item.image.height - 3
        corners = {1: (2, 2), 2: (right, 2), 3: (right, bottom), 4: (2, bottom)}
        corners |= {5: (2, 2), 6: (right, 2), 7: (right, bottom), 8: (2, bottom)}
        red, _, blue = item.image.getpixel(corners[orientation])
        assert red > 200
        assert blue < 60

    def test_pictures_become_rgb(self, tmp_path):
        members = []
        for mode in ("L", "P", "RGBA", "CMYK", "LA"):
            picture = encode_picture((4, 4), "JPEG" if mode == "CMYK" else "PNG", mode=mode)
            members += [(f"{mode}.webp", b"jpg comes first"), (f"{mode}.JPG", picture), (f"{mode}.txt", "0/0")]
        (tmp_path / "x.tar").write_bytes(encode_archive(members))
        dataset = ShardDataset(tmp_path / "x.tar", lambda image: image.mode, tokenizer)
        assert [item.image for item in dataset] == ["RGB"] * 5


class TestBatches:
    @pytest.mark.parametrize(("captions", "shape"), [("flat", (12, 2)), ("nested", (6, 2, 2))])
    def test_images_texts_and_labels_belong_together(self, shards, captions, shape):
        dataset = ShardDataset(shards, transform, tokenizer, captions=captions)
        for images, texts, labels, *_ in batches_of(dataset, 6, captions_per_image=2):
            numbers = numbers_of(images)
            assert images.shape == (6, 3, 4, 4)
            assert texts.shape == shape
            assert texts.view(6, 2, 2)[:, :, 0].tolist() == [[number, number] for number in numbers]
            assert labels.tolist() == [number % 2 if number < 6 else number for number in numbers]
            assert labels.dtype == torch.int64

    @pytest.mark.parametrize(("captions", "shape"), [("flat", (8,)), ("nested", (4, 2))])
    def test_ids_of_captions_that_are_shown_and_of_others(self, tmp_path, captions, shape):
        counts = [1, 2, 3, 5]
        dataset = ShardDataset(write_numbered(tmp_path, counts), transform, tokenizer, captions=captions)
        ((_, texts, labels, ref_ids, matching_ids),) = batches_of(dataset, 4, captions_per_image=2)
        assert ref_ids.shape == shape
        assert matching_ids.shape == (4, 3)
        shown = [f"{image}/{number}" for image, number in texts.view(8, 2).tolist()]
        assert ref_ids.flatten().tolist() == content_ids(shown)
        for row, image in enumerate(labels.tolist()):
            captions_of_image = {f"{image}/{number}" for number in range(counts[image])}
            others = captions_of_image - set(shown[2 * row : 2 * row + 2])
            ids = matching_ids[row].tolist()
            assert set(ids[: len(others)]) == set(content_ids(sorted(others)))
            assert ids[len(others) :] == [-1] * (3 - len(others))

    def test_different_numbers_of_captions(self, tmp_path):
        dataset = ShardDataset(write_numbered(tmp_path, [2, 3]), transform, tokenizer)
        with pytest.raises(UserError, match=r"images of a batch have \[2, 3\] captions: use a CaptionSampler"):
            next(iter(DataLoader(dataset, 2, collate_fn=dataset.collate)))

    def test_they_are_the_same_for_any_number_of_workers(self, shards):
        dataset = ShardDataset(shards, transform, tokenizer)
        before = torch.get_rng_state()
        expected = [batches_of(dataset, 3, epoch) for epoch in range(2)]
        for workers in (1, 3):
            sampler = CaptionSampler(dataset.collection, 3)
            loader = training_loader(dataset, sampler, workers=workers)
            for epoch in (0, 1, 0):
                sampler.set_epoch(epoch)
                assert_equal(list(loader), expected[epoch])
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_pickled_copy_reads_the_same(self, shards):
        """As spawned workers are given one."""
        dataset = ShardDataset(shards, transform, tokenizer, captions="nested")
        assert_equal(batches_of(pickle.loads(pickle.dumps(dataset)), 6), batches_of(dataset, 6))


def draw(image):
    """Stand in for an augmentation, which may draw from any generator."""
    return torch.tensor([[[torch.rand(()), np.random.rand(), random.random()]]])  # noqa: NPY002


def test_augmentation_depends_on_seed_epoch_and_image_alone(shards):
    dataset = ShardDataset(shards, draw, tokenizer)
    seed_everything(0)
    found = {}
    for seed, epoch, workers, batch_size in ((0, 0, 0, 4), (0, 0, 2, 8), (0, 1, 0, 4), (1, 0, 0, 4)):
        drawn = {}
        for numbers, texts, *_ in batches_of(dataset, batch_size, epoch, workers, seed=seed):
            drawn |= zip(texts[:, 0].tolist(), map(tuple, numbers.flatten(1).tolist()), strict=True)
        assert len(drawn) == 64
        assert found.setdefault((seed, epoch), drawn) == drawn
    assert len({numbers for drawn in found.values() for numbers in drawn.values()}) == 3 * 64
    # Generators of the process are as before, and serve those who ask for an image without a sampler.
    found = dataset[0].image
    seed_everything(0)
    assert torch.equal(found, draw(None))


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"\x89PNG", "the file is not an image in JPEG, PNG or WebP format"),
            (EPS, "the file is not an image in JPEG, PNG or WebP format"),
            (png_of_noise()[:2000], "image file is truncated"),
            (None, "it has no images, expected jpg or png or webp or jpeg; it has json"),
        ],
    )
    def test_a_picture(self, own_shards, caplog, content, reason, tmp_path, monkeypatch):
        ghostscript_has_run = replace_ghostscript(monkeypatch, tmp_path)
        replace_member(own_shards[1], "numbered-005.png", content)
        options = {"transform": transform, "tokenizer": tokenizer}
        with pytest.raises(UserError, match=rf"^cannot read image 5, in {own_shards[1]}: .*{reason}"):
            batches_of(ShardDataset(own_shards, **options), 2)
        assert not caplog.messages
        dataset = ShardDataset(own_shards, on_error="skip", **options)
        for epoch in range(3):
            for batch_size in (3, 12):
                batches = batches_of(dataset, batch_size, epoch, captions_per_image=2)
                assert len(batches) == 12 // batch_size
                assert {number for images, *_ in batches for number in numbers_of(images)} == set(range(12)) - {5}
                for images, texts, labels, *_ in batches:
                    numbers = numbers_of(images)
                    assert labels.tolist() == numbers
                    assert texts[:, 0].tolist() == [number for number in numbers for _ in range(2)]
                    assert len(texts.view(-1, 4).unique(dim=0)) == len(set(numbers)), (
                        "captions as where it stands itself"
                    )
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert reason in record.message
        assert not ghostscript_has_run.exists()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_what_is_skipped_is_counted_and_limited(self, tmp_path, caplog, workers):
        """Of 40 images 12 are damaged; ten are allowed in any case, and a share of 0.3 allows twelve."""
        shards = write_numbered(tmp_path, [1] * 40)
        for image in range(12):
            replace_member(shards[image // 4], f"numbered-{image:03}.png", b"damaged")
        options = {"on_error": "skip", "transform": transform, "tokenizer": tokenizer}
        dataset = ShardDataset(shards, max_errors=0.3, **options)
        loader = training_loader(dataset, CaptionSampler(dataset.collection, 20), workers=workers)
        assert dataset.describe_errors() is None
        assert sum(len(labels) for _, _, labels, *_ in read_batches("--train-data", loader)) == 40
        assert caplog.messages[-1] == "--train-data: 12 of 40 images skipped: 12 unreadable"
        assert len(caplog.messages) <= 1 + 10
        for max_errors in (0.01, 0.27):
            dataset = ShardDataset(shards, max_errors=max_errors, **options)
            loader = training_loader(dataset, CaptionSampler(dataset.collection, 20), workers=workers)
            with pytest.raises(UserError, match=f"of 40 images cannot be read, more than max_errors {max_errors}; the"):
                list(read_batches("--train-data", loader))

    def test_a_picture_of_too_many_pixels(self, tmp_path, monkeypatch, caplog):
        members = [("vast.png", vast_png()), ("vast.txt", "vast"), ("small.png", encode_picture()), ("small.txt", "b")]
        (tmp_path / "x.tar").write_bytes(encode_archive(members))
        skipping = ShardDataset(tmp_path / "x.tar", transform, tokenizer, on_error="skip")
        assert [item.index for item in skipping.__getitems__([0, 1])] == [1, 1]
        assert f"the image has {VAST}, more than max_image_pixels 89,000,000" in caplog.text
        fail_to_decode(monkeypatch)
        with pytest.raises(UserError, match=f"image 0, in .*: the image has {VAST}, more than "):
            ShardDataset(tmp_path / "x.tar", transform, tokenizer)[0]
        with pytest.raises(UserError, match="decoded"):
            ShardDataset(tmp_path / "x.tar", transform, tokenizer, max_image_pixels=0)[0]
        with pytest.raises(UserError, match="max_image_pixels must be at least 0, which sets no limit; got -1"):
            ShardDataset(tmp_path / "x.tar", transform, tokenizer, max_image_pixels=-1)

    def test_captions_that_are_not_those_of_the_index(self, own_shards):
        content = Path(own_shards[1]).read_bytes()
        assert content.count(b"5/0") == 1
        Path(own_shards[1]).write_bytes(content.replace(b"5/0", b"6/0"))
        with pytest.raises(UserError, match=r"cannot read image 5, in .*: its captions are not those of the index"):
            ShardDataset(own_shards, transform, tokenizer)[Draw(5, [1])]

    def test_a_shard_that_is_cut_or_gone_since(self, own_shards):
        dataset = ShardDataset(own_shards, transform, tokenizer, on_error="skip")
        last = int(dataset.collection.starts[7] + dataset.collection.sizes[7])
        with open(own_shards[1], "r+b") as stream:
            stream.truncate(last - 1)
        Path(own_shards[2]).unlink()
        items = dataset.__getitems__(range(12))
        assert {item.index for item in items} == {0, 1, 2, 3, 4, 5, 6}
        for index in (7, 8):
            with pytest.raises(UserError, match=f"cannot read image {index}, in {own_shards[index // 4]}: "):
                dataset[index]  # a batch without any other

    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    def test_an_error_of_the_transform_is_no_damage(self, shards, on_error):
        with pytest.raises(ZeroDivisionError):
            ShardDataset(shards, lambda image: 1 / 0, tokenizer, on_error=on_error)[0]


def encode(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


class TestFeatures:
    @pytest.fixture
    def shard(self, tmp_path):
        """Images with 1, 2 and 3 rows of features."""
        arrays = [encode(np.full((rows, 2), rows, dtype="float16")) for rows in (1, 2, 3)]
        members = [
            (f"{index}.{name}", data)
            for index in range(3)
            for name, data in (("npy", arrays[index]), ("txt", f"{index}/0"))
        ]
        (tmp_path / "x.tar").write_bytes(encode_archive(members))
        return str(tmp_path / "x.tar")

    def test_batches_are_padded_with_zeros(self, shard):
        dataset = ShardDataset(shard, torch.from_numpy, tokenizer, inputs="features")
        ((features, texts, *_),) = batches_of(dataset, 3)
        assert features.dtype == torch.float32
        for rows, (index, _) in zip(features, texts.tolist(), strict=True):
            assert rows.tolist() == [[index + 1] * 2] * (index + 1) + [[0, 0]] * (2 - index)

    def test_pictures_are_no_features(self, shard, shards):
        for where, inputs, found in ((shard, "images", "npy, txt"), (shards, "features", "json, png")):
            dataset = ShardDataset(where, transform, tokenizer, inputs=inputs)
            with pytest.raises(UserError, match=f"cannot read image 0, in .*: it has no {inputs}, .* it has {found}"):
                dataset[0]

    @pytest.mark.parametrize(("dtype", "order"), [("<f2", "C"), (">f4", "C"), ("<f8", "F")])
    def test_floats(self, dtype, order):
        features = decode_features(encode(np.asarray([[1.5, -2, 0], [0, 0, 0]], dtype=dtype, order=order)))
        assert (features.dtype, features.flags.c_contiguous) == (np.float32, True)
        assert features.tolist() == [[1.5, -2, 0], [0, 0, 0]]

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (pickle.dumps(np.ones((2, 3))), "cannot be read"),
            (encode(np.ones((2, 3)))[:-1], "cannot be read"),
            (encode(np.ones((1, 2, 3))), r"must be \(N, W\) of floats, it is \(1, 2, 3\) of float64"),
            (encode(np.ones((2, 3), dtype=int)), "it is .* of int64"),
            (encode(np.zeros((2, 3))), r"\(2, 3\) has .*only zeros"),
            (encode(np.array([[1, np.nan]])), "not finite"),
            (encode(np.array([[1, 1e39]])), "not finite in 32 bits"),
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_what_is_an_error(self, data, reason):
        with pytest.raises(UserError, match=reason):
            decode_features(data)


COUNTS = [1 + index % 4 for index in range(10)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Ten images with one to four captions in three shards."""
    return ShardDataset(write_numbered(tmp_path_factory.mktemp("counted"), COUNTS), transform, tokenizer)


class TestEvaluation:
    def test_captions_of_an_image_in_any_number(self, counted):
        loader = evaluation_loader(counted, 4)
        assert len(loader) == 3
        for batch in loader:
            assert numbers_of(batch.images) == list(range(batch.start, min(batch.start + 4, 10)))
            owners = [(index, number) for index in numbers_of(batch.images) for number in range(COUNTS[index])]
            assert list(map(tuple, batch.texts.tolist())) == owners
            assert (batch.start + batch.image_of_caption).tolist() == [index for index, _ in owners]

    @pytest.mark.parametrize(("processes", "workers"), [(1, 2), (2, 0), (3, 1), (5, 0)])
    def test_batches_are_the_same_for_any_split(self, counted, processes, workers):
        before = torch.get_rng_state()
        expected = list(evaluation_loader(counted, 3))
        found = []
        for rank in range(processes):
            found += evaluation_loader(counted, 3, workers=workers, rank=rank, world_size=processes)
        found.sort(key=lambda batch: batch.start)
        assert [batch.start for batch in found] == [batch.start for batch in expected] == [0, 3, 6, 9]
        for batch, same in zip(found, expected, strict=True):
            assert all(torch.equal(tensor, other) for tensor, other in zip(batch[:3], same[:3], strict=True))
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_an_unreadable_image_is_an_error_even_where_training_skips_it(self, tmp_path, workers):
        shards = write_numbered(tmp_path, [1] * 8)
        replace_member(shards[1], "numbered-005.png", encode_picture()[:50])
        dataset = ShardDataset(shards, transform, tokenizer, on_error="skip")
        with pytest.raises(UserError, match=rf"cannot read image 5, in {shards[1]}"):
            list(evaluation_loader(dataset, 3, workers=workers))
        assert len(dataset.__getitems__([4, 5])) == 2, "the data set itself goes on"


def accelerate_batches(rank, shards):
    """Return what a process gets of batches of 16 images with 5 captions, which accelerate reads in one and cuts."""
    configuration = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    dataset = ShardDataset(shards, transform, tokenizer, captions="nested")
    sampler = CaptionSampler(dataset.collection, 16, captions_per_image="all", rank=0, world_size=1)
    return [list(batch) for batch in accelerator.prepare(training_loader(dataset, sampler))]


class TestLoadersOfOthers:
    def test_accelerate_cuts_batches_into_parts_of_whole_images(self, shards):
        parts = in_processes(accelerate_batches, 2, shards, joined=False)
        dataset = ShardDataset(shards, transform, tokenizer, captions="nested")
        whole = batches_of(dataset, 16, captions_per_image="all")
        joined = [[torch.cat(tensors) for tensors in zip(*batch, strict=True)] for batch in zip(*parts, strict=True)]
        assert [len(images) for images, *_ in parts[0]] == [8] * 4
        assert_equal(joined, whole)
