"""Captions that an evaluator does not take: the error names the row."""

import re

import pytest
import torch

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers", exc_type=ImportError, reason=reason)

IMAGES = ["picture 0", "picture 1", "picture 2"]


def make(captions, image_ids=None, images=IMAGES):
    return ours.CrossModalRetrievalEvaluator(images, captions, image_ids)


KIND = "must be a caption or a list of captions"
BLANK = "is blank: leave it out, and its image if it has no other"
NUMBER = "expected captions of each of 3 images"


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["a dog", None, "a cat"], f"captions[1] {KIND}, got None"),
        (["a dog", "a cat", float("nan")], f"captions[2] {KIND}, got nan"),
        (["a dog", {"en": "a cat"}, "a bird"], f"captions[1] {KIND}, got {{'en': 'a cat'}}"),
        (["a dog", ["a cat", None], "a bird"], "captions[1][1] must be a text, got None"),
        (["a dog", ["a cat", ["a bird"]], "a fox"], "captions[1][1] must be a text, got ['a bird']"),
        (["a dog", "", "a cat"], f"captions[1] {BLANK}"),
        (["a dog", "a cat", ["a bird", " \u200b"]], f"captions[2][1] {BLANK}"),
        (["a dog", [], ["a cat"]], "captions[1] is empty: every image needs at least one caption"),
        (["a dog", "a cat"], f"captions[2] is missing: {NUMBER}, got 2"),
        ([], f"captions[0] is missing: {NUMBER}, got 0"),
        (["a dog", "a cat", "a bird", "a fox"], f"captions[3] is of no image: {NUMBER}, got 4"),
        ("abc", "captions must be a list with captions of each image, got the text 'abc'"),
    ],
)
def test_the_row_is_named(captions, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(captions)


def test_ids_of_other_rows():
    with pytest.raises(ValueError, match=r"^image_ids\[2\] is missing: expected an id of each of 3 images, got 2$"):
        make(["a dog", "a cat", "a bird"], image_ids=[5, 6])
    with pytest.raises(ValueError, match=r"^images must be at least one, got none$"):
        make([], images=[])


def test_one_row_of_an_image_may_have_all_captions():
    """The first two rows are one image."""
    evaluator = make([["a dog", "a pup"], [], ("a cat",)], image_ids=["x", "x", "y"])
    assert evaluator.captions == ["a dog", "a pup", "a cat"]
    assert evaluator.image_of_caption.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match=r"^captions\[1\] is empty: every image needs at least one caption$"):
        make([["a dog", "a pup"], [], []], image_ids=["x", "y", "y"])


def test_ids_in_a_tensor():
    evaluator = make(["a dog", "a pup", "a cat"], image_ids=torch.tensor([7, 7, 9]))
    assert evaluator.image_of_caption.tolist() == [0, 0, 1]
