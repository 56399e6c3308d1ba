"""Statistics of shards, and damage that is found in them."""

import base64
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import fsspec
import pytest

from tests.helpers.archives import encode_archive, encode_picture
from tests.helpers.pictures import EPS, VAST, vast_png
from vl_plugins.data import (
    CaptionedImage,
    inspect_shards,
    normalize_caption,
    verify_shards,
    write_shards,
)
from vl_plugins.data.index import index_file, index_shard
from vl_plugins.data.records import CaptionRule

FIRST, SECOND, THIRD = (f"tiny-train-{index:06d}.tar" for index in range(3))
PICTURE = encode_picture((200, 100))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Folder with the splits ``tiny-train`` (2 + 2 + 1 images, two captions each) and ``tiny-val`` (1 image)."""
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("sound")
    images = []
    for index in range(6):
        (root / f"{index}.png").write_bytes(encode_picture((80 + index, 60)))
        captions, ids = (f"{index} one", f"{index} two"), (10 * index, 10 * index + 1)
        split = "val" if index == 5 else "train"
        images.append(CaptionedImage(index, f"{index}.png", captions, ids, split, "tiny", "x.png", index % 2))
    write_shards(images, root, out, samples_per_shard=2)
    return out


@pytest.fixture
def folder(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "shards"))


class TestStatistics:
    def test_they_are_those_of_plain_loops(self, tmp_path):
        """5 shards of 30 images with 1 to 4 short captions."""
        rng, images = random.Random(0), []
        (tmp_path / "x.png").write_bytes(PICTURE)
        for index in range(30):
            words = [rng.choices(("a", "A", "Dog ", "dog"), k=rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
            ids = tuple(10 * index + number for number in range(len(words)))
            images.append(CaptionedImage(index, "x.png", tuple(map(" ".join, words)), ids, "train", "set", "x.png"))
        shards = write_shards(images, tmp_path, tmp_path / "out", samples_per_shard=7).shards

        owners = Counter(text for image in images for text in {*map(normalize_caption, image.captions)})
        repeated = [count for count in owners.values() if count > 1]
        counts = [len(image.captions) for image in images]
        assert inspect_shards(shards) == {
            "set-train": {
                "shards": 5,
                "images": 30,
                "captions": sum(counts),
                "captions_per_image": Counter(counts),
                "repeated_captions": {
                    "number": sum(repeated),
                    "share": sum(repeated) / owners.total(),
                    "different": len(repeated),
                    "most_frequent": max(repeated),
                },
            }
        }

    def test_shards_of_other_programs(self, tmp_path):
        """As img2dataset writes them, with other files between and beside."""
        picture, names = encode_picture((50, 30), "JPEG"), {"caption": "A dog", "key": "0"}
        first = [("0.jpg", picture), ("0.json", names), ("0.txt", "A dog"), ("1.jpeg", picture), ("1.txt", "a  dog")]
        second = [("readme", "x"), ("a/1.WEBP", encode_picture((5, 7), "WEBP")), ("a/1.txt", "cat")]
        shards = {"00000.tar": first, "00001.tar": second, "val_7.tar": first}
        for name, members in shards.items():
            (tmp_path / name).write_bytes(encode_archive(members))
        found = inspect_shards([str(tmp_path / name) for name in shards])
        counts = {name: (split["shards"], split["images"]) for name, split in found.items()}
        assert counts == {"shards": (2, 3), "val": (1, 2)}
        assert found["shards"]["repeated_captions"]["number"] == 2


def problems(folder, shard="*.tar"):
    """Return the problems of a folder or of one shard, without its name."""
    _, _, found = verify_shards([str(file) for file in sorted(folder.glob(shard))])
    prefix = f"{folder}/" if shard == "*.tar" else f"{folder / shard}: "
    assert all(problem.startswith(prefix) for problem in found)
    return [problem.removeprefix(prefix) for problem in found]


CHANGED = "it is not what was written: its index has another SHA-256"
DAMAGE = {
    "edited caption": (lambda data: data.replace(b"2 one", b"3 one", 1), CHANGED),
    "zeros at its end": (lambda data: data + bytes(512), " bytes, but its index says "),
    "cut between samples": (lambda data: data[: data.index(b"tiny-train-00000003")], " bytes, but its index says "),
    "no samples": (lambda data: bytes(len(data)), CHANGED),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_archive(folder, damage, expected):
    (folder / SECOND).write_bytes(damage((folder / SECOND).read_bytes()))
    assert expected in problems(folder, SECOND)[0]


def test_any_flipped_bit_is_a_problem(folder):
    rng, sound = random.Random(0), (folder / SECOND).read_bytes()
    for _ in range(40):
        data = bytearray(sound)
        data[rng.choice([rng.randrange(len(sound)), rng.randrange(512)])] ^= 1 << rng.randrange(8)
        (folder / SECOND).write_bytes(data)
        assert problems(folder, SECOND)


def change_head(**changes):
    return lambda head, *records: [head | {name: change(head[name]) for name, change in changes.items()}, *records]


def swap(text):
    return base64.b64encode(base64.b64decode(text)[::-1]).decode()


OTHER = "its index is that of other images"
INDEXES = {
    "hash": (change_head(sha256=lambda value: value[::-1]), CHANGED),
    "size of the shard": (change_head(size=lambda value: value + 1), " bytes, but its index says "),
    "positions": (change_head(starts=lambda starts: [start + 512 for start in starts]), OTHER),
    "hashes of captions": (change_head(captions=swap), OTHER),
    "caption": (lambda head, first, *more: [head, first | {"captions": ["other", "2 two"]}, *more], OTHER),
    "no index": (lambda head, *records: records, "is damaged: "),
}


@pytest.mark.parametrize(("change", "expected"), INDEXES.values(), ids=INDEXES)
def test_index_that_differs(folder, change, expected):
    file = Path(index_file(str(folder / SECOND)))
    lines = change(*map(json.loads, file.read_text().splitlines()))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (problem,) = problems(folder, SECOND)
    assert expected in problem


SAMPLES = {
    "cut picture": ({"png": PICTURE[: len(PICTURE) * 3 // 4]}, "the image is damaged: "),
    "EPS": ({"jpg": EPS}, "the file is not an image in JPEG, PNG or WebP format"),
    "too many pixels": ({"png": vast_png()}, f"the image has {VAST}, more than max_image_pixels 89,000,000"),
    "damaged features": ({"npy": b"no array"}, "the array cannot be read"),
}


@pytest.mark.parametrize(("members", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_unusable_sample_of_another_program_is_named(tmp_path, members, expected):
    bad = [(f"bad.{extension}", data) for extension, data in ({"txt": "a"} | members).items()]
    sound = [("good.png", PICTURE), ("good.txt", "a")]
    (tmp_path / "0.tar").write_bytes(encode_archive([*sound, *bad]))
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"0.tar: bad: {expected}")
    (tmp_path / "0.tar").write_bytes(encode_archive(sound))
    assert problems(tmp_path) == []


def test_a_shard_that_is_gone(folder):
    (problem,) = verify_shards([str(folder / "gone.tar")])[2]
    assert problem.startswith(f"{folder}/gone.tar: ")
    assert "No such file" in problem


def test_sound_folder_and_its_copy_behind_a_url(sound):
    shards = [FIRST, SECOND, THIRD, "tiny-val-000000.tar"]
    assert verify_shards([f"{sound}/{name}" for name in shards]) == (6, 12, [])
    fsspec.filesystem("memory").put(str(sound), "/test_inspection", recursive=True)
    assert verify_shards([f"memory://test_inspection/{name}" for name in shards]) == (6, 12, [])


def test_an_index_by_another_rule_is_compared_by_its_own(tmp_path):
    metadata = {"long": "a long one", "short": "one"}
    shard = tmp_path / "x.tar"
    shard.write_bytes(encode_archive([("a.png", PICTURE), ("a.json", json.dumps(metadata)), ("a.txt", "alt")]))
    index_shard(str(shard), rule=CaptionRule(fields=("long", "short")))
    assert verify_shards([str(shard)]) == (1, 2, [])
    shard.write_bytes(shard.read_bytes().replace(b"alt", b"ALT"))
    (problem,) = verify_shards([str(shard)])[2]
    assert "its index has another SHA-256" in problem
