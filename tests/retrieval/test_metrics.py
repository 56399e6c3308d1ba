import pytest
import torch

from vl_plugins.retrieval import Ranks, format_metrics_table, retrieval_metrics, retrieval_ranks, similarity_ranks


def test_worked_by_hand():
    """Ranks of the images: 1 and 2; of the captions: 1, 2, 1, and 2 for a tie."""
    scores = torch.tensor([[0.9, 0.6, 0.8, 0.5], [0.2, 0.86, 0.85, 0.5]])
    metrics = retrieval_metrics(similarity_ranks(scores, torch.tensor([0, 0, 1, 1])))
    both = {"R@1": 0.5, "R@5": 1.0, "R@10": 1.0, "mean_rank": 1.5, "median_rank": 1.5, "r_precision": 0.5}
    expected = {f"{way}_{name}": value for way in Ranks._fields for name, value in both.items()}
    # The first two captions of the images are right and wrong, and wrong and right.
    expected["image_to_text_mean_average_precision_at_r"] = (1 / 2 + 1 / 4) / 2
    expected["text_to_image_mean_average_precision_at_r"] = 0.5
    expected |= {"rsum": 500.0, "positive_similarity": (0.9 + 0.6 + 0.85 + 0.5) / 4}
    expected["hardest_negative_similarity"] = ((0.8 + 0.86) / 2 + (0.2 + 0.86 + 0.8 + 0.5) / 4) / 2
    assert metrics == pytest.approx(expected)


def test_other_recalls():
    """Image i has the rank 1 + i."""
    scores = (torch.arange(60)[None] > 59 - torch.arange(60)[:, None]).double() + 0.5 * torch.eye(60).flip(1)
    metrics = retrieval_metrics(similarity_ranks(scores, torch.arange(59, -1, -1)), recall_at=(2, 50))
    assert {key: value for key, value in metrics.items() if "image_to_text_R@" in key} == pytest.approx(
        {"image_to_text_R@2": 2 / 60, "image_to_text_R@50": 50 / 60}
    )
    assert metrics["image_to_text_median_rank"] == 30.5
    assert "rsum" not in metrics


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
    poor = retrieval_metrics(retrieval_ranks(torch.eye(8), torch.eye(8), torch.arange(8).flip(0)))
    poor = {name: value for name, value in poor.items() if "R@10" not in name and name != "rsum"}
    lines = format_metrics_table({"unified": good, "clip": poor}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [" ".join(line.split()) for line in lines] == [
        "i2t R@1 R@5 R@10 median t2i R@1 R@5 R@10 median RSUM",
        "unified 100.0 100.0 100.0 1.0 100.0 100.0 100.0 1.0 600.0",
        "clip 0.0 0.0 - 8.0 0.0 0.0 - 8.0 -",
    ]
    judged = format_metrics_table({"unified": good}, judged=True).splitlines()
    assert [" ".join(line.split()) for line in judged] == [
        "i2t mAP@R R-P R@1 t2i mAP@R R-P R@1",
        "unified 100.0 100.0 100.0 100.0 100.0 100.0",
    ]
