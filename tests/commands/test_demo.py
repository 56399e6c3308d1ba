import re
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from vl_plugins.cli import main


def demo(cwd, *flags):
    command = [sys.executable, "-m", "vl_plugins.cli", "demo", *flags]
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished


def rsums(output):
    return {name: float(value) for name, value in re.findall(r"^(\w+) .* (\d+\.\d)$", output, re.MULTILINE)}


def test_demo_from_scenes_to_table(tmp_path):
    """A short one, in a folder with a space in its name."""
    (tmp_path / "a demo").mkdir()
    finished = demo(tmp_path, "--out", "a demo", "--epochs", "1", "--train-images", "256")
    assert [*rsums(finished.stdout)] == ["clip", "unified", "sets"]
    assert "Train Epoch: 0" in (tmp_path / "a demo" / "clip.log").read_text()
    with Image.open(tmp_path / "a demo" / "training.png") as picture:
        assert min(picture.size) > 400
    assert (tmp_path / "a demo" / "report.html").read_text().startswith("<!DOCTYPE html>")
    commands = [shlex.split(line[2:]) for line in finished.stdout.splitlines() if line.startswith("$ ")]
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
    rsum = rsums(demo(tmp_path).stdout)
    assert min(rsum["unified"], rsum["sets"]) > rsum["clip"] + 20
