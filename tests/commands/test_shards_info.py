import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.helpers.archives import encode_archive
from vl_plugins.cli import main
from vl_plugins.data import CaptionedImage, RejectedImage
from vl_plugins.data.writer import write_shards


def run(action, *arguments):
    return main(["shards", action, *map(str, arguments)])


def test_verify(toy_shards, tmp_path, capsys):
    assert run("verify", f"{toy_shards}/") == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("14 shards, 112 samples, 560 captions: no problems\n", "")
    for number in range(2):
        (tmp_path / f"{number:03}.tar").write_bytes(encode_archive([]))
    assert run("verify", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/000.tar: it has no samples"
    assert lines[2:] == ["2 shards, 0 samples, 0 captions: 2 problems"]
    shards = (tmp_path / "{000..001}.tar", tmp_path / "000.tar", toy_shards)
    assert run("verify", *shards, "--split", "val", "shards", "--json") == 1
    problems = [f"{tmp_path}/{number}.tar: it has no samples" for number in ("000", "001")]
    expected = {"shards": 5, "samples": 24, "captions": 120, "problems": problems}
    assert json.loads(capsys.readouterr().out) == expected


def test_other_files_of_a_folder_count_unless_splits_are_chosen(tmp_path, toy_shards, capsys):
    (tmp_path / "a-0.tar").write_bytes((toy_shards / "toy-val-000000.tar").read_bytes())
    (tmp_path / ".a-1.tar.01234567.partial").touch()
    assert run("verify", f"{tmp_path}/") == 1
    assert f"{tmp_path}/.a-1.tar.01234567.partial: left over" in capsys.readouterr().out
    assert run("verify", tmp_path, "--split", "a") == 0
    assert run("verify", tmp_path / "a-0.tar") == 0


def test_info(tmp_path, capsys):
    for name, rows in (("0", 1), ("1", 2), ("2", 2)):
        np.save(tmp_path / f"{name}.npy", np.ones((rows, 4)))
    images = [RejectedImage("row 9", "train", "no file")]
    for number, captions in enumerate((("A dog",), ("a  dog", "cat"), ("dog dog dog",))):
        ids = tuple(range(10 * number, 10 * number + len(captions)))
        images.append(CaptionedImage(number, f"{number}.jpg", captions, ids, "train", "a", f"{number}.jpg", "same"))
    source = {"format": "table", "name": "b\nc", "annotations": []}
    write_shards(images, tmp_path, tmp_path / "out", inputs="features", source=source)
    assert run("info", tmp_path / "out") == 0
    output = capsys.readouterr()
    lines = r"""a-train
  shards              1, 0.0 MB
  source              format table, name b\nc
  images              3
  captions            4
  groups              1
  rejected            1
  captions per image  1: 2 (66.7%), 2: 1 (33.3%)
  values per feature  4: 3 (100.0%)
  words per caption   min 1, median 2, max 3
  features per image  min 1, median 2, max 2
  repeated pictures   2 (66.67%), 1 different; most frequent: the picture of 'a-train-00000001', 2 images
  repeated captions   2 (50.00%), 1 different; most frequent: the text 'a dog', 2 images

A repeat in a batch is a false negative: """
    assert output.out.startswith(lines)


@pytest.mark.parametrize("action", ["info", "verify"])
def test_any_number_of_workers_finds_the_same(toy_shards, tmp_path, capsys, action):
    for file in (*toy_shards.glob("toy-val-*.tar"), *toy_shards.glob("toy-test-*.tar")):
        (tmp_path / file.name).write_bytes(file.read_bytes() + bytes([0, action == "verify"]))
    status = run(action, tmp_path, "--json", "--workers", 1)
    alone = json.loads(capsys.readouterr().out)
    assert run(action, tmp_path, "--json", "--workers", 3) == status
    assert json.loads(capsys.readouterr().out) == alone
    assert list(alone.get("splits", {})) == (["toy-test", "toy-val"] if action == "info" else [])
    assert len(alone.get("problems", ())) == (6 if action == "verify" else 0)


def test_contact_sheet(toy_shards, tmp_path):
    assert run("info", toy_shards, "--contact-sheet", tmp_path / "a.PNG", "--samples", 3) == 0
    with Image.open(tmp_path / "a.PNG") as image:
        assert (image.format, image.width) == ("PNG", 2 * 340)


SHEET = "a contact sheet is a .png file of 1 to 60 samples, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("info --split dev", "unknown split 'dev'; known: toy-test, toy-train, toy-val"),
        ("info --contact-sheet a.png --samples 61", f"{SHEET} a.png and 61"),
        ("info --contact-sheet a.jpg", f"{SHEET} a.jpg and 12"),
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
