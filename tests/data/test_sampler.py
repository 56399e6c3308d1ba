"""Batches of a training epoch, against their definition."""

import contextlib
import logging
import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.numbered_shards import make_collection, numbered
from vl_plugins.data import CaptionSampler, Collection, ShardDataset, normalize_caption
from vl_plugins.data.index import HASHES, IndexHead
from vl_plugins.data.sampler import parse_captions_per_image
from vl_plugins.errors import UserError

FEW_OR_MANY = [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2


def epoch(collection, batch_size, number=0, *, processes=1, **options):
    """Return the batches of an epoch, with the parts of all processes together."""
    parts = []
    for rank in range(processes):
        sampler = CaptionSampler(collection, batch_size, rank=rank, world_size=processes, **options)
        sampler.set_epoch(number)
        draws = list(sampler)
        assert len(draws) == len(sampler)
        parts.append([draws[start : start + batch_size] for start in range(0, len(draws), batch_size)])
    return [[*chain(*batch)] for batch in zip(*parts, strict=True)]


def images_of(batches):
    return [draw.image for batch in batches for draw in batch]


class TestEpochs:
    @pytest.mark.parametrize(("batch_size", "processes"), [(6, 1), (3, 2), (5, 1), (2, 3), (1, 4)])
    def test_an_image_at_most_once_over_all_processes(self, batch_size, processes):
        collection = make_collection(numbered([5] * 24))
        batches = epoch(collection, batch_size, processes=processes)
        images = images_of(batches)
        assert len(batches) == 24 // (batch_size * processes)
        assert len(images) == len(set(images)) == len(batches) * batch_size * processes

    @pytest.mark.parametrize("captions", ["random", "all"])
    def test_processes_have_the_parts_of_one_batch(self, captions):
        collection = make_collection([[str(index % 5), str(index)] for index in range(48)])
        whole = epoch(collection, 8, 1, captions_per_image=captions)
        for processes in (2, 4):
            parts = epoch(collection, 8 // processes, 1, processes=processes, captions_per_image=captions)
            assert parts == whole

    def test_an_epoch_depends_on_seed_and_number_alone(self):
        collection = make_collection(numbered([5] * 24))
        found = {}
        for seed in (0, 1):
            sampler = CaptionSampler(collection, 4, seed=seed)
            for number in range(3):
                sampler.set_epoch(number)
                found[seed, number] = list(sampler)
                assert found[seed, number] == [*chain(*epoch(collection, 4, number, seed=seed))]
        assert len({tuple(draw.image for draw in draws) for draws in found.values()}) == 6
        assert len({tuple(sorted((draw.image, *draw.captions) for draw in draws)) for draws in found.values()}) == 6
        assert len({draw.seed for draws in found.values() for draw in draws}) == 6 * 24

    def test_the_process_is_that_of_the_environment(self, monkeypatch):
        collection = make_collection(numbered([1] * 24))
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert list(CaptionSampler(collection, 4)) == list(CaptionSampler(collection, 4, rank=1, world_size=2))

    def test_too_few_images(self):
        collection = make_collection(numbered([1] * 24))
        with pytest.raises(UserError, match=r"24 images make no full batch of 13 for each of 2 .*can be at most 12"):
            CaptionSampler(collection, 13, rank=0, world_size=2)


class TestShuffleWindow:
    def test_a_window_has_images_of_few_shards(self):
        """Windows of 12 images reach over at most four shards of four."""
        collection = make_collection(numbered([1] * 96))
        orders = set()
        for number in range(3):
            images = images_of(epoch(collection, 1, number, shuffle_window=12))
            assert sorted(images) == list(range(96))
            shards = [[image // 4 for image in images[start : start + 12]] for start in range(0, 96, 12)]
            assert all(len(set(window)) <= 4 for window in shards)
            assert any(window != sorted(window, key=window.index) for window in shards), "images are shuffled"
            orders.add(tuple(frozenset(window) for window in shards))
        assert len(orders) == 3, "so are shards"
        without = images_of(epoch(collection, 1))
        assert len({image // 4 for image in without[:12]}) > 6, "all meet"


class TestCaptionsPerImage:
    def test_random(self):
        collection = make_collection(numbered([5] * 24))
        counts = Counter(
            number for index in range(60) for draw in chain(*epoch(collection, 24, index)) for number in draw.captions
        )
        assert counts.total() == 60 * 24
        assert all(230 < counts[number] < 350 for number in range(5))

    def test_a_number(self):
        (batch,) = epoch(make_collection(numbered(FEW_OR_MANY)), 22, captions_per_image=6)
        for image, captions, _ in batch:
            assert len(captions) == 6
            assert len(set(captions)) == min(FEW_OR_MANY[image], 6)
            assert FEW_OR_MANY[image] > 5 or captions[5] == captions[0], "one with fewer repeats them in turn"
        assert any(captions != sorted(captions) for _, captions, _ in batch)

    def test_all_in_source_order(self):
        (batch,) = epoch(make_collection(numbered(FEW_OR_MANY)), 22, captions_per_image="all")
        assert {draw.image: draw.captions for draw in batch} == {
            image: [number % count for number in range(7)] for image, count in enumerate(FEW_OR_MANY)
        }

    def test_first(self):
        """Others are no reason for an image to wait."""
        collection = make_collection([[str(image), str((image + 1) % 24)] for image in range(24)])
        (batch,) = epoch(collection, 24, captions_per_image="first")
        assert sorted((draw.image, *draw.captions) for draw in batch) == [(image, 0) for image in range(24)]

    def test_what_it_may_be(self):
        values = "random", "first", "all", "5", 5
        assert [parse_captions_per_image(value) for value in values] == ["random", "first", "all", 5, 5]
        for value in (0, "0", -1, 2.5, "some", ""):
            with pytest.raises(UserError, match="must be 'random', 'first', 'all' or a positive number"):
                parse_captions_per_image(value)


class TestDistinctCaptions:
    @pytest.mark.parametrize(("captions", "expected"), [("first", [[0], [1]]), (2, [[0, 0], [1, 1]])])
    def test_another_caption_takes_the_place_of_a_shared_one(self, captions, expected):
        collection = make_collection([["a dog."], [" A  dog.\n", "b"]], images_per_shard=100)
        (batch,) = epoch(collection, 2, captions_per_image=captions, shuffle_window=1)
        assert [draw.captions for draw in batch] == expected

    @pytest.mark.parametrize(
        ("captions", "size", "expected"),
        [
            (["1", "2", "3", "4"], 2, ["ab", "cd"]),
            (["x", "x", "1", "2", "3", "4"], 2, ["ac", "bd", "ef"]),
            (["x", "x", "x", "x", "1", "2", "3", "4"], 2, ["ae", "bf", "cg", "dh"]),
            (["x", "y", "x", "y", "1", "2"], 3, ["abe", "cdf"]),
            (["x", "x", "x", "y", "y", "y"], 2, ["ad", "be", "cf"]),
            (["a dog.", "\ta  DOG.\n", "a cat.", "a cow."], 2, ["ac", "bd"]),
            ([["1", "2", "3"], "1", "1", "2", "3", "9", "8", "7"], 2, ["af", "bd", "ce", "gh"]),
        ],
        ids="distinct waits oldest-first both-wait waiting-alone normalized some-wait-on".split(),
    )
    def test_an_image_without_a_caption_of_its_own_waits(self, captions, size, expected, caplog):
        captions = [[texts] if isinstance(texts, str) else texts for texts in captions]
        # The window keeps the order of a shard.
        collection = make_collection(captions, images_per_shard=100)
        batches = epoch(collection, size, captions_per_image="all", shuffle_window=1)
        assert ["".join("abcdefgh"[draw.image] for draw in batch) for batch in batches] == expected
        assert not caplog.messages

    def test_what_is_left_out_is_logged_and_images_of_the_epoch_fill_the_batches(self, caplog):
        """One of twelve images of one caption fits into each of three batches, so twelve others fill 21 places."""
        collection = make_collection([["0"]] * 12 + [[str(index)] for index in range(1, 13)])
        batches = epoch(collection, 4, processes=2)
        assert len(batches) == 3
        assert all(len({draw.image for draw in batch}) == 8 for batch in batches)
        images = set(images_of(batches))
        assert len(images & set(range(12))) == 3
        assert images >= set(range(12, 24))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.message.startswith("epoch 0: 9 of 24 images are left out, because all their captions are")

    def test_no_such_batch(self):
        collection = make_collection([["A dog"], ["a dog"]] * 4)
        with pytest.raises(UserError, match=r"no 2 images have different captions: .*--allow-duplicate-captions"):
            epoch(collection, 2)
        assert sorted(images_of(epoch(collection, 4, distinct_captions=False))) == list(range(8))


def assert_distinct(batches, captions, groups=None):
    """No image is twice in a batch, and no caption belongs to images of different labels."""
    groups = groups or [None] * len(captions)
    for batch in batches:
        assert len({draw.image for draw in batch}) == len(batch)
        owners = {}
        for draw in batch:
            label = draw.image if groups[draw.image] is None else str(groups[draw.image])
            for number in draw.captions:
                assert owners.setdefault(normalize_caption(captions[draw.image][number]), label) == label


texts = st.lists(st.sampled_from(["x", "X", "y", " y", "z", *map(str, range(30))]), min_size=1, max_size=3)


@given(
    captions=st.lists(texts, min_size=1, max_size=40),
    groups=st.lists(st.sampled_from([None, None, "a", "b"]), min_size=40, max_size=40),
    batch_size=st.integers(1, 4),
    processes=st.integers(1, 2),
    mode=st.sampled_from(["random", "first", "all", 2]),
    window=st.sampled_from([None, 5]),
)
@example([["x"]] * 8, [None] * 40, 4, 1, "all", None)
def test_any_captions(captions, groups, batch_size, processes, mode, window):
    groups, size = groups[: len(captions)], batch_size * processes
    collection = make_collection(captions, groups=groups)
    options = {"processes": processes, "captions_per_image": mode, "shuffle_window": window}
    owners = {}
    for index, (group, of_image) in enumerate(zip(groups, captions, strict=True)):
        for text in of_image:
            owners.setdefault(normalize_caption(text), set()).add(group or index)
    with_own = [
        of_image for of_image in captions if any(len(owners[normalize_caption(text)]) == 1 for text in of_image)
    ]
    batches = None
    with contextlib.suppress(UserError):
        batches = epoch(collection, batch_size, **options)
    if batches is None:
        assert len(with_own) < size
        return
    assert len(batches) == len(captions) // size
    assert all(len(batch) == size for batch in batches)
    assert_distinct(batches, captions, groups)
    width = max(map(len, captions)) if mode == "all" else mode if mode == 2 else 1
    assert all(len(draw.captions) == width for batch in batches for draw in batch)


def made_up(images, captions=5, per_shard=10_000):
    """Yield the facts of shards of made-up images."""
    for first in range(0, images, per_shard):
        number = min(per_shard, images - first)
        places = np.arange(number) * 100_000
        hashes = np.arange(first * captions, (first + number) * captions, dtype=HASHES)
        sizes, counts = [100_000] * number, [captions] * number
        yield IndexHead(size=0, starts=places.tolist(), sizes=sizes, counts=counts, captions=hashes.tobytes())


@pytest.mark.parametrize("images", [100_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_memory_of_many_images(images):
    tracemalloc.start()
    shards = [f"{number:06}.tar" for number in range(-(-images // 10_000))]
    collection = Collection(shards, made_up(images))
    dataset = ShardDataset(collection, str, str)
    draws = iter(CaptionSampler(dataset.collection, 100, captions_per_image=5))
    next(draws)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 60 * images < held < 100 * images


def test_a_batch_that_cannot_be_filled_begins_with_other_images():
    collection = make_collection([["a"], ["a"], ["b"], ["a"]], groups=["g", "g", None, None])
    for number in range(30):
        assert sorted(images_of(epoch(collection, 3, number))) == [0, 1, 2]
