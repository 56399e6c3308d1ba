import json
import re

import pytest
import torch
from pytorch_metric_learning.losses import NTXentLoss

from vl_plugins.cli import build_parser, main
from vl_plugins.errors import UserError
from vl_plugins.plots import attention, gradients, training

ROW = {"epoch": 1, "rsum_percent": 300.0, "positive_similarity": 0.6, "hardest_negative_similarity": 0.4}


@pytest.fixture
def run_command():
    """Parse and run ``plot ...`` alone."""

    def run(*argv):
        arguments = build_parser().parse_args(["plot", *map(str, argv)])
        return arguments.run(arguments)

    return run


@pytest.fixture
def drawn(monkeypatch):
    """What the command hands to the plot."""
    calls = {}
    monkeypatch.setattr(training, "plot_training_curves", lambda runs, out: calls.update(runs=runs, out=out))
    monkeypatch.setattr(gradients, "plot_gradient_sizes", lambda losses, out: calls.update(losses=losses, out=out))
    return calls


def make_run(folder, name, rsum=300.0):
    checkpoints = folder / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "results.jsonl").write_text(json.dumps({**ROW, "rsum_percent": rsum}) + "\n")
    return folder / name


def test_runs_are_named_by_folder_or_by_hand(tmp_path, monkeypatch, drawn, run_command, capsys):
    clip = make_run(tmp_path, "clip", rsum=1.0)
    monkeypatch.chdir(make_run(tmp_path, "here", rsum=2.0))
    unified = make_run(tmp_path, "lr=0.1", rsum=3.0)
    checkpoints = make_run(tmp_path, "folder", rsum=4.0) / "checkpoints"
    file = make_run(tmp_path, "file", rsum=5.0) / "checkpoints" / "results.jsonl"
    run_command("training", f"ours={clip}", ".", unified, checkpoints, file)
    rsums = {name: rows[0]["rsum_percent"] for name, rows in drawn["runs"].items()}
    assert rsums == {"ours": 1.0, "here": 2.0, "lr=0.1": 3.0, "folder": 4.0, "file": 5.0}
    assert capsys.readouterr().out == "wrote training_curves.png\n"


def test_wrong_runs_are_named(tmp_path, drawn, run_command):
    run = make_run(tmp_path, "clip")
    with pytest.raises(UserError, match="two runs are called 'ours'; name them"):
        run_command("training", f"ours={run}", f"ours={make_run(tmp_path, 'b')}")
    with pytest.raises(UserError, match=r"no such results file or run folder: .*absent"):
        run_command("training", tmp_path / "absent")
    assert not drawn


def test_losses_with_the_options_given(drawn, run_command):
    run_command("gradients", "goal")
    assert (list(drawn["losses"]), str(drawn["out"])) == (["goal"], "gradients.png")
    run_command(
        *"gradients NTXentLoss unified margin=0.1 scale=30 reducer=SumReducer".split(),
        *"unified --out gradients.pdf".split(),
    )
    names = ["NTXentLoss", "unified(margin=0.1, scale=30, reducer='SumReducer')", "unified"]
    assert list(drawn["losses"]) == names
    of_pml, unified, default = drawn["losses"].values()
    assert type(of_pml) is NTXentLoss
    assert (unified.margin, unified.scale, type(unified.reducer).__name__) == (0.1, 30, "SumReducer")
    assert (default.margin, default.scale) == (0.2, 50)
    assert str(drawn["out"]) == "gradients.pdf"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("vlc --out gradients.jpg", "the picture must end in .png, .pdf or .svg, got gradients.jpg"),
        ("unifed", "unknown loss 'unifed' (did you mean 'unified'?)"),
        ("NTXentLos", "unknown loss 'NTXentLos' (did you mean 'NTXentLoss'?)"),
        ("unified scael=1", "loss 'unified': "),
        ("unified scale=0", "unified: scale must be a finite number > 0, got 0"),
        ("scale=1 vlc", "scale=1: give it after the loss that it is for"),
        ("FastAPLoss", "FastAPLoss: ref_emb is not supported"),
    ],
)
def test_wrong_losses_are_one_line(argv, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "gradients", *argv.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vl-plugins plot: error: {message}")
    assert not any(tmp_path.iterdir())


def test_from_the_command_to_the_picture(tmp_path, capsys, monkeypatch):
    pil_image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gradients, "POINTS", 7)
    for argv, size in (
        ("gradients goal vlc", (1080, 912)),
        (f"training {make_run(tmp_path, 'run')}", (1200, 504)),
    ):
        out = tmp_path / "new" / "picture.png"
        assert main(["plot", *argv.split(), "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"wrote {out}\n"
        with pil_image.open(out) as picture:
            assert picture.size == size


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder with ``set.pt``, ``linear.pt`` and ``plain.pt``: small models with a set head, a linear one and none."""
    open_clip = pytest.importorskip("open_clip")
    from vl_plugins.integrations.open_clip.heads import CLIPWithHeads
    from vl_plugins.integrations.open_clip.models import register_models

    register_models()
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    clip = open_clip.create_model("vl-tiny", output_dict=True)
    models = {
        "set": CLIPWithHeads(clip, "vl-tiny", {}, "set", {"num_slots": 3, "num_iters": 2, "hidden_dim": 32}),
        "linear": CLIPWithHeads(clip, "vl-tiny", {}, "linear", {"dim": 16}),
        "plain": clip,
    }
    for name, model in models.items():
        torch.save({"state_dict": model.state_dict()}, folder / f"{name}.pt")
    return folder


@pytest.fixture
def attention_arguments(checkpoints, toy_shards):
    return ["--checkpoint", str(checkpoints / "set.pt"), "--shards", f"{toy_shards}/toy-test-{{000000..000001}}.tar"]


def test_options_of_attention_reach_the_picture(attention_arguments, run_command, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, plot_attention = [], attention.plot_attention
    monkeypatch.setattr(
        attention, "plot_attention", lambda items, out: (drawn.append(items), plot_attention(items, out))
    )
    run_command("attention", *attention_arguments, "--images", "10", "--iteration", "1", "--out", tmp_path / "a.png")
    keys = ["toy-test-00000009", "toy-test-00000001"]
    run_command("attention", *attention_arguments, "--keys", *keys, "--iteration", "1", "--out", tmp_path / "b.pdf")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    everything, chosen = drawn
    assert len(chosen) == 2
    for item, other in zip(chosen, (everything[9], everything[1]), strict=True):
        assert torch.equal(item.image, other.image)
        torch.testing.assert_close(item.attention, other.attention)
        assert (item.captions, item.matches) == (other.captions, other.matches)


@pytest.mark.parametrize(
    ("argv", "message", "early"),
    [
        ("--checkpoint absent.pt", "--checkpoint absent.pt: no such file", True),
        ("--images 0", "--images must be at least 1, got 0", True),
        ("--shards absent.tar", "1 of 1 shards do not exist: absent.tar", True),
        ("--out attention.jpg", "the picture must end in .png, .pdf or .svg, got attention.jpg", True),
        ("--device nowhere", "--device nowhere: ", True),
        ("--checkpoint {folder}/linear.pt", "the model has no set head but a linear head, so no slots to draw", False),
        ("--checkpoint {folder}/plain.pt", "--checkpoint {folder}/plain.pt: there is no model with a set head", False),
        ("--keys nothing", "unknown image 'nothing'; known: toy-test-00000000", False),
    ],
)
def test_wrong_attention_is_one_line(
    argv, message, early, attention_arguments, checkpoints, tmp_path, monkeypatch, capsys
):
    """And what can be known early is checked before the model is loaded."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    if early:
        monkeypatch.setattr("vl_plugins.integrations.checkpoints.load_model", None)
    argv = [argument.format(folder=checkpoints) for argument in argv.split()]
    assert main(["plot", "attention", *attention_arguments, *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"vl-plugins plot: error: ", line)
    assert message.format(folder=checkpoints) in line
    assert not any(tmp_path.iterdir())
