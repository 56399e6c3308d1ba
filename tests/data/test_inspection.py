import io
import itertools
import json
import random
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data import CaptionedImage, RejectedImage, normalize_caption
from vl_plugins.data.inspection import draw_contact_sheet, inspect_shards
from vl_plugins.data.writer import write_shards
from vl_plugins.errors import UserError

PICTURE = encode_picture((5, 4))
NO_REPEATS = {"number": 0, "share": 0.0, "different": 0, "example": None, "example_images": 0}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """5 shards of 30 images with 1 to 4 short captions, some pictures twice or more; one more was rejected."""
    rng = random.Random(0)
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("shards")
    for index in range(20):
        picture = encode_picture((rng.randint(20, 900), rng.randint(20, 300)), rng.choice(["PNG", "JPEG"]), 0)
        (root / str(index)).write_bytes(picture)
    images = [RejectedImage("row 7", "train", "no file")]
    for index in range(30):
        captions = [
            " ".join(rng.choices(("a", "A", "Dog ", "dog"), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4))
        ]
        ids = tuple(10 * index + number for number in range(len(captions)))
        file = str(rng.randrange(20))
        images.append(CaptionedImage(index, file, tuple(captions), ids, "train", "set", file, index % 3))
    write_shards(images, root, out, samples_per_shard=7, source={"format": "table"})
    return sorted(map(str, out.glob("*.tar")))


def value_range(values):
    return {"minimum": min(values), "median": statistics.median(values), "maximum": max(values)}


def find_repeats(images):
    """Return the values that several images have, given the values of each image."""
    owners = Counter(value for values in images for value in dict.fromkeys(values))
    every = list(itertools.chain(*images))
    number = sum(owners[value] > 1 for value in every)
    example = max(owners, key=owners.__getitem__)  # the first one of them
    different = sum(count > 1 for count in owners.values())
    return dict(zip(NO_REPEATS, (number, number / len(every), different, example, owners[example]), strict=True))


def test_statistics_are_those_of_plain_loops(shards):
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    pictures = [sample.get("jpg", sample.get("png")) for sample in samples]
    captions = [json.loads(sample["json"])["captions"] for sample in samples]
    sizes = [Image.open(io.BytesIO(picture)).size for picture in pictures]
    keys = [samples[pictures.index(picture)]["__key__"] for picture in pictures]
    words = [len(caption.split()) for caption in itertools.chain(*captions)]
    assert inspect_shards(shards) == {
        "set-train": {
            "shards": 5,
            "bytes": sum(Path(shard).stat().st_size for shard in shards),
            "images": 30,
            "captions": len(words),
            "unusable": 0,
            "rejected": 1,
            "source": {"format": "table"},
            "groups": 3,
            "captions_per_image": Counter(map(len, captions)),
            "words": value_range(words),
            "widths": value_range([width for width, _ in sizes]),
            "heights": value_range([height for _, height in sizes]),
            "features": None,
            "feature_dims": {},
            "repeated_pictures": find_repeats([[key] for key in keys]),
            "repeated_captions": find_repeats([list(map(normalize_caption, texts)) for texts in captions]),
        }
    }


def inspect_members(tmp_path, *members_of_shards):
    for number, members in enumerate(members_of_shards):
        (tmp_path / f"a-{number}.tar").write_bytes(encode_archive(members))
    return inspect_shards([str(tmp_path / f"a-{number}.tar") for number in range(len(members_of_shards))])["a"]


def test_more_captions_than_are_in_memory_at_a_time(tmp_path):
    texts = [*(f"caption {number}" for number in range(199_999)), "b"]
    common = ["Common 0", "Common 0", *(f"common {number}" for number in range(500))]
    second = [("1.png", PICTURE + b"1"), ("1.json", {"captions": common})]
    second += [("2.png", PICTURE + b"2"), ("2.json", {"captions": common[3:]}), ("3.png", b"no"), ("3.txt", "a")]
    second += [("4.png", PICTURE + b"4"), ("4.txt", "COMMON 0"), ("5.png", PICTURE), ("5.txt", "b")]
    found = inspect_members(tmp_path, [("0.png", PICTURE), ("0.json", {"captions": texts})], second)
    # The first of those that two images have.
    repeats = (1004, 1004 / 201_003, 501, "b", 2)
    assert found["repeated_captions"] == dict(zip(NO_REPEATS, repeats, strict=True))
    assert found["repeated_pictures"] == dict(zip(NO_REPEATS, (2, 2 / 5, 1, "0", 2), strict=True))


UNUSABLE = {
    "no picture": {"txt": "a"},
    "no caption": {"png": PICTURE},
    "no text": {"png": PICTURE, "json": {"captions": ["a", 5]}},
    "not Unicode": {"png": PICTURE, "txt": b"\xff"},
    "half a character": {"png": PICTURE, "json": b'{"captions": ["\\ud800"]}'},
    "damaged picture": {"png": PICTURE[:50], "txt": "a"},
    "damaged array": {"npy": b"no array", "txt": "a"},
    "no JSON": {"png": PICTURE, "json": "{", "txt": "a"},
}


@pytest.mark.parametrize("members", UNUSABLE.values(), ids=UNUSABLE)
def test_samples_that_cannot_be_used_are_counted(tmp_path, members):
    usable = [("0.png", PICTURE), ("0.json", "[]"), ("0.txt", "a")]
    found = inspect_members(tmp_path, [*usable, *((f"1.{extension}", data) for extension, data in members.items())])
    assert (found["images"], found["captions"], found["unusable"]) == (1, 1, 1)


def test_features(tmp_path):
    streams = [io.BytesIO(), io.BytesIO()]
    for rows, stream in enumerate(streams, 2):
        np.save(stream, np.ones((rows, 7)))
    members = [(f"{number}.npy", stream.getvalue()) for number, stream in enumerate(streams)]
    found = inspect_members(tmp_path, [members[0], ("0.txt", "a"), members[1], ("1.txt", "b")])
    assert (found["features"], found["feature_dims"]) == ({"minimum": 2, "median": 2.5, "maximum": 3}, {7: 2})
    assert (found["widths"], found["heights"]) == (None, None)


def test_shards_of_other_programs(tmp_path):
    """As img2dataset writes them, with other files between and beside."""
    first = [
        ("0.jpg", encode_picture((50, 30), "JPEG")),
        ("0.json", {"caption": "A dog", "key": "0"}),
        ("0.txt", "A dog"),
    ]
    first += [("1.jpeg", encode_picture((60, 40), "JPEG")), ("1.txt", "a  dog"), ("readme", "x")]
    second = [("a/1.WEBP", encode_picture((5, 7), "WEBP")), ("a/1.txt", "cat"), ("b/1.png", b"no"), ("b/1.txt", "a")]
    shards = {"00000.tar": first, "00001.tar": second, "val_7.tar": first, "test.tar": []}
    for name, members in shards.items():
        (tmp_path / name).write_bytes(encode_archive(members))
    found = inspect_shards([str(tmp_path / name) for name in shards])
    counts = {name: (split["shards"], split["images"], split["unusable"]) for name, split in found.items()}
    assert counts == {"shards": (2, 3, 1), "val": (1, 2, 0), "test": (1, 0, 0)}
    every = found["shards"]
    assert (every["rejected"], every["source"], every["groups"]) == (None, None, 0)
    assert (every["widths"], every["heights"]) == (value_range([5, 50, 60]), value_range([7, 30, 40]))
    assert (every["repeated_captions"]["number"], every["repeated_captions"]["example"]) == (2, "a dog")
    assert found["test"]["words"] is None


@pytest.mark.parametrize("data", [b"text" * 1000, encode_archive([("0.png", bytes(500))])[:900]], ids=["text", "cut"])
def test_damaged_archive(tmp_path, data):
    (tmp_path / "a-0.tar").write_bytes(data)
    with pytest.raises(UserError, match=r"^cannot read .*a-0\.tar: "):
        inspect_shards([str(tmp_path / "a-0.tar")])


def draw(tmp_path, samples, number=12):
    """Draw samples, by their key, and return the sheet as an array."""
    members = [(f"{key}.{name}", data) for key, files in samples.items() for name, data in files.items()]
    (tmp_path / "a.tar").write_bytes(encode_archive(members))
    draw_contact_sheet([str(tmp_path / "a.tar")], tmp_path / "new" / "sheet.png", number, "title")
    with Image.open(tmp_path / "new" / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        return np.asarray(sheet.convert("RGB"))


def test_samples_of_the_contact_sheet_are_spread(tmp_path):
    colors = [(10 * index, 7, 250 - 10 * index) for index in range(24)]
    pictures = [encode_picture((30, 20), color=color, mode="RGB") for color in colors]
    sheet = draw(tmp_path, {index: {"png": picture, "txt": "a"} for index, picture in enumerate(pictures)}, 3)
    assert sheet.shape == (780, 680, 3)
    shown = [index for index, color in enumerate(colors) if (sheet == color).all(axis=-1).any()]
    assert shown == [4, 12, 20]
    # In rows from left to right.
    centers = [np.argwhere((sheet == colors[index]).all(axis=-1)).mean(axis=0).tolist() for index in shown]
    assert centers[0][0] == centers[1][0] < centers[2][0]
    assert centers[0][1] == centers[2][1] < centers[1][1]


def test_odd_samples_are_drawn(tmp_path, recwarn):
    """Captions that look like formulas, that no font has or no screen can hold; pictures that cannot be shown."""
    captions = ("It costs $5, or $\\frac{1}{2}$ %", r"$\nosuchcommand$", "一只猫🐶", "b\x00c\x1b[31m", "W " * 9999, " ")
    samples = {f"$k$/{index}": {"png": PICTURE, "json": {"captions": [text]}} for index, text in enumerate(captions)}
    samples |= {"cut": {"jpg": PICTURE[:30], "txt": "a"}, "no picture": {"txt": "b"}}
    samples["wide"] = {"png": encode_picture((4000, 3)), "txt": "c"}
    height, width, _ = draw(tmp_path, samples).shape
    assert height == 1140
    assert 1019 <= width <= 1020  # 10.2 inches of 100 pixels, which matplotlib 3.7 rounds down
    assert [str(warning.message) for warning in recwarn.list] == []
