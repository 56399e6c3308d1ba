import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.archives import encode_archive, encode_picture, read_archive
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage
from vl_plugins.data.storage import Folder
from vl_plugins.data.verification import verify_shards
from vl_plugins.errors import UserError

FIRST, SECOND, THIRD = (f"tiny-train-{index:06d}.tar" for index in range(3))
KEY, NEXT = "tiny-train-00000002", "tiny-train-00000003"  # of the second shard
CHANGED = f"{SECOND}: its content is not what was written (SHA-256 differs from manifest.json)"


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """Folder with the splits ``tiny-train`` (2 + 2 + 1 images, two captions each) and ``tiny-val`` (1 image)."""
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("sound")
    images = []
    for index in range(6):
        (root / f"{index}.png").write_bytes(encode_picture((80 + index, 60)))
        captions, ids = (f"{index} one", f"{index} two"), (10 * index, 10 * index + 1)
        images.append(
            CaptionedImage(index, f"{index}.png", captions, ids, "val" if index == 5 else "train", "tiny", "x.png")
        )
    write_shards(images, root, out, samples_per_shard=2)
    return out


@pytest.fixture
def folder(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "shards"))


def problems(folder, **options):
    return list(verify_shards(folder, **options).problems)


def edit_json(file, edit):
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def edit_manifest(folder, edit):
    edit_json(folder / "manifest.json", lambda manifest: edit(manifest["splits"]["tiny-train"]))


def make_manifest_agree(folder):
    """Put size and hash of the second shard into the manifest, as if its samples had been written so."""
    data = (folder / SECOND).read_bytes()
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(folder, lambda entry: entry["shards"][SECOND].update(facts))


def rewrite(folder, **changes):
    """Change files of the first sample of the second shard by extension; ``...`` takes one out."""
    changes = {f"{KEY}.{extension}": data for extension, data in changes.items()}
    members = {**read_archive(folder / SECOND), **changes}
    (folder / SECOND).write_bytes(encode_archive((name, data) for name, data in members.items() if data is not ...))


def test_sound_folder(folder):
    result = verify_shards(folder)
    assert (result.shards, result.samples, result.captions, result.problems) == (4, 6, 12, ())


def flip(folder):
    data = bytearray((folder / SECOND).read_bytes())
    data[data.index(b"2 one")] ^= 1
    (folder / SECOND).write_bytes(data)


CHANGES = {
    "flipped bit": flip,
    "edited caption": lambda folder: rewrite(folder, txt=b"2 two"),
    "zeros at the end": lambda folder: (folder / SECOND).open("ab").write(bytes(512)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_content(folder, change):
    change(folder)
    assert CHANGED in problems(folder)


def test_any_flipped_bit_is_noticed(folder):
    """Damaged headers and pictures raise no other error, also where the manifest agrees."""
    rng, sound = random.Random(0), (folder / SECOND).read_bytes()
    manifest = (folder / "manifest.json").read_bytes()
    for _ in range(40):
        data = bytearray(sound)
        data[rng.choice([rng.randrange(len(sound)), rng.randrange(512)])] ^= 1 << rng.randrange(8)
        (folder / SECOND).write_bytes(data)
        assert CHANGED in problems(folder, splits=["train"])
        make_manifest_agree(folder)
        verify_shards(folder, splits=["train"])
        (folder / "manifest.json").write_bytes(manifest)


PICTURE = encode_picture((200, 100))
# What is wrong with a sample whose hash is right.
SAMPLES = {
    "empty picture": ({"png": b""}, "the file is empty"),
    "cut picture": ({"png": PICTURE[: len(PICTURE) * 3 // 4]}, "the image is damaged: "),
    "other format": ({"png": encode_picture((9, 9), "BMP")}, "the format BMP is not supported"),
    "no picture": ({"png": ...}, "it has no images; expected jpg or"),
    "no json": ({"json": ...}, "it has no captions"),
    "captions of numbers": ({"json": {"captions": ["2 one", 2]}}, "'captions' must be a list of strings, got ["),
    "no JSON": ({"json": "{"}, "its json is not valid JSON"),
    "deep": ({"json": "[" * 100_000}, "its json is not valid JSON: maximum recursion depth"),
}


@pytest.mark.parametrize(("changes", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_sample_that_cannot_be_used_is_named(folder, changes, expected):
    rewrite(folder, **changes)
    assert problems(folder)[0] == CHANGED
    make_manifest_agree(folder)
    found = problems(folder)
    assert found[0].startswith(f"{SECOND}: {KEY}: {expected}")
    # The captions that are not counted are missing.
    assert found[1:] == (
        [f"{SECOND}: has 2 samples and 2 captions, manifest.json says 2 and 4"] if "json" in changes else []
    )


CUTS = {
    "between samples": (
        lambda data: data[: data.index(NEXT.encode())],
        "it is cut off or damaged at byte {size:,}: an archive ends with zeros",
    ),
    "file twice": (lambda data: encode_archive([("a.png", b""), ("a.png", b"")]), "a.png is in it twice"),
}


@pytest.mark.parametrize(("cut", "expected"), CUTS.values(), ids=CUTS)
def test_damaged_archive(folder, cut, expected):
    data = cut((folder / SECOND).read_bytes())
    (folder / SECOND).write_bytes(data)
    found = problems(folder)
    assert found[0] == CHANGED
    assert found[1].startswith(f"{SECOND}: cannot be read to its end: {expected.format(size=len(data))}")
    assert len(found) == 2


def test_sample_too_few(folder):
    members = read_archive(folder / SECOND).items()
    (folder / SECOND).write_bytes(encode_archive(item for item in members if KEY in item[0]))
    make_manifest_agree(folder)
    assert problems(folder) == [
        f"{SECOND}: has 1 samples and 2 captions, manifest.json says 2 and 4",
    ]


def test_shard_that_cannot_be_read(folder, monkeypatch):
    def fail(self, name):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Folder, "open", fail)
    (problem,) = problems(folder, splits=["tiny-val"])
    assert problem.startswith("tiny-val-000000.tar: cannot be read to its end: ")
    assert problem.endswith("Input/output error")


def test_missing_shard_and_other_splits(folder):
    (folder / SECOND).unlink()
    assert problems(folder) == [f"{SECOND}: does not exist"]
    result = verify_shards(folder, splits=["tiny-val"])
    assert (result.shards, result.samples, result.captions, result.problems) == (1, 1, 2, ())


def test_two_workers_report_the_same(folder):
    (folder / SECOND).unlink()
    for shard in (FIRST, THIRD):
        (folder / shard).write_bytes((folder / shard).read_bytes()[:-700])
    alone = verify_shards(folder)
    assert alone == verify_shards(folder, workers=2)
    assert len(alone.problems) == 3


def test_memory(sound):
    folder = Folder("memory://test_verification/shards")
    folder.make()
    for file in sound.iterdir():
        with folder.write(file.name) as stream:
            stream.write(file.read_bytes()[: -1024 if file.name == THIRD else None])
    assert problems(folder) == [CHANGED.replace(SECOND, THIRD)]
    folder.remove(THIRD)
    assert problems(folder) == [f"{THIRD}: does not exist"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-train-000003.tar", "manifest.json does not list it"),
        (".tiny-train-000000.tar.0123abcd.partial", "left over from an interrupted conversion; run it again"),
        (".tiny-train-000002.tar.done", "left over from an interrupted conversion; run it again"),
        ("pictures.tar", None),
    ],
)
def test_other_files(folder, name, expected):
    (folder / name).write_bytes(b"")
    assert problems(folder) == ([f"{name}: {expected}"] if expected else [])
    assert problems(folder, splits=["tiny-val"]) == []


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda sizes: sizes.pop(SECOND), f"number of samples of {SECOND}: not listed, in manifest.json: 2"),
        (
            lambda sizes: sizes.update({"x-000000.tar": 1}),
            "number of samples of x-000000.tar: 1, in manifest.json: not listed",
        ),
    ],
)
def test_sizes(folder, edit, expected):
    edit_json(folder / "sizes.json", edit)
    assert problems(folder) == [f"sizes.json: {expected}"]
    assert problems(folder, splits=["tiny-val"]) == []


def test_sizes_missing_or_unreadable(folder):
    (folder / "sizes.json").unlink()
    assert len(problems(folder)) == 4
    (folder / "sizes.json").write_text('{"a": "b"}')
    (problem,) = problems(folder)
    assert problem.startswith(f"{folder / 'sizes.json'} must hold numbers of samples by name of shard")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda entry: entry["shards"][SECOND].update(captions=5),
            f"{SECOND}: has 2 samples and 4 captions, manifest.json says 2 and 5",
        ),
        (lambda entry: entry["shards"][SECOND].update(sha256=""), CHANGED),
    ],
)
def test_edited_manifest(folder, edit, expected):
    edit_manifest(folder, edit)
    assert problems(folder) == [expected]


def test_shard_outside_of_the_folder_is_not_opened(folder):
    shutil.copy(folder / FIRST, folder.parent / "x.tar")
    edit_manifest(folder, lambda entry: entry["shards"].update({"../x.tar": entry["shards"][FIRST]}))
    assert problems(folder)[-1] == "../x.tar: does not exist"


def test_no_manifest(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*manifest\.json: no shards of vl-plugins, or an interrupted"):
        verify_shards(tmp_path)
