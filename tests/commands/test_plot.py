import argparse
import json

import pytest

import vl_plugins.retrieval
from vl_plugins.commands import plot
from vl_plugins.errors import UserError

ROW = {"epoch": 1, "rsum": 300.0, "positive_similarity": 0.6, "hardest_negative_similarity": 0.4}


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
    monkeypatch.setattr(
        vl_plugins.retrieval, "plot_training_curves", lambda runs, out: calls.update(runs=runs, out=out)
    )
    return calls


def make_run(folder, name, rsum=300.0):
    checkpoints = folder / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "results.jsonl").write_text(json.dumps({**ROW, "rsum": rsum}) + "\n")
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
    rsums = {name: rows[0]["rsum"] for name, rows in drawn["runs"].items()}
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


@pytest.mark.parametrize("argv", [(), ("training",), ("nothing",), ("training", "run", "--ou", "x.png")])
def test_usage_errors(argv, capsys, run_command):
    with pytest.raises(SystemExit) as error:
        run_command(*argv)
    assert error.value.code == 2
    assert "usage:" in capsys.readouterr().err
