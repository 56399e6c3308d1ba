import base64
import json
import random
import shutil
from pathlib import Path

import fsspec
import pytest

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data import CaptionedImage
from vl_plugins.data.index import index_file
from vl_plugins.data.inspection import verify_shards
from vl_plugins.data.writer import write_shards
from vl_plugins.errors import UserError

FIRST, SECOND, THIRD = (f"tiny-train-{index:06d}.tar" for index in range(3))
CHANGED = "it is not what was written: its index has another SHA-256"
CUT = "it cannot be read to its end: "
FILES_V0_2 = Path(__file__).parents[1] / "files_v0_2"


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


def verify(folder, **options):
    shards = [str(file) for file in sorted(folder.glob("*.tar"))]
    return verify_shards(shards, folders=[str(folder)], **options)


def problems(folder, shard=None):
    """Return the problems of a folder, or of one shard, without its name."""
    found = verify(folder).problems if shard is None else verify_shards([str(folder / shard)]).problems
    prefix = f"{folder}/" if shard is None else f"{folder / shard}: "
    assert all(problem.startswith(prefix) for problem in found)
    return [problem.removeprefix(prefix) for problem in found]


def edit(file, change):
    file.write_bytes(change(file.read_bytes()))


SIZE = " bytes, but "
DAMAGE = {
    "edited caption": (lambda data: data.replace(b"2 one", b"3 one", 1), [CHANGED]),
    "edited padding": (lambda data: data[:-1] + b"x", [f"{CUT}it is cut off or damaged", CHANGED]),
    "zeros at its end": (lambda data: data + bytes(512), [SIZE]),
    "cut between samples": (
        lambda data: data[: data.index(b"tiny-train-00000003")],
        [f"{CUT}it is cut off or damaged", SIZE],
    ),
    "cut in a file": (
        lambda data: data[: data.index(b"IDAT")],
        [f"{CUT}it is damaged or compressed: unexpected end", SIZE],
    ),
    "no archive": (lambda data: b"text" * 1000, [f"{CUT}it is damaged or compressed: ", SIZE]),
    "nothing": (lambda data: b"", [f"{CUT}it is damaged or compressed: empty file", SIZE]),
    "no samples": (lambda data: bytes(len(data)), ["it has no samples", CHANGED]),
    "file twice": (lambda data: encode_archive([("a.png", "")] * 2), [f"{CUT}a.png is in it twice", CHANGED]),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_archive(folder, damage, expected):
    edit(folder / SECOND, damage)
    found = problems(folder, SECOND)
    assert len(found) == len(expected)
    for problem, part in zip(found, expected, strict=True):
        assert part in problem


def test_any_flipped_bit_is_a_problem(folder):
    rng, sound = random.Random(0), (folder / SECOND).read_bytes()
    for _ in range(40):
        data = bytearray(sound)
        data[rng.choice([rng.randrange(len(sound)), rng.randrange(512)])] ^= 1 << rng.randrange(8)
        (folder / SECOND).write_bytes(data)
        assert CHANGED in problems(folder, SECOND)


def change_head(**changes):
    return lambda head, *records: [head | {name: change(head[name]) for name, change in changes.items()}, *records]


def swap(text):
    return base64.b64encode(base64.b64decode(text)[::-1]).decode()


INDEXES = {
    "hash": (change_head(sha256=lambda value: value[::-1]), CHANGED),
    "size of the shard": (change_head(size=lambda value: value + 1), SIZE),
    "positions": (change_head(starts=lambda starts: [start + 512 for start in starts]), "other starts"),
    "sizes": (change_head(sizes=lambda sizes: [size + 512 for size in sizes]), "other sizes"),
    "numbers of captions": (change_head(counts=lambda counts: [counts[0] + 1, counts[1] - 1]), "other counts"),
    "hashes of captions": (change_head(captions=swap), "other captions"),
    "groups": (change_head(groups=swap), "other groups"),
    "different lengths": (change_head(starts=lambda starts: starts[1:]), "its arrays have different lengths"),
    "caption": (lambda head, first, *more: [head, first | {"captions": ["other", "2 two"]}, *more], "other records"),
    "caption id": (lambda head, first, *more: [head, first | {"caption_ids": [7, 8]}, *more], "other records"),
    "missing record": (lambda head, first, *more: [head, *more], "other records"),
    "no index": (lambda head, *records: records, "is damaged: "),
}


@pytest.mark.parametrize(("change", "expected"), INDEXES.values(), ids=INDEXES)
def test_index_that_differs(folder, change, expected):
    file = Path(index_file(str(folder / SECOND)))
    lines = change(*map(json.loads, file.read_text().splitlines()))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (problem,) = problems(folder, SECOND)
    assert expected in problem


PICTURE = encode_picture((200, 100))
SAMPLES = {
    "empty picture": ({"png": b""}, "the file is empty"),
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


LEFT = "left over from an interrupted run; run it again, or delete this file"
GONE = "does not exist, but sizes.json or an index has it"
FOLDERS = {
    f".{FIRST}.01234567.partial": (b"", LEFT),
    f"__index__/.{FIRST}.jsonl.01234567.partial": (b"", LEFT),
    "x.tar": (encode_archive([("0.png", PICTURE), ("0.txt", "a")]), "has no index, unlike other shards of the folder"),
    f"__index__/{FIRST}.jsonl": (None, "has no index, unlike other shards of the folder"),
    SECOND: (None, GONE),
}


@pytest.mark.parametrize("file", FOLDERS)
def test_file_too_many_or_too_few(folder, file):
    content, expected = FOLDERS[file]
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    (problem,) = problems(folder)
    assert problem.startswith(f"{Path(file).name.removesuffix('.jsonl') if content is None else file}: {expected}")
    (folder / "notes.txt").touch()
    assert len(problems(folder)) == 1


def test_sizes(folder):
    sizes = {FIRST: 2, SECOND: 3, "tiny-val-000000.tar": 1, "../x.tar": 1}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    wrong = [f"{SECOND}: has 2 samples, sizes.json says 3", f"{THIRD}: has 1 samples, sizes.json says None"]
    assert problems(folder) == [f"../x.tar: {GONE}", *wrong]
    (folder / "sizes.json").unlink()
    assert problems(folder)[0] == f"{FIRST}: has 2 samples, sizes.json says None"
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
    folder, files = "memory://test_verification", fsspec.filesystem("memory")
    files.put(str(sound), "/test_verification", recursive=True)
    files.touch("/test_verification/.x.partial")
    shards = [f"{folder}/{name}" for name in (FIRST, SECOND, THIRD, "tiny-val-000000.tar")]
    assert verify_shards(shards, folders=[folder]).problems == [f"{folder}/.x.partial: {LEFT}"]
