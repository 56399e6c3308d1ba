import random

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.inference import CustomKNN

from vl_plugins.retrieval import Ranks, format_metrics_table, retrieval_metrics, retrieval_ranks, similarity_ranks


def test_worked_by_hand():
    """Ranks of the images: 1 and 2; of the captions: 1, 2, 1, and 2 for a tie."""
    scores = torch.tensor([[0.9, 0.6, 0.8, 0.5], [0.2, 0.86, 0.85, 0.5]])
    metrics = retrieval_metrics(similarity_ranks(scores, torch.tensor([0, 0, 1, 1])))
    assert metrics == pytest.approx(
        {
            "image_to_text_R@1": 0.5,
            "image_to_text_R@5": 1.0,
            "image_to_text_R@10": 1.0,
            "image_to_text_mean_rank": 1.5,
            "image_to_text_median_rank": 1.5,
            # The first two answers: right and wrong, wrong and right.
            "image_to_text_mean_average_precision_at_r": (1 / 2 + 1 / 4) / 2,
            "image_to_text_r_precision": 0.5,
            "text_to_image_R@1": 0.5,
            "text_to_image_R@5": 1.0,
            "text_to_image_R@10": 1.0,
            "text_to_image_mean_rank": 1.5,
            "text_to_image_median_rank": 1.5,
            "text_to_image_mean_average_precision_at_r": 0.5,
            "text_to_image_r_precision": 0.5,
            "rsum": 500.0,
            "positive_similarity": (0.9 + 0.6 + 0.85 + 0.5) / 4,
            "hardest_negative_similarity": ((0.8 + 0.86) / 2 + (0.2 + 0.86 + 0.8 + 0.5) / 4) / 2,
        }
    )


@pytest.mark.parametrize(("recall_at", "has_rsum"), [((1, 5, 10, 50), True), ((2,), False)])
def test_other_recalls(recall_at, has_rsum):
    """Image i has the rank 1 + i."""
    scores = (torch.arange(60)[None] > 59 - torch.arange(60)[:, None]).double() + 0.5 * torch.eye(60).flip(1)
    metrics = retrieval_metrics(similarity_ranks(scores, torch.arange(59, -1, -1)), recall_at=recall_at)
    for k in recall_at:
        assert metrics[f"image_to_text_R@{k}"] == pytest.approx(k / 60)
    assert metrics["image_to_text_median_rank"] == 30.5
    assert sum("R@" in key for key in metrics) == 2 * len(recall_at)
    assert ("rsum" in metrics) == has_rsum


@pytest.mark.parametrize("pairs", [40, 41])
def test_equals_open_clip_for_one_caption_per_image_without_ties(pairs):
    get_clip_metrics = pytest.importorskip("open_clip_train.train").get_clip_metrics
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(pairs, 16, generator=generator), dim=1)
    texts = torch.nn.functional.normalize(images + 0.8 * torch.randn(pairs, 16, generator=generator), dim=1)
    theirs = get_clip_metrics(images, texts, logit_scale=torch.tensor(1.0))
    ours = retrieval_metrics(retrieval_ranks(images, texts, torch.arange(pairs)))
    assert len(theirs) == 10
    for name, value in theirs.items():
        # Their median is rounded down where it falls between two ranks.
        assert (ours[name] // 1 if "median" in name else ours[name]) == pytest.approx(value)
        assert "R@" not in name or 0 < value < 1


def test_table_is_aligned_and_shows_percent_and_what_is_missing():
    good = retrieval_metrics(retrieval_ranks(torch.eye(3), torch.eye(3), torch.arange(3)))
    poor = retrieval_metrics(retrieval_ranks(torch.eye(8), torch.eye(8), torch.arange(8).flip(0)), recall_at=(1, 5, 8))
    lines = format_metrics_table({"unified": good, "clip": poor}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [" ".join(line.split()) for line in lines] == [
        "i2t R@1 R@5 R@10 median t2i R@1 R@5 R@10 median RSUM",
        "unified 100.0 100.0 100.0 1.0 100.0 100.0 100.0 1.0 600.0",
        "clip 0.0 0.0 - 8.0 0.0 0.0 - 8.0 -",
    ]
    assert all(len(line) <= 80 for line in lines)
    judged = format_metrics_table({"unified": good}, judged=True).splitlines()
    assert [" ".join(line.split()) for line in judged] == [
        "i2t mAP@R R-P R@1 t2i mAP@R R-P R@1",
        "unified 100.0 100.0 100.0 100.0 100.0 100.0",
    ]


@pytest.mark.filterwarnings("ignore:failed to import `ujson`")
@pytest.mark.parametrize("seed", range(3))
def test_equals_eccv_caption(seed):
    """Its functions take, for each query, the sorted ids of all candidates, and the ids of the right ones.

    Some captions belong to several images, some are no query, and some answers are not among the candidates.
    """
    theirs = pytest.importorskip("eccv_caption._metrics")
    generator = random.Random(seed)
    scores = torch.randn(17, 43, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    answers = []
    for rows, queries in ((scores, 13), (scores.T, 21)):
        by_query = {}
        for query in generator.sample(range(len(rows)), queries):
            by_query[query] = generator.sample(range(rows.shape[1]), generator.randint(1, 6))
            rows[query, by_query[query]] += 1.5  # otherwise chance is all there is to measure
            if generator.random() < 0.3:
                by_query[query].append(-1)
        answers.append(by_query)
    ours = retrieval_metrics(similarity_ranks(scores, tuple(answers)), recall_at=(1, 3, 5, 10))
    for name, rows, by_query in zip(Ranks._fields, (scores, scores.T), answers, strict=True):
        retrieved = {query: row.argsort(descending=True).tolist() for query, row in enumerate(rows)}
        expected = theirs.compute_eccv_metrics(retrieved, by_query)
        assert 0 < expected["eccv_map_at_r"] < expected["eccv_rprecision"] < 1
        pairs = {"mean_average_precision_at_r": expected["eccv_map_at_r"], "r_precision": expected["eccv_rprecision"]}
        pairs |= {f"R@{k}": theirs.compute_r_at_k(retrieved, by_query, K=k) for k in (1, 3, 5, 10)}
        for metric, value in pairs.items():
            assert ours[f"{name}_{metric}"] == pytest.approx(value, rel=1e-12)  # their means are numpy's


@pytest.mark.parametrize("captions_per_image", [1, 5])
def test_equals_pytorch_metric_learning(captions_per_image):
    """Images as queries and captions as references, or the other way round; labels are the images."""
    accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    generator = torch.Generator().manual_seed(captions_per_image)
    images = torch.nn.functional.normalize(torch.randn(40, 16, generator=generator), dim=1)
    image_of_caption = torch.arange(40).repeat_interleave(captions_per_image)
    image_of_caption = image_of_caption[torch.randperm(len(image_of_caption), generator=generator)]
    noise = torch.randn(len(image_of_caption), 16, generator=generator)
    captions = torch.nn.functional.normalize(images[image_of_caption] + 0.4 * noise, dim=1)
    ours = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption))
    # The default neighbors of AccuracyCalculator need FAISS.
    calculator = accuracy_calculator.AccuracyCalculator(
        include=("mean_average_precision_at_r", "r_precision", "precision_at_1"),
        knn_func=CustomKNN(CosineSimilarity(), batch_size=16),
        device=torch.device("cpu"),
    )
    sides = [(images, torch.arange(40)), (captions, image_of_caption)]
    for name, (query, reference_side) in zip(Ranks._fields, (sides, sides[::-1]), strict=True):
        theirs = calculator.get_accuracy(*query, *reference_side, ref_includes_query=False)
        assert len(theirs) == 3
        for metric, value in theirs.items():
            assert 0.1 < value < 0.95
            our_name = {"precision_at_1": "R@1"}.get(metric, metric)
            assert ours[f"{name}_{our_name}"] == pytest.approx(value, rel=1e-12)
