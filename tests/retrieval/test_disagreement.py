import math
import random
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from vl_plugins.data import CaptionedImage, read_collection, write_shards
from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.disagreement import caption_groups, group_differences, groups_of_shards, only_one_finds

IMAGES, CAPTIONS = 120, 5
WORDS = "dog cat bus man woman tree boat ball table plate street field".split()


def loop_interval(hits, baseline_hits, owners, members, tried):
    """Deviation and half width in plain loops over Python numbers."""
    difference = []
    for ours, theirs in zip(hits, baseline_hits, strict=True):
        difference.append(100 * ours - 100 * theirs)
    group_mean = math.fsum(difference[query] for query in members) / len(members)
    mean = math.fsum(difference) / len(difference)
    inside, outside = dict.fromkeys(owners, 0), dict.fromkeys(owners, 0)
    influence = dict.fromkeys(owners, 0.0)
    for query, image in enumerate(owners):
        influence[image] -= (difference[query] - mean) / len(difference)
        if query in members:
            influence[image] += (difference[query] - group_mean) / len(members)
            inside[image] += 1
        else:
            outside[image] += 1
    counts = inside.values(), outside.values()
    images = min(sum(side) ** 2 / sum(count * count for count in side) for side in counts)
    variance = images / (images - 1) * math.fsum(value * value for value in influence.values())
    variance += 2 * (100 / len(members) - 100 / len(difference)) ** 2 + 2 * (100 / len(difference)) ** 2
    return group_mean - mean, stats.t.ppf(1 - 0.025 / tried, images - 1) * math.sqrt(variance)


def captions_with_topics(generator):
    """Captions of five words; two of these are the topics of their image, and so in all of its captions."""
    captions = []
    for _ in range(IMAGES):
        topics = generator.sample(WORDS, 2)
        for _ in range(CAPTIONS):
            captions.append(" ".join([*topics, *generator.sample(WORDS, 3)]))
    return captions


def hits_of_images(generator, rate=0.5):
    """(Q,) hits which the captions of an image mostly share."""
    of_image = torch.rand(IMAGES, generator=generator).repeat_interleave(CAPTIONS)
    of_caption = torch.rand(IMAGES * CAPTIONS, generator=generator)
    return (0.9 * of_image + 0.1 * of_caption < rate).double()


OWNERS = torch.arange(IMAGES).repeat_interleave(CAPTIONS)


def test_intervals_equal_those_of_loops():
    generator = torch.Generator().manual_seed(0)
    seeds = [(torch.rand(90, generator=generator) < 0.5).double() for _ in range(3)]
    hits = torch.stack(seeds).mean(dim=0)
    baseline = (torch.rand(90, generator=generator) < 0.4).double()
    owners = torch.randint(0, 30, (90,), generator=generator)  # some images have one caption, some none
    groups = {
        "some": torch.arange(0, 90, 3),
        "few images": (owners < 4).nonzero().flatten(),
        "most": torch.arange(70),
        "too few": torch.arange(5),
        "too many": torch.arange(84),
        "one image": (owners == 7).nonzero().flatten(),
    }
    computed = {group.name: group for group in group_differences(hits, baseline, owners, groups, fewest=7)}
    assert set(computed) == {"some", "few images", "most"}
    for name, group in computed.items():
        members = groups[name].tolist()
        mean, half_width = loop_interval(hits.tolist(), baseline.tolist(), owners.tolist(), members, tried=3)
        assert group.deviation == pytest.approx(mean, abs=1e-10)
        assert (group.low, group.high) == pytest.approx((mean - half_width, mean + half_width), rel=1e-9)
        assert (group.captions, group.images) == (len(members), len({int(owners[query]) for query in members}))
        assert group.value == pytest.approx(100 * hits[members].mean().item())
        assert group.baseline == pytest.approx(100 * baseline[members].mean().item())
        assert group.difference == pytest.approx(group.value - group.baseline)


def test_captions_that_agree_within_their_image_count_as_one_draw():
    """Five equal captions of each image tell no more than one, up to the two queries more."""
    generator = torch.Generator().manual_seed(1)
    hits = (torch.rand(2000, generator=generator) < 0.5).double()
    baseline = (torch.rand(2000, generator=generator) < 0.5).double()
    owners, group = torch.arange(2000), torch.arange(700)
    (single,) = group_differences(hits, baseline, owners, {"first": group})
    repeated = [tensor.repeat_interleave(5) for tensor in (hits, baseline, owners)]
    (several,) = group_differences(*repeated, {"first": torch.arange(3500)})
    assert several.deviation == pytest.approx(single.deviation, abs=1e-9)
    # 2 * 100 ** 2 of some 700 * 50 * 100: less than one percent of the variance.
    assert several.high - several.low == pytest.approx(single.high - single.low, rel=5e-3)


def test_a_model_blind_to_one_word_is_found_out_by_that_word_alone():
    generator = torch.Generator().manual_seed(2)
    captions = captions_with_topics(random.Random(2))
    baseline = (torch.rand(len(captions), generator=generator) < 0.8).double()
    blind = torch.tensor(["boat" in caption for caption in captions])
    by_chance = (torch.rand(len(captions), generator=generator) < 0.1).double()
    hits = torch.where(blind, torch.zeros_like(baseline), (baseline + by_chance).clamp(max=1))
    differences = group_differences(hits, baseline, OWNERS, caption_groups(captions))
    assert len(differences) == len(WORDS)
    assert [group.name for group in differences if group.resolved and group.deviation < 0] == ["“boat”"]
    assert differences[0].name == "“boat”"
    assert differences[0].value == 0


@pytest.mark.parametrize("draws", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_without_an_effect_at_most_one_table_in_twenty_has_a_resolved_group(draws):
    """Both models are equally good everywhere; the words go with the images, and so do the hits."""
    generator = torch.Generator().manual_seed(3)
    words = random.Random(3)
    resolved = 0
    for _ in range(draws):
        groups = caption_groups(captions_with_topics(words))
        differences = group_differences(hits_of_images(generator), hits_of_images(generator), OWNERS, groups)
        assert len(differences) == len(WORDS)
        resolved += differences[0].resolved
    assert resolved <= stats.binom.ppf(0.999, draws, 0.05)


def test_intervals_are_not_so_wide_that_they_never_exclude_anything():
    """Of single groups without an effect, nearly five in a hundred are resolved."""
    generator = torch.Generator().manual_seed(4)
    draws = 1000
    resolved = 0
    group = {"half": torch.arange(IMAGES * CAPTIONS // 2)}
    for _ in range(draws):
        (half,) = group_differences(hits_of_images(generator), hits_of_images(generator), OWNERS, group)
        resolved += half.resolved
    assert stats.binom.ppf(0.0005, draws, 0.035) <= resolved <= stats.binom.ppf(0.9995, draws, 0.05)


def test_models_that_agree_on_each_query_have_an_interval_around_zero():
    hits = (torch.arange(100) % 3 == 0).double()
    (group,) = group_differences(hits, hits, torch.arange(100) // 2, {"some": torch.arange(40)})
    assert group.low < group.deviation == 0 < group.high


def test_a_group_without_a_query_that_only_one_model_finds_is_not_resolved_by_that():
    """The baseline is better by one percent. 30 captions without a difference say nothing against that."""
    baseline = torch.ones(3000)
    hits = torch.ones(3000)
    hits[100:3000:100] = 0
    (group,) = group_differences(hits, baseline, torch.arange(3000), {"some": torch.arange(30)})
    assert group.difference == 0
    assert group.deviation == pytest.approx(29 / 30)
    assert not group.resolved


def test_captions_are_grouped_by_words_lengths_and_groups_of_the_shards():
    captions = ["A dog, a DOG!", "“Two” red-haired dogs...", "one", "नमस्ते दुनिया।", "a b c d e f"]
    groups = {name: indices.tolist() for name, indices in caption_groups(captions, [7, None, "x", "7", "x"]).items()}
    assert groups == {
        "up to 2 words": [2, 3],
        "3 words": [1],
        "more than 3 words": [0, 4],
        "group 7": [0, 3],
        "group x": [2, 4],
        "“a”": [0, 4],
        "“dog”": [0],
        "“two”": [1],
        "“red-haired”": [1],
        "“dogs”": [1],
        "“one”": [2],
        "“नमस्ते”": [3],
        "“दुनिया”": [3],
        "“b”": [4],
        "“c”": [4],
        "“d”": [4],
        "“e”": [4],
        "“f”": [4],
    }


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3, 3, 3, 3], {}),
        ([], {}),
        ([3], {}),
        ([3, 3, 3, 9], {"up to 3 words": 3, "more than 3 words": 1}),
        ([1, 9, 9, 9], {}),
        ([1, 1, 9, 9], {"up to 1 word": 2, "2 to 9 words": 2}),
        ([0, 4, 5, 6, 7, 8], {"up to 4 words": 2, "5 to 6 words": 2, "more than 6 words": 2}),
    ],
)
def test_thirds_of_lengths_keep_captions_of_one_length_together(lengths, expected):
    groups = caption_groups(["w " * length for length in lengths])
    assert {name: len(indices) for name, indices in groups.items() if "word" in name} == expected


def test_groups_come_from_the_shards(tmp_path, toy_scenes):
    files = sorted(path.relative_to(toy_scenes).as_posix() for path in toy_scenes.rglob("*.png"))[:3]
    images = []
    for number, (file, group) in enumerate(zip(files, ["street", None, 5], strict=True)):
        texts, ids = (f"first of {number}", f"second of {number}"), (2 * number, 2 * number + 1)
        images.append(CaptionedImage(number, file, texts, ids, "test", "toy", file, group))
    write_shards(images, toy_scenes, tmp_path)
    collection = read_collection(sorted(map(str, tmp_path.glob("*.tar"))))
    assert groups_of_shards(collection) == ["street", "street", None, None, 5, 5]
    assert groups_of_shards(collection.with_captions(torch.tensor([1, 5]))) == ["street", 5]


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"one shape \(Q,\), got \[\(3,\), \(3,\), \(2,\)\]"):
        group_differences(torch.ones(3), torch.ones(3), torch.zeros(2, dtype=torch.int64), {})
    with pytest.raises(ValueError, match="fewest must be at least 2"):
        group_differences(torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.int64), {}, fewest=1)


def test_queries_that_one_model_alone_finds_start_with_the_largest_gain():
    generator = torch.Generator().manual_seed(5)
    ours, theirs = (similarity_ranks(torch.randn(40, 40, generator=generator), torch.arange(40))[1] for _ in range(2))
    for k in (1, 10):
        expected = []
        for query in range(40):
            if ours.rank[query] <= k < theirs.rank[query]:
                expected.append((-int(theirs.rank[query] - ours.rank[query]), query))
        assert len(expected) > 1 or k == 1
        assert only_one_finds(ours, theirs, k).tolist() == [query for _, query in sorted(expected)]


def test_only_one_finds_refuses_other_queries():
    def ranks(*queries):
        return SimpleNamespace(queries=torch.tensor(queries), rank=torch.ones(len(queries)))

    with pytest.raises(ValueError, match="the same queries"):
        only_one_finds(ranks(0, 1), ranks(0, 2))
