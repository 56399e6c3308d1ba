import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vl_plugins.cli import main
from vl_plugins.commands import shards_info
from vl_plugins.commands.shards_info import format_statistics
from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.repeats import Repeats
from vl_plugins.data.shards import write_shards
from vl_plugins.data.statistics import Range, SplitStatistics, shard_statistics
from vl_plugins.data.storage import Folder


@pytest.fixture(autouse=True)
def in_new_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def info(*arguments):
    return main(["shards", "info", *map(str, arguments)])


def make_statistics(**changes):
    repeats = Repeats(
        number=0, share=0.0, different=0, batch_size=128, expected_pairs=0.0, example=None, example_images=0
    )
    values = {
        "shards": 114,
        "bytes": 19_000_000_000,
        "images": 113_287,
        "captions": 566_747,
        "unusable": 0,
        "rejected": 1_200,
        "source": {
            "format": "karpathy-coco",
            "annotations": [{"file": "dataset_coco.json", "sha256": "0"}],
            "caption_ids": "coco-annotation",
        },
        "captions_per_image": {5: 112_000, 6: 1_200, 7: 87},
        "words": Range(5, 10.5, 50),
        "widths": Range(59, 640.0, 1640),
        "heights": Range(51, 480.0, 640),
        "shorter_sides": {0: 12, 64: 0, 128: 275, 224: 13_000, 336: 100_000, 512: 0, 768: 0, 1024: 0},
        "features": None,
        "feature_dims": {},
        "repeated_pictures": repeats,
        "repeated_captions": repeats,
        "places": (),
    }
    return SplitStatistics(**values | changes)


def test_whole_text():
    pictures = Repeats(
        number=12,
        share=12 / 113_287,
        different=6,
        batch_size=128,
        expected_pairs=1e-5,
        example="coco-train-00000123",
        example_images=2,
    )
    captions = Repeats(
        number=30_000,
        share=0.0529,
        different=4_000,
        batch_size=128,
        expected_pairs=0.3096,
        example="a " * 60,
        example_images=1_234,
    )
    text = format_statistics({"coco-train": make_statistics(repeated_pictures=pictures, repeated_captions=captions)})
    assert (
        text
        == """\
            shards   images  captions  rejected         size
coco-train     114  113,287   566,747     1,200  19,000.0 MB

coco-train
  format              karpathy-coco
  annotations         dataset_coco.json
  caption ids         coco-annotation
  captions per image  min 5, max 7
    5  112,000 images 98.9%  ########################################
    6    1,200 images  1.1%  #
    7       87 images  0.1%  #
  words per caption   min 5, median 10.5, max 50
  width               min 59, median 640, max 1,640 pixels
  height              min 51, median 480, max 640 pixels
  shorter side
    below 64       12 images  0.0%  #
    64-127          0 images  0.0%
    128-223       275 images  0.2%  #
    224-335    13,000 images 11.5%  ######
    336-511   100,000 images 88.3%  ########################################
  repeated pictures   12 images (less than 0.1%) with the same picture as others; 6 different
                      expected in a random batch of 128: less than 0.01 pairs
                      most frequent: the picture of coco-train-00000123, 2 times
  repeated captions   30,000 captions (5.3%) with the same text as other images'; 4,000 different
                      expected in a random batch of 128: 0.31 pairs
                      most frequent: "a a a a a a a a a a a a a a a a a a a a a a a ...", with 1,234
                      images

A repeat in a batch is a false negative: two images that show or say the same, which a contrastive
loss pushes apart. The training reader of vl-plugins holds such captions back, so that equal ones of
different images never meet in a batch of one process. Pictures it does not compare; leave repeated
ones out when you make the shards, or give them a group in common (--group-key)."""
    )


def lines_of(**changes):
    return format_statistics({"x": make_statistics(**changes)}).splitlines()


def test_no_line_is_long():
    source = {"format": "table", "annotations": [{"file": f"{'long-name' * 3}{index}.json"} for index in range(9)]}
    lines = lines_of(source=source)
    assert max(map(len, lines)) <= 100
    assert sum("long-name" in line for line in lines) > 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, []),
        (None, []),
        ({"format": 3, "annotations": 4, "caption_ids": []}, []),
        ({"annotations": "a.json"}, ["  annotations         a.json"]),
        ({"annotations": [{"file": "a.json"}, 3, {"file": "b\n.json"}]}, [r"  annotations         a.json, b\n.json"]),
        ({"caption_ids": "running-number"}, ["  caption ids         running-number"]),
    ],
)
def test_sources(source, expected):
    lines = lines_of(source=source)
    assert lines[4 : lines.index("  captions per image  min 5, max 7")] == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({1: 10}, ["1 10"]),
        ({1: 1, 40: 2}, ["1 1", "40 2"]),
        (dict.fromkeys(range(1, 13), 1), [f"{number} 1" for number in range(1, 13)]),
        (
            {number: number for number in range(1, 25)},
            [f"{number}-{number + 1} {2 * number + 1}" for number in range(1, 25, 2)],
        ),
        (
            dict.fromkeys(range(1, 14), 1),
            [*(f"{number}-{number + 1} 2" for number in range(1, 13, 2)), "13-14 1"],
        ),
    ],
)
def test_many_numbers_of_captions_are_put_together(counts, expected):
    lines = lines_of(captions_per_image=counts)
    start = next(index for index, line in enumerate(lines) if line.startswith("  captions per image"))
    rows = [line.split()[:2] for line in lines[start + 1 : start + 1 + len(expected)]]
    assert [" ".join(row) for row in rows] == expected
    assert lines[start + 1 + len(expected)].startswith("  words per caption")


@pytest.mark.parametrize(
    ("bins", "expected"),
    [
        ({0: 1, 64: 0, 128: 0}, ["below 64"]),
        ({0: 0, 64: 3, 128: 0}, ["64-127"]),
        ({0: 0, 64: 3, 128: 1}, ["64-127", "128 and more"]),
        ({0: 2, 64: 0, 128: 1}, ["below 64", "64-127", "128 and more"]),
    ],
)
def test_bins_from_the_first_to_the_last_that_is_used(bins, expected):
    lines = lines_of(shorter_sides=bins)
    start, stop = lines.index("  shorter side"), lines.index("  repeated pictures   none")
    assert [re.split("  +", line.strip())[0] for line in lines[start + 1 : stop]] == expected


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [(0.004, "less than 0.01"), (0.005, "0.01"), (0.31, "0.31"), (12.346, "12.35"), (1234.5, "1,234.50")],
)
def test_expected_pairs(pairs, expected):
    repeats = Repeats(
        number=2, share=0.5, different=1, batch_size=1_000, expected_pairs=pairs, example="a", example_images=2
    )
    line = " " * 22 + f"expected in a random batch of 1,000: {expected} pairs"
    assert lines_of(repeated_captions=repeats).count(line) == 1


def test_split_without_images():
    lines = lines_of(images=0, unusable=3, rejected=None, captions_per_image={}, words=None, widths=None, source=None)
    assert lines[1].split() == ["x", "114", "0", "566,747", "-", "19,000.0", "MB"]
    assert lines[3:6] == [
        "x",
        "  unusable            3 samples without a picture, or features, or a caption, not counted",
        "",
    ]


def test_groups():
    assert "  groups              1,200" in lines_of(groups=1200)
    assert not [line for line in lines_of() if line.startswith("  groups")]


def test_images_of_unknown_size():
    lines = lines_of(widths=None)
    assert not [line for line in lines if line.startswith(("  width", "  shorter"))]


def test_names_cannot_control_the_terminal():
    repeats = Repeats(
        number=2, share=1.0, different=1, batch_size=2, expected_pairs=1.0, example="a\x1b[31m", example_images=2
    )
    text = format_statistics({"x\x1b": make_statistics(repeated_captions=repeats, repeated_pictures=repeats)})
    assert text.replace("\n", "").isprintable()
    assert text.count(r"a\x1b[31m") == 2


def test_toy(toy_shards, capsys):
    pytest.importorskip("matplotlib")
    assert info(toy_shards, "--batch-size", 16, "--contact-sheet", "sheet.png") == 0
    output = capsys.readouterr()
    statistics = shard_statistics(toy_shards, batch_size=16)
    assert output.out == f"{format_statistics(statistics)}\n\ncontact sheet: sheet.png\n"
    assert output.err == ""
    assert Path("sheet.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path().iterdir()] == ["sheet.png"]


def test_without_contact_sheet_nothing_is_written(toy_shards, capsys):
    assert info(toy_shards) == 0
    assert capsys.readouterr().out == f"{format_statistics(shard_statistics(toy_shards))}\n"
    assert list(Path().iterdir()) == []


def test_json(toy_shards, capsys):
    assert info(toy_shards, "--json", "--split", "toy-val") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["splits", "contact_sheet"]
    assert document["contact_sheet"] is None
    assert list(document["splits"]) == ["toy-val"]
    split = document["splits"]["toy-val"]
    assert "places" not in split
    assert split["captions_per_image"] == {"5": 24}
    assert split["widths"] == {"minimum": 64, "median": 64, "maximum": 64}
    assert split["repeated_captions"]["batch_size"] == 24
    assert split["source"] == {}


def test_json_with_a_contact_sheet(toy_shards, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert info(toy_shards, "--json", "--contact-sheet", tmp_path / "new" / "a.png", "--samples", "1") == 0
    assert json.loads(capsys.readouterr().out)["contact_sheet"] == str(tmp_path / "new" / "a.png")
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert image.width == 364


@pytest.fixture
def drawn(monkeypatch):
    """What the command hands to the contact sheet."""
    from vl_plugins.data import contact_sheet

    calls = []

    def note(samples, file, *, title):
        calls.append((samples, file, title))

    monkeypatch.setattr(contact_sheet, "draw_contact_sheet", note)
    return calls


@pytest.fixture
def feature_shards(tmp_path):
    """Folder with one shard of two images, of 3 and 1 features."""
    features = tmp_path / "features"
    features.mkdir()
    images = []
    for index, number in enumerate((3, 1)):
        np.save(features / f"{index}.npy", np.ones((number, 2048)))
        images.append(CaptionedImage(index, f"{index}.jpg", ("a dog",), (index,), "train", "grid", f"{index}.jpg"))
    write_shards(images, None, tmp_path / "grid", features=features)
    return tmp_path / "grid"


def test_features(feature_shards, drawn, capsys):
    assert info(feature_shards, "--contact-sheet", "a.png") == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("  features per image  min 1, median 2, max 3")
    assert lines[start + 1] == "  values per feature  2,048"
    assert not any(line.startswith(("  width", "  height", "  unusable")) for line in lines)
    assert lines[-1] == "no contact sheet: the shards have features in place of pictures"
    assert info(feature_shards, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    split = document["splits"]["grid-train"]
    assert split["features"] == {"minimum": 1, "median": 2, "maximum": 3}
    assert (split["feature_dims"], document["contact_sheet"], drawn) == ({"2048": 2}, None, [])


def test_contact_sheet_of_the_splits_with_pictures(feature_shards, toy_shards, drawn, capsys):
    manifest = json.loads((feature_shards / "manifest.json").read_text())
    more = json.loads((toy_shards / "manifest.json").read_text())["splits"]["toy-val"]
    manifest["splits"]["toy-val"] = more
    (feature_shards / "manifest.json").write_text(json.dumps(manifest))
    for shard in more["shards"]:
        shutil.copy(toy_shards / shard, feature_shards)
    assert info(feature_shards, "--contact-sheet", "a.png") == 0
    ((samples, _, title),) = drawn
    assert title == "toy-val: 12 of 24 samples"
    assert all(sample.picture for sample in samples)


def test_samples_of_the_contact_sheet(toy_shards, drawn, capsys):
    assert info(toy_shards, "--split", "toy-val", "toy-train", "--samples", "4", "--contact-sheet", "a.png") == 0
    ((samples, file, title),) = drawn
    assert (str(file), title) == ("a.png", "toy-train, toy-val: 4 of 88 samples")
    # In the order of the manifest: 64 of train, 24 of val.
    assert [sample.key for sample in samples] == [
        "toy-train-00000011",
        "toy-train-00000033",
        "toy-train-00000055",
        "toy-val-00000013",
    ]
    assert all(sample.picture.startswith(b"\x89PNG") and len(sample.captions) == 5 for sample in samples)
    assert capsys.readouterr().out.splitlines()[-1] == "contact sheet: a.png"


def test_url(toy_shards, drawn, capsys):
    folder = Folder("memory://test_shards_info/shards")
    folder.make()
    for file in toy_shards.iterdir():
        with folder.write(file.name) as stream:
            stream.write(file.read_bytes())
    assert info("memory://test_shards_info/shards", "--contact-sheet", "a.png") == 0
    remote = capsys.readouterr().out
    ((samples, file, _),) = drawn
    assert (len(samples), str(file)) == (12, "a.png")
    assert info(toy_shards) == 0
    assert remote.startswith(capsys.readouterr().out)


def test_shards_of_other_programs_with_a_damaged_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "other"
    folder.mkdir()
    stream = io.BytesIO()
    Image.new("RGB", (30, 20)).save(stream, "JPEG")
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for name, data in (
            ("0.jpg", stream.getvalue()),
            ("0.txt", b"a $dog$"),
            ("1.jpg", b"no"),
            ("1.txt", b"a"),
            ("2.txt", b"b"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert info(folder, "--contact-sheet", "a.png") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["shards", "1", "1", "1", "-"]
    assert lines[4] == "  unusable            2 samples without a picture, or features, or a caption, not counted"
    assert lines[-1] == "contact sheet: a.png"
    with Image.open("a.png") as image:
        # Three samples, also those that cannot be used.
        assert image.width == pytest.approx(1020, abs=1)


def test_empty_shard(tmp_path, drawn, capsys):
    with tarfile.open(tmp_path / "a-0.tar", "w"):
        pass
    assert info(tmp_path, "--contact-sheet", "a.png") == 0
    assert drawn == []
    assert "contact sheet" not in capsys.readouterr().out


def test_without_matplotlib(toy_shards, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert info(toy_shards, "--contact-sheet", "a.png") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "matplotlib is not installed" in output.err
    assert info(toy_shards) == 0
    assert "matplotlib" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--split", "toy-vla"),
            "unknown split 'toy-vla' (did you mean 'toy-val'?); known: toy-test, toy-train, toy-val",
        ),
        (("--batch-size", "0"), "the batch size must be at least 1, got 0"),
        (("--samples", "0"), "--samples must be 1 to 60, got 0"),
        (("--samples", "61"), "--samples must be 1 to 60, got 61"),
        (("--contact-sheet", "a.jpg"), "--contact-sheet must be a .png file, got a.jpg"),
    ],
)
def test_wrong_input_is_one_line(toy_shards, capsys, arguments, message):
    assert info(toy_shards, *arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"vl-plugins shards: error: {message}\n")
    assert list(Path().iterdir()) == []


def test_statistics_are_printed_before_the_picture_fails(toy_shards, capsys):
    pytest.importorskip("matplotlib")
    Path("a.png").mkdir()
    assert info(toy_shards, "--contact-sheet", "a.png") == 2
    output = capsys.readouterr()
    assert "toy-train" in output.out
    assert "cannot write a.png" in output.err


def test_no_shards(tmp_path, capsys):
    assert info(tmp_path / "here") == 2
    assert "here holds no shards; expected .tar files" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("x", "--bat", "3")])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        info(*arguments)
    assert error.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_example_is_a_command(toy_shards, drawn, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        info("--help")
    assert shards_info.EPILOG in capsys.readouterr().out
    (command,) = (line.strip() for line in shards_info.EPILOG.splitlines() if "vl-plugins" in line)
    shutil.copytree(toy_shards, "shards")
    assert main(command.replace("coco", "toy").split()[1:]) == 0
    assert str(drawn[0][1]) == "toy-train.png"


def test_import_needs_nothing_that_is_optional():
    code = """
import sys
import vl_plugins.commands.shards_info, vl_plugins.commands.shards_verify
print(sorted({"torch", "PIL", "webdataset", "matplotlib", "fsspec", "numpy"} & set(sys.modules)))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
