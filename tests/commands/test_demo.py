import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from tests.helpers.processes import in_processes
from vl_plugins.cli import main
from vl_plugins.commands import demo


def rsums(output):
    """Return RSUM of each model: of the table of metrics, and not of the differences that follow."""
    table, _, _ = output.partition("compared with")
    return {name: float(value) for name, value in re.findall(r"^(\w+) .* (\d+\.\d)$", table, re.MULTILINE)}


def run_module(rank, words):
    """Run ``python -m module ...``; return its exit status, and what it printed."""
    sys.argv, status = words[2:], 0
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
    return status, printed.getvalue()


def run_forked(words, stdout, stderr=None, text=True):
    """``subprocess.run`` in a process that need not import torch again."""
    ((status, printed),) = in_processes(run_module, 1, words, joined=False)
    if stdout != subprocess.PIPE:
        stdout.write(printed)
    return subprocess.CompletedProcess(words, status, printed)


def test_demo_from_scenes_to_table(tmp_path, monkeypatch, capsys):
    """A short one, in a folder with a space in its name."""
    (tmp_path / "a demo").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.subprocess, "run", run_forked)
    monkeypatch.setattr(demo, "SHARDS", demo.SHARDS.replace("--test 1000", "--val 20 --test 100"))
    assert main(["demo", "--out", "a demo", "--epochs", "1", "--train-images", "256"]) == 0
    printed = capsys.readouterr().out
    assert [*rsums(printed)] == ["clip", "unified", "sets"]
    assert "Train Epoch: 0" in (tmp_path / "a demo" / "clip.log").read_text()
    with Image.open(tmp_path / "a demo" / "training.png") as picture:
        assert min(picture.size) > 400
    assert (tmp_path / "a demo" / "report.html").read_text().startswith("<!DOCTYPE html>")
    commands = [shlex.split(line[2:]) for line in printed.splitlines() if line.startswith("$ ")]
    assert [command[:3][-1 if command[0] == "python" else 1] for command in commands] == [
        *("toy", "shards", *["vl_plugins.integrations.open_clip"] * 3, "plot", "evaluate")
    ]
    assert commands[5][-1] == "a demo/training.png"


def test_a_folder_with_files_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert error == "vl-plugins demo: error: --out demo is not empty: delete it, or name a new folder\n"
    assert [file.name for file in tmp_path.rglob("*")] == ["demo", "thesis.txt"]


@pytest.mark.slow
def test_several_captions_help(tmp_path):
    """By about 60, with a standard deviation of about 10 over seeds."""
    command = [sys.executable, "-m", "vl_plugins.cli", "demo"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    rsum = rsums(finished.stdout)
    assert min(rsum["unified"], rsum["sets"]) > rsum["clip"] + 20
