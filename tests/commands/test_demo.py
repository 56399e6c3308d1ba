import re
import subprocess
import sys

import pytest
from PIL import Image

from vl_plugins.cli import main


def demo(cwd, *flags):
    return subprocess.run(
        [sys.executable, "-m", "vl_plugins.cli", "demo", *flags],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_demo_from_scenes_to_table(tmp_path, again):
    """A short one, in a folder with a space in its name; a second run replaces what the first has made."""
    flags = ["--out", "a demo", "--epochs", "1", "--train-images", "256"]
    (tmp_path / "a demo").mkdir()
    first = demo(tmp_path, *flags)
    assert first.returncode == 0, first.stderr
    rows = re.findall(r"^(clip|unified|sets) .* (\d+\.\d)$", first.stdout, flags=re.MULTILINE)
    rsum = {name: float(value) for name, value in rows}
    found = re.search(r"^RSUM against clip: unified (.*), sets (.*)$", first.stdout, flags=re.MULTILINE)
    expected = [rsum["unified"] - rsum["clip"], rsum["sets"] - rsum["clip"]]
    assert list(map(float, found.groups())) == pytest.approx(expected, abs=0.11)  # both are rounded
    assert "100%" in first.stderr, "the progress bar reaches its end"
    with Image.open(tmp_path / "a demo" / "training.png") as picture:
        assert min(picture.size) > 400
    report = tmp_path / first.stdout.splitlines()[-1].partition(": ")[2]
    assert report.read_text().startswith("<!DOCTYPE html>")
    if not again:
        return

    stray = tmp_path / "a demo" / "logs" / "stray"
    stray.touch()
    second = demo(tmp_path, *flags)
    assert second.returncode == 0, second.stderr
    assert not stray.exists()
    table = first.stdout.partition("Test split")[2]
    assert second.stdout.partition("Test split")[2] == table, "the same seed gives the same numbers"


def test_a_folder_of_others_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert error == "vl-plugins demo: error: --out demo exists and was not made by the demo; name a new folder\n"
    assert (tmp_path / "demo" / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_several_captions_help(tmp_path):
    """By about 60, with a standard deviation of about 10 over seeds."""
    finished = demo(tmp_path)
    assert finished.returncode == 0, finished.stderr
    unified, sets = re.search(r"^RSUM against clip: unified (.*), sets (.*)$", finished.stdout, re.MULTILINE).groups()
    assert float(unified) > 20
    assert float(sets) > 20
