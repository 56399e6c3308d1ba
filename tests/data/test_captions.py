import pytest

from vl_plugins.data.batching import normalize_caption, parse_captions_per_image
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


@pytest.mark.parametrize(("value", "parsed"), [("random", "random"), ("first", "first"), ("3", 3), (3, 3)])
def test_captions_per_image(value, parsed):
    assert parse_captions_per_image(value) == parsed


@pytest.mark.parametrize("value", ["0", "some", "", "1.5", None])
def test_wrong_captions_per_image(value):
    with pytest.raises(UserError, match="must be 'random', 'first', 'all' or a positive number, got"):
        parse_captions_per_image(value)
