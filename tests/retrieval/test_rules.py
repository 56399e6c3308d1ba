import contextlib
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from tests.helpers.tied_embeddings import KINDS, tied_features
from tests.reference.rules import CUTOFFS, expected_numbers, fold_means, rising_ids, share_of_answers
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.retrieval import id_order, retrieval_metrics, rules, similarity_ranks
from vl_plugins.retrieval.features import Features, describe_similarity
from vl_plugins.retrieval.rules import format_rules, rules_notes, rules_table, tool_numbers
from vl_plugins.retrieval.tools import RULES, ToolNumbers
from vl_plugins.tables import align_columns

DIRECTIONS = ("image_to_text", "text_to_image")
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "why_numbers_differ.md"


def texts(ids, number):
    return [str(one) for one in (range(number) if ids is None else ids)]


def scores_of(features):
    return (features.images.double() @ features.captions.double().T).tolist()


def reference(features, scores=None):
    image_ids = texts(features.image_ids, len(features.images))
    caption_ids = texts(features.caption_ids, len(features.captions))
    owners = features.image_of_caption.tolist()
    return expected_numbers(scores or scores_of(features), owners, image_ids, caption_ids)


def by_rule(numbers):
    assert [(one.tool, one.rule) for one in numbers] == [(rule.tool, rule.name) for rule in RULES]
    return {(one.tool, one.rule): one for one in numbers}


def assert_equals(numbers, expected):
    """Compare both ends; means of the same fractions differ by their rounding in float64."""
    for direction, (low, high) in zip(DIRECTIONS, expected, strict=True):
        for column, k in enumerate(CUTOFFS):
            metric = f"{direction}_R@{k}"
            assert numbers.low[metric] == pytest.approx(low[column], abs=1e-12), (numbers.tool, numbers.rule, metric)
            assert numbers.high[metric] == pytest.approx(high[column], abs=1e-12), (numbers.tool, numbers.rule, metric)


def assert_is_missing(numbers, reason):
    assert (numbers.low, numbers.high) == ({}, {})
    assert reason in numbers.note


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_rule_equals_plain_loops_that_sort_whole_rows(seed, kind):
    features = tied_features(seed, kind=kind, images=(12, 24), shuffled=True)
    numbers = by_rule(tool_numbers(features))
    for rule, expected in reference(features).items():
        if numbers[rule].low or rule[0] != "VSE++":
            assert_equals(numbers[rule], expected)


@pytest.mark.parametrize("images", [1, 2, 3, 9])
def test_few_images(images):
    features = tied_features(images, kind="signs", images=(images, images), captions=(5, 5), width=4)
    numbers = by_rule(tool_numbers(features))
    expected = reference(features)
    clip_benchmark = ("CLIP_benchmark", "any right answer")
    assert_is_missing(
        numbers[clip_benchmark], f"`torch.topk` needs at least 10 candidates, and there are {images} images"
    )
    for rule in expected.keys() - {clip_benchmark}:
        assert_equals(numbers[rule], expected[rule])


def test_ties_decide_in_these_cases():
    features = tied_features(1, kind="signs", width=4)
    numbers = by_rule(tool_numbers(features))
    both_ends = numbers["eccv_caption", "compute_r_at_k"]
    rising = numbers["sentence-transformers", "accuracy@K"].low
    falling = numbers["mteb", "hit_rate@K"].low
    for direction in DIRECTIONS:
        metric = f"{direction}_R@1"
        assert both_ends.low[metric] < min(rising[metric], falling[metric])
        assert both_ends.high[metric] > max(rising[metric], falling[metric])
        assert rising[metric] != falling[metric]


def test_positions_as_text_decide_ties_where_there_are_no_ids():
    features = tied_features(2, kind="signs", width=4, ids=False)
    assert len(features.captions) > 10  # "10" comes before "2"
    numbers = by_rule(tool_numbers(features))
    for rule, expected in reference(features).items():
        if rule[0] in ("sentence-transformers", "mteb"):
            assert_equals(numbers[rule], expected)
            assert numbers[rule].note == ""


def test_positions_decide_ties_where_ids_are_not_unique_as_text():
    features = tied_features(3, kind="signs", width=4, ids=False)
    image_ids = list(range(len(features.images)))[::-1]
    image_ids[0] = str(image_ids[1])
    numbers = by_rule(tool_numbers(replace(features, image_ids=image_ids)))
    plain = by_rule(tool_numbers(features))
    for rule in (("sentence-transformers", "recall@K"), ("mteb", "recall@K")):
        assert numbers[rule].low == plain[rule].low
        assert numbers[rule].note == "image ids are not unique as text, so positions decide ties"


@pytest.mark.parametrize(("captions", "is_ordered"), [(1000, True), (1001, True), (1002, False)])
def test_mteb_has_no_order_among_more_candidates_than_it_retrieves(captions, is_ordered):
    owners = torch.arange(captions) % 12
    images = torch.eye(12)
    features = Features(images=images, captions=images[:1].expand(captions, -1), image_of_caption=owners)
    numbers = by_rule(tool_numbers(features))
    for name in ("recall@K", "hit_rate@K"):
        mteb = numbers["mteb", name]
        assert (mteb.low == mteb.high) == is_ordered
        assert ("ties of 12 queries reach beyond the 1,001 candidates" in mteb.note) == (not is_ordered)
    if not is_ordered:
        assert mteb.low["image_to_text_R@10"] == 0
        assert mteb.high["image_to_text_R@10"] == 1
    right = [set(range(image, captions, 12)) for image in range(12)]
    ids = texts(None, captions)
    expected = rising_ids(scores_of(features), right, share_of_answers, ids)[0]
    recall = numbers["sentence-transformers", "recall@K"].low
    assert [recall[f"image_to_text_R@{k}"] for k in CUTOFFS] == pytest.approx(expected, abs=1e-12)


def test_blocks_give_the_same_numbers(monkeypatch):
    features = tied_features(4, kind="equal images", images=(40, 45), captions=(5, 5), width=4)
    whole = tool_numbers(features)
    monkeypatch.setattr(id_order, "BLOCK", 1)
    assert tool_numbers(features) == whole


def test_the_first_row_is_what_retrieval_metrics_returns():
    features = tied_features(5, kind="signs", width=4)
    metrics = retrieval_metrics(similarity_ranks(features.similarities(), features.image_of_caption))
    for metric, value in tool_numbers(features)[0].low.items():
        assert value == metrics[metric]


def test_ready_ranks_give_the_same_numbers():
    features = tied_features(6, kind="duplicates")
    for top in (10, 14):
        ranks = similarity_ranks(features.similarities(), features.image_of_caption, top=top)
        assert tool_numbers(features, ranks) == tool_numbers(features)


def test_ranks_of_other_features_or_with_too_few_candidates_are_an_error():
    features = tied_features(6)
    similarities = features.similarities()
    with pytest.raises(ValueError, match=r"top=10 or more, got 9"):
        tool_numbers(features, similarity_ranks(similarities, features.image_of_caption, top=9))
    fewer = tied_features(7, images=(11, 11))
    with pytest.raises(ValueError, match="ranks of all images and captions of the features"):
        tool_numbers(features, similarity_ranks(fewer.similarities(), fewer.image_of_caption))


def test_sets_are_compared_by_their_own_similarity():
    generator = torch.Generator().manual_seed(0)
    images = normalize(torch.randn(14, 3, 8, generator=generator, dtype=torch.float64), dim=-1)
    captions = normalize(torch.randn(30, 2, 8, generator=generator, dtype=torch.float64), dim=-1)
    owners = torch.arange(30) % 14
    similarity = SmoothChamferSimilarity()
    features = Features(
        images=images, captions=captions, image_of_caption=owners, description=describe_similarity(similarity)
    )
    scores = similarity.compute_mat(images, captions).tolist()
    numbers = by_rule(tool_numbers(features))
    for rule, expected in reference(features, scores).items():
        if rule[0] != "VSE++":
            assert_equals(numbers[rule], expected)


def test_folds_are_galleries_of_consecutive_images(monkeypatch):
    features = tied_features(8, kind="signs", images=(40, 40), captions=(5, 5), width=4, shuffled=True)
    monkeypatch.setattr(rules, "FOLDED_IMAGES", 40)
    numbers = by_rule(tool_numbers(features))
    expected = fold_means(scores_of(features), features.image_of_caption.tolist(), folds=5)
    assert expected[0][0] != expected[0][1]
    for rule in (("eccv_caption", "coco_1k_recalls"), ("VSE++", "fold5")):
        assert_equals(numbers[rule], expected)


def test_rules_that_do_not_apply_say_why():
    three = tied_features(9, images=(20, 20), captions=(3, 3))
    numbers = by_rule(tool_numbers(three))
    for name in ("i2t, t2i", "fold5"):
        assert_is_missing(numbers["VSE++", name], "it takes 5 captions of each image; 20 of 20 have another number")
    folds = "its 5 folds take 5,000 images, and there are 20"
    assert_is_missing(numbers["eccv_caption", "coco_1k_recalls"], folds)
    five = by_rule(tool_numbers(tied_features(9, images=(20, 20), captions=(5, 5))))
    assert five["VSE++", "i2t, t2i"].low
    assert_is_missing(five["VSE++", "fold5"], folds)


def test_negative_similarities_count_only_for_the_hit_rate_of_torchmetrics():
    images = torch.eye(3)
    features = Features(images=images, captions=-images, image_of_caption=torch.arange(3))
    numbers = by_rule(tool_numbers(features))
    metric = "image_to_text_R@5"
    assert numbers["torchmetrics", "RetrievalHitRate"].low[metric] == 1
    assert numbers["torchmetrics", "RetrievalRecall"].high[metric] == 0
    assert numbers["torchmetrics", "RetrievalPrecision"].high[metric] == 0


def test_the_table_shows_two_ends_only_where_printed_digits_differ():
    low = {f"{direction}_R@{k}": 0.5 for direction in DIRECTIONS for k in CUTOFFS}
    high = low | {"image_to_text_R@1": 0.58249, "text_to_image_R@5": 0.50049}
    numbers = [
        ToolNumbers("eccv_caption", "compute_r_at_k", low, high),
        ToolNumbers("VSE++", "fold5", {}, {}, "too few images"),
        ToolNumbers("eccv_caption", "coco_1k_recalls", {}, {}, "too few images"),
    ]
    table = rules_table(numbers)
    assert table == [
        ["", "i2t R@1", "R@5", "R@10", "t2i R@1", "R@5", "R@10"],
        ["eccv_caption: compute_r_at_k", "50.0-58.2", "50.0", "50.0", "50.0", "50.0", "50.0"],
        ["VSE++: fold5", "-", "-", "-", "-", "-", "-"],
        ["eccv_caption: coco_1k_recalls", "-", "-", "-", "-", "-", "-"],
    ]
    notes = [
        "A range has ties against the model at its low end and in its favor at its high end.",
        "VSE++: fold5, eccv_caption: coco_1k_recalls: too few images.",
    ]
    assert rules_notes(numbers) == notes
    assert rules_notes(numbers[1:]) == notes[1:]
    assert format_rules(numbers).splitlines() == ["  ".join(row) for row in align_columns(table)] + notes


def test_numbers_are_plain_floats_in_order_of_their_ends():
    for one in tool_numbers(tied_features(10, kind="signs", width=4)):
        for metric, low in one.low.items():
            assert type(low) is float
            assert 0 <= low <= one.high[metric] <= 1
            assert math.isfinite(low)


def test_the_page_has_the_sentence_of_each_rule():
    page = PAGE.read_text(encoding="utf-8")
    for rule in RULES:
        assert f"| {rule.tool} | {rule.name} | {rule.sentence} |" in page


def test_the_output_on_the_page_is_that_of_its_code():
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (output,) = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, PAGE.name, "exec"), {})
    assert printed.getvalue() == output
