import random
from itertools import islice, repeat

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vl_plugins.data.batching import DistinctBatches, Group, Sample, normalize_caption
from vl_plugins.errors import UserError


def samples_of(*captions, groups=None):
    """Samples with the keys a, b, c, ...; a string is a single caption."""
    groups = groups or [None] * len(captions)
    return [
        Sample(chr(97 + index), index, [texts] if isinstance(texts, str) else texts, group=group and Group("d", group))
        for index, (texts, group) in enumerate(zip(captions, groups, strict=True))
    ]


def batches_of(samples, batch_size, num_batches, *passes, max_waiting=100, **options):
    """Batches of a first pass, and of others, by default repeats of the first."""
    passes = [samples, *passes] if passes else repeat(samples)
    return DistinctBatches(passes, batch_size, num_batches, max_waiting=max_waiting, **options)


def keys(batches):
    return ["".join(sample.key for sample in batch) for batch in batches]


class TestFirstPass:
    @pytest.mark.parametrize(
        ("captions", "batch_size", "expected"),
        [
            (["1", "2", "3", "4"], 2, ["ab", "cd"]),
            (["x", "x", "1", "2", "3", "4"], 2, ["ac", "bd", "ef"]),
            (["x", "x", "x", "x", "1", "2", "3", "4"], 2, ["ae", "bf", "cg", "dh"]),
            (["x", "y", "x", "y", "1", "2"], 3, ["abe", "cdf"]),
            (["x", "x", "x", "y", "y", "y"], 2, ["ad", "be", "cf"]),
            (["a dog.", "\ta  DOG.\n", "a cat.", "a cow."], 2, ["ac", "bd"]),
            ([["1", "x"], ["x", "4"], ["2", "3"], ["5", "6"]], 2, ["ac", "bd"]),
            ([["x", "x"], ["y", "Y"]], 2, ["ab"]),
        ],
        ids="distinct waits oldest-first both-wait waiting-alone normalized any-caption of-one-image".split(),
    )
    def test_equal_captions_do_not_meet(self, captions, batch_size, expected):
        batches = batches_of(samples_of(*captions), batch_size, len(expected))
        assert keys(batches) == expected
        assert batches.left_out == {}

    def test_duplicates_may_be_allowed_but_not_the_same_image(self):
        samples = samples_of("x", "x", "x", "x")
        assert keys(batches_of([samples[0], *samples], 2, 2, allow_duplicates=True)) == ["ab", "cd"]

    def test_a_batch_is_made_as_soon_as_it_is_full(self):
        def stream():
            yield from samples_of(["x", "y"], "x", "y", "1")
            raise AssertionError("read too far")

        assert keys(islice(batches_of(stream(), 2, 3), 2)) == ["ad", "bc"], "b and c need no other"
        assert keys(batches_of(stream(), 2, 2)) == ["ad", "bc"]

    def test_only_what_has_a_place_is_prepared(self):
        prepared = []
        prepare = lambda sample: prepared.append(sample.key) or sample  # noqa: E731
        batches = iter(batches_of(samples_of("x", "x", "1", "2"), 2, 2, prepare=prepare))
        assert keys(islice(batches, 1)) == ["ac"]
        assert prepared == ["a", "c"]
        assert keys(batches) == ["bd"]
        assert prepared == ["a", "c", "b", "d"]

    @pytest.mark.parametrize(("unusable", "expected"), [("a", ["bc", "de"]), ("b", ["ac", "de"])])
    def test_the_next_one_takes_the_place_of_an_unusable_one(self, unusable, expected):
        samples = samples_of("x", "x", "1", "2", "3")
        batches = batches_of(samples, 2, 2, prepare=lambda sample: None if sample.key == unusable else sample)
        assert keys(batches) == expected
        assert batches.left_out == {}


class TestFurtherPasses:
    def test_they_complete_what_is_missing(self):
        batches = batches_of(samples_of("x", "x", "x", "1"), 2, 2)
        stream = iter(batches)
        assert keys(islice(stream, 1)) == ["ad"]
        assert batches.left_out == {}
        assert keys(stream) == ["bd"]
        assert batches.left_out == {2: "c"}

    def test_an_image_is_not_repeated_within_a_batch(self):
        batches = batches_of(samples_of("1", "2", "3"), 2, 3)
        assert keys(batches) == ["ab", "ca", "bc"]
        assert batches.left_out == {}

    def test_a_repeated_image_does_not_wait(self):
        assert keys(batches_of(samples_of("x", "x", "1"), 2, 4)) == ["ac", "bc", "ac", "ac"]

    def test_more_than_may_wait_are_left_out_but_may_come_back(self):
        first = samples_of("x", "x", "x", "1")
        batches = batches_of(first, 2, 1, max_waiting=1)
        assert (keys(batches), batches.left_out) == (["ad"], {1: "b", 2: "c"})
        batches = batches_of(first, 2, 2, first[2:], max_waiting=0)
        assert (keys(batches), batches.left_out) == (["ad", "cd"], {1: "b"})

    def test_a_batch_that_nothing_goes_with_is_given_up(self):
        first = samples_of(["x", "y"], "x", "y", "1")
        # a and d block the rest; the other order does not.
        batches = batches_of([first[0], first[3]], 3, 1, first, first[1:])
        assert keys(batches) == ["bcd"]
        assert batches.left_out == {0: "a"}, "d has been shown after all"


class TestGroups:
    def test_images_of_a_group_do_not_meet(self):
        samples = samples_of(*"12345678", groups=["x", "x", None, None, "y", "x", "y", "z"])
        assert keys(batches_of(samples, 2, 4)) == ["ac", "bd", "ef", "gh"]

    def test_a_group_is_no_caption_and_belongs_to_its_data_set(self):
        samples = samples_of("1", "x", groups=["x", "1"])
        assert keys(batches_of(samples, 2, 1)) == ["ab"]
        samples[1] = samples[1]._replace(group=Group("other", "x"))
        assert keys(batches_of(samples, 2, 1)) == ["ab"]

    def test_positives_may_meet_and_share_captions(self):
        """They are no false negatives of each other, but still of others."""
        samples = samples_of("1", "1", "1", "1", "2", groups=["x", "x", "y", None, None])
        assert keys(batches_of(samples, 3, 1, same_group="positive")) == ["abe"]


class TestErrors:
    @pytest.mark.parametrize(
        ("captions", "groups", "batch_size", "reason"),
        [
            (
                ["a dog", "A dog"],
                None,
                2,
                "images with different captions .* x.tar: the caption 'a dog' belongs to",
            ),
            (["1", "2"], ["x", "x"], 2, "images with different groups .* x.tar: the group 'x' belongs to several"),
            (["1", "2"], None, 3, r"^no full batch of 3 can be read from x\.tar$"),
            ([], None, 1, r"^no full batch of 1 can be read from x\.tar$"),
        ],
    )
    def test_no_batch(self, captions, groups, batch_size, reason):
        with pytest.raises(UserError, match=reason):
            list(batches_of(samples_of(*captions, groups=groups), batch_size, 1, source="x.tar"))

    def test_the_reason_is_that_of_the_last_pass(self):
        """Duplicates of an earlier pass are not why there are too few images in this one."""
        with pytest.raises(UserError, match="no full batch of 4 can be read"):
            list(batches_of(samples_of("x", "x", "1"), 4, 1, *repeat(samples_of("1", "2"), 2)))


def texts_of(sample):
    return {normalize_caption(caption) for caption in sample.captions}


captions = st.lists(st.sampled_from(["x", "X", "y", " y", "z", *map(str, range(30))]), min_size=1, max_size=3)


@given(
    captions=st.lists(captions, min_size=1, max_size=40),
    batch_size=st.integers(1, 6),
    max_waiting=st.integers(0, 12),
    unusable=st.sets(st.integers(0, 39), max_size=3),
)
@example(captions=[["x"]] * 8, batch_size=4, max_waiting=3, unusable=set())
def test_any_captions(captions, batch_size, max_waiting, unusable):
    samples = [Sample(str(index), index, texts) for index, texts in enumerate(captions)]
    num_batches = max(len(samples) // batch_size, 1)

    def passes():
        rng = random.Random(0)
        yield samples
        while True:
            yield rng.sample(samples, len(samples))

    def prepare(sample):
        return None if sample.position in unusable else sample

    def make():
        batches = DistinctBatches(passes(), batch_size, num_batches, max_waiting=max_waiting, prepare=prepare)
        made, error = [], None
        try:
            made.extend(batches)
        except UserError as raised:
            error = str(raised)
        return made, batches.left_out, error

    made, left_out, error = make()
    assert make() == (made, left_out, error)
    for batch in made:
        assert len({sample.position for sample in batch}) == len(batch) == batch_size
        assert sum(len(texts_of(sample)) for sample in batch) == len(set().union(*map(texts_of, batch)))
    if error is not None:
        assert error.startswith("no ")
        return
    assert len(made) == num_batches
    seen = {sample.position for batch in made for sample in batch}
    assert seen.isdisjoint(left_out)
    if len(samples) == num_batches * batch_size:
        assert seen | set(left_out) | unusable >= set(range(len(samples))), "nothing is lost without a word"
    if not unusable and sum(map(len, map(texts_of, samples))) == len(set().union(*map(texts_of, samples))):
        assert [sample.position for batch in made for sample in batch] == list(range(num_batches * batch_size))
