"""Differences between models, against loops over the formulas, and against leaving images out."""

import math
from dataclasses import replace
from statistics import fmean, stdev, variance

import pytest
import torch
from scipy import stats
from torch.nn.functional import normalize

from vl_plugins.retrieval import compare, image_values, retrieval_metrics, retrieval_ranks, similarity_ranks
from vl_plugins.retrieval.comparison import join_folds, top_for_comparison

DIRECTIONS = ("image_to_text", "text_to_image")
RECALLS = [f"{direction}_R@{k}" for direction in DIRECTIONS for k in (1, 5, 10)]


class World:
    """Images with one to five captions, next to each other or not, and models that see them with errors."""

    def __init__(self, images, seed=0, shuffled=True):
        self.generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(1, 6, (images,), generator=self.generator)
        owners = torch.arange(images).repeat_interleave(counts)
        order = torch.randperm(len(owners), generator=self.generator) if shuffled else torch.arange(len(owners))
        self.images, self.image_of_caption = images, owners[order]
        self.content = self.draw(images)

    def draw(self, rows):
        return torch.randn(rows, 6, generator=self.generator, dtype=torch.float64)

    def embeddings(self, error):
        captions = self.content[self.image_of_caption]
        return (
            normalize(self.content + error * self.draw(self.images), dim=1),
            normalize(captions + error * self.draw(len(captions)), dim=1),
        )

    def ranks(self, error=0.9, top=20):
        return retrieval_ranks(*self.embeddings(error), self.image_of_caption, top=top)

    def values(self, error=0.9):
        return image_values(self.ranks(error), self.image_of_caption, self.images)


@pytest.fixture(scope="module")
def world():
    return World(60)


def row(values, metric):
    return values.metrics.index(metric)


def matrix(blocked, images):
    """The (I, I) matrix of what each image would gain without each other one."""
    dense = torch.zeros(images, images, dtype=torch.float64)
    assert len({*zip(blocked.image.tolist(), blocked.blocked_by.tolist(), strict=True)}) == len(blocked.gain)
    dense[blocked.image, blocked.blocked_by] = blocked.gain
    return dense


def test_means_are_the_metrics(world):
    ranks = world.ranks()
    metrics = retrieval_metrics(ranks)
    values = image_values(ranks, world.image_of_caption, world.images)
    means = dict(zip(values.metrics, values.values.mean(dim=1).tolist(), strict=True))
    assert means.pop("rsum") == pytest.approx(metrics["rsum"], rel=1e-12)
    precision = "mean_average_precision_at_r"
    both = [metrics[f"{direction}_{precision}"] for direction in DIRECTIONS]
    assert means.pop(precision) == pytest.approx(100 * fmean(both), rel=1e-12)
    assert set(means) == {*RECALLS, *(f"{way}_{name}" for way in DIRECTIONS for name in (precision, "r_precision"))}
    assert means == pytest.approx({metric: 100 * metrics[metric] for metric in means}, rel=1e-12)


def test_influences_are_those_of_the_formula(world):
    ranks = world.ranks()
    values = image_values(ranks, world.image_of_caption, world.images)
    owners = world.image_of_caption.tolist()
    for direction, part, image_of_query in zip(DIRECTIONS, ranks, (range(world.images), owners), strict=True):
        hits = [100.0 * (rank <= 5) for rank in part.rank.tolist()]
        mean = fmean(hits)
        influences = values.values[row(values, f"{direction}_R@5")].tolist()
        for image in range(world.images):
            own = [hit - mean for hit, owner in zip(hits, image_of_query, strict=True) if owner == image]
            expected = mean + world.images / len(hits) * math.fsum(own)
            assert influences[image] == pytest.approx(expected, rel=0, abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_blocked_queries_are_those_of_leaving_an_image_out_and_ranking_again(seed):
    """Exactly, for each image, both directions and all K."""
    world = World(40, seed)
    images, captions = world.embeddings(0.9)
    owners = world.image_of_caption
    ranks = retrieval_ranks(images, captions, owners, top=top_for_comparison(owners))
    values = image_values(ranks, owners, world.images)
    blocked = {metric: matrix(values.blocked[row(values, metric)], world.images) for metric in [*RECALLS, "rsum"]}
    assert (blocked["rsum"] - sum(blocked[metric] for metric in RECALLS)).abs().max() < 1e-9
    entries = 0
    for image in range(world.images):
        other_images = torch.tensor([other for other in range(world.images) if other != image])
        other_captions = (owners != image).nonzero().flatten()
        new_owners = owners[other_captions] - (owners[other_captions] > image).long()
        again = retrieval_ranks(images[other_images], captions[other_captions], new_owners)
        queries = {"image_to_text": other_images, "text_to_image": other_captions}
        image_of_query = {"image_to_text": other_images, "text_to_image": owners[other_captions]}
        for direction in DIRECTIONS:
            before = getattr(ranks, direction).rank
            after = getattr(again, direction).rank
            for k in (1, 5, 10):
                freed = (after <= k) & (before[queries[direction]] > k)
                gain = torch.zeros(world.images, dtype=torch.float64)
                gain.index_add_(0, image_of_query[direction], 100 * world.images / len(before) * freed.double())
                column = blocked[f"{direction}_R@{k}"][:, image]
                assert torch.equal(column > 0, gain > 0)
                assert column.tolist() == pytest.approx(gain.tolist(), rel=1e-12)
                entries += int((gain > 0).sum())
    assert entries > 50


def loop_difference(method, baseline, metric, comparisons=1):
    """The interval of the difference, by loops over the formulas; each side has (values of the images, blocked)."""
    sides = []
    for runs in (method, baseline):
        place = row(runs[0], metric)
        sides.append(([run.values[place].tolist() for run in runs], [run.blocked[place] for run in runs]))
    images = len(sides[0][0][0])
    few = min(len(values) for values, _ in sides)
    means = [[fmean(seed[image] for seed in values) for image in range(images)] for values, _ in sides]
    difference = [ours - theirs for ours, theirs in zip(*means, strict=True)]
    of_images = variance(difference)
    if sides[0][1][0] is not None:
        dense = [sum(matrix(one, images) for one in blocked) / len(blocked) for _, blocked in sides]
        blocked = dense[0] - dense[1]
        influence = [difference[image] - math.fsum(blocked[:, image].tolist()) for image in range(images)]
        by_chance = math.fsum(value**2 for value in blocked.flatten().tolist()) / images
        of_images = max(of_images, variance(influence) - by_chance)
    step = float(method[0].steps[row(method[0], metric)]) / few
    image_variance = of_images / images + 2 * step**2 / images**2
    seed_variance, below = 0.0, image_variance**2 / (images - 1)
    for values, _ in sides if few >= 3 else ():
        seeds = len(values)
        of_seed = [fmean(seed) for seed in values]
        of_image = [fmean(seed[image] for seed in values) for image in range(images)]
        squares = []
        for number, seed in enumerate(values):
            for image, value in enumerate(seed):
                squares.append((value - of_seed[number] - of_image[image] + fmean(of_seed)) ** 2)
        mean_square = math.fsum(squares) / (seeds - 1) / (images - 1)
        term = (stdev(of_seed) ** 2 - mean_square / images) / seeds
        seed_variance += term
        below += max(0.0, term) ** 2 / (seeds - 1)
    total = image_variance + max(0.0, seed_variance)
    freedom = total**2 / below
    half = stats.t.ppf(1 - 0.025 / comparisons, freedom) * math.sqrt(total)
    return fmean(difference) - half, fmean(difference) + half, freedom


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 5), (3, 4)])
def test_intervals_are_those_of_loops_over_the_formulas(world, ours, theirs):
    method, baseline = ([world.values(error) for _ in range(n)] for error, n in ((0.8, ours), (1.0, theirs)))
    differences = compare({"clip": baseline, "unified": method}, "clip")
    assert [*differences] == ["unified"]
    assert [*differences["unified"]] == list(method[0].metrics)
    for metric, difference in differences["unified"].items():
        low, high, freedom = loop_difference(method, baseline, metric)
        assert (difference.low, difference.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
        assert difference.freedom == pytest.approx(freedom, rel=1e-9)
        assert (difference.seed_error is None) == (min(ours, theirs) < 3)
        assert (difference.seeds, difference.images) == ((ours, theirs), 60)
        assert difference.fixed_gallery == ("precision" in metric)


def test_intervals_of_several_models_hold_together(world):
    """They are as wide as Bonferroni's correction makes those of each pair."""
    runs = {name: [world.values(error)] for name, error in (("a", 1.0), ("b", 0.9), ("c", 0.8), ("d", 0.7))}
    together = compare(runs, "b")
    assert [*together] == ["a", "c", "d"]
    for name in together:
        (alone,) = compare({"b": runs["b"], name: runs[name]}, "b").values()
        factor = stats.t.ppf(1 - 0.025 / 3, 59) / stats.t.ppf(0.975, 59)
        assert together[name]["rsum"].half_width == pytest.approx(factor * alone["rsum"].half_width)
        assert together[name]["rsum"].mean == pytest.approx(alone["rsum"].mean)


def test_models_that_agree_on_all_queries_have_an_interval(world):
    """Two queries, one for each model, could have been among those drawn."""
    values = world.values()
    (difference,) = compare({"one": [values], "same": [values]}, "one").values()
    step = 100 * 60 / len(world.image_of_caption)
    expected = stats.t.ppf(0.975, 59) * math.sqrt(2) * step / 60
    assert difference["text_to_image_R@1"].half_width == pytest.approx(expected)
    assert not difference["text_to_image_R@1"].resolved


def test_what_images_resolve():
    """A difference of the smallest size that is resolved in 4 of 5 cases is, in 4 of 5 draws of a normal error."""
    world = World(100, seed=3)
    (metrics,) = compare({"a": [world.values(1.0)], "b": [world.values(0.9)]}, "a").values()
    difference = metrics["rsum"]
    threshold = difference.half_width
    power = 1 - stats.t.cdf((threshold - difference.smallest()) / difference.error, difference.freedom)
    assert power == pytest.approx(0.8)
    needed = difference.images_needed(difference.smallest() / 2)
    assert needed == pytest.approx(4 * 100, abs=1)  # the error falls with the root of the number of images
    noisy = replace(difference, seed_error=difference.smallest())
    assert noisy.images_needed(difference.smallest() / 2) == math.inf


def test_folds_are_parts_of_one_comparison():
    """Whose images do not block the queries of other folds."""
    worlds = World(20, seed=1), World(20, seed=2)
    folds = {name: [world.values(error) for world in worlds] for name, error in (("a", 1.0), ("b", 0.8))}
    joined = {name: [join_folds(values)] for name, values in folds.items()}
    values = joined["a"][0]
    assert values.values.shape == (len(values.metrics), 40)
    place = row(values, "rsum")
    blocked = matrix(values.blocked[place], 40)
    assert torch.equal(blocked[:20, :20], matrix(folds["a"][0].blocked[place], 20))
    assert torch.equal(blocked[20:, 20:], matrix(folds["a"][1].blocked[place], 20))
    assert not blocked[:20, 20:].any()
    assert not blocked[20:, :20].any()
    (difference,) = compare(joined, "a").values()
    low, high, _ = loop_difference(joined["b"], joined["a"], "rsum")
    assert (difference["rsum"].low, difference["rsum"].high) == pytest.approx((low, high))
    assert values.blocked[row(values, "mean_average_precision_at_r")] is None


def test_an_image_does_not_block_its_own_queries():
    """As where ECCV Caption has other right answers than an image's own captions."""
    owners = torch.tensor([0, 1, 2])
    similarities = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.8, 0.3], [0.1, 0.2, 0.7]])
    answers = {0: [1], 1: [1], 2: [2]}, {0: [0], 1: [1], 2: [2]}
    values = image_values(similarity_ranks(similarities, answers, top=12), owners, 3)
    blocked = values.blocked[row(values, "image_to_text_R@1")]
    assert len(blocked.gain) == 0


def test_errors(world):
    values = world.values()
    with pytest.raises(ValueError, match="needs 14: rank with top=14"):
        image_values(world.ranks(top=10), world.image_of_caption, world.images)
    for runs, baseline, message in (
        ({"a": [values], "b": [values]}, "c", "the baseline 'c' is none of a, b"),
        ({"a": [values]}, "a", "needs two methods or more"),
        ({"a": [values], "b": []}, "a", "needs two methods or more"),
        ({"a": [values], "b": [World(61).values()]}, "a", "runs of each with the same images"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(runs, baseline)
    one = World(1)
    with pytest.raises(ValueError, match="needs two images or more"):
        compare({"a": [one.values()], "b": [one.values()]}, "a")
