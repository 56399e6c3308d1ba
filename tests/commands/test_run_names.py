import pytest

from vl_plugins.commands.run_names import run_names
from vl_plugins.errors import UserError


@pytest.fixture
def make_files(tmp_path, monkeypatch):
    """Function that makes empty files in the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(*files):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()

    return make


def test_names_are_short_or_paths(make_files):
    files = ["logs/vit/checkpoints/epoch_9.pt", "runs/vsepp/best.pt", "features/b32.npz", "c/lr=0.1/best.pt"]
    files += ["a/run/x.pt", "b/run/x.pt"]
    make_files(*files, "logs/vit/params.txt", "runs/vsepp/results.jsonl", "c/lr=0.1/results.jsonl")
    named = run_names([*files, "ours=runs/vsepp/best.pt", "laion2b_s34b_b79k"])
    assert [*named] == ["vit", "vsepp", "b32", "lr=0.1", *files[-2:], "ours", "laion2b_s34b_b79k"]
    assert [*named.values()] == [*files, "runs/vsepp/best.pt", "laion2b_s34b_b79k"]
    assert [*run_names(["logs/vit", "runs/vsepp", "c/lr=0.1/"])] == ["vit", "vsepp", "lr=0.1"]
    assert [*run_names(["logs/vit/checkpoints", "runs/vsepp/results.jsonl"])] == ["vit", "vsepp"]
    for runs in (["ours=logs/vit", "ours=runs/vsepp"], ["a.pt", "a.pt"]):
        with pytest.raises(UserError, match="two runs are called"):
            run_names(runs)


@pytest.mark.parametrize(
    "mistyped",
    [
        "runs/epoch=3-step=999.ckpt",
        "epoch=3-step=999.ckpt",
        "epoch=3.ckpt",
        "best-loss=-0.5.ckpt",
        "c/lr=0.2/best.pt",
        "runs/lr=small/best.pt",
    ],
)
def test_a_path_with_an_equals_sign_that_is_not_there_stays_whole(mistyped, make_files):
    make_files("runs/epoch=3-step=99.ckpt", "c/lr=0.1/best.pt", "4.npz")
    assert run_names([mistyped]) == {mistyped: mistyped}
    named = ["ours=laion2b_s34b_b79k", "siglip=hf-hub:timm/ViT-B-16-SigLIP2", "theirs=runs/none.pt", "a/b=4.npz"]
    named += ["lightning=runs/epoch=3-step=99.ckpt"]
    assert run_names(named) == dict(run.split("=", maxsplit=1) for run in named)


def test_checkpoints_outside_of_runs_are_named_after_their_file(make_files, tmp_path):
    make_files("weights/foo.pt", "checkpoints/bar.pt", "cache/0123")
    (tmp_path / "weights" / "link.bin").symlink_to(tmp_path / "cache" / "0123")
    assert [*run_names(["weights/foo.pt", "checkpoints/bar.pt", "weights/link.bin"])] == ["foo", "bar", "link"]
