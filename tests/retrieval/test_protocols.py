import warnings

import pytest
import torch

from vl_plugins.data.collection import Collection
from vl_plugins.errors import UserError
from vl_plugins.retrieval import EmbeddingSimilarities, protocols
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.names import clip_benchmark_names, eccv_caption_names
from vl_plugins.retrieval.protocols import PROTOCOLS, prepare

WAYS = {"i2t": "image_to_text", "t2i": "text_to_image"}


@pytest.fixture(scope="module")
def benchmark():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from eccv_caption import Metrics

        return Metrics()


def items(image_ids, captions, splits=("coco-test",)):
    """Images and captions that have ids and nothing else; ``captions`` holds the ids of each image's."""
    counts = torch.tensor([len(of_image) for of_image in captions])
    caption_ids = tuple(caption for of_image in captions for caption in of_image)
    return Collection(
        shards=("test.tar",),
        sizes=(len(image_ids),),
        keys=tuple(f"{number:05d}" for number in range(len(image_ids))),
        image_ids=tuple(image_ids),
        captions=tuple("" for _ in caption_ids),
        caption_ids=caption_ids,
        image_of_caption=torch.arange(len(image_ids)).repeat_interleave(counts),
        splits=splits,
    )


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
        captions[caption_index[caption]] += images[[image_index[image] for image in also]].sum(dim=0) / (4 * len(also) ** 0.5)
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


def assert_equals_eccv_caption(benchmark, test_split, embeddings, number):
    """Compare all that ``compute_all_metrics`` computes, given so many answers of each query."""
    ids = test_split.image_ids, test_split.caption_ids
    expected = benchmark.compute_all_metrics(
        nearest(*embeddings, *ids, number),
        nearest(*embeddings[::-1], *ids[::-1], number),
        target_metrics=("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision"),
        Ks=(1, 5, 10),
    )
    expected |= benchmark.compute_all_metrics(target_metrics=("eccv_recalls",), Ks=(1, 5, 10))
    similarities = EmbeddingSimilarities(*embeddings)
    results = {}
    for protocol in ("coco-1k", "coco-5k", "eccv"):
        results |= prepare(protocol, test_split).evaluate(similarities).results
    found = eccv_caption_names(results)
    assert found.keys() == expected.keys()
    assert len(found) == 14
    for name, ways in expected.items():
        assert 0.01 < ways["i2t"] < 0.95
        assert 0.01 < ways["t2i"] < 0.95
        assert found[name] == pytest.approx(ways, rel=0, abs=1e-12), name


def test_equals_eccv_caption(benchmark, test_split, embeddings):
    """On COCO's ids. No metric looks at more than the first 200 answers, of which a fifth are of the same fold."""
    assert_equals_eccv_caption(benchmark, test_split, embeddings, 200)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_equals_eccv_caption_with_all_answers(benchmark, test_split, embeddings):
    whole = tuple(part[:] for part in embeddings)
    assert_equals_eccv_caption(benchmark, test_split, whole, 5000)
