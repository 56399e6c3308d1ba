import json
import shutil

import pytest

from tests.helpers.archives import encode_archive
from vl_plugins.cli import main


def run(action, *arguments):
    return main(["shards", action, *map(str, arguments)])


def test_verify(toy_shards, tmp_path, capsys):
    assert run("verify", f"{toy_shards}/") == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("14 shards, 112 samples, 560 captions: no problems\n", "")
    for number in range(2):
        (tmp_path / f"{number:03}.tar").write_bytes(encode_archive([]))
    shards = (tmp_path / "{000..001}.tar", tmp_path / "000.tar", toy_shards)
    assert run("verify", *shards, "--split", "val", "shards") == 1
    assert capsys.readouterr().out.splitlines() == [
        *(f"{tmp_path}/{number}.tar: it has no samples" for number in ("000", "001")),
        "5 shards, 24 samples, 120 captions: 2 problems",
    ]


def test_sizes_of_a_folder_count_unless_splits_are_chosen(tmp_path, toy_shards, capsys):
    (tmp_path / "a-0.tar").write_bytes((toy_shards / "toy-val-000000.tar").read_bytes())
    (tmp_path / "sizes.json").write_text('{"a-0.tar": 7}')
    assert run("verify", f"{tmp_path}/") == 1
    assert f"{tmp_path}/a-0.tar: has 8 samples, sizes.json says 7" in capsys.readouterr().out
    assert run("verify", tmp_path, "--split", "a") == 0
    assert run("verify", tmp_path / "a-0.tar") == 0


def test_info(toy_shards, tmp_path, capsys):
    shutil.copy(toy_shards / "toy-val-000000.tar", tmp_path / "a\n-0.tar")
    shutil.copy(toy_shards / "toy-val-000000.tar", tmp_path / "a\n-1.tar")
    assert run("info", tmp_path) == 0
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == r"a\n"
    values = {line[:20].strip(): line[20:].strip() for line in lines if line.startswith("  ")}
    assert values["bytes"] == f"{2 * (toy_shards / 'toy-val-000000.tar').stat().st_size:,}"
    assert (values["images"], values["captions"], values["captions per image"]) == ("16", "80", "5: 16 (100.0%)")
    assert values["words"].startswith("min ")
    assert values["repeated pictures"] == "16 (100.00%), 8 different, the most frequent 2 times"


@pytest.mark.parametrize("action", ["info", "verify"])
def test_any_number_of_workers_finds_the_same(toy_shards, tmp_path, capsys, action):
    for file in (*toy_shards.glob("toy-val-*.tar"), *toy_shards.glob("toy-test-*.tar")):
        (tmp_path / file.name).write_bytes(file.read_bytes() + bytes([0, action == "verify"]))
    flags = ["--json"] if action == "info" else []
    status = run(action, tmp_path, *flags, "--workers", 1)
    alone = capsys.readouterr().out
    assert run(action, tmp_path, *flags, "--workers", 3) == status
    assert capsys.readouterr().out == alone
    if action == "info":
        assert list(json.loads(alone)["splits"]) == ["toy-test", "toy-val"]
    else:
        assert alone.endswith("6 problems\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("info --split dev", "unknown split 'dev'; known: toy-test, toy-train, toy-val"),
        ("info empty", "empty holds no shards; expected .tar files"),
        ("verify none.tar", "1 of 1 shards do not exist: none.tar"),
        ("verify --workers 0", "workers must be at least 1, got 0"),
    ],
)
def test_wrong_input_is_one_line(toy_shards, capsys, arguments, message):
    action, *rest = arguments.split()
    assert run(action, toy_shards, *rest) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"vl-plugins shards: error: {message}\n")


def test_index_is_that_of_the_writer_without_facts(toy_shards, tmp_path, capsys):
    shards = tmp_path / "shards"
    shutil.copytree(toy_shards, shards)
    written = {file.name: file.read_text().splitlines() for file in (shards / "__index__").glob("*.jsonl")}
    shutil.rmtree(shards / "__index__")
    assert run("index", shards) == 0
    assert run("verify", shards) == 0
    for file in (shards / "__index__").glob("*.jsonl"):
        head, *images = file.read_text().splitlines()
        expected, *records = written.pop(file.name)
        assert images == records
        facts = {"fingerprint", "options", "rejected", "source"}
        assert json.loads(head) == {name: value for name, value in json.loads(expected).items() if name not in facts}
    assert not written
    capsys.readouterr()
    assert run("index", shards) == 0
    assert capsys.readouterr().out == "indexed 0 shards, 0 images\n"
