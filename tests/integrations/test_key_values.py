import argparse

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import KeyValues, parse_key_values


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("a=1e-3", {"a": 0.001}),
        ("a='1'", {"a": "1"}),
        ("a=true", {"a": True}),
        ("a=null", {"a": None}),
        ("a=MeanReducer", {"a": "MeanReducer"}),
        ("a=b=c", {"a": "b=c"}),
    ],
)
def test_values(token, expected):
    parsed = parse_key_values([token], "--options")
    assert parsed == expected
    assert type(parsed["a"]) is type(expected["a"])


def test_a_flag_may_occur_again():
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", action=KeyValues)
    assert parser.parse_args("--options a=1 b=2 --options a=3 c=x".split()).options == {"a": 3, "b": 2, "c": "x"}
    assert parser.parse_args([]).options == {}
    for token in ("x", "=1", "a-b=1"):
        with pytest.raises(UserError, match=f"--options: expected key=value, got '{token}'"):
            parser.parse_args(["--options", token])
