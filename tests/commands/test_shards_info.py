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
    assert run("verify", *shards) == 1
    assert capsys.readouterr().out.splitlines() == [
        *(f"{tmp_path}/{number}.tar: it has no samples" for number in ("000", "001")),
        "16 shards, 112 samples, 560 captions: 2 problems",
    ]


def test_verify_with_a_limit_of_pixels(toy_shards, capsys):
    shards = f"{toy_shards}/toy-val-000000.tar"
    assert run("verify", shards, "--max-image-pixels", "4095") == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"{shards}: toy-val-00000000: the image has 64 x 64 pixels, more than max_image_pixels 4,095"
    )
    assert last == "1 shards, 8 samples, 0 captions: 8 problems"


def test_a_shard_that_is_gone_from_a_folder(tmp_path, toy_shards, capsys):
    folder = shutil.copytree(toy_shards, tmp_path / "shards")
    (folder / "toy-val-000001.tar").unlink()
    assert run("verify", folder) == 1
    assert f"{folder}/toy-val-000001.tar: cannot read" in capsys.readouterr().out


def test_info(toy_shards, capsys):
    assert run("info", *toy_shards.glob("toy-val-*.tar")) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["toy-val"]
    assert (found["toy-val"]["images"], found["toy-val"]["captions"]) == (24, 120)
    assert found["toy-val"]["captions_per_image"] == {"5": 24}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("info empty", "empty holds no shards; expected .tar files"),
        ("verify none.tar", "1 of 1 shards do not exist: none.tar"),
        ("verify --workers 0", "workers must be at least 1, got 0"),
        (
            "verify --max-image-pixels=-1",
            "argument --max-image-pixels: expected a number of pixels, or 0 for no limit; got '-1'",
        ),
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
        facts = {"fingerprint", "rejected"}
        assert json.loads(head) == {name: value for name, value in json.loads(expected).items() if name not in facts}
    assert not written
    assert capsys.readouterr().out.splitlines()[0] == (
        "14 shards, 112 images; indexes: 14 new, 0 rewritten, 0 unchanged"
    )


def test_index_writes_stale_and_damaged_indexes_again(toy_shards, tmp_path, capsys):
    """Of a shard with other captions, of one with other pixels, of one that was cut; and one that is damaged."""
    folder = shutil.copytree(toy_shards, tmp_path / "shards")
    shards = sorted(folder.glob("toy-train-*.tar"))
    shards[0].write_bytes(shards[0].read_bytes().replace(b"shape", b"thing"))
    flipped = bytearray(shards[1].read_bytes())
    flipped[flipped.index(b"IDAT") + 10] ^= 1
    shards[1].write_bytes(flipped)
    content = shards[2].read_bytes()
    shards[2].write_bytes(content[: content.index(b"toy-train-00000017.")] + bytes(10_240))
    index = folder / "__index__" / f"{shards[3].name}.jsonl"
    index.write_text(index.read_text()[:100])
    left = {file: file.stat().st_mtime_ns for file in (folder / "__index__").glob("toy-val-*.jsonl")}
    assert run("index", folder) == 0
    assert capsys.readouterr().out == "14 shards, 105 images; indexes: 0 new, 4 rewritten, 10 unchanged\n"
    assert {file: file.stat().st_mtime_ns for file in left} == left
    assert run("verify", *shards[:1], *shards[2:]) == 0
    assert run("verify", shards[1]) == 1, "its picture is damaged"
    assert "its index" not in capsys.readouterr().out
