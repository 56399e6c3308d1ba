import json

import pytest
import torch
from PIL import Image

from vl_plugins.cli import main
from vl_plugins.data import read_collection
from vl_plugins.plots import attention, curves, gradients


@pytest.fixture
def drawn(monkeypatch):
    """What the commands hand to the plots."""
    calls = []
    for module, name in ((curves, "plot_training_curves"), (gradients, "plot_gradient_sizes")):
        plot = getattr(module, name)
        monkeypatch.setattr(module, name, lambda data, out, plot=plot: (calls.append((data, out)), plot(data, out)))
    monkeypatch.setattr(gradients, "POINTS", 7)
    return calls


def make_run(folder, rsum=300.0):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "results.jsonl").write_text(json.dumps({"epoch": 1, "rsum": rsum}) + "\n")
    return str(folder)


def test_runs_are_named_by_folder_or_by_hand(tmp_path, monkeypatch, drawn, capsys):
    clip, unified, here = (make_run(tmp_path / name, rsum) for name, rsum in (("clip", 1.0), ("b", 2.0), ("here", 3.0)))
    monkeypatch.chdir(here)
    assert main(["plot", "training", f"ours={clip}", unified, "."]) == 0
    assert capsys.readouterr().out == "wrote training.png\n"
    with Image.open("training.png") as picture:
        assert picture.size == (1200, 504)
    ((runs, out),) = drawn
    assert {name: rows[0]["rsum"] for name, rows in runs.items()} == {"ours": 1, "b": 2, "here": 3}
    assert out == "training.png"
    assert main(["plot", "training", str(tmp_path / "absent")]) == 2
    assert f"{tmp_path}/absent is no results.jsonl, nor a run folder with one" in capsys.readouterr().err


def test_losses_with_the_options_given(drawn, tmp_path, monkeypatch):
    words = "NTXentLoss unified margin=0.1 scale=30 reducer=SumReducer unified --out gradients.pdf".split()
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "gradients", *words]) == 0
    assert (tmp_path / "gradients.pdf").read_bytes().startswith(b"%PDF-")
    ((losses, out),) = drawn
    assert [*losses] == ["NTXentLoss", "unified(margin=0.1, scale=30, reducer='SumReducer')", "unified"]
    of_pml, unified, default = losses.values()
    assert type(of_pml).__name__ == "NTXentLoss"
    assert (unified.margin, unified.scale, type(unified.reducer).__name__) == (0.1, 30, "SumReducer")
    assert (default.margin, default.scale, out) == (0.2, 50, "gradients.pdf")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("unifed --out gradients.jpg", "the picture must end in .png, .pdf or .svg, got gradients.jpg"),
        ("unified scael=1", "loss 'unified': "),
        ("unified scale=0", "unified: scale must be a finite number > 0, got 0"),
        ("scale=1 vlc", "unknown loss 'scale=1'"),
        ("FastAPLoss", "FastAPLoss: ref_emb is not supported"),
    ],
)
def test_wrong_losses_are_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "gradients", *argv.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vl-plugins plot: error: {message}")
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder with ``set.pt`` and ``linear.pt``: small models with a set head and a linear one."""
    open_clip = pytest.importorskip("open_clip")
    from tests.helpers.open_clip_training import checkpoint_with_heads
    from vl_plugins.integrations.open_clip.models import register_models

    register_models()
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for name, options in (("set", {"num_slots": 3, "num_iters": 2, "hidden_dim": 32}), ("linear", {"dim": 16})):
        clip = open_clip.create_model("vl-tiny", output_dict=True)
        torch.save(checkpoint_with_heads(clip, "vl-tiny", name, options), folder / f"{name}.pt")
    return folder


@pytest.fixture
def attention_arguments(checkpoints, toy_shards):
    shards = f"{toy_shards}/toy-test-{{000000..000001}}.tar"
    return ["plot", "attention", "--checkpoint", str(checkpoints / "set.pt"), "--shards", shards]


def test_options_of_attention_reach_the_picture(attention_arguments, tmp_path, monkeypatch):
    """Images are in the order asked for, each once, by key or image id."""
    drawn, plot = [], attention.plot_attention
    monkeypatch.setattr(attention, "plot_attention", lambda items, out: (drawn.append(items), plot(items, out)))
    image_id = str(read_collection(attention_arguments[-1]).image_ids[1])
    for options in (["--images", "10"], ["--keys", "toy-test-00000009", image_id, "toy-test-00000009"]):
        assert main([*attention_arguments, *options, "--out", f"{tmp_path}/out.png"]) == 0
    everything, chosen = drawn
    for item, other in zip(chosen, (everything[9], everything[1]), strict=True):
        assert torch.equal(item.image, other.image)
        torch.testing.assert_close(item.attention, other.attention)
        assert item[2:] == other[2:]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--checkpoint absent.pt", "checkpoint absent.pt: no such file"),
        ("--shards absent.tar", "1 of 1 shards do not exist: absent.tar"),
        ("--checkpoint {folder}/linear.pt", "the model has no set head, so no slots to draw"),
        ("--keys nothing", "unknown image 'nothing'; known: toy-test-00000000"),
    ],
)
def test_wrong_attention_is_one_line(argv, message, attention_arguments, checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*attention_arguments, *argv.format(folder=checkpoints).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vl-plugins plot: error: ")
    assert message in line
    assert not any(tmp_path.iterdir())
