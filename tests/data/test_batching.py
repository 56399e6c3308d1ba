import random
from itertools import islice, repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vl_plugins.data.batching import DistinctBatches, Group, Sample
from vl_plugins.data.captions import normalize_caption
from vl_plugins.utils.errors import UserError


def samples_of(*shown):
    """Samples with the keys a, b, c, ... that show these captions; a string is a single caption."""
    texts = [[captions] if isinstance(captions, str) else list(captions) for captions in shown]
    return [Sample(chr(97 + index), index, captions, captions) for index, captions in enumerate(texts)]


def keys(batches):
    return ["".join(sample.key for sample in batch) for batch in batches]


def batches_of(samples, batch_size, num_batches=100, *, max_waiting=100, **options):
    """One pass."""
    return DistinctBatches([samples], batch_size, num_batches, max_waiting=max_waiting, **options)


def any_caption(sample, taken):
    free = [caption for caption in sample.captions if normalize_caption(caption) not in taken]
    return free[: len(sample.shown)] or None


class TestOnePass:
    def test_distinct_captions_keep_their_order(self):
        batches = batches_of(samples_of("1", "2", "3", "4", "5"), 2)
        assert keys(batches) == ["ab", "cd"]
        assert batches.left_out == {4: "e"}
        assert batches.example is None

    def test_one_that_does_not_fit_waits_for_the_next_batch(self):
        batches = batches_of(samples_of("x", "x", "1", "2", "3", "4"), 2)
        assert keys(batches) == ["ac", "bd", "ef"]
        assert batches.left_out == {}
        assert batches.example == "x"

    def test_the_oldest_is_offered_first(self):
        assert keys(batches_of(samples_of("x", "x", "x", "x", "1", "2", "3", "4"), 2)) == ["ae", "bf", "cg", "dh"]
        # The y could not wait for the x before it.
        assert keys(batches_of(samples_of("x", "y", "x", "y", "1", "2"), 3)) == ["abe", "cdf"]

    def test_those_that_wait_may_fill_several_batches(self):
        samples = samples_of("x", "x", "x", "y", "y", "y", "1")
        # a waits for a third caption; b and d, c and f have found each other by then.
        batches = batches_of(samples, 3)
        assert keys(batches) == ["adg"]
        batches = batches_of(samples, 2)
        assert keys(batches) == ["ad", "be", "cf"]

    @pytest.mark.parametrize("text", ["A dog.", "a  DOG.", "\ta dog.\n"])
    def test_texts_are_compared_as_a_tokenizer_sees_them(self, text):
        assert keys(batches_of(samples_of("a dog.", text, "a cat.", "a cow."), 2)) == ["ac", "bd"]

    def test_any_of_several_captions_counts(self):
        samples = samples_of(["1", "x"], ["2", "3"], ["x", "4"], ["5", "6"])
        assert keys(batches_of(samples, 2)) == ["ab", "cd"]
        assert keys(batches_of([samples[index] for index in (0, 2, 1, 3)], 2)) == ["ab", "cd"]

    def test_captions_of_one_image_may_coincide(self):
        assert keys(batches_of(samples_of(["x", "x"], ["y", "Y"]), 2)) == ["ab"]

    def test_an_image_does_not_meet_itself(self):
        samples = samples_of("1", "2", "3")
        again = samples[0]._replace(shown=["other"], key="A")
        assert keys(batches_of([samples[0], again, *samples[1:]], 2)) == ["ab"]

    def test_duplicates_may_be_allowed_but_not_the_same_image(self):
        samples = samples_of("x", "x", "x", "x")
        assert keys(batches_of([samples[0], *samples], 2, allow_duplicates=True)) == ["ab", "cd"]

    def test_a_batch_is_made_as_soon_as_it_is_full(self):
        def stream():
            yield from samples_of("1", "2")
            raise AssertionError("read too far")

        assert keys(islice(batches_of(stream(), 2), 1)) == ["ab"]
        assert keys(batches_of(stream(), 2, num_batches=1)) == ["ab"]

    def test_no_batches(self):
        assert keys(batches_of(iter([None]), 2, num_batches=0)) == []


class TestPrepare:
    def test_only_what_has_a_place_is_prepared(self):
        prepared = []

        def prepare(sample):
            prepared.append(sample.key)
            return sample.key.upper()

        batches = iter(batches_of(samples_of("x", "x", "1", "2"), 2, prepare=prepare))
        assert next(batches) == ["A", "C"]
        assert prepared == ["a", "c"]
        assert next(batches) == ["B", "D"]
        assert prepared == ["a", "c", "b", "d"]

    def test_the_next_one_takes_the_place_of_an_unusable_one(self):
        samples = samples_of("x", "x", "1", "2")
        batches = batches_of(samples, 2, prepare=lambda sample: None if sample.key == "a" else sample)
        assert keys(batches) == ["bc"], "the caption of what cannot be used is free"
        assert batches.left_out == {3: "d"}

    def test_an_unusable_one_that_waited(self):
        samples = samples_of("x", "x", "1", "2", "3")
        batches = batches_of(samples, 2, prepare=lambda sample: None if sample.key == "b" else sample)
        assert keys(batches) == ["ac", "de"]
        assert batches.left_out == {}


class TestOtherCaptions:
    def test_only_at_the_end_of_the_pass(self):
        samples = [Sample("a", 0, ["x"], ["x"]), Sample("b", 1, ["x", "y"], ["x"])]
        batches = batches_of([*samples, *samples_of("", "", "1", "2")[2:]], 2, other_captions=any_caption)
        assert [[(sample.key, sample.shown) for sample in batch] for batch in batches] == [
            [("a", ["x"]), ("c", ["1"])],
            [("b", ["x"]), ("d", ["2"])],
        ]
        batches = batches_of(samples, 2, other_captions=any_caption)
        assert [[(sample.key, sample.shown) for sample in batch] for batch in batches] == [[("a", ["x"]), ("b", ["y"])]]

    def test_not_among_those_that_wait_while_there_is_more_to_come(self):
        samples = [Sample(key, index, ["x", f"{key}2"], ["x"]) for index, key in enumerate("abc")]
        samples += samples_of("", "", "", "1", "2", "3")[3:]
        batches = list(batches_of(samples, 2, other_captions=any_caption))
        assert keys(batches) == ["ad", "be", "cf"]
        assert [batch[0].shown for batch in batches] == [["x"]] * 3

    def test_after_those_that_need_none(self):
        first = [*samples_of("x", "q"), Sample("c", 2, ["x", "y"], ["x"]), Sample("d", 3, ["x"], ["x"])]
        last = [Sample("e", 4, ["x", "w"], ["x"]), Sample("f", 5, ["q"], ["q"])]
        assert keys(batches_of([*first, *last], 3, other_captions=any_caption)) == ["abc", "dfe"]

    def test_they_are_given_what_is_taken(self):
        seen = []
        samples = [*samples_of("A", "b  c"), Sample("c", 2, ["a"], ["a"])]
        list(batches_of(samples, 3, other_captions=lambda sample, taken: seen.append((sample.key, set(taken)))))
        assert seen == [("c", {"a", "b c"})]

    def test_new_captions_are_taken_too(self):
        samples = [Sample(key, index, ["x", "y"], ["x"]) for index, key in enumerate("abc")]
        batches = batches_of(samples, 3, other_captions=any_caption)
        assert keys(batches) == []
        assert batches.left_out == {0: "a", 1: "b", 2: "c"}

    def test_the_oldest_changes_first(self):
        samples = [Sample(key, index, ["x", "y"], ["x"]) for index, key in enumerate("abcd")]
        assert keys(batches_of(samples, 2, other_captions=any_caption)) == ["ab", "cd"]

    def test_at_once_when_too_many_wait(self):
        samples = [Sample(key, index, ["x", key], ["x"]) for index, key in enumerate("abcd")]
        read = []
        stream = (read.append(sample.key) or sample for sample in samples)
        batches = iter(batches_of(stream, 2, max_waiting=1, other_captions=any_caption))
        assert [(sample.key, sample.shown) for sample in next(batches)] == [("a", ["x"]), ("c", ["c"])]
        assert read == ["a", "b", "c"]
        assert keys(batches) == ["bd"]

    def test_left_out_at_once_when_there_are_none(self):
        read = []
        stream = (read.append(sample.key) or sample for sample in samples_of("x", "x", "x", "1"))
        batches = batches_of(stream, 2, max_waiting=1)
        assert keys(batches) == ["ad"]
        assert batches.left_out == {1: "b", 2: "c"}


class TestFurtherPasses:
    def test_they_complete_what_is_missing(self):
        first = samples_of("x", "x", "x", "1")
        batches = DistinctBatches([first, first, first], 2, 2, max_waiting=10)
        assert keys(batches) == ["ad", "bd"]
        assert batches.left_out == {2: "c"}
        assert batches.example == "x"

    def test_the_passes_are_read_as_far_as_needed(self):
        def passes():
            yield samples_of("x", "x")
            yield samples_of("1", "2", "3")[2:]
            raise AssertionError("read too far")

        assert keys(DistinctBatches(passes(), 2, 1, max_waiting=10)) == ["ac"]

    def test_an_image_is_not_repeated_within_a_batch(self):
        first = samples_of("1", "2", "3")
        batches = DistinctBatches(repeat(first), 2, 3, max_waiting=10)
        assert keys(batches) == ["ab", "ca", "bc"]
        assert batches.left_out == {}

    def test_a_repeated_image_does_not_wait(self):
        first = samples_of("x", "x", "1")
        batches = DistinctBatches(repeat(first), 2, 4, max_waiting=10)
        assert keys(batches) == ["ac", "bc", "ac", "ac"]
        assert batches.left_out == {}

    def test_other_captions_at_once(self):
        first = [Sample("a", 0, ["x"], ["x"]), Sample("b", 1, ["1"], ["1"])]
        second = [Sample("c", 2, ["x", "y"], ["x"])]
        third = samples_of("", "", "", "x")[3:]
        batches = DistinctBatches([first, second, third], 3, 1, max_waiting=10, other_captions=any_caption)
        assert [sample.shown for sample in next(iter(batches))] == [["x"], ["1"], ["y"]]

    def test_those_that_wait_change_at_the_start_of_a_batch(self):
        first = [Sample(key, index, ["x", "y"], ["x"]) for index, key in enumerate("abc")]
        second = samples_of("", "", "", "1")[3:]
        batches = DistinctBatches([first, second], 3, 1, max_waiting=10, other_captions=any_caption)
        assert [(sample.key, sample.shown[0]) for sample in next(iter(batches))] == [("a", "x"), ("b", "y"), ("d", "1")]
        assert batches.left_out == {2: "c"}

    def test_a_batch_that_nothing_goes_with_is_given_up_once(self):
        first = samples_of(["x", "y"], "x", "y", "1")
        # a and d block the rest; the other order does not.
        batches = DistinctBatches([[first[0], first[3]], first, first[1:]], 3, 1, max_waiting=10)
        assert keys(batches) == ["bcd"]
        assert batches.left_out == {0: "a"}, "d has been shown after all"

    def test_an_image_left_out_early_may_come_back(self):
        first = samples_of("x", "x", "1")
        batches = DistinctBatches([first[:2], first[1:]], 2, 1, max_waiting=0)
        assert keys(batches) == ["ac"]
        assert batches.left_out == {1: "b"}
        batches = DistinctBatches([first, first[1:]], 2, 2, max_waiting=0)
        assert keys(batches) == ["ac", "bc"]
        assert batches.left_out == {}

    def test_a_repeated_image_is_not_left_out(self):
        first = samples_of("1", "2")
        batches = DistinctBatches([first, [*first, first[0]]], 2, 5, max_waiting=10)
        assert keys(batches) == ["ab", "ab"]
        assert batches.left_out == {}

    def test_left_out_is_complete_with_the_last_batch(self):
        first = samples_of("x", "x", "x", "1")
        batches = DistinctBatches(repeat(first), 2, 2, max_waiting=10)
        stream = iter(batches)
        next(stream)
        assert batches.left_out == {}
        next(stream)
        assert batches.left_out == {2: "c"}

    def test_samples_that_wait_when_the_first_pass_is_not_used_up(self):
        batches = DistinctBatches([samples_of("x", "x", "1", "2")], 2, 1, max_waiting=10)
        assert keys(batches) == ["ac"]
        assert batches.left_out == {}, "more was not asked for"


class TestGroups:
    @staticmethod
    def samples(*groups, shown=None):
        samples = samples_of(*(shown or map(str, range(len(groups)))))
        return [
            sample._replace(group=None if group is None else Group("d", group))
            for sample, group in zip(samples, groups, strict=True)
        ]

    def test_images_of_a_group_do_not_meet(self):
        batches = batches_of(self.samples("x", "x", None, None, "y", "x", "y", "z"), 2)
        assert keys(batches) == ["ac", "bd", "ef", "gh"]
        assert (batches.obstacle, batches.example) == ("group", "x")

    def test_a_group_is_no_caption_and_belongs_to_its_data_set(self):
        samples = self.samples("x", "1", shown=["1", "x"])
        assert keys(batches_of(samples, 2)) == ["ab"]
        samples = [samples[0], samples[1]._replace(group=Group("other", "x"))]
        assert keys(batches_of(samples, 2)) == ["ab"]

    def test_other_captions_do_not_help(self):
        samples = [sample._replace(captions=["1", "2", "3"]) for sample in self.samples("x", "x")]
        batches = batches_of(samples, 2, max_waiting=0, other_captions=any_caption)
        assert (keys(batches), batches.left_out) == ([], {0: "a", 1: "b"})
        batches = batches_of(samples, 2, allow_duplicates=True, other_captions=any_caption)
        assert keys(batches) == []

    def test_positives_may_meet_and_share_captions(self):
        """They are no false negatives of each other, but still of others."""
        samples = self.samples("x", "x", "y", None, shown=["1", "1", "1", "1"])
        assert keys(batches_of(samples, 2, same_group="positive")) == ["ab"]
        assert keys(batches_of([*samples, *samples_of("", "", "", "", "2")[4:]], 3, same_group="positive")) == ["abe"]

    def test_positives_keep_their_captions_apart_from_others_only(self):
        samples = self.samples("y", "x", "x", shown=["1", "2", "1"])
        samples[2] = samples[2]._replace(captions=["1", "2"])
        batches = DistinctBatches([samples], 3, 1, max_waiting=9, other_captions=any_caption, same_group="positive")
        assert [[sample.shown for sample in batch] for batch in batches] == [[["1"], ["2"], ["2"]]]

    def test_one_group_everywhere(self):
        batches = DistinctBatches(repeat(self.samples("x", "x", "x")), 2, 1, max_waiting=9, source="x.tar")
        with pytest.raises(UserError) as raised:
            list(batches)
        assert str(raised.value) == (
            "no batch of 2 images with different groups can be made of x.tar: the last try ended with 1, and 'x' for "
            "one is a group of several images; give a smaller batch size, spread the groups with `vl-plugins shards "
            "--seed`, or let such images meet as positives with --same-group positive (same_group='positive')"
        )


class TestErrors:
    def test_the_same_caption_everywhere(self):
        batches = DistinctBatches(repeat(samples_of("a dog", "A dog", "a dog")), 2, 1, max_waiting=9, source="x.tar")
        with pytest.raises(UserError) as raised:
            list(batches)
        assert str(raised.value) == (
            "no batch of 2 images with different captions can be made of x.tar: the last try ended with 1, and 'A dog' "
            "for one is a caption of several images; give a smaller batch size or fewer captions per image, or let "
            "such images meet as false negatives with --allow-duplicate-captions (allow_duplicate_captions=True)"
        )

    def test_the_caption_named_is_the_most_common(self):
        batches = DistinctBatches(repeat(samples_of("y", "y", "x", "x", "x")), 3, 1, max_waiting=9)
        with pytest.raises(UserError, match="'x' for one"):
            list(batches)

    def test_too_few_images(self):
        batches = DistinctBatches(repeat(samples_of("1", "2")), 3, 1, max_waiting=9, source="x.tar")
        with pytest.raises(UserError, match=r"^no full batch of 3 can be read from x\.tar$"):
            list(batches)

    def test_no_images(self):
        with pytest.raises(UserError, match="no full batch of 1 can be read from the samples"):
            list(DistinctBatches(repeat([]), 1, 1, max_waiting=9))

    def test_the_reason_is_that_of_the_last_pass(self):
        """Duplicates of an earlier pass are not why there are too few images in this one."""
        passes = [samples_of("x", "x", "1"), *repeat(samples_of("1", "2"), 2)]
        with pytest.raises(UserError, match="no full batch of 4 can be read"):
            list(DistinctBatches(passes, 4, 1, max_waiting=9))

    def test_one_image_in_a_batch_never_collides(self):
        assert keys(DistinctBatches(repeat(samples_of("x", "x")), 1, 5, max_waiting=9)) == ["a", "b", "a", "b", "a"]


def texts_of(sample):
    return {normalize_caption(caption) for caption in sample.shown}


captions = st.lists(st.sampled_from(["x", "X", "y", " y", "z", *map(str, range(30))]), min_size=1, max_size=5)


@settings(deadline=None)
@given(
    captions=st.lists(captions, min_size=1, max_size=40),
    shown=st.integers(1, 3),
    batch_size=st.integers(1, 6),
    max_waiting=st.integers(0, 12),
    change=st.booleans(),
    unusable=st.sets(st.integers(0, 39), max_size=3),
)
@example(captions=[["x"]] * 8, shown=1, batch_size=4, max_waiting=3, change=False, unusable=set())
@example(captions=[["x", "y", "z"]] * 8, shown=1, batch_size=3, max_waiting=8, change=True, unusable={0})
def test_any_captions(captions, shown, batch_size, max_waiting, change, unusable):
    samples = [Sample(str(index), index, texts, texts[:shown]) for index, texts in enumerate(captions)]
    options = {"other_captions": any_caption} if change else {}
    waiting = []

    def make(passes, num_batches):
        def prepare(sample):
            waiting.append(len(batches._waiting))
            return None if sample.position in unusable else sample

        batches = DistinctBatches(passes, batch_size, num_batches, max_waiting=max_waiting, prepare=prepare, **options)
        made = []
        try:
            made.extend(batches)
        except UserError as error:
            return made, batches.left_out, str(error)
        return made, batches.left_out, None

    # One pass: nothing occurs twice, and nothing is lost unless it is reported.
    made, left_out, _ = make([samples], 100)
    assert make([samples], 100)[0] == made
    shown_once = [sample.position for batch in made for sample in batch]
    # Whether a sample can be used is found when it gets a place.
    once = [position for position in [*shown_once, *left_out] if position not in unusable]
    assert sorted(once) == sorted(set(range(len(samples))) - unusable)
    usable = len(set(range(len(samples))) - unusable)
    if sum(len(texts_of(sample)) for sample in samples) == len(set().union(*map(texts_of, samples))):
        assert len(made) == usable // batch_size, "without duplicates nothing changes"

    # As many passes as it takes, each in another order: full batches, or an error.
    def passes():
        rng = random.Random(0)
        yield samples
        while True:
            yield rng.sample(samples, len(samples))

    num_batches = max(len(samples) // batch_size, 1)
    made_of_many, left_out, error = make(passes(), num_batches)
    assert make(passes(), num_batches) == (made_of_many, left_out, error)
    assert len(made_of_many) == num_batches or error.startswith("no ")
    if error is None:
        seen = {sample.position for batch in made_of_many for sample in batch}
        assert seen.isdisjoint(left_out)
        if len(samples) == num_batches * batch_size:
            assert seen | set(left_out) | unusable >= set(range(len(samples)))

    for batch in [*made, *made_of_many]:
        assert len(batch) == batch_size
        assert len({sample.position for sample in batch}) == batch_size
        for sample in batch:
            assert sample.shown == captions[sample.position][:shown] or change
            assert set(sample.shown) <= set(captions[sample.position])
        assert sum(len(texts_of(sample)) for sample in batch) == len(set().union(*map(texts_of, batch)))
    assert max(waiting, default=0) <= max_waiting
