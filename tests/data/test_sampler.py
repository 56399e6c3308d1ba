"""Batches of training, against their definition: a stream of passes, each of them a permutation of the images."""

import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.numbered_shards import make_collection, numbered, tokenizer, transform, write_numbered
from vl_plugins.data import CaptionSampler, Collection, ShardDataset, training_loader
from vl_plugins.data.index import HASHES, IndexHead
from vl_plugins.data.sampler import parse_captions_per_image
from vl_plugins.errors import InputWarning, UserError

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


@given(
    counts=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
    processes=st.integers(1, 4),
    mode=st.sampled_from(["random", "first", "all", 1, 3]),
    samples=st.none() | st.integers(1, 150),
    window=st.none() | st.integers(1, 70),
    seed=st.integers(0, 2**32),
    first_epoch=st.sampled_from([0, 0, 1, 7]),
)
def test_every_image_once_a_pass_and_none_twice_in_a_batch(
    counts, batch_size, processes, mode, samples, window, seed, first_epoch
):
    collection, size = make_collection([["a"] * count for count in counts]), batch_size * processes
    options = {"captions_per_image": mode, "samples_per_epoch": samples, "shuffle_window": window, "seed": seed}
    if len(counts) < size:
        with pytest.raises(UserError, match="make no full batch"):
            CaptionSampler(collection, batch_size, rank=0, world_size=processes, **options)
        return
    steps = len(counts) // size if samples is None else -(-samples // size)
    batches = []
    for number in range(first_epoch, first_epoch + 3):
        batches += epoch(collection, batch_size, number, processes=processes, **options)
    assert len(batches) == 3 * steps
    width = max(counts) if mode == "all" else mode if isinstance(mode, int) else 1
    for batch in batches:
        assert len({draw.image for draw in batch}) == size
        for draw in batch:
            assert len(draw.captions) == width
            assert len(set(draw.captions)) == min(width, counts[draw.image])
            assert min(draw.captions) >= 0
            assert max(draw.captions) < counts[draw.image]
    images, place = images_of(batches), first_epoch * steps * size
    missing = -place % len(counts)  # places until the next pass begins
    for start in range(missing, len(images) - len(counts) + 1, len(counts)):
        assert sorted(images[start : start + len(counts)]) == list(range(len(counts)))
    assert len(set(images[:missing])) == len(images[:missing])


class TestEpochs:
    def test_the_next_epoch_goes_on(self):
        """Without set_epoch, too: five epochs of 10 images are two passes over 25."""
        collection = make_collection(numbered([1] * 25))
        sampler = CaptionSampler(collection, 5, samples_per_epoch=10)
        images = [draw.image for _ in range(5) for draw in sampler]
        assert sorted(images[:25]) == sorted(images[25:]) == list(range(25))

    def test_samples_are_rounded_up_to_batches(self):
        collection = make_collection(numbered([1] * 25))
        sizes = []
        for samples in (None, 1, 10, 11, 60):
            sizes.append(len(CaptionSampler(collection, 5, samples_per_epoch=samples, rank=1, world_size=2)))
        assert sizes == [10, 5, 5, 10, 30]
        for wrong in (0, 2.5, True):
            with pytest.raises(ValueError, match="samples_per_epoch must be an integer >= 1"):
                CaptionSampler(collection, 5, samples_per_epoch=wrong)

    def test_equal_captions_are_the_losses_business(self):
        with pytest.warns(InputWarning, match="distinct_captions has no effect"):
            CaptionSampler(make_collection([["a"]] * 4), 2, distinct_captions=True)

    def test_a_later_pass_of_few_images(self):
        """What is moved back in one pass may be among the last of it, which the next pass has to know."""
        collection = make_collection(numbered([1] * 7))
        whole = [epoch(collection, 5, number) for number in range(40)]
        sampler = CaptionSampler(collection, 5)
        for number in (39, 3, 17):
            sampler.set_epoch(number)
            assert [list(sampler)] == whole[number]

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

    @pytest.mark.parametrize("number", [2, 3])
    def test_all_choices_are_as_likely(self, number):
        """Ordered pairs and triples of four captions, in 24,000 draws."""
        collection = make_collection(numbered([4] * 100))
        counts = Counter()
        for index in range(240):
            for draw in chain(*epoch(collection, 100, index, captions_per_image=number)):
                counts[tuple(draw.captions)] += 1
        choices = {2: 12, 3: 24}[number]
        assert len(counts) == choices
        expected = 24_000 / choices
        # Of a chi-squared variable with n degrees of freedom, n + 6 * sqrt(2 n) is exceeded once in a million.
        statistic = sum((count - expected) ** 2 / expected for count in counts.values())
        assert statistic < choices + 6 * (2 * choices) ** 0.5

    def test_all_in_source_order(self):
        (batch,) = epoch(make_collection(numbered(FEW_OR_MANY)), 22, captions_per_image="all")
        assert {draw.image: draw.captions for draw in batch} == {
            image: [number % count for number in range(7)] for image, count in enumerate(FEW_OR_MANY)
        }

    def test_first(self):
        collection = make_collection(numbered([2] * 24))
        (batch,) = epoch(collection, 24, captions_per_image="first")
        assert sorted((draw.image, *draw.captions) for draw in batch) == [(image, 0) for image in range(24)]

    def test_what_it_may_be(self):
        values = "random", "first", "all", "5", 5
        assert [parse_captions_per_image(value) for value in values] == ["random", "first", "all", 5, 5]
        for value in (0, "0", -1, 2.5, "some", ""):
            with pytest.raises(UserError, match="must be 'random', 'first', 'all' or a positive number"):
                parse_captions_per_image(value)


class TestState:
    @pytest.mark.parametrize("steps", [None, 0, 3])
    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_rest_of_the_stream(self, steps, processes):
        collection = make_collection(numbered([3] * 23))
        options = {"captions_per_image": 2, "samples_per_epoch": 40, "rank": processes - 1, "world_size": processes}
        sampler = CaptionSampler(collection, 4, **options)
        sampler.set_epoch(2)
        read = [draw for _ in range(2) for draw in sampler]
        state = sampler.state_dict(steps)
        other = CaptionSampler(collection, 4, **options)
        other.load_state_dict(state)
        rest = [draw for _ in range(3) for draw in other]
        sampler.set_epoch(3)
        stream = [draw for _ in range(4) for draw in sampler]
        start = len(sampler) if steps is None else steps * 4
        assert read[len(sampler) :] == stream[: len(sampler)]
        assert rest == stream[start : start + len(rest)]

    @pytest.mark.parametrize("workers", [0, 1, 4])
    def test_any_number_of_workers(self, workers, tmp_path):
        dataset = ShardDataset(write_numbered(tmp_path, [3] * 14), transform, tokenizer)
        sampler = CaptionSampler(dataset.collection, 4, samples_per_epoch=20)
        expected = [draw.image for _ in range(3) for draw in sampler]
        loader = training_loader(dataset, sampler, workers=workers)
        sampler.set_epoch(0)
        images, steps = [], 0
        for batch in loader:  # which reads ahead
            images += batch[2].tolist()
            steps += 1
            if steps == 2:
                break
        sampler.load_state_dict(sampler.state_dict(steps))
        for _ in range(2):
            for batch in loader:
                images += batch[2].tolist()
        assert images == expected[: len(images)]
        assert len(images) == 4 * (2 + 5 + 5)

    @pytest.mark.parametrize(
        ("images", "batch_size", "options", "name"),
        [
            (25, 4, {}, "images was 24, now 25"),
            (24, 3, {}, "global_batch was 4, now 3"),
            (24, 4, {"seed": 1}, "seed was 0, now 1"),
            (24, 4, {"shuffle_window": 5}, "shuffle_window was 24, now 5"),
        ],
    )
    def test_of_another_stream(self, images, batch_size, options, name):
        state = CaptionSampler(make_collection(numbered([1] * 24)), 4).state_dict()
        other = CaptionSampler(make_collection(numbered([1] * images)), batch_size, **options)
        with pytest.raises(UserError, match=name):
            other.load_state_dict(state)


def made_up(images, captions=5, per_shard=10_000):
    """Yield the facts of shards of made-up images."""
    for first in range(0, images, per_shard):
        number = min(per_shard, images - first)
        places = np.arange(number) * 100_000
        hashes = np.arange(first * captions, (first + number) * captions, dtype=HASHES)
        sizes, counts = [100_000] * number, [captions] * number
        yield IndexHead(size=0, starts=places.tolist(), sizes=sizes, counts=counts, caption_hashes=hashes.tobytes())


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
