import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.cli import main
from vl_plugins.commands.shards_info import format_statistics
from vl_plugins.data import contact_sheet
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage
from vl_plugins.data.statistics import Range, Repeats, SplitStatistics, shard_statistics


@pytest.fixture(autouse=True)
def in_new_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def info(*arguments):
    return main(["shards", "info", *map(str, arguments)])


STATISTICS = SplitStatistics(
    shards=114,
    bytes=19_000_000_000,
    images=113_287,
    captions=566_747,
    unusable=3,
    rejected=1_200,
    source={"format": "karpathy-coco", "annotations": [{"file": "dataset_coco.json"}], "caption_ids": "a\n" + "b" * 70},
    groups=1_200,
    captions_per_image={5: 112_000, 6: 1_200, 7: 87},
    words=Range(5, 10.5, 50),
    widths=Range(59, 640.0, 1640),
    heights=Range(51, 480.0, 640),
    features=Range(10, 36.0, 100),
    feature_dims={2048: 113_287},
    repeated_pictures=Repeats(12, 12 / 113_287, 6, "coco-train-00000123", 2),
    repeated_captions=Repeats(30_000, 0.0529, 4_000, "a " * 60, 1_234),
    places=(),
)


def test_whole_text():
    text = format_statistics({"coco\x1b": STATISTICS})
    assert text.replace("\n", "").isprintable()
    assert (
        text
        == r"""          shards   images  captions  rejected         size
coco\x1b     114  113,287   566,747     1,200  19,000.0 MB

coco\x1b
  source              format karpathy-coco, caption_ids
                      a\nbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
  unusable            3 samples without a picture, or features, or a caption, not counted
  captions per image  5: 112,000 (98.9%), 6: 1,200 (1.1%), 7: 87 (0.1%)
  groups              1,200
  words per caption   min 5, median 10.5, max 50
  width               min 59, median 640, max 1,640 pixels
  height              min 51, median 480, max 640 pixels
  features per image  min 10, median 36, max 100
  values per feature  2,048: 113,287 (100.0%)
  repeated pictures   12 images (0.01%), 6 different
                      most frequent: the picture of 'coco-train-00000123', 2 images
  repeated captions   30,000 captions (5.29%), 4,000 different
                      most frequent: the text 'a a a a a a a a a a a a a a a a a a a a a a a ...',
                      1,234 images

A repeat in a batch is a false negative: two images that show or say the same, which a contrastive
loss pushes apart. The training reader of vl-plugins keeps equal captions of different images out of
a batch of one process. It does not compare pictures: leave repeated ones out when you make the
shards, or give them a common group (--group-key)."""
    )


def test_toy(toy_shards, capsys):
    pytest.importorskip("matplotlib")
    assert info(toy_shards, "--contact-sheet", "new/sheet.png", "--samples", 3) == 0
    output = capsys.readouterr()
    assert output.out == f"{format_statistics(shard_statistics(toy_shards))}\n"
    assert output.err == ""
    with Image.open("new/sheet.png") as image:
        assert (image.format, image.width) == ("PNG", 2 * 340)


def test_json(toy_shards, capsys):
    assert info(toy_shards, "--json", "--split", "toy-val") == 0
    (split,) = json.loads(capsys.readouterr().out)["splits"].values()
    assert split.keys() == {field for field in vars(STATISTICS) if field != "places"}
    assert split["captions_per_image"] == {"5": 24}
    assert split["widths"] == {"minimum": 64, "median": 64, "maximum": 64}
    assert split["features"] is None
    assert list(Path().iterdir()) == []


@pytest.fixture
def drawn(monkeypatch):
    """Keys of the samples that the command hands to the contact sheet, its file and title."""
    calls = []

    def note(samples, file, *, title):
        calls.append(([sample.key for sample in samples], str(file), title))

    monkeypatch.setattr(contact_sheet, "draw_contact_sheet", note)
    return calls


@pytest.mark.parametrize(
    ("number", "keys"),
    [(1, ["toy-val-00000012"]), (3, ["toy-val-00000004", "toy-val-00000012", "toy-val-00000020"])],
)
def test_samples_of_the_contact_sheet_are_spread(toy_shards, drawn, number, keys):
    assert info(toy_shards, "--split", "val", "--samples", number, "--contact-sheet", "a.png") == 0
    assert drawn == [(keys, "a.png", f"toy-val: {number} of 24 samples")]


def test_features_are_not_drawn(toy_shards, tmp_path, drawn, capsys):
    np.save(tmp_path / "0.npy", np.ones((3, 2048)))
    image = CaptionedImage(0, "0.jpg", ("a dog",), (0,), "train", "grid", "0.jpg")
    write_shards([image], tmp_path, tmp_path / "grid", inputs="features")
    assert info(tmp_path / "grid", "--contact-sheet", "a.png") == 2
    output = capsys.readouterr()
    assert "  features per image  min 3, median 3, max 3\n  values per feature  2,048: 1 (100.0%)\n" in output.out
    assert "no contact sheet: the shards hold no pictures" in output.err
    (tmp_path / "grid" / "manifest.json").unlink()
    for shard in toy_shards.glob("toy-val-*.tar"):
        shutil.copy(shard, tmp_path / "grid")
    assert info(tmp_path / "grid", "--contact-sheet", "a.png") == 0
    assert [title for _, _, title in drawn] == ["toy-val: 12 of 24 samples"]


def test_shards_of_other_programs_with_a_damaged_picture(tmp_path, drawn, capsys):
    members = [("0.jpg", encode_picture(image_format="JPEG")), ("0.txt", "a $dog$"), ("1.jpg", b"no"), ("1.txt", "a")]
    (tmp_path / "00000.tar").write_bytes(encode_archive([*members, ("2.txt", "b")]))
    assert info(tmp_path, "--contact-sheet", "a.png") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["shards", "1", "1", "1", "-"]
    assert lines[4].startswith("  unusable            2 samples")
    # Also those that cannot be used.
    assert drawn == [(["0", "1", "2"], "a.png", "shards: 3 of 3 samples")]


def test_without_matplotlib(toy_shards, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert info(toy_shards, "--contact-sheet", "a.png") == 2
    output = capsys.readouterr()
    assert (output.out, "matplotlib is not installed" in output.err) == ("", True)
    assert info(toy_shards) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "dev"), "unknown split 'dev'; known: toy-test, toy-train, toy-val"),
        (("--contact-sheet", "a.png", "--samples", "61"), "a contact sheet shows 1 to 60 samples, got 61"),
        (("--contact-sheet", "a.jpg"), "a contact sheet is a .png file, got a.jpg"),
    ],
)
def test_wrong_input_is_one_line(toy_shards, capsys, arguments, message):
    assert info(toy_shards, *arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"vl-plugins shards: error: {message}\n")
