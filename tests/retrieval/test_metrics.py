import random

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.inference import CustomKNN

from tests.reference import retrieval as reference
from vl_plugins.retrieval import (
    DirectionRanks,
    GroundTruth,
    Ranks,
    format_metrics_table,
    precision_at_r,
    retrieval_metrics,
    retrieval_ranks,
    similarity_ranks,
)


def make_direction(rank, positive_similarity, hardest_negative):
    """Queries with one right answer each, but the first one with all the rest."""
    queries, positives = len(rank), len(positive_similarity)
    positive_query = [0] * (positives - queries + 1) + list(range(1, queries))
    return DirectionRanks(
        queries=torch.arange(queries),
        rank=torch.tensor(rank),
        right_answers=torch.tensor(positive_query).bincount(),
        positive_query=torch.tensor(positive_query),
        positives=torch.arange(positives),
        positive_similarity=torch.tensor(positive_similarity),
        hardest_negative_similarity=torch.tensor(hardest_negative),
        negatives=torch.empty(queries, 0, dtype=torch.int64),
        negative_similarity=torch.empty(queries, 0),
    )


def make_ranks(image_to_text, text_to_image):
    return Ranks(
        make_direction(image_to_text, [0.5, 0.7, 0.9, 0.8][: max(2, len(image_to_text))], [0.2, 0.4]),
        make_direction(text_to_image, [0.6, 0.6, 0.6, 0.8][: max(2, len(text_to_image))], [0.0, 0.1, 0.2]),
    )


def test_worked_by_hand():
    assert retrieval_metrics(make_ranks([1, 6], [1, 5, 10, 11])) == pytest.approx(
        {
            "image_to_text_mean_rank": 3.5,
            "image_to_text_median_rank": 3.5,
            "image_to_text_R@1": 50.0,
            "image_to_text_R@5": 50.0,
            "image_to_text_R@10": 100.0,
            "text_to_image_mean_rank": 6.75,
            "text_to_image_median_rank": 7.5,
            "text_to_image_R@1": 25.0,
            "text_to_image_R@5": 50.0,
            "text_to_image_R@10": 75.0,
            "rsum": 350.0,
            # (0.5 + 0.7) / 2 of the images and (0.6 + 0.6 + 0.6 + 0.8) / 4 of the captions; 0.3 and 0.1.
            "positive_similarity": 0.625,
            "hardest_negative_similarity": 0.2,
        }
    )


@pytest.mark.parametrize(("recall_at", "has_rsum"), [((1, 5, 10, 50), True), ((2,), False)])
def test_other_recalls(recall_at, has_rsum):
    metrics = retrieval_metrics(make_ranks([1, 2, 3, 60], [1]), recall_at=recall_at)
    for k in recall_at:
        assert metrics[f"image_to_text_R@{k}"] == 100 * sum(rank <= k for rank in [1, 2, 3, 60]) / 4
    assert sum("R@" in key for key in metrics) == 2 * len(recall_at)
    assert ("rsum" in metrics) == has_rsum


def test_recall_at_zero_is_an_error():
    with pytest.raises(ValueError, match=r"recall_at must hold positive numbers, got \(0, 1\)"):
        retrieval_metrics(make_ranks([1], [1]), recall_at=(0, 1))


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
        if "R@" in name:
            assert 0 < value < 1
            assert ours[name] == pytest.approx(100 * value)
        elif "median" in name:
            # Theirs is rounded down where it falls between two ranks.
            assert value == ours[name] // 1
        else:
            assert ours[name] == pytest.approx(value)


def test_table_is_aligned_and_shows_what_is_missing():
    good = retrieval_metrics(make_ranks([1, 1], [1, 1]))
    poor = retrieval_metrics(make_ranks([1, 6], [1, 5, 10, 1100]), recall_at=(1, 5))
    lines = format_metrics_table({"unified": good, "clip": poor}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[0].split()) == "i2t R@1 R@5 R@10 median t2i R@1 R@5 R@10 median RSUM"
    assert " ".join(lines[1].split()) == "unified 100.0 100.0 100.0 1.0 100.0 100.0 100.0 1.0 600.0"
    assert " ".join(lines[2].split()) == "clip 50.0 50.0 - 3.5 25.0 50.0 - 7.5 -"
    assert all(len(line) <= 80 for line in lines)
    with pytest.raises(ValueError, match="results must hold at least one"):
        format_metrics_table({})


def random_case(seed, absent=0.3, images=17, captions=43):
    """Scores, their ground truth, and the answers of both directions.

    Some captions belong to several images, some are no query, and some answers are not among the candidates.
    """
    generator = random.Random(seed)
    scores = torch.randn(images, captions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    answers = []
    for rows, queries in ((scores, images - 4), (scores.T, captions // 2)):
        by_query = {}
        for query in generator.sample(range(len(rows)), queries):
            by_query[query] = generator.sample(range(rows.shape[1]), generator.randint(1, 6))
            rows[query, by_query[query]] += 1.5  # otherwise chance is all there is to measure
            if generator.random() < absent:
                by_query[query].append(-1)
        answers.append(by_query)
    return scores, GroundTruth.from_ids(range(images), range(captions), *answers, allow_absent=True), answers


class TestPrecisionAtR:
    def test_by_hand(self):
        # Ranking: right, wrong, right, wrong, right; R = 3.
        scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5], [0.0, 1.0, 0.0, 1.0, 0.0]])
        ranks = similarity_ranks(scores, torch.tensor([0, 1, 0, 1, 0]), negatives=3)
        average_precision, r_precision = precision_at_r(ranks.image_to_text)
        assert average_precision.tolist() == pytest.approx([(1 + 2 / 3) / 3, 1])
        assert r_precision.tolist() == pytest.approx([2 / 3, 1])
        metrics = retrieval_metrics(ranks)
        assert metrics["image_to_text_mean_average_precision_at_r"] == pytest.approx(100 * (5 / 9 + 1) / 2)
        assert metrics["image_to_text_r_precision"] == pytest.approx(100 * 5 / 6)
        # With one right image, both tell whether it comes first.
        assert metrics["text_to_image_mean_average_precision_at_r"] == metrics["text_to_image_R@1"]
        assert metrics["text_to_image_r_precision"] == metrics["text_to_image_R@1"]

    def test_a_tie_puts_the_wrong_one_first(self):
        ranks = similarity_ranks(torch.tensor([[0.5, 0.5, 0.1], [0.0, 0.5, 0.0]]), torch.tensor([0, 1, 0]), negatives=2)
        average_precision, r_precision = precision_at_r(ranks.image_to_text)
        assert average_precision.tolist() == pytest.approx([1 / 2 / 2, 1])
        assert r_precision.tolist() == pytest.approx([1 / 2, 1])

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("more", [0, 5])
    def test_equals_plain_loops(self, seed, more):
        scores, truth, answers = random_case(seed)
        ranks = similarity_ranks(scores, truth, negatives=truth.most_positives + more)
        for part, rows, by_query in zip(ranks, (scores, scores.T), answers, strict=True):
            expected = reference.precision_at_r(rows.tolist(), by_query)
            for got, values in zip(precision_at_r(part), expected, strict=True):
                assert got.tolist() == pytest.approx(values, abs=1e-12)

    def test_too_few_negatives_are_an_error(self):
        scores, truth, answers = random_case(0)
        ranks = similarity_ranks(scores, truth, negatives=4)
        for part, by_query in zip(ranks, answers, strict=True):
            most = max(map(len, by_query.values()))
            with pytest.raises(ValueError, match=f"up to {most} right answers, which need as many negatives; got 4"):
                precision_at_r(part)
        assert not any("precision" in name for name in retrieval_metrics(ranks))


@pytest.mark.filterwarnings("ignore:failed to import `ujson`")
@pytest.mark.parametrize("seed", range(3))
def test_equals_eccv_caption(seed):
    """Its functions take, for each query, the sorted ids of all candidates, and the ids of the right ones."""
    theirs = pytest.importorskip("eccv_caption._metrics")
    scores, truth, answers = random_case(seed)
    ranks = similarity_ranks(scores, truth, negatives=truth.most_positives)
    ours = retrieval_metrics(ranks, recall_at=(1, 3, 5, 10))
    for name, rows, by_query in zip(Ranks._fields, (scores, scores.T), answers, strict=True):
        retrieved = {query: row.argsort(descending=True).tolist() for query, row in enumerate(rows)}
        expected = theirs.compute_eccv_metrics(retrieved, by_query)
        assert 0 < expected["eccv_map_at_r"] < expected["eccv_rprecision"] < 1
        pairs = {"mean_average_precision_at_r": expected["eccv_map_at_r"], "r_precision": expected["eccv_rprecision"]}
        pairs |= {f"R@{k}": theirs.compute_r_at_k(retrieved, by_query, K=k) for k in (1, 3, 5, 10)}
        for metric, value in pairs.items():
            # Their means are numpy's and ours torch's.
            assert ours[f"{name}_{metric}"] == pytest.approx(100 * value, rel=1e-12)


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
    ours = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption, negatives=captions_per_image))
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
            assert ours[f"{name}_{our_name}"] == pytest.approx(100 * value, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_equal_a_sort_in_numpy(seed):
    """Mean and median rank, of queries that are only some of the rows and columns."""
    scores, truth, answers = random_case(seed, absent=0)
    ours = retrieval_metrics(similarity_ranks(scores, truth))
    for name, rows, by_query in zip(Ranks._fields, (scores.numpy(), scores.numpy().T), answers, strict=True):
        ranks = []
        for query, right in by_query.items():
            order = np.argsort(-rows[query])
            ranks.append(1 + min(np.flatnonzero(order == candidate)[0] for candidate in right))
        assert ours[f"{name}_mean_rank"] == pytest.approx(np.mean(ranks))
        assert ours[f"{name}_median_rank"] == np.median(ranks)
