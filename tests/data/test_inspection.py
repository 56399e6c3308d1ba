"""Statistics of shards, and damage that is found in them."""

import base64
import io
import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import webdataset

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data import (
    CaptionedImage,
    RejectedImage,
    inspect_shards,
    normalize_caption,
    verify_shards,
    write_shards,
)
from vl_plugins.data.index import index_file
from vl_plugins.errors import UserError

FIRST, SECOND, THIRD = (f"tiny-train-{index:06d}.tar" for index in range(3))
FILES_V0_2 = Path(__file__).parents[1] / "files_v0_2"
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
        """5 shards of 30 images with 1 to 4 short captions, some pictures twice or more; one more was rejected."""
        rng, images = random.Random(0), [RejectedImage("row 7", "train", "no file")]
        for index in range(20):
            size = rng.randint(20, 900), rng.randint(20, 300)
            (tmp_path / str(index)).write_bytes(encode_picture(size, rng.choice(["PNG", "JPEG"]), 0))
        for index in range(30):
            words = [rng.choices(("a", "A", "Dog ", "dog"), k=rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
            ids, file = tuple(10 * index + number for number in range(len(words))), str(rng.randrange(20))
            images.append(CaptionedImage(index, file, tuple(map(" ".join, words)), ids, "train", "set", file))
        shards = write_shards(images, tmp_path, tmp_path / "out", samples_per_shard=7, on_error="skip").shards

        samples = list(webdataset.WebDataset(shards, shardshuffle=False))
        captions = [json.loads(sample["json"])["captions"] for sample in samples]

        def repeats(values_of_images):
            owners = Counter(itertools.chain(*values_of_images))
            repeated = [count for count in owners.values() if count > 1]
            share = sum(repeated) / owners.total()
            counts = {"number": sum(repeated), "different": len(repeated), "most_frequent": max(repeated)}
            return {**counts, "share": share}, [value for value, count in owners.items() if count == max(repeated)]

        found = inspect_shards(shards)
        texts, frequent = repeats([set(map(normalize_caption, texts)) for texts in captions])
        assert found["set-train"]["repeated_captions"].pop("example") in frequent

        assert found == {
            "set-train": {
                "shards": 5,
                "bytes": sum(Path(shard).stat().st_size for shard in shards),
                "images": 30,
                "captions": sum(map(len, captions)),
                "unusable": 0,
                "rejected": 1,
                "captions_per_image": Counter(map(len, captions)),
                "repeated_pictures": repeats([[sample.get("jpg", sample.get("png"))] for sample in samples])[0],
                "repeated_captions": texts,
            }
        }

    @pytest.mark.parametrize(
        "members",
        [
            {"txt": "a"},
            {"png": PICTURE},
            {"png": PICTURE, "json": {"captions": ["a", 5]}},
            {"png": PICTURE, "txt": b"\xff"},
            {"png": PICTURE, "json": b'{"captions": ["\\ud800"]}'},
            {"png": PICTURE[:50], "txt": "a"},
            {"npy": b"no array", "txt": "a"},
        ],
        ids="no-picture no-caption no-text not-utf8 half-a-character damaged-picture damaged-array".split(),
    )
    def test_samples_that_cannot_be_used_are_counted(self, tmp_path, members):
        array = io.BytesIO()
        np.save(array, np.ones((2, 7)))
        usable = [("0.png", PICTURE), ("0.json", "[]"), ("0.txt", "a"), ("1.npy", array.getvalue()), ("1.txt", "b")]
        (tmp_path / "a-0.tar").write_bytes(
            encode_archive([*usable, *((f"2.{extension}", data) for extension, data in members.items())])
        )
        found = inspect_shards([str(tmp_path / "a-0.tar")])["a"]
        assert (found["images"], found["captions"], found["unusable"]) == (2, 2, 1)

    def test_shards_of_other_programs(self, tmp_path):
        """As img2dataset writes them, with other files between and beside."""
        picture, names = encode_picture((50, 30), "JPEG"), {"caption": "A dog", "key": "0"}
        first = [("0.jpg", picture), ("0.json", names), ("0.txt", "A dog"), ("1.jpeg", picture), ("1.txt", "a  dog")]
        second = [("readme", "x"), ("a/1.WEBP", encode_picture((5, 7), "WEBP")), ("a/1.txt", "cat")]
        shards = {"00000.tar": first, "00001.tar": second, "val_7.tar": first, "test.tar": []}
        for name, members in shards.items():
            (tmp_path / name).write_bytes(encode_archive(members))
        found = inspect_shards([str(tmp_path / name) for name in shards])
        assert {name: (split["shards"], split["images"]) for name, split in found.items()} == {
            "shards": (2, 3),
            "val": (1, 2),
            "test": (1, 0),
        }
        assert found["shards"]["repeated_captions"]["number"] == found["shards"]["repeated_pictures"]["number"] == 2
        assert found["test"]["captions_per_image"] == {}

    def test_damaged_archive(self, tmp_path):
        (tmp_path / "a-0.tar").write_bytes(encode_archive([("0.png", bytes(500))])[:900])
        with pytest.raises(UserError, match=r"^cannot read .*a-0\.tar: "):
            inspect_shards([str(tmp_path / "a-0.tar")])


def verify(folder, **options):
    shards = [str(file) for file in sorted(folder.glob("*.tar"))]
    return verify_shards(shards, folders=[str(folder)], **options)


def problems(folder, shard=None):
    """Return the problems of a folder, or of one shard, without its name."""
    found = verify(folder).problems if shard is None else verify_shards([str(folder / shard)]).problems
    prefix = f"{folder}/" if shard is None else f"{folder / shard}: "
    assert all(problem.startswith(prefix) for problem in found)
    return [problem.removeprefix(prefix) for problem in found]


CHANGED = "it is not what was written: its index has another SHA-256"
DAMAGE = {
    "edited caption": (lambda data: data.replace(b"2 one", b"3 one", 1), CHANGED),
    "edited padding": (lambda data: data[:-1] + b"x", "it is cut off or damaged"),
    "zeros at its end": (lambda data: data + bytes(512), " bytes, but its index says "),
    "cut between samples": (lambda data: data[: data.index(b"tiny-train-00000003")], "it is cut off or damaged"),
    "cut in a file": (lambda data: data[: data.index(b"IDAT")], "it is damaged or compressed: unexpected end"),
    "no archive": (lambda data: b"text" * 1000, "it is damaged or compressed: "),
    "nothing": (lambda data: b"", "it is damaged or compressed: empty file"),
    "no samples": (lambda data: bytes(len(data)), "it has no samples"),
    "file twice": (lambda data: encode_archive([("a.png", "")] * 2), "a.png is in it twice"),
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
    "sizes": (change_head(sizes=lambda sizes: [size + 512 for size in sizes]), OTHER),
    "numbers of captions": (change_head(counts=lambda counts: [counts[0] + 1, counts[1] - 1]), OTHER),
    "hashes of captions": (change_head(captions=swap), OTHER),
    "groups": (change_head(groups=swap), OTHER),
    "caption": (lambda head, first, *more: [head, first | {"captions": ["other", "2 two"]}, *more], OTHER),
    "missing record": (lambda head, first, *more: [head, *more], OTHER),
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
    # Without the tables that its pixels need; its header and end are whole.
    "JPEG": ({"png": encode_picture((99, 99), "JPEG").replace(b"\xff\xdb", b"\xff\xfe")}, "the image is damaged: "),
    "no picture": ({}, "it has no images"),
    "damaged features": ({"npy": b"no array"}, "the array cannot be read"),
    "no captions": ({"png": PICTURE, "json": {}, "txt": ...}, "it has no captions"),
}


@pytest.mark.parametrize(("members", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_unusable_sample_of_another_program_is_named(tmp_path, members, expected):
    bad = [(f"bad.{extension}", data) for extension, data in ({"txt": "a"} | members).items() if data is not ...]
    sound = [("good.png", PICTURE), ("good.txt", "a")]
    (tmp_path / "0.tar").write_bytes(encode_archive([*sound, *bad]))
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"0.tar: bad: {expected}")
    (tmp_path / "0.tar").write_bytes(encode_archive(sound))
    assert problems(tmp_path) == []


def test_shards_that_a_folder_lacks_and_other_sizes(folder):
    sizes = {FIRST: 2, SECOND: 3, "tiny-val-000000.tar": 1, "../x.tar": 1}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    gone = "does not exist, but sizes.json or an index has it"
    wrong = [f"{SECOND}: has 2 samples, sizes.json says 3", f"{THIRD}: has 1 samples, sizes.json says None"]
    assert problems(folder) == [f"../x.tar: {gone}", *wrong]
    (folder / "sizes.json").unlink()
    (folder / SECOND).unlink()
    assert problems(folder)[:2] == [f"{FIRST}: has 2 samples, sizes.json says None", f"{SECOND}: {gone}"]
    (folder / "sizes.json").write_text("[1]")
    with pytest.raises(UserError, match=r"sizes\.json: "):
        verify(folder)


@pytest.mark.parametrize("name", ["features", "pictures"])
def test_shards_of_version_0_2(name):
    result = verify(FILES_V0_2 / "shards" / name)
    assert (result.shards, result.problems) == (5, [])


def test_sound_folder_and_its_copy_behind_a_url(sound):
    result = verify(sound)
    assert (result.shards, result.samples, result.captions, result.problems) == (4, 6, 12, [])
    folder = "memory://test_inspection"
    fsspec.filesystem("memory").put(str(sound), "/test_inspection", recursive=True)
    shards = [f"{folder}/{name}" for name in (FIRST, SECOND, THIRD, "tiny-val-000000.tar")]
    assert verify_shards(shards, folders=[folder]).problems == []
