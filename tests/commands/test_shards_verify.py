import json
import shutil
from pathlib import Path

import pytest

from vl_plugins.cli import main
from vl_plugins.commands import shards_verify
from vl_plugins.data.parallel import usable_cores


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


def test_problems(folder, capsys):
    (folder / "toy-train-000003.tar").unlink()
    (folder / "toy-val-000001.tar").unlink()
    assert verify(folder, "--workers", 1) == 1
    assert capsys.readouterr().out.splitlines() == [
        "toy-train-000003.tar: does not exist",
        "toy-val-000001.tar: does not exist",
        "12 shards, 96 samples, 480 captions: 2 problems",
    ]


def test_only_some_splits(folder, capsys):
    (folder / "toy-train-000003.tar").unlink()
    assert verify(folder, "--split", "toy-val", "toy-test") == 0
    assert capsys.readouterr().out.startswith("6 shards, 48 samples, 240 captions: everything")
    assert verify(folder, "--split", "toy-train", "--workers", 2) == 1
    assert capsys.readouterr().out.endswith("7 shards, 56 samples, 280 captions: 1 problem\n")


def test_large_numbers_have_commas_and_one_has_no_plural(monkeypatch, capsys):
    import vl_plugins.data.verification

    result = vl_plugins.data.verification.Verification(1, 1, 25_000, ())
    monkeypatch.setattr(vl_plugins.data.verification, "verify_shards", lambda *arguments, **options: result)
    assert verify("x") == 0
    assert capsys.readouterr().out.startswith("1 shard, 1 sample, 25,000 captions: everything is")


@pytest.mark.parametrize("number", [100, 101, 1300])
def test_many_problems(folder, capsys, number):
    with (folder / "rejected.jsonl").open("w") as stream:
        stream.write("{\n" * number)
    assert verify(folder) == 1
    lines = capsys.readouterr().out.splitlines()
    expected = [
        f"rejected.jsonl: line {index + 1} is not a JSON object that names the 'shards' it belongs to"
        for index in range(100)
    ]
    more = {100: [], 101: ["... and 1 more; --json lists all"], 1300: ["... and 1,200 more; --json lists all"]}[number]
    assert lines == [*expected, *more, f"14 shards, 112 samples, 560 captions: {number:,} problems"]
    assert verify(folder, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert len(document["problems"]) == number
    assert document["problems"][:100] == expected


def test_json(toy_shards, capsys):
    assert verify(toy_shards, "--json", "--split", "toy-val") == 0
    assert json.loads(capsys.readouterr().out) == {"shards": 3, "samples": 24, "captions": 120, "problems": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--split", "toy-vla"),
            "unknown split 'toy-vla' (did you mean 'toy-val'?); known: toy-test, toy-train, toy-val",
        ),
        (("--workers", "0"), "workers must be at least 1, got 0"),
    ],
)
def test_wrong_input_is_one_line(toy_shards, capsys, arguments, message):
    assert verify(toy_shards, *arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"vl-plugins shards: error: {message}\n")


def test_folder_without_shards(tmp_path, capsys):
    assert verify(tmp_path) == 2
    assert f"there is no {tmp_path / 'manifest.json'}: it holds no shards" in capsys.readouterr().err


def test_default_is_all_cores(monkeypatch, toy_shards):
    import vl_plugins.data.verification

    given = {}

    def note(folder, **options):
        given.update(options, folder=folder)
        return vl_plugins.data.verification.Verification(1, 1, 1, ())

    monkeypatch.setattr(vl_plugins.data.verification, "verify_shards", note)
    verify("memory://x")
    assert given == {"folder": "memory://x", "splits": None, "workers": usable_cores()}


@pytest.mark.parametrize("arguments", [(), ("x", "--spl", "a"), ("x", "--split"), ("x", "--workers", "two")])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        verify(*arguments)
    assert error.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_example_is_a_command(capsys):
    with pytest.raises(SystemExit):
        verify("--help")
    assert shards_verify.EPILOG in capsys.readouterr().out
    (command,) = (line.strip() for line in shards_verify.EPILOG.splitlines() if "vl-plugins" in line)
    assert command.split()[:3] == ["vl-plugins", "shards", "verify"]
    # It can be parsed; there are no such shards.
    assert main(command.split()[1:]) == 2
