import json

import pytest
import torch
from PIL import Image

from vl_plugins import create_loss
from vl_plugins.cli import main
from vl_plugins.data import read_collection
from vl_plugins.plots import attention, curves, gradients


@pytest.fixture
def figures(monkeypatch):
    """The figures that the commands write."""
    found = []
    for module in (curves, gradients):
        write = module.write_figure
        monkeypatch.setattr(module, "write_figure", lambda *call, write=write: (found.append(call[0]), write(*call)))
    monkeypatch.setattr(gradients, "POINTS", 6)
    return found


def row(epoch, rsum, positive, negative):
    return {"epoch": epoch, "rsum": rsum, "positive_similarity": positive, "hardest_negative_similarity": negative}


def test_curves_of_runs_that_are_named_by_folder_or_by_hand(tmp_path, monkeypatch, figures, capsys):
    """Runs of open_clip's own validation have no similarities."""
    runs = {"stock": [{"epoch": 1, "rsum": 150.0}, {"epoch": 2, "rsum": 300.0}], "here": [row(1, 300, 0.6, 0.4)]}
    runs["clip"] = [row(1, 100, 0.3, 0.2), row(3, 200, 0.5, 0.4)]
    for name, rows in runs.items():
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        lines = "".join(json.dumps(item) + "\n" for item in rows)
        (tmp_path / name / "checkpoints" / "results.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path / "here")
    assert main(["plot", "training", f"{tmp_path}/stock", f"ours={tmp_path}/clip", "."]) == 0
    assert capsys.readouterr().out == "wrote training.png\n"
    with Image.open("training.png") as picture:
        assert picture.size == (1200, 504)
    assert main(["plot", "training", f"{tmp_path}/stock"]) == 0
    (rsum_axes, similarity_axes), (only,) = (figure.axes for figure in figures)
    assert [line.get_label() for line in rsum_axes.lines] == ["stock", "ours", "here"]
    assert only.lines[0].get_xydata().tolist() == rsum_axes.lines[0].get_xydata().tolist() == [[1, 150], [2, 300]]
    assert rsum_axes.lines[1].get_xydata().tolist() == [[1, 100], [3, 200]]
    positive, negative, other, *_ = similarity_axes.lines
    assert positive.get_xydata().tolist() == [[1, 0.3], [3, 0.5]]
    assert negative.get_xydata().tolist() == [[1, 0.2], [3, 0.4]]
    assert (positive.get_linestyle(), negative.get_linestyle()) == ("-", "--")
    # On a single epoch there is no line, only the markers tell them apart.
    assert positive.get_markerfacecolor() != negative.get_markerfacecolor()
    assert positive.get_color() == negative.get_color() == rsum_axes.lines[1].get_color() != other.get_color()
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (rsum_axes, similarity_axes)]
    assert legends == [["stock", "ours", "here"], ["positives", "hardest negatives"]]
    assert main(["plot", "training", str(tmp_path / "absent")]) == 2
    assert f"{tmp_path}/absent is no results.jsonl, nor a run folder with one" in capsys.readouterr().err


def test_gradients_of_losses_with_the_options_given(figures, tmp_path, monkeypatch):
    words = "NTXentLoss unified margin=0.1 scale=30 reducer=SumReducer unified --out gradients.pdf".split()
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "gradients", *words]) == 0
    assert (tmp_path / "gradients.pdf").read_bytes().startswith(b"%PDF-")
    options = {"margin": 0.1, "scale": 30, "reducer": "SumReducer"}
    losses = [create_loss("NTXentLoss"), create_loss("unified", **options), create_loss("unified")]
    (figure,) = figures
    titles = ["NTXentLoss", "unified(margin=0.1, scale=30, reducer='SumReducer')", "unified"]
    assert [part.texts[0].get_text() for part in figure.subfigs] == titles
    grid = torch.tensor([-5, -3, -1, 1, 3, 5]) / 6  # centers of the six cells
    expected = [size for loss in losses for size in gradients.gradient_sizes(loss, grid, grid)]
    panels = [axes for axes in figure.axes if axes.images]
    for number, (axes, size) in enumerate(zip(panels, expected, strict=True)):
        image, pair = axes.images[0], ("positive", "negative")[number % 2]
        torch.testing.assert_close(torch.tensor(image.get_array()), size)
        assert (axes.get_title(), image.origin) == (f"gradient at the {pair} pair", "lower")
        assert tuple(image.get_extent()) == (-1, 1, -1, 1)
        assert "positive" in axes.get_xlabel()
        assert "negative" in axes.get_ylabel()


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
