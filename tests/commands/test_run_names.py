import pytest

from vl_plugins.commands.run_names import run_names, split_name
from vl_plugins.errors import UserError


def test_names_are_short_and_differ(tmp_path, monkeypatch):
    files = ["logs/vit/checkpoints/epoch_9.pt", "logs/vit/checkpoints/epoch_10.pt", "runs/vsepp/best.pt"]
    files += ["a/run/x.pt", "b/run/x.pt", "features/b32.npz", "c/lr=0.1/best.pt"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    named = [split_name(file) for file in [*files, "ours=runs/vsepp/best.pt", "laion2b_s34b_b79k"]]
    short = ["vit/epoch_9", "vit/epoch_10", "vsepp", "a/run/x.pt", "b/run/x.pt", "b32", "lr=0.1"]
    assert run_names(named) == [*short, "ours", "laion2b_s34b_b79k"]
    assert [path for _, path in named][-3:] == ["c/lr=0.1/best.pt", "runs/vsepp/best.pt", "laion2b_s34b_b79k"]
    assert run_names([("", "logs/vit/checkpoints/epoch_9.pt")]) == ["vit"]


@pytest.mark.parametrize("argument", ["=path", "name="])
def test_half_a_name_is_an_error(argument):
    with pytest.raises(UserError, match=f"a run is NAME=PATH or a path, got {argument!r}"):
        split_name(argument)
