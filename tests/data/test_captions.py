import pytest

from vl_plugins.data.captions import normalize_caption


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("A Dog.", "a dog."),
        ("  a dog.\n", "a dog."),
        ("a\tdog \u00a0 runs", "a dog runs"),
        ("STRASSE", "Straße"),
    ],
)
def test_same(first, second):
    assert normalize_caption(first) == normalize_caption(second)


@pytest.mark.parametrize(("first", "second"), [("a dog", "a dog."), ("a dog", "adog"), ("a dog", "dog a")])
def test_different(first, second):
    assert normalize_caption(first) != normalize_caption(second)


def test_result_is_readable_and_stays_the_same():
    assert normalize_caption(" A  Dog\n") == normalize_caption("a dog") == "a dog"
