import pytest

from vl_plugins.data.captions import CaptionedImage, caption_hash, content_ids, normalize_caption
from vl_plugins.errors import UserError


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("A Dog.", "a dog.", True),
        ("  a\tdog \u00a0 runs\n", "a dog runs", True),
        ("STRASSE", "Straße", True),
        ("a dog", "a dog.", False),
        ("a dog", "adog", False),
    ],
)
def test_captions_that_say_the_same(first, second, equal):
    assert (normalize_caption(first) == normalize_caption(second)) is equal
    assert (caption_hash(first) == caption_hash(second)) is equal


def test_hashes_stay_what_they_are():
    """Indexes have them."""
    assert [caption_hash("A  dog"), caption_hash("Ünïcode")] == [-4081912340589182210, -8218377507933086173]


VALID = {"image_id": "a", "file": "a/b.jpg", "captions": ("a cat", "a dog"), "caption_ids": ("1", "2")}
VALID |= {"split": "train_2017", "dataset": "my-set", "filename": "b.jpg"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("caption_ids", (1,), "it has 1 caption ids for 2 captions"),
        ("split", "val/2017", "'val/2017' cannot name a split or data set; use up to 40 letters"),
        ("dataset", "val\n", r"'val\\n' cannot name a split or data set"),
        ("dataset", "x" * 41, "'x+' cannot name a split or data set"),
    ],
)
def test_an_image_that_shards_cannot_hold_cannot_be_made(field, value, message):
    assert CaptionedImage(**VALID, group=" ").group is None
    with pytest.raises(UserError, match=f"^{message}"):
        CaptionedImage(**{**VALID, field: value})


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ("a dog", "captions must be a list of strings, got str"),
        ({"a dog": 1}, "captions must be a list of strings, got dict"),
        (["a dog", None], "captions must be strings, got NoneType at place 1"),
        ([["a dog", "a cat"]], "got list at place 0; join the captions of all images in one list"),
    ],
)
def test_ids_of_what_are_no_captions(captions, message):
    with pytest.raises(ValueError, match=message):
        content_ids(captions)
