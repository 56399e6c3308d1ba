import pytest
import torch

from vl_plugins.retrieval import GroundTruth


def pairs(tensor):
    assert tensor.dtype == torch.int64
    return [tuple(pair) for pair in tensor.T.tolist()]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_from_image_of_caption(dtype):
    truth = GroundTruth.from_image_of_caption(torch.tensor([2, 0, 2, 1, 0], dtype=dtype), 3)
    assert pairs(truth.image_to_text) == pairs(truth.text_to_image) == [(0, 1), (0, 4), (1, 3), (2, 0), (2, 2)]
    assert truth.most_positives == 2


@pytest.mark.parametrize(
    ("image_of_caption", "message"),
    [
        (torch.zeros(5), r"must be an integer tensor of shape \(C,\).* got torch.float32 of shape \(5,\)"),
        (torch.zeros(5, dtype=torch.bool), r"must be an integer tensor .* got torch.bool of shape \(5,\)"),
        (torch.zeros(5, 1).long(), r"must be an integer tensor .* got torch.int64 of shape \(5, 1\)"),
        (torch.tensor([0, 3, 1, 2]), r"must lie in \[0, 3\), got 0 to 3"),
        (torch.tensor([0, 1, 2, -1, -2]), r"must lie in \[0, 3\), got -2 to 2"),
        (torch.tensor([0, 0, 2]), "must give every image at least one caption; 1 of 3 have none, such as image 1"),
        (torch.zeros(0).long(), r"must lie in \[0, 3\), got none"),
    ],
)
def test_bad_image_of_caption_is_named(image_of_caption, message):
    with pytest.raises(ValueError, match="image_of_caption " + message):
        GroundTruth.from_image_of_caption(image_of_caption, 3)


def test_other_pairs_in_each_direction():
    truth = GroundTruth.from_ids(
        image_ids=[30, "10", 20],
        caption_ids=["z", 7, "a", 5],
        image_to_text={20: ["a", 5, "a"], 30: iter(["z"])},
        text_to_image={"z": [30, 20], 5: {20}, 7: ["10", 20]},
    )
    assert pairs(truth.image_to_text) == [(0, 0), (2, 2), (2, 3)]
    assert pairs(truth.text_to_image) == [(0, 0), (1, 1), (2, 0), (2, 1), (2, 3)]
    assert truth.most_positives == 2


def test_the_other_way_round_by_default():
    truth = GroundTruth.from_ids("abc", range(4), {"c": [0, 3], "a": [3]})
    assert pairs(truth.text_to_image) == pairs(truth.image_to_text) == [(0, 3), (2, 0), (2, 3)]


def test_most_positives_looks_at_both_directions():
    assert GroundTruth.from_ids(range(4), range(4), {0: [0, 1, 2]}, {0: [0]}).most_positives == 3
    assert GroundTruth.from_ids(range(4), range(4), {0: [0]}, {0: [0, 1, 2, 3]}).most_positives == 4


def test_right_answers_that_are_not_there():
    maps = {"a": [0, 9, 8], "b": [1]}, {0: ["a", "y"], 1: ["b"]}
    truth = GroundTruth.from_ids("ab", range(2), *maps, allow_absent=True)
    assert pairs(truth.image_to_text) == [(0, -1), (0, -1), (0, 0), (1, 1)]
    assert pairs(truth.text_to_image) == [(-1, 0), (0, 0), (1, 1)]
    assert truth.most_positives == 3
    # A caption that is not there is no query either.
    assert pairs(GroundTruth.from_ids("ab", range(2), maps[0], allow_absent=True).text_to_image) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("aba", range(3), {"a": [0]}), "image_ids must differ; 'a' occurs at 0 and at 2"),
        (("ab", [3, 4, 5, 4], {"a": [3]}), "caption_ids must differ; 4 occurs at 1 and at 3"),
        (("ab", range(3), {"c": [0]}), "image_to_text has the query 'c', which is not among the ids"),
        (("ab", range(3), {"a": [1, 3]}), r"image_to_text\['a'\] has 3, which is not among the ids"),
        # An id that was read as text.
        (("ab", range(3), {"a": ["1"]}), r"image_to_text\['a'\] has '1', which is not among the ids"),
        (("ab", range(3), {"a": [1], "b": []}), r"image_to_text\['b'\] has no right answer"),
        (("ab", range(3), {}), "image_to_text must have the right answers of at least one query, got none"),
        (("ab", range(3), {"a": [0]}, {3: ["a"]}), "text_to_image has the query 3, which is not among the ids"),
    ],
)
def test_bad_ids_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroundTruth.from_ids(*arguments)


def test_absent_answers_alone_are_an_error():
    with pytest.raises(ValueError, match=r"image_to_text\['b'\] has no right answer that is among the ids"):
        GroundTruth.from_ids("ab", range(3), {"a": [0], "b": [7]}, allow_absent=True)
