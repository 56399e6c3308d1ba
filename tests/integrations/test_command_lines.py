"""Options as ``key=value``, and configuration files."""

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import CommandParser, KeyValues, key_value, read_yaml


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a=1", 1), ("a=1e-3", 0.001), ("a='1'", "1"), ("a=true", True), ("a=null", None), ("a=b=c", "b=c"), ("a=", "")],
)
def test_values(text, expected):
    key, value = key_value(text)
    assert (key, value, type(value)) == ("a", expected, type(expected))


def test_a_flag_may_occur_again():
    parser = CommandParser()
    parser.add_argument("--options", action=KeyValues)
    assert parser.parse_args("--options a=1 b=2 --options a=3 c=x".split()).options == {"a": 3, "b": 2, "c": "x"}
    assert parser.parse_args([]).options == {}
    for text in ("x", "=1", "a-b=1"):
        with pytest.raises(UserError, match=f"^argument --options: expected key=value, got '{text}'$"):
            parser.parse_args(["--options", text])


def test_objects_in_yaml(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"!!python/object/apply:os.mkdir [{tmp_path}/made]")
    with pytest.raises(UserError, match=f"^{path}: not valid YAML"):
        read_yaml(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--losss", r"unrecognized arguments: --losss x \(did you mean --loss\?\)"),
        ("--qqq", "unrecognized arguments: --qqq x"),
    ],
)
def test_misspelled_flags(flag, message):
    parser = CommandParser()
    parser.add_argument("--loss")
    with pytest.raises(UserError, match=f"^{message}$"):
        parser.parse_args([flag, "x"])
