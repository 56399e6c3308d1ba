import argparse

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import KeyValues, parse_key_values


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a=1e-3", {"a": 0.001}),
        ("a='1'", {"a": "1"}),
        ("a=true", {"a": True}),
        ("a=null", {"a": None}),
        ("a=MeanReducer", {"a": "MeanReducer"}),
        ("a=b=c", {"a": "b=c"}),
        ("a=", {"a": ""}),
    ],
)
def test_values(token, expected):
    parsed = parse_key_values([token], "--options")
    assert parsed == expected
    assert type(parsed["a"]) is type(expected["a"])


def test_the_last_of_a_key_counts():
    assert parse_key_values(["a=1", "b=2", "a=3"], "--options") == {"a": 3, "b": 2}
    assert parse_key_values([], "--options") == {}


@pytest.mark.parametrize("token", ["a", "=1", "a-b=1"])
def test_anything_else_is_refused(token):
    with pytest.raises(UserError) as raised:
        parse_key_values([token], "--options")
    assert str(raised.value) == f"--options: expected key=value, got {token!r}"


def test_a_flag_may_occur_again():
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", action=KeyValues)
    assert parser.parse_args("--options a=1 b=2 --options a=3 c=x".split()).options == {"a": 3, "b": 2, "c": "x"}
    assert parser.parse_args([]).options == {}
    with pytest.raises(UserError, match="--options: expected key=value, got 'x'"):
        parser.parse_args(["--options", "x"])
