import pytest
import torch

from tests.reference import retrieval as reference
from vl_plugins.retrieval import Ranks, format_metrics_table, retrieval_metrics, retrieval_ranks


def make_ranks(image_to_text, text_to_image):
    return Ranks(
        image_to_text=torch.tensor(image_to_text),
        text_to_image=torch.tensor(text_to_image),
        positive_similarity=torch.tensor([0.5, 0.7, 0.9]),
        image_to_text_hardest_negative=torch.tensor([0.2, 0.4]),
        text_to_image_hardest_negative=torch.tensor([0.0, 0.1, 0.2]),
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
            "positive_similarity": 0.7,
            "hardest_negative_similarity": 0.2,
        }
    )


@pytest.mark.parametrize("ranks", [[3], [4, 1], [9, 2, 2], [1, 1, 5, 8]])
def test_median_and_mean(ranks):
    metrics = retrieval_metrics(make_ranks(ranks, [1]))
    assert metrics["image_to_text_median_rank"] == reference.median(ranks)
    assert metrics["image_to_text_mean_rank"] == pytest.approx(sum(ranks) / len(ranks))
    assert isinstance(metrics["image_to_text_median_rank"], float)


@pytest.mark.parametrize(("recall_at", "has_rsum"), [((1, 5, 10), True), ((1, 5, 10, 50), True), ((2,), False)])
def test_other_recalls(recall_at, has_rsum):
    metrics = retrieval_metrics(make_ranks([1, 2, 3, 60], [1]), recall_at=recall_at)
    for k in recall_at:
        assert metrics[f"image_to_text_R@{k}"] == 100 * sum(rank <= k for rank in [1, 2, 3, 60]) / 4
    assert sum("R@" in key for key in metrics) == 2 * len(recall_at)
    assert ("rsum" in metrics) == has_rsum


def test_recall_at_zero_is_refused():
    with pytest.raises(ValueError, match=r"recall_at must hold positive numbers, got \(0, 1\)"):
        retrieval_metrics(make_ranks([1], [1]), recall_at=(0, 1))


def test_perfect_and_worst_models():
    image_of_caption = torch.arange(20).repeat_interleave(5)
    captions = torch.eye(20)[image_of_caption]
    assert retrieval_metrics(retrieval_ranks(torch.eye(20), captions, image_of_caption))["rsum"] == 600
    for images in (torch.zeros(20, 20), -torch.eye(20)):
        metrics = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption))
        assert metrics["rsum"] == 0
        assert metrics["text_to_image_median_rank"] == 20
        assert metrics["image_to_text_median_rank"] == 96


@pytest.mark.parametrize("pairs", [40, 41])
def test_equals_open_clip_for_one_caption_per_image_without_ties(pairs):
    get_clip_metrics = pytest.importorskip("open_clip_train.train").get_clip_metrics
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(pairs, 16, generator=generator), dim=1)
    texts = torch.nn.functional.normalize(images + 0.8 * torch.randn(pairs, 16, generator=generator), dim=1)
    theirs = get_clip_metrics(images, texts, logit_scale=torch.tensor(1.0))
    ranks = retrieval_ranks(images, texts, torch.arange(pairs))
    ours = retrieval_metrics(ranks)
    assert len(theirs) == 10
    for name, value in theirs.items():
        if "R@" in name:
            assert 0 < value < 1
            value = 100 * value
        elif "median" in name:
            # Theirs is rounded down where it falls between two ranks.
            assert value == ours[name] // 1
            continue
        assert ours[name] == pytest.approx(value)


def test_table_is_aligned_and_in_order():
    good = retrieval_metrics(make_ranks([1, 1], [1, 1]))
    poor = retrieval_metrics(make_ranks([1, 6], [1, 5, 10, 1100]))
    lines = format_metrics_table({"unified": good, "clip": poor}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[0].split()) == "i2t R@1 R@5 R@10 median t2i R@1 R@5 R@10 median RSUM"
    assert " ".join(lines[1].split()) == "unified 100.0 100.0 100.0 1.0 100.0 100.0 100.0 1.0 600.0"
    assert " ".join(lines[2].split()) == "clip 50.0 50.0 100.0 3.5 25.0 50.0 75.0 7.5 350.0"
    assert all(len(line) <= 80 for line in lines)


def test_table_shows_what_is_missing():
    line = format_metrics_table({"clip": retrieval_metrics(make_ranks([1], [2]), recall_at=(1,))}).splitlines()[1]
    assert " ".join(line.split()) == "clip 100.0 - - 1.0 0.0 - - 2.0 -"


def test_table_in_markdown():
    lines = format_metrics_table({"a|b": {"rsum": 1.0}, "c": {}}, markdown=True).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    delimiters = [cell.strip() for cell in lines[1].strip("|").split("|")]
    assert len(delimiters) == 10
    assert all(set(cell[:-1]) == {"-"} and cell[-1] == ":" for cell in delimiters[1:])
    assert lines[2].startswith(r"| a\|b |")


def test_empty_table_is_refused():
    with pytest.raises(ValueError, match="results must hold at least one"):
        format_metrics_table({})
