import statistics
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from vl_plugins.errors import UserError
from vl_plugins.retrieval import EmbeddingSimilarities, protocols, retrieval_metrics, retrieval_ranks
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.protocols import prepare

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "evaluation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def benchmark():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from eccv_caption import Metrics

        return Metrics()


@dataclass(frozen=True)
class Items:
    """What protocols look at of a :class:`~vl_plugins.data.Collection`."""

    image_ids: tuple
    caption_ids: tuple
    image_of_caption: torch.Tensor
    splits: tuple


def items(image_ids, captions, splits=("coco-test",)):
    """Images and captions that have ids and nothing else; ``captions`` holds the ids of each image's."""
    counts = torch.tensor([len(captions_of_image) for captions_of_image in captions])
    caption_ids = tuple(caption for captions_of_image in captions for caption in captions_of_image)
    return Items(tuple(image_ids), caption_ids, torch.arange(len(image_ids)).repeat_interleave(counts), splits)


@pytest.fixture(scope="module")
def test_split(benchmark):
    """COCO's test split, in its order."""
    image_ids = list(dict.fromkeys(benchmark.coco_gts["t2i"][int(caption)][0] for caption in benchmark.coco_ids))
    assert len(image_ids) == 5000
    return items(image_ids, [benchmark.coco_gts["i2t"][image] for image in image_ids])


@pytest.fixture(scope="module")
def embeddings(benchmark, test_split):
    """Unit vectors (5000, 64) and (25000, 64) of a model that is right now and then, by any of the ground truths."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5000, 64, generator=generator, dtype=torch.float64)
    captions = 0.25 * images[test_split.image_of_caption] + torch.randn(25000, 64, generator=generator).double()
    image_index = {image: number for number, image in enumerate(test_split.image_ids)}
    caption_index = {caption: number for number, caption in enumerate(test_split.caption_ids)}
    for caption, also in benchmark.eccv_gts["t2i"].items():
        captions[caption_index[caption]] += images[[image_index[image] for image in also]].sum(dim=0) / (
            4 * len(also) ** 0.5
        )
    for image, also in benchmark.eccv_gts["i2t"].items():
        images[image_index[image]] += 0.05 * captions[[caption_index[c] for c in also if c in caption_index]].sum(dim=0)
    return torch.nn.functional.normalize(images, dim=1), torch.nn.functional.normalize(captions, dim=1)


def nearest(queries, candidates, query_ids, candidate_ids, number):
    """Map of the ids of all queries to those of their nearest candidates, the nearest first."""
    found = {}
    for start in range(0, len(queries), 500):
        part = (queries[start : start + 500] @ candidates.T).topk(number, dim=1).indices.tolist()
        for query, order in zip(query_ids[start : start + 500], part, strict=True):
            found[query] = [candidate_ids[index] for index in order]
    return found


@pytest.mark.parametrize("number", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_equals_eccv_caption(benchmark, test_split, embeddings, number):
    """On COCO's ids. No metric looks at more than the first 200 answers, of which a fifth are of the same fold."""
    ids = test_split.image_ids, test_split.caption_ids
    expected = benchmark.compute_all_metrics(
        nearest(*embeddings, *ids, number),
        nearest(*embeddings[::-1], *ids[::-1], number),
        target_metrics=("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision"),
        Ks=(1, 5, 10),
    )
    expected |= benchmark.compute_all_metrics(target_metrics=("eccv_recalls",), Ks=(1, 5, 10))
    results = {}
    for protocol in ("coco-1k", "coco-5k", "eccv"):
        results |= prepare(protocol, test_split).evaluate(EmbeddingSimilarities(*embeddings)).results
    assert len(expected) == 14
    sources = {"coco_1k": "coco-1k", "coco_5k": "coco-5k", "cxc": "cxc", "eccv": "eccv-caption"}
    metrics = {"r1": "R@1", "r5": "R@5", "r10": "R@10", "map_at_r": "mean_average_precision_at_r"}
    metrics["rprecision"] = "r_precision"
    names = {f"{theirs}_{short}": (ours, metrics[short]) for theirs, ours in sources.items() for short in metrics}
    for name, ways in expected.items():
        source, metric = names[name]
        for way, short in (("image_to_text", "i2t"), ("text_to_image", "t2i")):
            assert 0.01 < ways[short] < 0.95
            assert results[source][f"{way}_{metric}"] == pytest.approx(100 * ways[short], rel=0, abs=1e-10), name


def test_coco_1k_is_the_mean_of_five_parts(test_split, embeddings):
    results = prepare("coco-1k", test_split).evaluate(EmbeddingSimilarities(*embeddings)).results["coco-1k"]
    parts = []
    for fold in range(5):
        images, captions = embeddings[0][1000 * fold :][:1000], embeddings[1][5000 * fold :][:5000]
        image_of_caption = torch.arange(1000).repeat_interleave(5)
        parts.append(retrieval_metrics(retrieval_ranks(images, captions, image_of_caption, negatives=5)))
    assert results.keys() == parts[0].keys()
    for name, value in results.items():
        assert value == pytest.approx(statistics.fmean(part[name] for part in parts), abs=1e-9), name
    assert len({part["rsum"] for part in parts}) == 5


def with_more_captions(test_split, ids):
    """The split with a sixth caption of every hundredth image, the first of its captions, and other caption ids."""
    captions = [list(test_split.caption_ids[5 * image : 5 * image + 5]) for image in range(5000)]
    for image in range(0, 5000, 100):
        captions[image].insert(0, -image - 1)
    whole = items(test_split.image_ids, captions)
    # Two of the other numbers are COCO's by chance.
    numbers = [*test_split.caption_ids[:2], *range(2, len(whole.caption_ids))]
    return whole if ids else replace(whole, caption_ids=tuple(numbers))


@pytest.mark.parametrize("protocol", ["coco-5k", "coco-1k", "eccv"])
def test_of_more_captions_the_ids_tell_which_count(test_split, protocol):
    trial = prepare(protocol, with_more_captions(test_split, ids=True))
    assert len(trial.captions) == 25000
    assert trial.captions[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert trial.captions[500].item() == 502


def test_without_cocos_ids_the_first_five_captions_count(test_split):
    trial = prepare("coco-5k", with_more_captions(test_split, ids=False))
    assert len(trial.captions) == 25000
    assert trial.captions[:12].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    with pytest.raises(UserError, match="are missing or belong to another image, such as"):
        prepare("eccv", with_more_captions(test_split, ids=False))


def test_captions_left_out_do_not_count(monkeypatch):
    """On a split of three images: a sixth caption that looks like every image would otherwise be the first answer."""
    captions = {image: frozenset(range(10 * image, 10 * image + 5)) for image in (1, 2, 3)}
    monkeypatch.setattr(protocols, "_coco_test_split", lambda: captions)
    whole = items([1, 2, 3], [[99, *range(10, 15)], range(20, 25), range(30, 35)])
    images = torch.cat([torch.eye(3), torch.ones(3, 1)], dim=1)
    embeddings = torch.cat([torch.eye(3).repeat_interleave(5, dim=0), torch.zeros(15, 1)], dim=1)
    embeddings = torch.cat([torch.tensor([[0.0, 0.0, 0.0, 2.0]]), embeddings])
    found = prepare("coco-5k", whole).evaluate(EmbeddingSimilarities(images, embeddings)).results["coco-5k"]
    assert found["rsum"] == 600
    assert prepare("plain", whole).evaluate(EmbeddingSimilarities(images, embeddings)).results["plain"]["rsum"] < 600


def test_the_whole_split_is_ranked_for_a_report_on_folds(monkeypatch):
    ids = list(range(1, 11))
    split = {image: frozenset(range(10 * image, 10 * image + 5)) for image in ids}
    monkeypatch.setattr(protocols, "_coco_test_split", lambda: split)
    trial = prepare("coco-1k", items(ids, [range(10 * image, 10 * image + 5) for image in ids]))
    similarities = EmbeddingSimilarities(torch.eye(10), torch.eye(10).repeat_interleave(5, dim=0))
    assert trial.evaluate(similarities).ranks is None
    evaluation = trial.evaluate(similarities, ranks=True)
    assert len(evaluation.ranks.image_to_text.queries) == 10
    assert evaluation.results == trial.evaluate(similarities).results


def test_reports_have_five_answers():
    evaluation = prepare("plain", items(range(9), [[image] for image in range(9)])).evaluate(
        EmbeddingSimilarities(torch.eye(9), torch.eye(9))
    )
    assert [direction.negatives.shape for direction in evaluation.ranks] == [(9, 5), (9, 5)]


def swapped(values, one, other):
    values = list(values)
    values[one], values[other] = values[other], values[one]
    return values


def coco_items(test_split, change):
    image_ids = list(test_split.image_ids)
    captions = [list(test_split.caption_ids[5 * image : 5 * image + 5]) for image in range(5000)]
    if change == "another split":
        return items([-image for image in image_ids], captions, splits=("coco-val",))
    if change == "shuffled":
        return items(swapped(image_ids, 7, 4000), swapped(captions, 7, 4000))
    if change == "an image is missing":
        return items(image_ids[1:], captions[1:])
    if change == "four captions":
        captions[17].pop()
    if change == "two captions changed places":
        captions[3][0], captions[9][0] = captions[9][0], captions[3][0]
    if change == "a caption twice":
        captions[3].append(captions[3][0])
    if change == "a caption in place of another":
        captions[3][1] = captions[3][0]
    return items(image_ids, captions)


@pytest.mark.parametrize("protocol", ["coco-1k", "eccv"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "another split",
            "5,000 of the 5,000 images of COCO's test split are missing, such as 391895 (these are coco-val)",
        ),
        (
            "shuffled",
            "the same 5,000 images are in another order: image {4000} stands at place 7, where COCO's test split",
        ),
        ("an image is missing", "1 of the 5,000 images of COCO's test split are missing, such as 391895"),
        ("four captions", "1 images have fewer than 5 captions, such as image {17} with 4"),
        ("two captions changed places", "2 of the 25,000 captions are missing or belong to another image, such as "),
        ("a caption twice", "caption ids occur twice"),
        ("a caption in place of another", "1 of the 25,000 captions are missing or belong to another image, such as "),
    ],
)
def test_other_images_or_captions_than_cocos(test_split, protocol, change, message):
    for number in (17, 4000):
        message = message.replace(f"{{{number}}}", str(test_split.image_ids[number]))
    with pytest.raises(UserError) as raised:
        prepare(protocol, coco_items(test_split, change), "test.tar")
    assert str(raised.value).startswith(f"test.tar is not what protocol {protocol} is about: ")
    assert message in str(raised.value)


def test_features_without_ids(test_split, embeddings):
    features = Features(
        images=embeddings[0], captions=embeddings[1], image_of_caption=test_split.image_of_caption, image_ids=None
    )
    with pytest.raises(UserError, match=r"f\.npz is not what protocol coco-5k is about: it has no image ids"):
        prepare("coco-5k", features, "f.npz")
    assert len(prepare("plain", features).captions) == 25000
    features = replace(features, image_ids=test_split.image_ids)
    assert len(prepare("coco-5k", features).captions) == 25000


def flickr30k_items(images=1000, captions=5, split="flickr30k-test"):
    return items(range(30000, 30000 + images), [range(captions)] * images, splits=(split,) if split else ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"images": 1014, "split": "flickr30k-val"},
            "it has 1,014 images and 5,070 captions, and the test split of Flickr30K 1,000 and 5,000 (these are "
            "flickr30k-val)",
        ),
        ({"captions": 1}, "it has 1,000 images and 1,000 captions, and the test split of Flickr30K 1,000 and 5,000"),
        ({"split": "flickr30k-val"}, "it is the test split (these are flickr30k-val)"),
    ],
)
def test_other_images_or_captions_than_flickr30ks(changes, message):
    with pytest.raises(UserError) as raised:
        prepare("flickr30k-1k", flickr30k_items(**changes), "test.tar")
    assert str(raised.value).startswith("test.tar is not what protocol flickr30k-1k is about: ")
    assert message in str(raised.value)


def test_flickr30k():
    for accepted in (flickr30k_items(), flickr30k_items(split=None), flickr30k_items(split="f30k-test")):
        trial = prepare("flickr30k-1k", accepted)
        assert (trial.images, len(trial.captions)) == (1000, 5000)
    uneven = items(range(1000), [range(4), range(6), *[range(5)] * 998])
    with pytest.raises(UserError, match="1 images have fewer than 5 captions, such as image 0 with 4"):
        prepare("flickr30k-1k", uneven)


def test_unknown_protocol_and_other_similarities(test_split):
    with pytest.raises(UserError, match=r"unknown protocol 'coco-5' \(did you mean 'coco-5k'"):
        prepare("coco-5", test_split)
    with pytest.raises(ValueError, match="similarities do not fit 1000 images and 5000 captions"):
        prepare("flickr30k-1k", flickr30k_items()).evaluate(EmbeddingSimilarities(torch.eye(9), torch.eye(9)))


def model(kind, images):
    """Embeddings of a model of which everybody knows what must come out, with five captions of each image."""
    generator = torch.Generator().manual_seed(0)
    own, others = (
        torch.nn.functional.normalize(torch.randn(number, 64, generator=generator), dim=1)
        for number in (images, 5 * images)
    )
    if kind == "constant":
        return own[:1].expand(images, -1), others[:1].expand(5 * images, -1)
    is_right = {"perfect": [True] * 5, "random": [False] * 5, "knows first captions": [True, *[False] * 4]}[kind]
    return own, torch.where(torch.tensor(is_right * images)[:, None], own.repeat_interleave(5, dim=0), others)


def sanity_cell(metrics, *names):
    """A cell of the guide's table: each metric of both directions, or the one of both together."""
    both = {name: [metrics[f"{way}_{name}"] for way in ("image_to_text", "text_to_image")] for name in names[:1]}
    both |= {name: [metrics[name]] for name in names[1:]}
    return ", ".join(" / ".join(f"{value:.1f}" for value in values) for values in both.values())


KINDS = ("perfect", "constant", "random", "knows first captions")


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_which_everybody_knows_the_numbers(kind):
    similarities = EmbeddingSimilarities(*model(kind, 1000))
    metrics = prepare("flickr30k-1k", flickr30k_items()).evaluate(similarities).results["flickr30k-1k"]
    assert f"\n| {kind} | {sanity_cell(metrics, 'R@1', 'rsum')} |" in GUIDE
    if kind == "constant":
        assert (metrics["image_to_text_mean_rank"], metrics["text_to_image_mean_rank"]) == (4996, 1000)
    if kind == "random":
        # Binomial, give or take four standard deviations.
        for k in (1, 5, 10):
            for way, chance, queries in (
                ("image_to_text", 1 - (1 - k / 5000) ** 5, 1000),
                ("text_to_image", k / 1000, 5000),
            ):
                deviation = 400 * (chance * (1 - chance) / queries) ** 0.5
                assert metrics[f"{way}_R@{k}"] == pytest.approx(100 * chance, abs=deviation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_the_guide_about_these_models(test_split, kind):
    results = {}
    for protocol in ("coco-1k", "coco-5k", "eccv"):
        results |= prepare(protocol, test_split).evaluate(EmbeddingSimilarities(*model(kind, 5000))).results
    cells = [sanity_cell(results[name], "R@1", "rsum") for name in ("coco-1k", "coco-5k")]
    cells += [sanity_cell(results["cxc"], "R@1"), sanity_cell(results["eccv-caption"], "mean_average_precision_at_r")]
    (line,) = (line for line in GUIDE.splitlines() if line.startswith(f"| {kind} | "))
    assert line.endswith(f" | {' | '.join(cells)} |")


def test_equals_clip_benchmark(test_split, embeddings):
    """On the first thousand images; its function makes a matrix of (queries, k, candidates)."""
    from clip_benchmark.metrics.zeroshot_retrieval import recall_at_k

    images, captions = (part[: 1000 * per_image] for part, per_image in zip(embeddings, (1, 5), strict=True))
    image_of_caption = test_split.image_of_caption[:5000]
    found = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption))
    scores = captions @ images.T
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(5000), image_of_caption] = True
    expected = {}
    for k in (1, 5, 10):
        for way, matrix, truth in (("text_to_image", scores, positive), ("image_to_text", scores.T, positive.T)):
            parts = [
                recall_at_k(matrix[start : start + 50], truth[start : start + 50], k) > 0
                for start in range(0, len(matrix), 50)
            ]
            expected[f"{way}_R@{k}"] = 100 * torch.cat(parts).double().mean().item()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0, abs=1e-10)
