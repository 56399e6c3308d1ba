import json
import shutil
from pathlib import Path

import pytest

from vl_plugins.cli import main


@pytest.fixture
def folder(toy_shards, tmp_path):
    return Path(shutil.copytree(toy_shards, tmp_path / "shards"))


def verify(*arguments):
    return main(["shards", "verify", *map(str, arguments)])


def test_sound_folder(toy_shards, capsys):
    assert verify(toy_shards) == 0
    output = capsys.readouterr()
    assert output.out == "14 shards, 112 samples, 560 captions: everything is as manifest.json says\n"
    assert output.err == ""
    assert verify(toy_shards, "--json", "--split", "toy-val") == 0
    assert json.loads(capsys.readouterr().out) == {"shards": 3, "samples": 24, "captions": 120, "problems": []}


def test_problems(folder, capsys):
    (folder / "toy-train-000003.tar").unlink()
    (folder / "toy-val-000001.tar").unlink()
    expected = ["toy-train-000003.tar: does not exist", "toy-val-000001.tar: does not exist"]
    assert verify(folder, "--workers", 1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*expected, "12 shards, 96 samples, 480 captions: 2 problems"]
    assert verify(folder, "--split", "toy-test") == 0
    capsys.readouterr()
    assert verify(folder, "--json") == 1
    assert json.loads(capsys.readouterr().out)["problems"] == expected


def test_many_problems(folder, capsys):
    for index in range(101):
        (folder / f"more-{index:06d}.tar").touch()
    assert verify(folder) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[99:] == [
        "more-000099.tar: manifest.json does not list it",
        "... and 1 more; --json lists all",
        "14 shards, 112 samples, 560 captions: 101 problems",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "dev"), "unknown split 'dev'; known: toy-test, toy-train, toy-val"),
        (("--workers", "0"), "workers must be at least 1, got 0"),
    ],
)
def test_wrong_input_is_one_line(toy_shards, capsys, arguments, message):
    assert verify(toy_shards, *arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"vl-plugins shards: error: {message}\n")
