from itertools import pairwise

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import read_yaml

ALIASES = "a: &a [1, 1, 1, 1]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijk"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loss: vlc\nseed: 1\nloss: unified\n", r"not valid YAML: duplicate key 'loss' in .*line 3, column 1: "),
        (ALIASES, r"a configuration of more than 10,000 values$"),
        ("loss: &a [*a]\n", r"a configuration of more than 10,000 values$"),
        (
            "train: 'a.tar::pipe:touch made'",
            r"'a\.tar::pipe:touch made' would run a program; give pipe: on the command ",
        ),
        ("!!python/object/apply:os.mkdir [made]", r"not valid YAML: could not determine a constructor"),
    ],
)
def test_yaml_that_is_no_configuration(tmp_path, monkeypatch, text, problem):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"^{path}: {problem}"):
        read_yaml(path, extra="pml")
    assert list(tmp_path.iterdir()) == [path]


def test_keys_may_be_merged(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert read_yaml(tmp_path / "a.yaml", extra="pml")["b"] == {"x": 3, "y": 2}
