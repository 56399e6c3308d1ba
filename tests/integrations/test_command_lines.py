"""Options as ``key=value``, and configuration files."""

import argparse

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import KeyValues, parse_key_values, read_yaml


@pytest.mark.parametrize(
    ("token", "expected"),
    [("a=1", 1), ("a=1e-3", 0.001), ("a='1'", "1"), ("a=true", True), ("a=null", None), ("a=b=c", "b=c"), ("a=", "")],
)
def test_values(token, expected):
    parsed = parse_key_values([token], "--options")
    assert parsed == {"a": expected}
    assert type(parsed["a"]) is type(expected)


def test_a_flag_may_occur_again():
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", action=KeyValues)
    assert parser.parse_args("--options a=1 b=2 --options a=3 c=x".split()).options == {"a": 3, "b": 2, "c": "x"}
    assert parser.parse_args([]).options == {}
    for token in ("x", "=1", "a-b=1"):
        with pytest.raises(UserError, match=f"^--options: expected key=value, got '{token}'$"):
            parser.parse_args(["--options", token])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loss: vlc\nseed: 1\nloss: unified\n", "a key is given twice: loss, seed, loss"),
        ("!!python/object/apply:os.mkdir [made]", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_no_configuration(tmp_path, monkeypatch, text, problem):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"^{path}: not valid YAML: {problem}"):
        read_yaml(path, extra="pml")
    assert list(tmp_path.iterdir()) == [path]


def test_keys_may_be_merged(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert read_yaml(tmp_path / "a.yaml", extra="pml")["b"] == {"x": 3, "y": 2}
