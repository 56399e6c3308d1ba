import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vl_plugins.errors import UserError
from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.protocols import evaluate

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "evaluation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def benchmark():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from eccv_caption import Metrics

        return Metrics()


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def numbered(images, captions):
    """Return different caption ids for each image."""
    return [range(image * captions, (image + 1) * captions) for image in range(images)]


def features(captions, image_ids=None, embeddings=None, splits=("coco-test",)):
    """Features of images with these caption ids each, by default all equal."""
    image_of_caption = torch.arange(len(captions)).repeat_interleave(torch.tensor([len(ids) for ids in captions]))
    images, texts = embeddings or (torch.eye(1).expand(len(rows), 1) for rows in (captions, image_of_caption))
    return Features(
        images=images,
        captions=texts,
        image_of_caption=image_of_caption,
        image_ids=image_ids,
        caption_ids=[caption for ids in captions for caption in ids],
        description={"splits": list(splits)} if splits else {},
    )


@pytest.fixture(scope="module")
def test_split(benchmark):
    """COCO's test split in its order: image id -> caption ids."""
    image_ids = list(dict.fromkeys(benchmark.coco_gts["t2i"][int(caption)][0] for caption in benchmark.coco_ids))
    assert len(image_ids) == 5000
    return {image: benchmark.coco_gts["i2t"][image] for image in image_ids}


@pytest.fixture(scope="module")
def coco(benchmark, test_split):
    """Features of a model that is right now and then, by any of the ground truths, in float64."""
    generator = torch.Generator().manual_seed(0)
    found = features([*test_split.values()], [*test_split])
    images = torch.randn(5000, 64, generator=generator, dtype=torch.float64)
    captions = 0.25 * images[found.image_of_caption] + torch.randn(25000, 64, generator=generator).double()
    rows, columns = ({name: row for row, name in enumerate(ids)} for ids in (found.image_ids, found.caption_ids))
    for caption, also in benchmark.eccv_gts["t2i"].items():
        captions[columns[caption]] += images[[rows[image] for image in also]].sum(dim=0) / (4 * len(also) ** 0.5)
    for image, also in benchmark.eccv_gts["i2t"].items():
        images[rows[image]] += 0.05 * captions[[columns[c] for c in also if c in columns]].sum(dim=0)
    images, captions = (torch.nn.functional.normalize(side, dim=1) for side in (images, captions))
    return replace(found, images=images, captions=captions)


def nearest(queries, candidates, query_ids, candidate_ids):
    """The ids of the 200 nearest candidates, the nearest first, by the id of the query."""
    found = torch.cat([(part @ candidates.T).topk(200).indices for part in queries.split(500)]).tolist()
    return {query: [candidate_ids[row] for row in rows] for query, rows in zip(query_ids, found, strict=True)}


def test_equals_eccv_caption(benchmark, coco):
    """On COCO's ids. No metric looks at more than the first 200 answers, of which a fifth are of the same fold."""
    expected = benchmark.compute_all_metrics(
        nearest(coco.images, coco.captions, coco.image_ids, coco.caption_ids),
        nearest(coco.captions, coco.images, coco.caption_ids, coco.image_ids),
        target_metrics=("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision"),
        Ks=(1, 5, 10),
    )
    expected |= benchmark.compute_all_metrics(target_metrics=("eccv_recalls",), Ks=(1, 5, 10))
    results = {}
    for protocol in ("coco-1k", "coco-5k", "eccv"):
        results |= evaluate([coco], protocol).metrics
    sources = {"coco_1k": "coco-1k", "coco_5k": "coco-5k", "cxc": "cxc", "eccv": "eccv-caption"}
    metrics = {f"r{k}": f"R@{k}" for k in (1, 5, 10)}
    metrics |= {"map_at_r": "mean_average_precision_at_r", "rprecision": "r_precision"}
    names = {f"{theirs}_{short}": (ours, metrics[short]) for theirs, ours in sources.items() for short in metrics}
    assert len(expected) == 14
    for name, ways in expected.items():
        for way, value in (("image_to_text", ways["i2t"]), ("text_to_image", ways["t2i"])):
            assert 0.01 < value < 0.95
            assert results[names[name][0]][f"{way}_{names[name][1]}"] == pytest.approx(value, rel=0, abs=1e-12), name


@pytest.mark.parametrize("ids", [True, False])
def test_of_more_captions_five_count(test_split, ids):
    """Of ten images with six captions those that COCO's ids tell, otherwise the first ones; the numbers say so."""
    captions = [list(of_image) for of_image in test_split.values()]
    for image in range(0, 5000, 500):
        captions[image].insert(0, -1 - image)
    if not ids:  # two of the other numbers are COCO's by chance
        numbers = iter([*captions[1][:2], *range(10**7, 10**7 + 25010)])
        captions = [[next(numbers) for _ in of_image] for of_image in captions]
    found = features(captions, [*test_split])
    evaluation = evaluate([found], "coco-5k")
    assert evaluation.captions[:7].tolist() == ([1, 2, 3, 4, 5, 6, 7] if ids else [0, 1, 2, 3, 4, 6, 7])
    metrics = evaluation.metrics["coco-5k"]
    assert (metrics["num_samples"], metrics["num_captions"]) == (5000, len(evaluation.captions)) == (5000, 25000)
    assert metrics["image_to_text_mean_rank"] == 24996  # all captions are equal
    folds, whole = (evaluate([found], "coco-1k", with_ranks=with_ranks) for with_ranks in (False, True))
    assert (folds.ranks, len(whole.ranks.text_to_image.queries), folds.metrics) == (None, 25000, whole.metrics)
    if not ids:
        with pytest.raises(UserError, match="are missing or of another image"):
            evaluate([found], "eccv")


def test_sets_and_the_mean_of_models():
    one = features(numbered(10, 5), range(10), (unit(10, 8), unit(50, 8, seed=1)))
    sets = {"images": unit(10, 3, 8, seed=2), "captions": unit(50, 2, 8, seed=3), "description": {"similarity": "mil"}}
    two = replace(one, **sets)
    matrices = [one.images @ one.captions.T, torch.einsum("ikd,cld->ickl", two.images, two.captions).amax(dim=(2, 3))]
    variances = [circular_variance(part).mean().item() for part in (two.images, two.captions)]
    for models, matrix in (([one], matrices[0]), ([two], matrices[1]), ([two, one], sum(matrices) / 2)):
        metrics = evaluate(models).metrics["plain"]
        found = [metrics.pop(f"{kind}_circular_variance", None) for kind in ("image", "caption")]
        assert found == (pytest.approx(variances) if models == [two] else [None, None])
        assert (metrics.pop("num_samples"), metrics.pop("num_captions")) == (10, 50)
        expected = retrieval_metrics(similarity_ranks(matrix, one.image_of_caption))
        assert metrics == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match="one model and another do not belong together"):
        evaluate([one, replace(two, image_ids=range(1, 11))])


def changed(test_split, change):
    image_ids, captions = [*test_split], [list(of_image) for of_image in test_split.values()]
    if change == "shuffled":
        for values in (image_ids, captions):
            values[7], values[4000] = values[4000], values[7]
    if change == "four captions":
        captions[17].pop()
    if change == "two captions changed places":
        captions[3][0], captions[9][0] = captions[9][0], captions[3][0]
    return features(captions, None if change == "no ids" else image_ids)


@pytest.mark.parametrize("protocol", ["coco-1k", "eccv"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no ids", "image ids are not those of COCO's test split: there are 0, expected 5,000"),
        ("shuffled", "number 7 of 5,000 is"),
        ("four captions", "1 images have fewer than 5 captions"),
        ("two captions changed places", "2 of 25,000 captions are missing or of another image"),
    ],
)
def test_other_images_or_captions_than_cocos(test_split, protocol, change, message):
    with pytest.raises(UserError, match=rf"protocol {protocol} is about.* {message}"):
        evaluate([changed(test_split, change)], protocol, name="test.tar")


def flickr30k(images=1000, captions=5, splits=("flickr30k-test",), **options):
    return features(numbered(images, captions), splits=splits, **options)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (flickr30k(images=1014), "protocol flickr30k-1k is about 1,000 images, but there are 1,014 in test.tar"),
        (flickr30k(captions=1), "1,000 images have fewer than 5 captions"),
        (features([*numbered(999, 5), range(5000, 5006)], splits=()), r"5,001 captions of the splits \(unknown\)"),
        (flickr30k(splits=("flickr30k-test", "flickr30k-val")), "splits flickr30k-test, flickr30k-val"),
    ],
)
def test_flickr30k(found, message):
    with pytest.raises(UserError, match=message):
        evaluate([found], "flickr30k-1k", name="test.tar")
    for splits in (("f30k-test",), ()):
        assert len(evaluate([flickr30k(splits=splits)], "flickr30k-1k").captions) == 5000


def model(kind, images=1000):
    """Embeddings of a model of which everybody knows what must come out, with five captions of each image."""
    generator = torch.Generator().manual_seed(0)
    sides = (torch.randn(number, 64, generator=generator) for number in (images, 5 * images))
    own, others = (torch.nn.functional.normalize(side, dim=1) for side in sides)
    if kind == "constant":
        return own[:1].expand(images, -1), others[:1].expand(5 * images, -1)
    is_right = {"perfect": [True] * 5, "random": [False] * 5, "knows first captions": [True, *[False] * 4]}[kind]
    return own, torch.where(torch.tensor(is_right * images)[:, None], own.repeat_interleave(5, dim=0), others)


@pytest.mark.parametrize("kind", ["perfect", "constant", "random", "knows first captions"])
def test_models_of_which_everybody_knows_the_numbers(kind):
    metrics = evaluate([flickr30k(embeddings=model(kind))], "flickr30k-1k").metrics["flickr30k-1k"]
    both = " / ".join(f"{100 * metrics[f'{way}_R@1']:.1f}" for way in ("image_to_text", "text_to_image"))
    assert f"\n| {kind} | {both}, {metrics['rsum']:.1f} |" in GUIDE
    if kind == "constant":
        assert (metrics["image_to_text_mean_rank"], metrics["text_to_image_mean_rank"]) == (4996, 1000)
    if kind == "random":  # binomial, give or take four standard deviations
        for way, chance, queries in (("image_to_text", 1 - (1 - 10 / 5000) ** 5, 1000), ("text_to_image", 0.01, 5000)):
            deviation = 4 * (chance * (1 - chance) / queries) ** 0.5
            assert metrics[f"{way}_R@10"] == pytest.approx(chance, abs=deviation)
