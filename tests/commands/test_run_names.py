import pytest

from vl_plugins.commands.run_names import run_names
from vl_plugins.errors import UserError


def test_names_are_short_or_paths(tmp_path, monkeypatch):
    files = ["logs/vit/checkpoints/epoch_9.pt", "runs/vsepp/best.pt", "features/b32.npz", "c/lr=0.1/best.pt"]
    files += ["a/run/x.pt", "b/run/x.pt"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    named = run_names([*files, "ours=runs/vsepp/best.pt", "laion2b_s34b_b79k"])
    assert [*named] == ["vit", "vsepp", "b32", "lr=0.1", *files[-2:], "ours", "laion2b_s34b_b79k"]
    assert [*named.values()] == [*files, "runs/vsepp/best.pt", "laion2b_s34b_b79k"]
    assert [*run_names(["logs/vit", "runs/vsepp", "c/lr=0.1/"])] == ["vit", "vsepp", "lr=0.1"]
    assert [*run_names(["logs/vit/checkpoints"])] == ["vit"]
    for runs in (["ours=logs/vit", "ours=runs/vsepp"], ["a.pt", "a.pt"]):
        with pytest.raises(UserError, match="two runs are called"):
            run_names(runs)
