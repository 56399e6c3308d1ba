import pytest

from vl_plugins.commands.run_names import run_names
from vl_plugins.errors import UserError


def test_names_are_short_and_differ(tmp_path, monkeypatch):
    files = ["logs/vit/checkpoints/epoch_9.pt", "logs/vit/checkpoints/epoch_10.pt", "runs/vsepp/best.pt"]
    files += ["a/run/x.pt", "b/run/x.pt", "features/b32.npz", "c/lr=0.1/best.pt"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    named = run_names([*files, "ours=runs/vsepp/best.pt", "laion2b_s34b_b79k"])
    short = ["vit/epoch_9", "vit/epoch_10", "vsepp", "a/run/x.pt", "b/run/x.pt", "b32", "lr=0.1"]
    assert [*named] == [*short, "ours", "laion2b_s34b_b79k"]
    assert [*named.values()] == [*files, "runs/vsepp/best.pt", "laion2b_s34b_b79k"]
    folders = ["logs/vit", "runs/vsepp", "c/lr=0.1/", "a/run", "b/run"]
    assert [*run_names(folders)] == ["vit", "vsepp", "lr=0.1", "a/run", "b/run"]
    assert [*run_names(["logs/vit/checkpoints"])] == [*run_names([files[0]])] == ["vit"]
    with pytest.raises(UserError, match="two runs are called 'ours'; name them"):
        run_names(["ours=logs/vit", "ours=runs/vsepp"])
