import pytest
import torch

from vl_plugins.retrieval import GroundTruth, Positives


def pairs(positives):
    assert positives.images.dtype == positives.captions.dtype == torch.int64
    assert positives.images.is_contiguous()
    assert positives.captions.is_contiguous()
    return list(zip(positives.images.tolist(), positives.captions.tolist(), strict=True))


class TestFromImageOfCaption:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_pairs_are_sorted(self, dtype):
        truth = GroundTruth.from_image_of_caption(torch.tensor([2, 0, 2, 1, 0], dtype=dtype), 3)
        assert pairs(truth.image_to_text) == [(0, 1), (0, 4), (1, 3), (2, 0), (2, 2)]
        assert pairs(truth.text_to_image) == pairs(truth.image_to_text)
        assert truth.most_positives == 2

    def test_it_equals_that_of_ids(self):
        image_of_caption = torch.tensor([2, 0, 2, 1, 0])
        truth = GroundTruth.from_ids("abc", range(5), {"a": [1, 4], "c": [2, 0], "b": [3]})
        for got, expected in zip(truth, GroundTruth.from_image_of_caption(image_of_caption, 3), strict=True):
            assert pairs(got) == pairs(expected)

    @pytest.mark.parametrize(
        ("image_of_caption", "message"),
        [
            (torch.zeros(5), r"must be an integer tensor of shape \(C,\).* got torch.float32 of shape \(5,\)"),
            (torch.zeros(5, dtype=torch.bool), r"must be an integer tensor .* got torch.bool of shape \(5,\)"),
            (torch.zeros(5, dtype=torch.complex64), r"must be an integer tensor .* got torch.complex64"),
            (torch.zeros(5, 1).long(), r"must be an integer tensor .* got torch.int64 of shape \(5, 1\)"),
            (torch.tensor([0, 3, 1, 2]), r"must lie in \[0, 3\).* 1 of 4 rows, first row 1: 3"),
            (torch.tensor([0, 1, 2, -1, -2]), r"must lie in \[0, 3\).* 2 of 5 rows, first row 3: -1"),
            (torch.tensor([0, 0, 2]), r"must give every image at least one caption; none for 1 of 3 rows, first row 1"),
            (torch.zeros(0).long(), r"must give every image at least one caption; none for 3 of 3 rows, first row 0"),
        ],
    )
    def test_bad_input_is_named(self, image_of_caption, message):
        with pytest.raises(ValueError, match="image_of_caption " + message):
            GroundTruth.from_image_of_caption(image_of_caption, 3)


class TestFromIds:
    def test_other_pairs_in_each_direction(self):
        truth = GroundTruth.from_ids(
            image_ids=[30, "10", 20],
            caption_ids=["z", 7, "a", 5],
            image_to_text={20: {"a", 5}, 30: ("z",)},
            text_to_image={7: ["10", 20], "z": [30, 20]},
        )
        assert pairs(truth.image_to_text) == [(0, 0), (2, 2), (2, 3)]
        assert pairs(truth.text_to_image) == [(0, 0), (1, 1), (2, 0), (2, 1)]
        assert truth.most_positives == 2

    def test_the_other_way_round_by_default(self):
        truth = GroundTruth.from_ids("abc", range(4), {"c": [0, 3], "a": [3]})
        assert pairs(truth.text_to_image) == pairs(truth.image_to_text) == [(0, 3), (2, 0), (2, 3)]

    def test_an_answer_given_twice_is_one(self):
        truth = GroundTruth.from_ids("ab", range(3), {"a": [2, 0, 2, 2], "b": iter([1, 1])})
        assert pairs(truth.image_to_text) == [(0, 0), (0, 2), (1, 1)]

    def test_most_positives_looks_at_both_directions(self):
        images, captions = range(4), range(4)
        assert GroundTruth.from_ids(images, captions, {0: [0, 1, 2]}, {0: [0]}).most_positives == 3
        assert GroundTruth.from_ids(images, captions, {0: [0]}, {0: [0, 1, 2, 3]}).most_positives == 4

    def test_answers_that_are_not_there(self):
        maps = {"a": [0, 9, 8], "b": [1]}, {0: ["a", "y"], 1: ["b"]}
        truth = GroundTruth.from_ids("ab", range(2), *maps, allow_absent=True)
        assert pairs(truth.image_to_text) == [(0, -1), (0, -1), (0, 0), (1, 1)]
        assert pairs(truth.text_to_image) == [(-1, 0), (0, 0), (1, 1)]
        assert truth.most_positives == 3
        # A caption that is not there is no query either.
        truth = GroundTruth.from_ids("ab", range(2), maps[0], allow_absent=True)
        assert pairs(truth.text_to_image) == [(0, 0), (1, 1)]
        with pytest.raises(ValueError, match=r"image_to_text gives image 'a' the caption 9, which is not among"):
            GroundTruth.from_ids("ab", range(2), *maps)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("aba", range(3), {"a": [0]}), "image ids must differ; 'a' occurs at 0 and at 2"),
            (("ab", [3, 4, 5, 4], {"a": [3]}), "caption ids must differ; 4 occurs at 1 and at 3"),
            (("ab", range(3), {"c": [0]}), "image_to_text has the image 'c', which is not among the image ids"),
            (("ab", range(3), {"a": [1, 3]}), "gives image 'a' the caption 3, which is not among the caption ids"),
            # An id that was read as text.
            ((["1"], range(3), {1: [0]}), "image_to_text has the image 1, which is not among the image ids"),
            (("ab", range(3), {"a": ["1"]}), "gives image 'a' the caption '1', which is not among the caption ids"),
            (("ab", range(3), {"a": [1], "b": []}), "image_to_text gives image 'b' no caption"),
            (("ab", range(3), {}), "image_to_text is empty; expected a map from image ids to caption ids"),
            (("ab", range(3), {"a": [0]}, {}), "text_to_image is empty; expected a map from caption ids to image ids"),
            (("ab", range(3), {"a": [0]}, {3: ["a"]}), "text_to_image has the caption 3, which is not among"),
            (("ab", range(3), {"a": [0]}, {0: ["x"]}), "text_to_image gives caption 0 the image 'x', which is not"),
            (("ab", range(3), {"a": [0]}, {0: []}), "text_to_image gives caption 0 no image"),
        ],
    )
    def test_bad_input_is_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            GroundTruth.from_ids(*arguments)

    def test_only_absent_answers_are_refused(self):
        with pytest.raises(ValueError, match="image_to_text gives image 'b' no caption that is there"):
            GroundTruth.from_ids("ab", range(3), {"a": [0], "b": [7]}, allow_absent=True)
        with pytest.raises(ValueError, match="image_to_text has the image 'x', which is not among the image ids"):
            GroundTruth.from_ids("ab", range(3), {"a": [0], "x": [1]}, allow_absent=True)


def test_it_is_a_pair_of_pairs():
    positives = Positives(torch.tensor([0]), torch.tensor([1]))
    truth = GroundTruth(positives, positives)
    assert truth.image_to_text is truth[0]
    assert truth.text_to_image is truth[1]
