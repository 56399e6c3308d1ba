import json
import uuid

import pytest

from vl_plugins.data.manifest import (
    ForeignManifestError,
    is_shard_of,
    read_manifest,
    read_sizes,
    select_splits,
    shard_name,
    update_index,
)
from vl_plugins.data.sources import RejectedImage
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError


def test_splits_are_selected_by_either_name():
    names = ["b-val", "a-train", "a-val", "a-train-b", "train"]
    assert select_splits(names, None) == names
    assert select_splits(names, ["val"]) == ["b-val", "a-val"]
    assert select_splits(names, ["a-train", "b-val"]) == ["b-val", "a-train"]
    assert select_splits(names, ["train"]) == ["a-train", "train"]
    for missing in ("rain", "a", ""):
        with pytest.raises(UserError, match=f"unknown split '{missing}'"):
            select_splits(names, ["val", missing])


def make_entry(name, *samples):
    facts = [{"samples": number, "captions": 0, "bytes": 0, "sha256": ""} for number in samples]
    return {
        "source": {},
        "options": {},
        "rejected": 0,
        "captions_per_image": {"max": 1},
        "shards": {shard_name(name, index): shard for index, shard in enumerate(facts)},
    }


def test_names():
    assert shard_name("coco-train", 7) == "coco-train-000007.tar"
    assert is_shard_of("coco-train", "coco-train-000007.tar")
    for other in ("coco-train-07.tar", "coco-train-000007.tar.gz", "coco-train-x-000007.tar"):
        assert not is_shard_of("coco-train", other)


@pytest.mark.parametrize("kind", ["path", "text", "URL"])
def test_entries_come_and_go(tmp_path, kind):
    location = {"path": tmp_path, "text": str(tmp_path), "URL": f"memory://{uuid.uuid4()}"}[kind]
    folder = Folder(location)
    folder.make()
    assert read_manifest(location) is read_sizes(location) is None
    update_index(folder, "a-train", make_entry("a-train", 3, 2), [RejectedImage("x.jpg", "train", "blank")])
    update_index(folder, "a-val", make_entry("a-val", 1), [RejectedImage("ü\u2028.jpg", "val", "empty")])
    entries = {"a-train": make_entry("a-train", 3, 2), "a-val": make_entry("a-val", 1)}
    assert read_manifest(location) == read_manifest(folder) == entries
    assert read_sizes(location) == {"a-train-000000.tar": 3, "a-train-000001.tar": 2, "a-val-000000.tar": 1}
    assert [json.loads(line) for line in folder.read("rejected.jsonl").decode().split("\n")[:-1]] == [
        {"shards": "a-train", "image": "x.jpg", "split": "train", "reason": "blank"},
        {"shards": "a-val", "image": "ü\u2028.jpg", "split": "val", "reason": "empty"},
    ]
    update_index(folder, "a-train", make_entry("a-train", 4))
    assert read_sizes(location) == {"a-train-000000.tar": 4, "a-val-000000.tar": 1}
    update_index(folder, "a-val", None)
    assert read_sizes(location) == {"a-train-000000.tar": 4}
    assert read_manifest(location) == {"a-train": make_entry("a-train", 4)}
    assert folder.names() == ["manifest.json", "sizes.json"]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("[]", ForeignManifestError, "manifest.json is not a manifest of vl-plugins shards"),
        ('{"splits": []}', ForeignManifestError, "is not a manifest"),
        ("{", UserError, "manifest.json is not valid JSON"),
    ],
)
def test_other_manifests(tmp_path, content, error, message):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(error, match=message) as raised:
        read_manifest(tmp_path)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "content",
    ["[]", *(f'{{"a.tar": {size}}}' for size in ("true", -1, "NaN", 10**18))],
)
def test_other_sizes(tmp_path, content):
    (tmp_path / "sizes.json").write_text(content)
    with pytest.raises(UserError, match=r"sizes.json must hold numbers of samples by name of shard"):
        read_sizes(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rejected": "3"}, "Expected `int`, got `str`"),
        ({"shards": {"x.tar": 3}}, "Expected `object`, got `int`"),
        ({"shards": {"x.tar": {"samples": 1}}}, "Object missing required field `captions`"),
    ],
)
def test_damaged_entries(tmp_path, change, problem):
    splits = {"a-train": make_entry("a-train", 3), "a-val": make_entry("a-val", 3) | change}
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(UserError, match=f"manifest.json is damaged: {problem}") as raised:
        read_manifest(tmp_path)
    assert type(raised.value) is UserError
