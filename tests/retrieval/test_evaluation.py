import pytest
import torch

from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval import protocols, retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.evaluation import evaluate_features
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.protocols import prepare

IMAGES = list(range(1, 11))


def features(seed, *shape, **description):
    """Ten images with five captions each, under the ids of a split of COCO's kind."""
    generator = torch.Generator().manual_seed(seed)
    images, captions = (
        torch.nn.functional.normalize(torch.randn(number, *shape, generator=generator), dim=-1) for number in (10, 50)
    )
    return Features(
        images=images,
        captions=captions,
        image_of_caption=torch.arange(10).repeat_interleave(5),
        image_ids=IMAGES,
        caption_ids=[10 * image + number for image in IMAGES for number in range(5)],
        description=description,
    )


@pytest.fixture
def trials(monkeypatch):
    """The folds of a split of ten images, of which ranks are not needed, and all of it."""
    captions = {image: frozenset(range(10 * image, 10 * image + 5)) for image in IMAGES}
    monkeypatch.setattr(protocols, "_coco_test_split", lambda: captions)
    return [prepare("coco-1k", features(0, 8)), prepare("plain", features(0, 8))]


def test_ranks_are_of_the_first_protocol(trials):
    members = {"one": features(0, 8), "two": features(1, 8)}
    assert [result.ranks for result in evaluate_features(members, trials).values()] == [None, None]
    found = evaluate_features(members, trials, ranks=True)
    assert len(found["one"].ranks.image_to_text.queries) == 10
    assert found["two"].ranks is None
    found = evaluate_features(members, trials, ranks=True, ensemble=True)
    assert list(found) == ["one", "two", "ensemble"]
    assert [result.ranks is None for result in found.values()] == [True, True, False]
    found = evaluate_features(members, trials[::-1])
    assert all(len(result.ranks.image_to_text.queries) == 10 for result in found.values())


def test_ranks_are_computed_for_the_first_protocol_only(trials, monkeypatch):
    asked = []
    evaluate = protocols.Trial.evaluate

    def watched(trial, similarities, **options):
        asked.append((trial.protocol, options["ranks"]))
        return evaluate(trial, similarities, **options)

    monkeypatch.setattr(protocols.Trial, "evaluate", watched)
    evaluate_features({"one": features(0, 8)}, [*trials, trials[0]], ranks=True)
    assert asked == [("coco-1k", True), ("plain", False), ("coco-1k", False)]


def test_metrics_of_members_and_of_their_mean(trials):
    one, two = features(0, 8), features(1, 3, 8, similarity="mil")
    found = evaluate_features({"one": one, "two": two}, trials, ensemble=True)
    matrices = [one.images @ one.captions.T, torch.einsum("ikd,cld->ickl", two.images, two.captions).amax(dim=(2, 3))]
    matrices.append((matrices[0] + matrices[1]) / 2)
    for result, matrix in zip(found.values(), matrices, strict=True):
        assert list(result.metrics) == ["coco-1k", "plain"]
        expected = retrieval_metrics(similarity_ranks(matrix, one.image_of_caption, negatives=5))
        assert result.metrics["plain"] == pytest.approx(expected, rel=1e-5)
    assert [result.circular_variances is None for result in found.values()] == [True, False, True]
    expected = [circular_variance(part).mean().item() for part in (two.images, two.captions)]
    assert found["two"].circular_variances == pytest.approx(expected)
