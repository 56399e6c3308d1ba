import argparse
import inspect
import json
import re
import shlex
from dataclasses import replace

import pytest
import torch

from vl_plugins.cli import main
from vl_plugins.commands import plot
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, Objective
from vl_plugins.losses import GOALLoss, TripletHNLoss, UnifiedLoss
from vl_plugins.plots import attention, gradients, training, weights
from vl_plugins.utils.errors import UserError

ROW = {"epoch": 1, "rsum_percent": 300.0, "positive_similarity": 0.6, "hardest_negative_similarity": 0.4}


@pytest.fixture
def run_command():
    """Parse and run ``plot ...`` alone."""

    def run(*argv):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        plot.register(parser.add_subparsers(required=True))
        arguments = parser.parse_args(["plot", *map(str, argv)])
        return arguments.run(arguments)

    return run


@pytest.fixture
def drawn(monkeypatch):
    """What the command hands to the plot."""
    calls = {}
    monkeypatch.setattr(training, "plot_training_curves", lambda runs, out: calls.update(runs=runs, out=out))
    monkeypatch.setattr(
        weights, "plot_weights", lambda out, *kinds, **options: calls.update(kinds=kinds, options=options, out=out)
    )
    monkeypatch.setattr(gradients, "plot_gradient_sizes", lambda losses, out: calls.update(losses=losses, out=out))
    return calls


def make_run(folder, name, rsum=300.0):
    checkpoints = folder / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "results.jsonl").write_text(json.dumps({**ROW, "rsum_percent": rsum}) + "\n")
    return folder / name


def test_draws_a_picture(tmp_path, capsys, run_command):
    pytest.importorskip("matplotlib")
    out = tmp_path / "curves.png"
    assert not run_command("training", make_run(tmp_path, "clip"), f"ours={make_run(tmp_path, 'b')}", "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_runs_are_named_by_folder_or_by_hand(tmp_path, monkeypatch, drawn, run_command):
    clip = make_run(tmp_path, "clip", rsum=1.0)
    monkeypatch.chdir(make_run(tmp_path, "here", rsum=2.0))
    unified = make_run(tmp_path, "lr=0.1", rsum=3.0)
    checkpoints = make_run(tmp_path, "folder", rsum=4.0) / "checkpoints"
    file = make_run(tmp_path, "file", rsum=5.0) / "checkpoints" / "results.jsonl"
    run_command("training", f"ours={clip}", ".", unified, checkpoints, file)
    rsums = {name: rows[0]["rsum_percent"] for name, rows in drawn["runs"].items()}
    assert rsums == {"ours": 1.0, "here": 2.0, "lr=0.1": 3.0, "folder": 4.0, "file": 5.0}
    assert str(drawn["out"]) == "training_curves.png"


@pytest.mark.parametrize("argument", ["=path", "name="])
def test_half_a_name_is_refused(drawn, run_command, argument):
    with pytest.raises(UserError, match=f"a run is NAME=PATH or a path, got {argument!r}"):
        run_command("training", argument)


def test_same_name_twice_is_refused(tmp_path, drawn, run_command):
    first, second = make_run(tmp_path / "a", "clip"), make_run(tmp_path / "b", "clip")
    with pytest.raises(UserError, match="two runs are called 'clip'; name them"):
        run_command("training", first, second)
    assert not drawn


def test_missing_run_is_named(tmp_path, drawn, run_command):
    with pytest.raises(UserError, match=r"no such results file or run folder: .*absent"):
        run_command("training", tmp_path / "absent")


def test_weights_are_drawn_with_the_options_given(drawn, run_command, capsys):
    run_command("weights")
    assert (drawn["kinds"], drawn["options"], str(drawn["out"])) == ((), {"objective": weights.PAPER}, "weights.png")
    assert capsys.readouterr().out == "wrote weights.png\n"
    run_command(
        *"weights --triplet-weight nca cir --pair-weight lin_ms con --margin 0.3 --tau 5 --offset -0.5".split(),
        *"--alpha 3 --beta 20 --lam 0.4 --relative 0.1 2 --out picture.svg".split(),
    )
    assert drawn["options"] == {
        "triplet_kinds": ["nca", "cir"],
        "pair_kinds": ["lin_ms", "con"],
        "objective": Objective(margin=0.3, tau=5.0, offset=-0.5, alpha=3.0, beta=20.0, lam=0.4),
        "relative": [0.1, 2.0],
    }
    assert str(drawn["out"]) == "picture.svg"


def test_named_kinds_are_drawn_alone(drawn, run_command):
    run_command(*"weights --triplet-weight con --margin 0".split())
    assert drawn["options"] == {
        "triplet_kinds": ["con"],
        "pair_kinds": (),
        "objective": replace(weights.PAPER, margin=0.0),
    }
    run_command(*"weights --pair-weight con --beta 0".split())
    assert drawn["options"] == {
        "triplet_kinds": (),
        "pair_kinds": ["con"],
        "objective": replace(weights.PAPER, beta=0.0),
    }


def test_losses_are_drawn_each_with_the_options_after_it(drawn, run_command, capsys):
    run_command(
        *"weights --loss goal --loss unified --loss-kwargs margin=0.1".split(),
        *"--loss-kwargs scale=30 reducer=SumReducer --loss unified --loss triplet_hn --loss-kwargs margin=0".split(),
        *"--out gradients.pdf".split(),
    )
    titles = ["goal", "unified(margin=0.1, scale=30, reducer='SumReducer')", "unified", "triplet_hn(margin=0)"]
    assert list(drawn["losses"]) == titles
    goal, unified, default, triplet = drawn["losses"].values()
    assert [type(loss) for loss in (goal, unified, default, triplet)] == [
        GOALLoss,
        UnifiedLoss,
        UnifiedLoss,
        TripletHNLoss,
    ]
    assert (unified.margin, unified.scale, type(unified.reducer).__name__) == (0.1, 30, "SumReducer")
    assert (default.margin, default.scale, triplet.margin) == (0.2, 50, 0)
    assert capsys.readouterr().out == "wrote gradients.pdf\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--triplet-weight lin", "unknown triplet_weight 'lin'; known: cir, con, nca"),
        ("--pair-weight sigms", "unknown pair_weight 'sigms' (did you mean 'sig_ms'?); known: con, lin, lin_ms, sig"),
        ("--tau 0", "tau must be a finite number > 0, got 0.0"),
        ("--out weights.jpg", "the picture must end in .png, .pdf or .svg, got weights.jpg"),
        ("--pair-weight lin --tau 5", "--tau is of triplet weights, and none is drawn: name one with --triplet-weight"),
        ("--triplet-weight con --lam 1", "--lam is of pair weights, and none is drawn: name one with --pair-weight"),
        ("--triplet-weight con --relative 1", "--relative is of pair weights, and none is drawn"),
        ("--loss unifed", "unknown loss 'unifed' (did you mean 'unified'?)"),
        ("--loss unified --loss-kwargs scael=1", "unknown option 'scael' of loss 'unified' (did you mean 'scale'?)"),
        ("--loss unified --loss-kwargs scale=0", "--loss unified: scale must be a finite number > 0, got 0"),
        ("--loss unified --loss-kwargs scale", "--loss-kwargs: expected key=value, got 'scale'"),
        ("--loss-kwargs scale=1 --loss vlc", "--loss-kwargs scale=1: give it after the --loss that it is for"),
        ("--loss vlc --margin 1", "--margin and --loss are of different pictures; options of a loss are --loss-kwargs"),
        ("--loss vlc --pair-weight con", "--pair-weight and --loss are of different pictures"),
        ("--loss vlc --triplet-weight con", "--triplet-weight and --loss are of different pictures"),
        ("--loss vlc --out gradients.jpg", "the picture must end in .png, .pdf or .svg, got gradients.jpg"),
        (
            "--loss vlc --loss-kwargs reducer=DoNothingReducer",
            "vlc(reducer='DoNothingReducer'): VLCLoss has no gradient for one anchor with one positive",
        ),
    ],
)
def test_wrong_weights_are_one_line(argv, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "weights", *argv.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vl-plugins plot: error: {message}")
    assert not any(tmp_path.iterdir())


def test_from_the_command_to_the_picture(tmp_path, capsys, monkeypatch):
    pil_image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gradients, "POINTS", 7)
    for name, argv, size in (
        ("weights.png", "", (1320, 912)),
        ("cir.png", "--triplet-weight cir", (504, 420)),
        ("gradients.png", "--loss goal --loss mine --loss-kwargs neg_margin=0.5", (1080, 912)),
    ):
        install_a_loss(tmp_path / name.replace(".", "_"), monkeypatch)
        assert main(["plot", "weights", *argv.split(), "--out", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / name}\n"
        with pil_image.open(tmp_path / name) as picture:
            assert picture.size == size


def install_a_loss(site, monkeypatch):
    """Make another distribution's loss ``mine`` importable, the way an installer would."""
    metadata = site / "other_losses-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-losses\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vl_plugins.losses]\nmine = pytorch_metric_learning.losses:ContrastiveLoss\n"
    )
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def help_text(capsys, monkeypatch):
    def text(*argv):
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as stopped:
            main([*argv, "--help"])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    return text


def test_help_names_the_kinds_and_the_defaults_in_force(help_text):
    text = help_text("plot", "weights")
    assert re.search(r"--triplet-weight KIND \[KIND ...\]\n +(.+)\n", text)[1] == ", ".join(TRIPLET_WEIGHTS)
    assert re.search(r"--pair-weight KIND \[KIND ...\]\n +(.+)\n", text)[1] == ", ".join(PAIR_WEIGHTS)
    for name in (*plot.TRIPLET_OPTIONS, *plot.PAIR_OPTIONS):
        stated = re.search(rf"--{name} X [^-]*?\(default: ([\d.]+)\)", text)[1]
        assert float(stated) == getattr(weights.PAPER, name)
    assert "(default: 0.1)" in text
    assert inspect.signature(weights.plot_weights).parameters["relative"].default == (0.1,)
    assert "(default: weights.png)" in text


def test_help_shows_examples_that_work(help_text, drawn):
    examples = help_text("plot", "weights").partition("examples:\n")[2].splitlines()
    assert len(examples) == 4
    for example in examples:
        program, *argv = example.split()
        assert program == "vl-plugins"
        assert main(argv) == 0


def test_help_of_all_pictures(help_text):
    text = help_text("plot")
    assert re.findall(r"^    (\w+)", text, flags=re.MULTILINE) == ["attention", "training", "weights"]
    assert "plot      draw training runs, the attention of slots, or how losses weigh a triplet" in help_text()


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("attention",),
        ("attention", "--checkpoint", "x.pt"),
        ("attention", "--shards", "x.tar"),
        ("attention", "--checkpoint", "x.pt", "--shards", "x.tar", "--images", "2", "--keys", "a"),
        ("attention", "--checkpoint", "x.pt", "--shards", "x.tar", "--keys"),
        ("training",),
        ("nothing",),
        ("training", "run", "--ou", "x.png"),
        ("weights", "--relative"),
        ("weights", "--margin", "x"),
        ("weights", "run"),
        ("weights", "--los", "vlc"),
    ],
)
def test_usage_errors(argv, capsys, run_command):
    with pytest.raises(SystemExit) as error:
        run_command(*argv)
    assert error.value.code == 2
    assert "usage:" in capsys.readouterr().err


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
    shards = f"{toy_shards}/toy-test-{{000000..000001}}.tar"
    return ["--checkpoint", str(checkpoints / "set.pt"), "--shards", shards]


def test_from_a_checkpoint_to_a_picture_of_attention(attention_arguments, tmp_path, capsys):
    pil_image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "attention.png"
    assert main(["plot", "attention", *attention_arguments, "--images", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    with pil_image.open(out) as picture:
        width, height = picture.size
    # Four panels of 1.9 inches with gaps and the colour bar, at 120 to the inch; two rows with a caption each.
    assert width == pytest.approx(1074, abs=2)
    assert 2 * 228 < height < 2 * 228 + 2 * 160 + 70
    assert [path.name for path in out.parent.iterdir()] == ["attention.png"]


def test_options_of_attention_reach_the_picture(attention_arguments, monkeypatch, run_command, checkpoints, capsys):
    drawn = []
    monkeypatch.setattr(attention, "plot_attention", lambda items, out: drawn.append((items, str(out))))
    run_command("attention", *attention_arguments)
    run_command(
        *("attention", *attention_arguments, "--keys", "toy-test-00000009", "toy-test-00000001"),
        *"--iteration 1 --max-captions 1 --batch-size 5 --device cpu --out picture.pdf".split(),
    )
    assert capsys.readouterr().out == "wrote attention.png\nwrote picture.pdf\n"
    (default, default_out), (chosen, chosen_out) = drawn
    assert (default_out, chosen_out) == ("attention.png", "picture.pdf")

    from vl_plugins.integrations.checkpoints import load_model

    loaded, shards = load_model(checkpoints / "set.pt"), attention_arguments[3]
    expected = attention.attended_images(*loaded, shards, images=3)
    assert [(item.captions, item.matches) for item in default] == [(item.captions, item.matches) for item in expected]
    everything = attention.attended_images(*loaded, shards, images=10, iteration=1, max_captions=1)
    assert len(chosen) == 2
    for item, other in zip(chosen, (everything[9], everything[1]), strict=True):
        assert torch.equal(item.image, other.image)
        torch.testing.assert_close(item.attention, other.attention)
        assert (item.captions, item.matches) == (other.captions, other.matches)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--checkpoint absent.pt", "--checkpoint absent.pt: no such file"),
        ("--checkpoint {folder}/linear.pt", "the model has no set head but a linear head, so no slots to draw"),
        ("--checkpoint {folder}/plain.pt", "--checkpoint {folder}/plain.pt: there is no model with a set head: "),
        ("--images 0", "--images must be at least 1, got 0"),
        ("--images 61", "the picture shows 1 to 60 images, got 61"),
        ("--keys nothing", "unknown image 'nothing'; the nearest of 32: "),
        ("--iteration 3", "the iteration must be 1 to 2, as many as the model has, got 3"),
        ("--max-captions 0", "max_captions must be at least 1, got 0"),
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--device nowhere", "--device nowhere: "),
        ("--shards absent.tar", "1 of 1 shards do not exist: absent.tar"),
        ("--out attention.jpg", "the picture must end in .png, .pdf or .svg, got attention.jpg"),
    ],
)
def test_wrong_attention_is_one_line(argv, message, attention_arguments, checkpoints, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    argv = [argument.format(folder=checkpoints) for argument in argv.split()]
    assert main(["plot", "attention", *attention_arguments, *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vl-plugins plot: error: {message.format(folder=checkpoints)}")
    assert not any(tmp_path.iterdir())


def test_what_is_wrong_is_said_before_the_model_is_loaded(attention_arguments, monkeypatch, run_command):
    from vl_plugins.integrations import checkpoints

    monkeypatch.setattr(checkpoints, "load_model", None)
    for argv, message in (
        ("--images 0", "--images must be"),
        ("--out x.jpg", "must end in"),
        ("--shards absent.tar", "do not exist"),
        ("--device nowhere", "--device nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            run_command("attention", *attention_arguments, *argv.split())


def test_examples_of_attention_are_understood(help_text, monkeypatch):
    asked = []
    monkeypatch.setattr(plot, "_run_attention", lambda arguments: asked.append(vars(arguments)))
    examples = help_text("plot", "attention").partition("examples:\n")[2].replace("\\\n", " ").splitlines()
    assert len(examples) == 2
    for example in examples:
        program, *argv = shlex.split(example)
        assert program == "vl-plugins"
        assert main(argv) == 0
    assert [arguments["images"] for arguments in asked] == [5, 3]
    assert len(asked[1]["keys"]) == 2
