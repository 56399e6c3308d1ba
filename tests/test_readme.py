"""The README's commands are run: those of the first hour with fewer scenes, open_clip's on toy shards."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.test_docs import ROOT, blocks, commands
from vl_plugins.cli import main
from vl_plugins.integrations.open_clip.launcher import main as launch

README = ROOT / "README.md"


def test_two_commands_set_everything_up(tmp_path):
    """What they would run in a new checkout: each says what it downloads, then installs, then does its work."""
    first, second = commands(README)[:2]
    steps = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    for command in (first, second):
        words = [*command, "--dry-run", "--no-print-directory", f"VENV={tmp_path}/venv", "PYTHON=python3"]
        printed = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert printed.returncode == 0, printed.stderr
        assert printed.stdout.index("3 GB of downloads, 6 GB on the disk") < printed.stdout.index("-m venv")
        steps.append(printed.stdout)
    assert "--editable '.[open-clip,eval]'" in steps[0]
    assert steps[0].rstrip().endswith("/bin/vl-plugins demo")
    assert "--editable '.[dev,docs]'" in steps[1]
    assert '-m pytest -n auto --dist worksteal -m "not slow"' in steps[1]


def test_the_first_hour(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fewer = {"2048": "64 --val 8 --test 8".split(), "512": ["16"]}
    ran = []
    for command in commands(README):
        words = [word for old in command for word in fewer.get(old, [old])]
        if words[0] == "vl-plugins" and words[1] != "demo":
            assert main(words[1:]) == 0
            ran.append(words[1])
        elif words[:2] == ["python", "-m"]:
            assert launch(words[3:]) == 0
            ran.append("train")
    assert ran == ["toy", "shards", "train", "evaluate", "plot", "train", "evaluate"]
    assert "\nplain, compared with clip:\n" in capsys.readouterr().out
    assert Path("report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert Path("training.png").is_file()


def changed_command(sign):
    """Return the open_clip command before ("-") or after ("+") the change that the README shows."""
    diff, _ = blocks(README, "diff")  # the other is of sentence-transformers
    lines = [line[1:].strip().removesuffix("\\") for line in diff.splitlines() if line[0] in (" ", sign)]
    return shlex.split(" ".join(lines))


def test_the_change_is_one_module_and_two_flags():
    before, after = changed_command("-"), changed_command("+")
    flags = ["--loss", "unified", "--captions-per-image", "random"]
    assert [word for word in after if word not in before] == ["vl_plugins.integrations.open_clip", *flags]
    assert [word for word in before if word not in after] == ["open_clip_train.main"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_open_clip_command(tmp_path, toy_shards, processes):
    """With a small model and toy shards."""
    command = changed_command("+")
    command[command.index("--nproc_per_node") + 1] = str(processes)
    small = "--model vl-tiny --device cpu --precision fp32 --batch-size 16 --workers 0 --epochs 1 --name run".split()
    small += ["--pretrained", "", "--train-data", f"{toy_shards}/toy-train-{{000000..000007}}.tar"]
    small += ["--val-data", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    run = subprocess.run([*command, *small], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Training with the loss of vl_plugins: unified;" in run.stdout + run.stderr
    assert (tmp_path / "logs" / "run" / "checkpoints" / "epoch_1.pt").is_file()


NOTEBOOK = ROOT / "docs" / "notebooks" / "first_hour.ipynb"


def small_command(line, variables):
    """Return the words of a shell line of the notebook, with fewer scenes and one epoch, and without its pipe."""
    command = line.removeprefix("!").format(**variables).partition(" 2>&1")[0]
    words = []
    for word in shlex.split(command):
        words += {"2048": "64 --val 8 --test 8".split(), "512": ["16"]}.get(word, [word])
    return words


def test_the_cells_of_the_notebook(tmp_path, monkeypatch, capsys):
    """Python cells run as they stand, but for the number of epochs; shell lines run in this process."""
    monkeypatch.chdir(tmp_path)
    install, *cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert install.startswith("%pip install")
    variables, programs = {"__name__": "notebook"}, []
    for source in cells:
        python = [line for line in source.splitlines() if not line.startswith("!")]
        shell = [line for line in source.splitlines() if line.startswith("!")]
        starts_with_shell = source.startswith("!")
        if not starts_with_shell and shell:  # names that the commands use
            names = source.partition("\n!")[0]
            exec(names, variables)
        for line in shell:
            words = small_command(line, variables)
            is_training = words[:2] == ["python", "-m"]
            assert (launch([*words[3:], "--epochs", "1"]) if is_training else main(words[1:])) == 0
            programs.append("train" if is_training else words[1])
        exec("\n".join(python).replace("epoch_8.pt", "epoch_1.pt"), variables)
    assert programs == ["toy", "shards", "shards", "train", "train", "evaluate", "plot"]
    assert variables["row"].size == (4 * 192, 192)
    assert variables["image_embeddings"].grad.any()


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    """All cells but the installation run, and the Unified loss with five captions wins."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert "pip install" in notebook.cells.pop(1).source
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    table, _, _ = printed.partition("compared with")  # and not the differences that follow
    rsum = dict(re.findall(r"^(clip|unified) .* (\d+\.\d)\s*$", table, flags=re.MULTILINE))
    assert float(rsum["unified"]) > float(rsum["clip"]) > 100
