import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from vl_plugins.data import shard_verification
from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.shards import write_shards
from vl_plugins.data.storage import Folder
from vl_plugins.data.verification import verify_shards
from vl_plugins.utils.errors import UserError

FIRST, SECOND, THIRD = (f"tiny-train-{index:06d}.tar" for index in range(3))
KEY = "tiny-train-00000002"  # the first sample of the second shard
NEXT = "tiny-train-00000003"
ZEROS = bytes(512)


def encode_image(image_format="PNG", size=(8, 6)):
    stream = io.BytesIO()
    Image.linear_gradient("L").resize(size).save(stream, image_format)
    return stream.getvalue()


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """Folder with the splits ``tiny-train`` (2 + 2 + 1 images, two captions each) and ``tiny-val`` (1 image)."""
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("sound")
    images = []
    for index in range(6):
        (root / f"{index}.png").write_bytes(encode_image(size=(8 + index, 6)))
        captions, ids = (f"{index} one", f"{index} two"), (10 * index, 10 * index + 1)
        images.append(
            CaptionedImage(index, f"{index}.png", captions, ids, "val" if index == 5 else "train", "tiny", "x.png")
        )
    write_shards(images, root, out, samples_per_shard=2)
    return out


@pytest.fixture
def folder(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "shards"))


def read_archive(file):
    """Return members as lists of name, data and type."""
    with tarfile.open(file) as tar:
        return [[member.name, tar.extractfile(member).read(), tarfile.REGTYPE] for member in tar]


def encode_archive(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere" if kind == tarfile.SYMTYPE else ""
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def edit_json_file(file, edit):
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def edit_manifest(folder, edit, split="tiny-train"):
    edit_json_file(folder / "manifest.json", lambda manifest: edit(manifest["splits"][split]))


def replace_shard(folder, shard, data):
    """Write a shard and make the manifest agree with its bytes."""
    (folder / shard).write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(folder, lambda entry: entry["shards"][shard].update(facts))


def edit_shard(folder, edit, shard=SECOND):
    """Edit the list of members of a shard."""
    members = read_archive(folder / shard)
    members = edit(members) or members
    replace_shard(folder, shard, encode_archive(members))


def edit_bytes(folder, edit, shard=SECOND):
    replace_shard(folder, shard, edit((folder / shard).read_bytes()))


def problems(folder, **options):
    return list(verify_shards(folder, **options).problems)


def set_data(name, data):
    def edit(members):
        (member,) = (member for member in members if member[0] == name)
        member[1] = data

    return edit


def change_record(**changes):
    def edit(members):
        (member,) = (member for member in members if member[0] == f"{KEY}.json")
        record = json.loads(member[1]) | changes
        member[1] = json.dumps({key: value for key, value in record.items() if value is not ...}).encode()

    return edit


def change_captions(captions, ids=(20, 21)):
    """Change the captions and, as they must be equal, the txt."""

    def edit(members):
        change_record(captions=captions, caption_ids=list(ids))(members)
        if captions and isinstance(captions[0], str):
            set_data(f"{KEY}.txt", captions[0].encode(errors="replace"))(members)

    return edit


def rename(old, new):
    def edit(members):
        for member in members:
            member[0] = member[0].replace(old, new)

    return edit


def set_kind(name, kind):
    def edit(members):
        (member,) = (member for member in members if member[0] == name)
        member[2] = kind

    return edit


def without(*names):
    return lambda members: [member for member in members if member[0] not in names]


def with_more(*more):
    return lambda members: [*members, *([name, data, tarfile.REGTYPE] for name, data in more)]


def test_sound_folder(folder):
    result = verify_shards(folder)
    assert (result.shards, result.samples, result.captions, result.problems) == (4, 6, 12, ())


def test_memory(sound):
    folder = Folder("memory://test_verification/shards")
    folder.make()
    for file in sound.iterdir():
        data = file.read_bytes()
        with folder.write(file.name) as stream:
            stream.write(data[:-1024] if file.name == THIRD else data)
    found = problems(folder)
    folder.remove(THIRD)
    size = (sound / THIRD).stat().st_size
    assert found[0] == f"{THIRD}: has {size - 1024:,} bytes, manifest.json says {size:,}"
    assert len(found) == 2
    assert found[1].startswith(f"{THIRD}: sha256 is ")
    assert problems(folder) == [f"{THIRD}: does not exist"]


def test_two_workers_report_the_same(folder):
    edit_shard(folder, set_data(f"{KEY}.txt", b"else"))
    edit_shard(folder, set_data("tiny-train-00000004.txt", b"else"), THIRD)
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1])
    (folder / "tiny-val-000000.tar").unlink()
    alone = verify_shards(folder)
    assert alone == verify_shards(folder, workers=2)
    assert len(alone.problems) == 5


RECORD_DAMAGE = {
    "image id missing": (change_record(image_id=...), "its json: Object missing required field `image_id`"),
    "image id true": (
        change_record(image_id=True),
        "its json: Expected `int | str`, got `bool` - at `$.image_id`",
    ),
    "width float": (change_record(width=10.0), "its json: Expected `int | null`, got `float` - at `$.width`"),
    "no height": (change_record(height=...), "its json: it has no width and height"),
    "caption ids null": (
        change_record(caption_ids=[20, None]),
        "its json: Expected `int | str`, got `null` - at `$.caption_ids[1]`",
    ),
    "group list": (change_record(group=[1]), "its json: Expected `int | str | null`, got `array` - at `$.group`"),
    "unknown fields": (change_record(url="x", a="y"), "its json: it has unknown keys: a, url"),
    "size of features": (change_record(feature_dim=3), "its json: it has unknown keys: feature_dim"),
    "other split": (
        change_record(split="val"),
        "its json: it says data set 'tiny' and split 'val', but it is in tiny-train",
    ),
    "no captions": (
        change_record(captions=[], caption_ids=[]),
        "its json: it has no captions; every image needs at least one",
    ),
    "captions of numbers": (
        change_record(captions=["2 one", 2]),
        "its json: Expected `str`, got `int` - at `$.captions[1]`",
    ),
    "fewer ids": (change_record(caption_ids=[20]), "its json: it has 1 caption ids for 2 captions"),
    "blank caption": (change_captions(["2 one", " \n"]), r"its json: caption ' \n' is blank"),
    "half a character": (
        change_captions(["2 one", "\ud800"]),
        r"its json: caption '\ud800' is not valid Unicode: surrogates not allowed",
    ),
    "json is no JSON": (
        set_data(f"{KEY}.json", b"{"),
        "its json: it is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    "json list": (set_data(f"{KEY}.json", b"[]"), "its json: Expected `object`, got `array`"),
    "json deep": (
        set_data(f"{KEY}.json", b"[" * 100_000),
        "its json: it is nested too deeply to be an annotation or index file",
    ),
    "other txt": (set_data(f"{KEY}.txt", b"2 two"), "its txt is not the first caption of its json"),
    "txt with a line end": (set_data(f"{KEY}.txt", b"2 one\n"), "its txt is not the first caption of its json"),
    "txt of Latin 1": (set_data(f"{KEY}.txt", b"\xff"), "its txt is not UTF-8 text: invalid start byte at byte 0"),
    "width": (change_record(width=11), "its json says 11 x 6, its image 10 x 6"),
    "string ids": (change_record(image_id="2", caption_ids=["20", "x"]), None),
    "image id twice": (change_record(image_id=0), "image id 0 was that of tiny-train-00000000 before"),
    "caption id of another shard": (
        change_record(caption_ids=[20, 11]),
        "caption id 11 was that of tiny-train-00000001 before",
    ),
    "caption id of the same image": (
        change_record(caption_ids=[20, 20]),
        "its json: caption id 20 occurs more than once; ids must be unique",
    ),
    "empty image": (set_data(f"{KEY}.png", b""), "the file is empty"),
    "text for an image": (set_data(f"{KEY}.png", b"text"), "the file is not an image"),
    "jpg in png": (set_data(f"{KEY}.png", encode_image("JPEG", (10, 6))), "its image is jpg, its name says png"),
    "other format": (
        set_data(f"{KEY}.png", encode_image("BMP", (10, 6))),
        "the format BMP is not supported; supported are JPEG, PNG and WebP",
    ),
    "jpeg": (
        rename(f"{KEY}.png", f"{KEY}.jpeg"),
        [f"has an unknown file {KEY}.jpeg", "has no image"],
    ),
    "unknown file": (
        lambda members: [[f"{KEY}.cls", b"1", tarfile.REGTYPE], *members],
        f"has an unknown file {KEY}.cls",
    ),
    "two images": (
        lambda members: [[f"{KEY}.jpg", encode_image("JPEG", (10, 6)), tarfile.REGTYPE], *members],
        f"has more than one image; {KEY}.png is another",
    ),
    "no image": (without(f"{KEY}.png"), "has no image"),
    "no txt": (without(f"{KEY}.txt"), "has no txt"),
    "no image and no txt": (without(f"{KEY}.png", f"{KEY}.txt"), "has no image, no txt"),
    "no json": (without(f"{KEY}.json"), "has no json"),
}


@pytest.mark.parametrize(("edit", "expected"), RECORD_DAMAGE.values(), ids=RECORD_DAMAGE)
def test_damaged_sample(folder, edit, expected):
    edit_shard(folder, edit)
    expected = [] if expected is None else [expected] if isinstance(expected, str) else expected
    assert problems(folder) == [f"{SECOND}: {KEY}: {line}" for line in expected]


def test_captions_that_are_not_known_are_not_missing(folder):
    edit_shard(folder, set_data(f"{KEY}.json", b"{}"))
    result = verify_shards(folder)
    assert len(result.problems) == 1
    assert (result.samples, result.captions) == (6, 10)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.DIRTYPE])
def test_member_that_is_no_plain_file(folder, kind):
    edit_shard(folder, set_kind(f"{KEY}.png", kind))
    assert problems(folder) == [f"{SECOND}: {KEY}.png is not a plain file", f"{SECOND}: {KEY}: has no image"]


def test_image_that_ends_early(folder):
    data = encode_image("PNG", (200, 100))

    def edit(members):
        set_data(f"{KEY}.png", data[: len(data) * 3 // 4])(members)
        change_record(width=200, height=100)(members)

    edit_shard(folder, edit)
    (problem,) = problems(folder)
    assert problem.startswith(f"{SECOND}: {KEY}: the image is damaged: ")


def test_txt_with_all_captions(folder):
    """Which captions a txt must have is an option in the manifest."""
    edit_shard(folder, set_data(f"{KEY}.txt", b"2 one\n2 two"))
    assert problems(folder) == [f"{SECOND}: {KEY}: its txt is not the first caption of its json"]
    edit_manifest(folder, lambda entry: entry["options"].update(txt="all"))
    others = [(FIRST, 0), (FIRST, 1), (SECOND, 3), (THIRD, 4)]
    assert problems(folder) == [
        f"{shard}: tiny-train-{index:08d}: its txt is not all captions of its json, one a line"
        for shard, index in others
    ]


def test_groups(folder):
    """A group is optional, and the manifest says how many there are."""
    edit_shard(folder, change_record(group="frog"))
    assert problems(folder) == ["manifest.json: tiny-train: says 0 groups, its shards have 1"]
    edit_manifest(folder, lambda entry: entry.update(groups=1))
    assert problems(folder) == []


def test_caption_too_many(folder):
    edit_shard(folder, change_captions(["2 one", "2 two", "2 three"], [20, 21, 22]))
    assert problems(folder) == [f"{SECOND}: has 5 captions, manifest.json says 4"]


def test_captions_that_only_the_histogram_shows(folder):
    def edit(members):
        change_captions(["2 one"], [20])(members)
        record = json.loads(members[3][1])
        record |= {"captions": [*record["captions"], "3 three"], "caption_ids": [30, 31, 32]}
        set_data(f"{NEXT}.json", json.dumps(record).encode())(members)

    edit_shard(folder, edit)
    assert problems(folder) == [
        'manifest.json: tiny-train: says captions per image are {"2": 5}, its shards have {"1": 1, "2": 3, "3": 1}'
    ]


def test_sample_too_few(folder):
    edit_shard(folder, without(*(f"{KEY}.{extension}" for extension in ("png", "txt", "json"))))
    assert problems(folder) == [
        f"{SECOND}: has 1 samples, manifest.json says 2",
        f"{SECOND}: has 2 captions, manifest.json says 4",
    ]


def test_files_of_samples_mixed(folder):
    edit_shard(folder, lambda members: [members[0], members[3], *members[1:3], *members[4:]])
    found = problems(folder)
    assert f"{SECOND}: has 4 samples, manifest.json says 2" in found
    assert f"{SECOND}: {KEY}: comes after {NEXT}; keys are in ascending order, each once" in found


def test_sample_twice_in_a_split(folder):
    twice = read_archive(folder / SECOND)[:3]
    edit_shard(folder, lambda members: twice, THIRD)
    assert problems(folder) == [f"{THIRD}: begins with {KEY}, but {SECOND} before it ends with {NEXT}"]


def test_shards_in_wrong_order(folder):
    first, second = (read_archive(folder / shard) for shard in (FIRST, SECOND))
    edit_shard(folder, lambda members: second, FIRST)
    edit_shard(folder, lambda members: first, SECOND)
    assert problems(folder) == [f"{SECOND}: begins with tiny-train-00000000, but {FIRST} before it ends with {NEXT}"]


def test_samples_in_wrong_order(folder):
    edit_shard(folder, lambda members: members[3:] + members[:3])
    assert problems(folder) == [f"{SECOND}: {KEY}: comes after {NEXT}; keys are in ascending order, each once"]


@pytest.mark.parametrize("key", ["tiny-val-00000002", "./tiny-train-00000002"])
def test_key_of_something_else(folder, key):
    edit_shard(folder, rename(KEY, key))
    assert problems(folder) == [f"{SECOND}: {key}: is not a key of tiny-train, which has the form tiny-train-00000000"]


def test_unused_keys_are_right(folder):
    edit_shard(folder, rename("tiny-train-00000004", "tiny-train-00000009"), THIRD)
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("README", tarfile.REGTYPE, "README is not named <key>.<extension>"),
        ("folder", tarfile.DIRTYPE, "folder is not a plain file"),
        ("a\nb", tarfile.REGTYPE, r"a\nb is not named <key>.<extension>"),
    ],
)
def test_file_of_no_sample(folder, name, kind, expected):
    # Between two files of a sample, which it does not part.
    edit_shard(folder, lambda members: [members[0], [name, b"x", kind], *members[1:]])
    assert problems(folder) == [f"{SECOND}: {expected}"]


def member_start(data, name):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmember(name).offset


UNREADABLE = "cannot be read to its end: "
CUTS = {
    "nothing": (lambda data: b"", UNREADABLE + "empty file"),
    "in the first header": (lambda data: data[:100], UNREADABLE + "truncated header"),
    "between samples": (
        lambda data: data[: member_start(data, f"{NEXT}.json")],
        UNREADABLE + "it is cut off or damaged at byte 3,072: an archive ends with zeros",
    ),
    "in data": (
        lambda data: data[: member_start(data, f"{NEXT}.txt") + 512 + 3],
        UNREADABLE + f"it is cut off in {NEXT}.txt",
    ),
    "garbage": (
        lambda data: data[: member_start(data, f"{NEXT}.json")] + bytes(range(256)) * 40,
        UNREADABLE + "it is cut off or damaged at byte 3,072: an archive ends with zeros",
    ),
    "file twice": (
        lambda data: data.replace(f"{KEY}.txt".encode(), f"{KEY}.png".encode()),
        UNREADABLE,
    ),
    "half a mark": (
        lambda data: data[: member_start(data, f"{NEXT}.json")] + ZEROS + data[member_start(data, f"{NEXT}.json") :],
        "has data behind its end-of-archive mark",
    ),
    "behind the mark": (lambda data: data + b"\1" * 512, "has data behind its end-of-archive mark"),
}


@pytest.mark.parametrize(("cut", "expected"), CUTS.values(), ids=CUTS)
def test_cut_off_shard(folder, cut, expected):
    edit_bytes(folder, cut)
    assert problems(folder)[0].startswith(f"{SECOND}: {expected}")


@pytest.mark.parametrize("zeros", [0, 18])
def test_length_of_the_end_is_free(folder, zeros):
    edit_bytes(folder, lambda data: data[: member_start(data, f"{NEXT}.txt") + 1024] + ZEROS * (2 + zeros))
    assert problems(folder) == []


def test_cut_off_shard_is_checked_up_to_the_cut(folder):
    def cut(data):
        return data[: member_start(data, f"{NEXT}.txt")]

    edit_shard(folder, set_data(f"{KEY}.txt", b"else"))
    edit_bytes(folder, cut)
    assert problems(folder) == [
        f"{SECOND}: cannot be read to its end: it is cut off or damaged at byte 5,120: an archive ends with zeros",
        f"{SECOND}: {KEY}: its txt is not the first caption of its json",
    ]


def test_wrong_hash_does_not_stop_the_rest(folder):
    before = hashlib.sha256((folder / SECOND).read_bytes()).hexdigest()
    members = read_archive(folder / SECOND)
    set_data(f"{KEY}.txt", b"else!")(members)
    data = encode_archive(members)
    (folder / SECOND).write_bytes(data)
    assert problems(folder) == [
        f"{SECOND}: sha256 is {hashlib.sha256(data).hexdigest()}, manifest.json says {before}",
        f"{SECOND}: {KEY}: its txt is not the first caption of its json",
    ]


def test_longer_shard(folder):
    data = (folder / SECOND).read_bytes()
    before, after = (hashlib.sha256(content).hexdigest() for content in (data, data + ZEROS))
    (folder / SECOND).write_bytes(data + ZEROS)
    assert problems(folder) == [
        f"{SECOND}: has {len(data) + 512:,} bytes, manifest.json says {len(data):,}",
        f"{SECOND}: sha256 is {after}, manifest.json says {before}",
    ]


def test_missing_shard(folder):
    (folder / SECOND).unlink()
    assert problems(folder) == [f"{SECOND}: does not exist"]


def test_shard_that_cannot_be_read(folder, monkeypatch):
    def fail(self, size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shard_verification._HashingStream, "read", fail)
    assert problems(folder, splits=["tiny-val"]) == ["tiny-val-000000.tar: cannot be read: Input/output error"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-train-000003.tar", ["tiny-train-000003.tar: manifest.json does not list it"]),
        ("other-train-000000.tar", ["other-train-000000.tar: manifest.json does not list it"]),
        ("pictures.tar", []),
        ("notes.txt", []),
        (
            ".tiny-train-000000.tar.0123abcd.partial",
            [".tiny-train-000000.tar.0123abcd.partial: left over from an interrupted conversion; run it again"],
        ),
        (
            ".tiny-train-000002.tar.done",
            [".tiny-train-000002.tar.done: left over from an interrupted conversion; run it again"],
        ),
        (
            "..tiny-train-000002.tar.done.0123abcd.partial",
            ["..tiny-train-000002.tar.done.0123abcd.partial: left over from an interrupted conversion; run it again"],
        ),
        (
            ".sizes.json.0123abcd.partial",
            [".sizes.json.0123abcd.partial: left over from an interrupted conversion; run it again"],
        ),
        (".hidden.partial", []),
    ],
)
def test_other_files(folder, name, expected):
    (folder / name).write_bytes(b"")
    assert problems(folder) == expected
    assert problems(folder, splits=["tiny-train"]) == ([] if name.startswith("other") else expected)
    assert problems(folder, splits=["tiny-val"]) == (expected if "sizes" in name else [])


SIZES_DAMAGE = {
    "not listed": (lambda sizes: sizes.pop(SECOND), [f"sizes.json: does not list {SECOND}"]),
    "other number": (
        lambda sizes: sizes.update({SECOND: 1}),
        [f"sizes.json: says 1 samples for {SECOND}, manifest.json says 2"],
    ),
    "one more": (
        lambda sizes: sizes.update({"tiny-train-000003.tar": 1}),
        ["sizes.json: lists tiny-train-000003.tar, manifest.json does not"],
    ),
}


@pytest.mark.parametrize(("edit", "expected"), SIZES_DAMAGE.values(), ids=SIZES_DAMAGE)
def test_sizes(folder, edit, expected):
    edit_json_file(folder / "sizes.json", edit)
    assert problems(folder) == problems(folder, splits=["tiny-train"]) == expected
    assert problems(folder, splits=["tiny-val"]) == []


def test_sizes_missing_or_unreadable(folder):
    sizes = folder / "sizes.json"
    sizes.unlink()
    assert problems(folder) == ["sizes.json: does not exist"]
    sizes.write_text("[")
    assert problems(folder) == ["sizes.json: is not valid JSON: Expecting value: line 1 column 2 (char 1)"]
    sizes.write_text('{"a": "b"}')
    assert problems(folder) == [
        "sizes.json: must hold numbers of samples by name of shard: Expected `int`, got `str` - at `$[...]`"
    ]


@pytest.fixture
def with_rejected(folder):
    """The folder with two rejected images."""
    lines = [
        {"shards": "tiny-train", "image": name, "split": "train", "reason": "one\u2028line"} for name in ("a", "b")
    ]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "rejected.jsonl").write_text(content, encoding="utf-8")
    edit_manifest(folder, lambda entry: entry.update(rejected=2))
    return folder


def test_rejected(with_rejected):
    assert problems(with_rejected) == []
    file = with_rejected / "rejected.jsonl"
    content = file.read_bytes()
    file.write_bytes(content.splitlines(keepends=True)[0])
    expected = "rejected.jsonl: has 1 lines of tiny-train, manifest.json says 2"
    assert problems(with_rejected) == [expected]
    file.unlink()
    assert problems(with_rejected) == [expected.replace("1 lines", "0 lines")]
    assert problems(with_rejected, splits=["tiny-val"]) == []


def test_rejected_of_other_splits(with_rejected):
    with (with_rejected / "rejected.jsonl").open("a") as stream:
        stream.write('{"shards": "other-train"}\n')
    expected = "rejected.jsonl: has 1 lines of other-train, manifest.json does not list it"
    assert problems(with_rejected) == [expected]
    assert problems(with_rejected, splits=["tiny-train"]) == []


@pytest.mark.parametrize("line", ["{", "[]", "{}"])
def test_rejected_that_cannot_be_read(with_rejected, line):
    file = with_rejected / "rejected.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")
    file.write_text("\n".join([lines[0], line, ""]), encoding="utf-8")
    assert problems(with_rejected) == [
        "rejected.jsonl: line 2 is not a JSON object that names the 'shards' it belongs to"
    ]


MANIFEST_DAMAGE = {
    "images": (
        lambda entry: entry.update(images=6),
        ["manifest.json: tiny-train: says 6 images, and 5 when those of its shards are added up"],
    ),
    "captions": (
        lambda entry: entry.update(captions=11),
        ["manifest.json: tiny-train: says 11 captions, and 10 when those of its shards are added up"],
    ),
    "rejected": (
        lambda entry: entry.update(rejected=1),
        ["rejected.jsonl: has 0 lines of tiny-train, manifest.json says 1"],
    ),
    "min": (
        lambda entry: entry["captions_per_image"].update(min=1),
        ["manifest.json: tiny-train: says min 1 captions per image, its histogram 2"],
    ),
    "max": (
        lambda entry: entry["captions_per_image"].update(max=3),
        ["manifest.json: tiny-train: says max 3 captions per image, its histogram 2"],
    ),
    "histogram": (
        lambda entry: entry["captions_per_image"].update(histogram={"2": 4}),
        ['manifest.json: tiny-train: says captions per image are {"2": 4}, its shards have {"2": 5}'],
    ),
    "histogram with a zero": (lambda entry: entry["captions_per_image"]["histogram"].update({"7": 0}), []),
    "name of no shard": (
        lambda entry: entry["shards"].update({"../x.tar": {"samples": 0, "captions": 0, "bytes": 0, "sha256": ""}}),
        [
            "sizes.json: does not list ../x.tar",
            "manifest.json: tiny-train: '../x.tar' is not the name of a shard of this split",
        ],
    ),
}


@pytest.mark.parametrize(("edit", "expected"), MANIFEST_DAMAGE.values(), ids=MANIFEST_DAMAGE)
def test_manifest_that_contradicts_itself(folder, edit, expected):
    edit_manifest(folder, edit)
    assert problems(folder) == expected


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ("samples", [f"sizes.json: says 2 samples for {SECOND}, manifest.json says 3", 6, "has 2 samples", 3]),
        ("captions", [11, "has 4 captions", 5]),
    ],
)
def test_manifest_that_contradicts_its_shards(folder, fact, expected):
    edit_manifest(folder, lambda entry: entry["shards"][SECOND].update({fact: entry["shards"][SECOND][fact] + 1}))
    total, right = ("images", 5) if fact == "samples" else ("captions", 10)
    lines = expected[:-3]
    lines.append(
        f"manifest.json: tiny-train: says {right} {total}, and {right + 1} when those of its shards are added up"
    )
    lines.append(f"{SECOND}: {expected[-2]}, manifest.json says {expected[-1]}")
    assert problems(folder) == lines


def test_only_some_splits(folder):
    (folder / SECOND).unlink()
    result = verify_shards(folder, splits=["tiny-val"])
    assert (result.shards, result.samples, result.captions, result.problems) == (1, 1, 2, ())
    both = verify_shards(folder, splits=["tiny-val", "tiny-train", "tiny-val"])
    assert (both.shards, both.samples, both.problems) == (3, 4, (f"{SECOND}: does not exist",))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "it holds no shards of vl-plugins"),
        (["tiny-train-000000.tar"], "these shards cannot be compared with anything"),
        (["tiny-train-000000.tar", ".tiny-train-000000.tar.done"], "a conversion was interrupted; run it again"),
    ],
)
def test_no_manifest(tmp_path, files, expected):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError) as error:
        verify_shards(tmp_path)
    assert str(error.value) == f"there is no {tmp_path / 'manifest.json'}: {expected}"


def test_what_conversion_writes_is_sound(tmp_path):
    """Also with rejected images, a gap in the keys, a split of another name, and captions of any script."""
    root = tmp_path / "images"
    root.mkdir()
    images = []
    for index, image_format in enumerate(("JPEG", "PNG", "WEBP", None, "JPEG")):
        (root / str(index)).write_bytes(encode_image(image_format) if image_format else b"text")
        captions = tuple(f"{index} {text}" for text in ("a cat", "قطة", "一只猫\u2028", "🐱", '"quoted"')[: index + 1])
        ids = tuple(f"{index}-{number}" for number in range(index + 1))
        images.append(CaptionedImage(f"id {index}", str(index), captions, ids, "train-2_b", "my-set", "name"))
    rejected = [RejectedImage("elsewhere", "train-2_b", "no captions")]
    write_shards(images, root, tmp_path / "out", samples_per_shard=2, on_error="skip", rejected=rejected)
    result = verify_shards(tmp_path / "out")
    assert (result.shards, result.samples, result.captions, result.problems) == (3, 4, 11, ())
