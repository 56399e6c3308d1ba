import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from dataclasses import replace

import pytest
from PIL import Image

from vl_plugins.data import sample_encoding
from vl_plugins.data import shards as shards_module
from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.images import resize_image
from vl_plugins.data.manifest import read_manifest
from vl_plugins.data.shards import is_training_split, write_shards
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import MissingExtraError, UserError


def encode_image(image_format="PNG", size=(5, 4), mode="RGB", **options):
    stream = io.BytesIO()
    noise = random.Random(0).randbytes(size[0] * size[1])
    Image.frombytes("L", size, noise).convert(mode).save(stream, format=image_format, **options)
    return stream.getvalue()


def read_folder(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_members(shard):
    with tarfile.open(shard) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


@pytest.fixture
def make_images(tmp_path):
    """Return records of small images, in the folder ``root``; image i has the captions ``i-0``, ``i-1``, ...."""
    root = tmp_path / "root"

    def make(count=5, split="train", first=0, captions=2):
        root.mkdir(exist_ok=True)
        images = []
        for index in range(first, first + count):
            # Names run against the source order.
            name = f"{100 - index}.png"
            (root / name).write_bytes(encode_image(size=(index + 1, 4)))
            texts = tuple(f"{index}-{number}" for number in range(captions))
            ids = tuple(10 * index + number for number in range(captions))
            images.append(CaptionedImage(index, name, texts, ids, split, "tiny", name))
        return images

    return make


def test_members_of_a_shard(tmp_path, make_images):
    images = make_images(3)
    data = encode_image("JPEG", size=(7, 6))
    (tmp_path / "root" / images[1].file).write_bytes(data)
    write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    with tarfile.open(tmp_path / "out" / "tiny-train-000000.tar") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [
        "tiny-train-00000000.json",
        "tiny-train-00000000.png",
        "tiny-train-00000000.txt",
        "tiny-train-00000001.jpg",
        "tiny-train-00000001.json",
        "tiny-train-00000001.txt",
    ]
    assert {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in members} == {
        (0, 0, 0, "", "")
    }
    content = read_members(tmp_path / "out" / "tiny-train-000000.tar")
    assert content["tiny-train-00000001.jpg"] == data, "the bytes are those of the file, the extension fits them"
    assert content["tiny-train-00000001.txt"] == b"1-0"
    assert json.loads(content["tiny-train-00000001.json"]) == {
        "image_id": 1,
        "captions": ["1-0", "1-1"],
        "caption_ids": [10, 11],
        "split": "train",
        "dataset": "tiny",
        "filename": "99.png",
        "width": 7,
        "height": 6,
    }


def test_a_shard_is_what_tarfile_would_write(tmp_path, make_images):
    # Every length of the last record occurs, since the pictures grow by a block each.
    images = make_images(2 * tarfile.RECORDSIZE // tarfile.BLOCKSIZE)
    for index, image in enumerate(images):
        data = encode_image("JPEG") + b"x" * (tarfile.BLOCKSIZE * index)
        (tmp_path / "root" / image.file).write_bytes(data)
    write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=1)
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert len(shards) == len(images)
    for shard in shards:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in read_members(shard).items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        assert shard.read_bytes() == stream.getvalue()


def test_whole_jpeg_files_are_not_decoded(tmp_path, make_images, monkeypatch):
    (image,) = make_images(1)
    data = encode_image("JPEG", size=(50, 40))
    decoded = []
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", lambda image: decoded.append(image.size))
    for content in (data, data[:-2]):
        (tmp_path / "root" / image.file).write_bytes(content)
        write_shards([image], tmp_path / "root", tmp_path / "out", overwrite=True)
        assert decoded == ([] if content == data else [(50, 40)])


def test_sorted_keys_restore_the_source_order(tmp_path, make_images):
    write_shards(make_images(13), tmp_path / "root", tmp_path / "out", samples_per_shard=4)
    texts = {}
    for shard in (tmp_path / "out").glob("*.tar"):
        members = read_members(shard)
        assert len(members.keys() & texts.keys()) == 0
        texts |= {name: content.decode() for name, content in members.items() if name.endswith(".txt")}
    assert [texts[name] for name in sorted(texts)] == [f"{index}-0" for index in range(13)]


def test_captions_are_stored_in_any_language(tmp_path, make_images):
    image = make_images(1)[0]
    text = 'Ein "Frosch" – カエル\tund\nmehr'
    image = CaptionedImage(**{**vars(image), "captions": (text,), "caption_ids": (1,)})
    write_shards([image], tmp_path / "root", tmp_path / "out")
    members = read_members(tmp_path / "out" / "tiny-train-000000.tar")
    assert members["tiny-train-00000000.txt"].decode() == text
    assert json.loads(members["tiny-train-00000000.json"])["captions"] == [text]
    assert "カエル" in members["tiny-train-00000000.json"].decode()


def test_the_same_input_gives_the_same_bytes(tmp_path, make_images):
    images = [*make_images(5), *make_images(2, split="val", first=5)]
    for out in ("one", "other"):
        write_shards(images, tmp_path / "root", tmp_path / out, samples_per_shard=2)
    one = read_folder(tmp_path / "one")
    assert sorted(one) == [
        "manifest.json",
        "sizes.json",
        "tiny-train-000000.tar",
        "tiny-train-000001.tar",
        "tiny-train-000002.tar",
        "tiny-val-000000.tar",
    ]
    assert one == read_folder(tmp_path / "other")
    write_shards(images, tmp_path / "root", tmp_path / "one", samples_per_shard=2)
    assert one == read_folder(tmp_path / "one")


def test_manifest_and_sizes_describe_the_shards(tmp_path, make_images):
    images = [*make_images(3, captions=2), *make_images(2, first=3, captions=4)]
    entries = write_shards(
        images, tmp_path / "root", tmp_path / "out", samples_per_shard=4, source={"annotations": "a.json"}
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["splits"] == entries
    entry = manifest["splits"]["tiny-train"]
    assert (entry["images"], entry["captions"], entry["rejected"]) == (5, 14, 0)
    assert entry["captions_per_image"] == {"min": 2, "max": 4, "histogram": {"2": 3, "4": 2}}
    assert entry["source"] == {"annotations": "a.json"}
    assert entry["options"] == {"samples_per_shard": 4, "on_error": "raise"}
    assert [(facts["samples"], facts["captions"]) for facts in entry["shards"].values()] == [(4, 10), (1, 4)]
    for name, facts in entry["shards"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert facts["sha256"] == hashlib.sha256(content).hexdigest()
        assert facts["bytes"] == len(content)
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert sizes == {"tiny-train-000000.tar": 4, "tiny-train-000001.tar": 1}


def test_splits_written_one_after_the_other_share_a_folder(tmp_path, make_images):
    for split, first in (("train", 0), ("val", 3)):
        write_shards(make_images(3, split, first), tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {
        "tiny-train-000000.tar": 2,
        "tiny-train-000001.tar": 1,
        "tiny-val-000000.tar": 2,
        "tiny-val-000001.tar": 1,
    }
    assert set(json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]) == {"tiny-train", "tiny-val"}


def test_a_failure_leaves_complete_shards_only_and_a_rerun_completes_them(tmp_path, make_images):
    images = make_images(7)
    write_shards(images, tmp_path / "root", tmp_path / "whole", samples_per_shard=2)
    content = (tmp_path / "root" / images[5].file).read_bytes()
    (tmp_path / "root" / images[5].file).unlink()
    with pytest.raises(UserError, match=r"root/95.png \(image id 5\): cannot read the file: No such file") as raised:
        write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    assert "\n" not in str(raised.value)
    whole = read_folder(tmp_path / "whole")
    complete = {name: whole[name] for name in ("tiny-train-000000.tar", "tiny-train-000001.tar")}
    left = read_folder(tmp_path / "out")
    assert {name: data for name, data in left.items() if not name.startswith(".")} == complete
    (tmp_path / "root" / images[5].file).write_bytes(content)
    write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    assert read_folder(tmp_path / "out") == whole


def test_an_interruption_leaves_no_partial_file(tmp_path, make_images, monkeypatch):
    def interrupt(data, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("vl_plugins.data.sample_encoding.inspect_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_shards(make_images(), tmp_path / "root", tmp_path / "out")
    assert read_folder(tmp_path / "out") == {}


def test_a_full_disk_ends_with_one_line(tmp_path, make_images, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot write .*tiny-train-000000.tar: No space left on device"):
        write_shards(make_images(), tmp_path / "root", tmp_path / "out")
    assert read_folder(tmp_path / "out") == {}


def test_an_unusable_image_stops_the_run_and_is_named(tmp_path, make_images):
    images = make_images(5)
    (tmp_path / "root" / images[2].file).write_bytes(b"a cat on a mat")
    with pytest.raises(UserError) as raised:
        write_shards(images, tmp_path / "root", tmp_path / "out")
    assert str(raised.value) == f"{tmp_path}/root/98.png (image id 2): the file is not an image"
    assert read_folder(tmp_path / "out") == {}


def test_skipped_images_are_listed_and_counted(tmp_path, make_images):
    images = make_images(6)
    write_shards(images, tmp_path / "root", tmp_path / "whole", samples_per_shard=2)
    (tmp_path / "root" / images[2].file).write_bytes(b"")
    earlier = [RejectedImage("image 9", "train", "it has no captions"), RejectedImage("image 10", "val", "blank")]
    entries = write_shards(
        images, tmp_path / "root", tmp_path / "out", samples_per_shard=2, on_error="skip", rejected=earlier
    )
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"shards": "tiny-train", "image": "image 9", "split": "train", "reason": "it has no captions"},
        {"shards": "tiny-train", "image": "98.png", "split": "train", "reason": "the file is empty"},
    ]
    assert (entries["tiny-train"]["images"], entries["tiny-train"]["rejected"]) == (5, 2)
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert sizes == {"tiny-train-000000.tar": 2, "tiny-train-000001.tar": 1, "tiny-train-000002.tar": 2}
    whole, out = read_folder(tmp_path / "whole"), read_folder(tmp_path / "out")
    for name in ("tiny-train-000000.tar", "tiny-train-000002.tar"):
        assert out[name] == whole[name], "other shards do not depend on the missing image"

    (tmp_path / "root" / images[2].file).write_bytes(encode_image(size=(3, 4)))
    write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2, overwrite=True)
    assert not (tmp_path / "out" / "rejected.jsonl").exists()


def test_a_split_of_unusable_images_only_is_an_error(tmp_path, make_images):
    with pytest.raises(UserError, match=r"none of the 5 images of tiny-train can be used; 96.png: cannot read"):
        write_shards(make_images(5), tmp_path / "elsewhere", tmp_path / "out", samples_per_shard=2, on_error="skip")
    assert read_folder(tmp_path / "out") == {}


def test_other_contents_are_kept_unless_overwritten(tmp_path, make_images):
    out = tmp_path / "out"
    write_shards(make_images(6), tmp_path / "root", out, samples_per_shard=2)
    write_shards(make_images(2, "val"), tmp_path / "root", out, samples_per_shard=2)
    before = read_folder(out)
    for count, samples_per_shard in ((4, 2), (6, 3), (8, 3)):
        with pytest.raises(
            UserError, match=r"tiny-train-00000\d.tar exists and does not belong to this run; .*--overwr"
        ):
            write_shards(make_images(count), tmp_path / "root", out, samples_per_shard=samples_per_shard)
        assert read_folder(out) == before

    write_shards(make_images(4), tmp_path / "root", out, samples_per_shard=3, overwrite=True)
    sizes = json.loads((out / "sizes.json").read_text())
    assert sizes == {"tiny-train-000000.tar": 3, "tiny-train-000001.tar": 1, "tiny-val-000000.tar": 2}
    assert sorted(path.name for path in out.glob("*.tar")) == sorted(sizes)
    assert (out / "tiny-val-000000.tar").read_bytes() == before["tiny-val-000000.tar"]


def test_an_overwriting_run_that_fails_leaves_no_index_of_replaced_shards(tmp_path, make_images):
    out = tmp_path / "out"
    images = make_images(6)
    write_shards(images, tmp_path / "root", out, samples_per_shard=2)
    (tmp_path / "root" / images[5].file).unlink()
    with pytest.raises(UserError, match="image id 5"):
        write_shards(images, tmp_path / "root", out, samples_per_shard=3, overwrite=True)
    assert json.loads((out / "manifest.json").read_text())["splits"] == {}
    assert json.loads((out / "sizes.json").read_text()) == {}


def test_groups_are_in_the_json_and_counted(tmp_path, make_images):
    images = make_images(5)
    groups = [7, None, "frog", "frog", "gone"]
    grouped = [replace(image, group=group) for image, group in zip(images, groups, strict=True)]
    (tmp_path / "root" / images[4].file).write_bytes(b"no picture")
    entry = write_shards(grouped, tmp_path / "root", tmp_path / "out", on_error="skip")["tiny-train"]
    assert entry["groups"] == 2
    content = read_members(tmp_path / "out" / "tiny-train-000000.tar")
    records = [json.loads(data) for name, data in content.items() if name.endswith(".json")]
    assert [record.get("group", "none") for record in records] == [7, "none", "frog", "frog"]
    assert "groups" not in write_shards(images[:4], tmp_path / "root", tmp_path / "without")["tiny-train"]


def test_shards_with_another_txt_are_other_contents(tmp_path, make_images):
    images, root, out = make_images(2), tmp_path / "root", tmp_path / "out"
    write_shards(images, root, out)
    before = read_folder(out)
    with pytest.raises(UserError, match="--overwrite"):
        write_shards(images, root, out, txt="all")
    assert read_folder(out) == before
    write_shards(images, root, out, txt="all", overwrite=True)
    content = read_members(out / "tiny-train-000000.tar")
    assert content["tiny-train-00000001.txt"] == b"1-0\n1-1"
    assert json.loads(content["tiny-train-00000001.json"])["captions"] == ["1-0", "1-1"]


def test_wrong_arguments(tmp_path, make_images):
    images = make_images(1)
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ({"images": []}, "there are no images"),
        ({"samples_per_shard": 0}, "samples_per_shard must be at least 1, got 0"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip', got 'ignore'"),
        ({"out": tmp_path / "file"}, "cannot make the folder .*file: File exists"),
    ):
        with pytest.raises(UserError, match=message):
            write_shards(**{"images": images, "image_root": tmp_path / "root", "out": tmp_path / "out", **arguments})
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest.json is not a manifest of vl-plugins shards"):
        write_shards(images, tmp_path / "root", tmp_path / "out")
    assert set(read_folder(tmp_path / "out")) == {"manifest.json"}


@pytest.mark.parametrize("module", ["fsspec.core", "PIL.Image"])
def test_a_missing_dependency_names_the_extra(tmp_path, make_images, monkeypatch, module):
    images = make_images(1)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed; .*vl_plugins\[data\]"):
        write_shards(images, tmp_path / "root", tmp_path / "out", on_error="skip")
    assert not (tmp_path / "out").exists()


def write_options(tmp_path, images, out, **options):
    entries = write_shards(images, tmp_path / "root", tmp_path / out, **options)
    return entries, read_folder(tmp_path / out)


@pytest.fixture
def pictures(tmp_path):
    """Records of 23 JPEG files of different sizes, the first 20 of ``train``, one of them damaged."""
    root = tmp_path / "root"
    root.mkdir()
    images = []
    for index in range(23):
        name = f"{index}.jpg"
        data = encode_image("JPEG", size=(60 + 7 * index, 90))
        (root / name).write_bytes(data[:-80] if index == 7 else data)
        split = "train" if index < 20 else "val"
        texts = (f"caption {index}", "other " * index + "words")
        images.append(CaptionedImage(index, name, texts, (2 * index, 2 * index + 1), split, "some", name))
    return images


OPTIONS = {
    "plain": {"samples_per_shard": 3},
    "resize": {"samples_per_shard": 4, "resize": 40, "quality": 80},
    "size": {"shard_size_mb": 0.025},
    "size after a resize": {"shard_size_mb": 0.02, "resize": 60},
    "shuffled": {"samples_per_shard": 3, "seed": 1},
    "one shard": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_number_of_workers_does_not_change_a_byte(tmp_path, pictures, name):
    options = {"on_error": "skip", **OPTIONS[name]}
    results = [write_options(tmp_path, pictures, str(workers), workers=workers, **options) for workers in (1, 3)]
    assert results[0] == results[1]
    entries, files = results[0]
    assert [(entry["images"], entry["rejected"]) for entry in entries.values()] == [(19, 1), (3, 0)]
    assert set(files) == {
        "manifest.json",
        "sizes.json",
        "rejected.jsonl",
        *(shard for entry in entries.values() for shard in entry["shards"]),
    }


@pytest.mark.parametrize("name", ["plain", "size after a resize"])
def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path, pictures, name):
    options = {"on_error": "skip", **OPTIONS[name]}
    entries, _ = write_options(tmp_path, pictures, "out", **options)
    assert write_shards(pictures, tmp_path / "root", tmp_path / "dry", dry_run=True, **options) == entries
    assert not (tmp_path / "dry").exists()
    before = read_folder(tmp_path / "out")
    assert write_shards(pictures, tmp_path / "root", tmp_path / "out", dry_run=True, **options) == entries
    assert read_folder(tmp_path / "out") == before


def test_a_dry_run_finds_what_the_run_would_stop_at(tmp_path, pictures):
    with pytest.raises(UserError, match=r"7.jpg \(image id 7\): the image is damaged"):
        write_shards(pictures, tmp_path / "root", tmp_path / "dry", dry_run=True)
    with pytest.raises(UserError, match=r"none of the 1 images of some-train can be used; 7\.jpg: the"):
        write_shards(pictures[7:8], tmp_path / "root", tmp_path / "dry", on_error="skip", dry_run=True)
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize(
    ("first", "count", "shard"),
    [(20, 1, "some-val-000001.tar"), (21, 2, "some-val-000000.tar")],
    ids=["one too many", "another"],
)
def test_a_dry_run_in_a_folder_with_other_shards(tmp_path, pictures, first, count, shard):
    _, before = write_options(tmp_path, pictures[20:22], "out", samples_per_shard=1)
    images = pictures[first : first + count]
    options = {"samples_per_shard": 1, "dry_run": True}
    with pytest.raises(UserError, match=rf"{shard} exists and does not belong to this run"):
        write_shards(images, tmp_path / "root", tmp_path / "out", **options)
    entries = write_shards(images, tmp_path / "root", tmp_path / "out", overwrite=True, **options)
    assert entries["some-val"]["images"] == count
    broken = replace(pictures[20], file="7.jpg")
    with pytest.raises(UserError, match="none of the 1 images of some-val can be used"):
        write_shards([broken], tmp_path / "root", tmp_path / "out", overwrite=True, on_error="skip", **options)
    assert read_folder(tmp_path / "out") == before


def test_shards_do_not_exceed_the_size_asked_for_and_are_filled(tmp_path, pictures):
    for options in ({}, {"resize": 60}):
        entries, _ = write_options(
            tmp_path, pictures[:20], f"out{len(options)}", shard_size_mb=0.05, on_error="skip", **options
        )
        facts = list(entries["some-train"]["shards"].values())
        assert len(facts) > 2
        assert all(fact["bytes"] <= 50_000 for fact in facts)
        # The next sample would not have fitted; the largest takes less than 20 kB, and the end of an archive 11 kB.
        assert all(fact["bytes"] > 50_000 - 20_000 - 11_264 for fact in facts[:-1])
    sizes = [fact["samples"] for fact in facts]
    assert sum(sizes) == 19


def test_an_image_larger_than_a_shard_has_one_for_itself(tmp_path, pictures):
    entries, _ = write_options(tmp_path, pictures[20:], "out", shard_size_mb=0.001)
    facts = entries["some-val"]["shards"].values()
    assert [fact["samples"] for fact in facts] == [1, 1, 1]
    assert entries["some-val"]["options"] == {"shard_size_mb": 0.001, "on_error": "raise"}


def test_resized_images(tmp_path, pictures):
    entries, _ = write_options(tmp_path, pictures[20:], "out", resize=45, quality=70)
    members = read_members(tmp_path / "out" / "some-val-000000.tar")
    for index in range(3):
        data = members[f"some-val-0000000{index}.jpg"]
        source = (tmp_path / "root" / pictures[20 + index].file).read_bytes()
        assert data == resize_image(source, 45, quality=70)[0]
        metadata = json.loads(members[f"some-val-0000000{index}.json"])
        assert (metadata["width"], metadata["height"]) == Image.open(io.BytesIO(data)).size
        assert metadata["height"] == 45
    assert entries["some-val"]["options"] == {
        "samples_per_shard": 1000,
        "resize": 45,
        "quality": 70,
        "on_error": "raise",
    }


def read_ids(folder, split):
    ids = []
    for shard in sorted(folder.glob(f"*-{split}-*.tar")):
        members = read_members(shard)
        ids += [json.loads(members[name])["image_id"] for name in members if name.endswith(".json")]
    return ids


def test_a_seed_shuffles_training_splits_only(tmp_path, make_images):
    images = [*make_images(12), *make_images(9, split="val", first=12), *make_images(8, split="restval", first=21)]
    orders = {}
    for seed in (0, 1):
        entries, _ = write_options(tmp_path, images, str(seed), samples_per_shard=5, seed=seed)
        orders[seed] = {split: read_ids(tmp_path / str(seed), split) for split in ("train", "val", "restval")}
        assert [entry["options"].get("seed") for entry in entries.values()] == [seed, None, seed]
    for order in orders.values():
        assert order["val"] == list(range(12, 21))
        assert sorted(order["train"]) == list(range(12)) != order["train"]
        assert sorted(order["restval"]) == list(range(21, 29)) != order["restval"]
    assert orders[0]["train"] != orders[1]["train"]
    with pytest.raises(UserError, match="seed shuffles training splits, and none of tiny-val is one"):
        write_shards(images[12:21], tmp_path / "root", tmp_path / "out", seed=0)


def test_training_splits():
    assert [
        is_training_split(split) for split in ("train", "train2014", "restval", "val", "test", "dev", "mytrain")
    ] == [
        *[True] * 3,
        *[False] * 4,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size_mb": 0}, "shard_size_mb must be more than 0, got 0"),
        ({"shard_size_mb": float("nan")}, "shard_size_mb must be more than 0, got nan"),
        ({"resize": 0}, "resize must be at least 1, got 0"),
        ({"txt": "al"}, "unknown txt 'al' (did you mean 'all'?); known: all, first"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"quality": 0}, "quality must be 1 to 100, got 0"),
        ({"quality": 101}, "quality must be 1 to 100, got 101"),
        ({"out": "nowhere://shards"}, "cannot use nowhere://shards: Protocol not known: nowhere"),
    ],
)
def test_wrong_options(tmp_path, make_images, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        write_shards(make_images(1), tmp_path / "root", **{"out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_names_that_tar_headers_have_no_room_for(tmp_path, make_images):
    (image,) = make_images(1)
    for length, fits in ((80, True), (81, False)):
        long_name = CaptionedImage(**{**vars(image), "dataset": "x" * length})
        if fits:
            entries, _ = write_options(tmp_path, [long_name], "out")
            (shard,) = entries["x" * 80 + "-train"]["shards"]
            assert len(read_members(tmp_path / "out" / shard)) == 3
        else:
            with pytest.raises(UserError, match="is longer than 86 characters"):
                write_shards([long_name], tmp_path / "root", tmp_path / "out")


def test_any_file_system_of_fsspec(tmp_path, pictures):
    _, local = write_options(tmp_path, pictures, "out", samples_per_shard=3, on_error="skip")
    url = f"memory://{uuid.uuid4()}/shards"
    write_shards(pictures, tmp_path / "root", url, samples_per_shard=3, on_error="skip")
    folder = Folder(url)
    assert {name: folder.read(name) for name in folder.names()} == local
    write_shards(
        pictures, tmp_path / "root", f"file://{tmp_path}/file", samples_per_shard=3, on_error="skip", workers=2
    )
    assert read_folder(tmp_path / "file") == local
    with pytest.raises(
        UserError, match=r"memory://.*/some-train-000000.tar was written .* cannot be seen here: .*--workers 1"
    ):
        write_shards(pictures, tmp_path / "root", f"{url}2", samples_per_shard=3, on_error="skip", workers=2)


# Runs until it is killed or done.
CONVERT = """
import sys
from vl_plugins.data.annotations import read_karpathy
from vl_plugins.data.shards import write_shards

if __name__ == "__main__":
    folder, out, workers = sys.argv[1:]
    images = read_karpathy(folder + "/dataset.json", "coco")
    write_shards(images, folder, out, samples_per_shard=6, resize=150, workers=int(workers), on_error="skip")
"""


@pytest.fixture(scope="module")
def large_pictures(tmp_path_factory):
    """Folder of 48 pictures, slow enough to be interrupted, and a missing one, with their annotation file."""
    folder = tmp_path_factory.mktemp("large")
    data = encode_image("JPEG", size=(1600, 1200), mode="RGB")
    items = []
    for index in range(49):
        if index != 20:
            (folder / f"{index}.jpg").write_bytes(data)
        sentences = [{"raw": f"caption {index}", "sentid": index}]
        item = {"filename": f"{index}.jpg", "filepath": "", "cocoid": index, "split": "train", "sentences": sentences}
        items.append(item)
    (folder / "dataset.json").write_text(json.dumps({"dataset": "large", "images": items}))
    (folder / "convert.py").write_text(CONVERT)
    return folder


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_run_continues_and_ends_as_if_it_had_not_been_killed(tmp_path, large_pictures, workers):
    def start(out):
        return subprocess.Popen(
            [sys.executable, large_pictures / "convert.py", large_pictures, tmp_path / out, str(workers)]
        )

    assert start("whole").wait() == 0
    whole = read_folder(tmp_path / "whole")
    assert len([name for name in whole if name.endswith(".tar")]) == 9

    out = tmp_path / "out"
    kept = {}
    for complete in (2, 5):
        process = start("out")
        deadline = time.monotonic() + 60
        while len(list(out.glob("large-*.tar"))) < complete or not list(out.glob(".*.partial")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        process.wait()
        shards = list(out.glob("large-*.tar"))
        assert complete <= len(shards) < 9
        assert all(shard.read_bytes() == whole[shard.name] for shard in shards), "no half shard has a final name"
        assert not (out / "manifest.json").exists()
        assert all(shard.stat().st_ino == kept.get(shard.name, shard.stat().st_ino) for shard in shards)
        recorded = [shard for shard in shards if (out / f".{shard.name}.done").exists()]
        kept |= {shard.name: shard.stat().st_ino for shard in recorded}
    assert len(kept) >= 4
    assert start("out").wait() == 0
    assert read_folder(out) == whole
    assert {name: (out / name).stat().st_ino for name in kept} == kept, "complete shards are not written again"


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_ends_with_one_line_and_a_further_run_goes_on(tmp_path, large_pictures, workers):
    def command(out):
        options = f"--resize 150 --samples-per-shard 6 --on-error skip --workers {workers}".split()
        source = ["--annotations", large_pictures / "dataset.json", "--images", large_pictures]
        return [sys.executable, "-m", "vl_plugins.cli", "shards", "coco", *source, "--out", tmp_path / out, *options]

    out = tmp_path / "out"
    # A group of its own, as a terminal gives each command: Ctrl-C reaches the workers too.
    process = subprocess.Popen(
        command("out"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a script ignores Ctrl-C, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("large-*.tar")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].splitlines()[-1:] == ["vl-plugins shards: interrupted"]
    assert process.returncode == 130
    shards = {path.name: path.stat().st_ino for path in out.glob("large-*.tar")}
    assert 1 <= len(shards) < 9
    shards = {name: inode for name, inode in shards.items() if (out / f".{name}.done").exists()}
    assert not list(out.glob(".*.partial"))
    for folder in ("out", "whole"):
        subprocess.run(command(folder), check=True, capture_output=True)
    assert read_folder(out) == read_folder(tmp_path / "whole")
    assert {name: (out / name).stat().st_ino for name in shards} == shards


@pytest.fixture
def interrupted(tmp_path, make_images):
    """Records of 6 images, and the folder ``out`` as a run leaves it that stops at the fifth."""
    images = make_images(6)
    file = tmp_path / "root" / images[4].file
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(UserError):
        write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    file.write_bytes(data)
    assert sorted(read_folder(tmp_path / "out")) == [
        ".tiny-train-000000.tar.done",
        ".tiny-train-000001.tar.done",
        "tiny-train-000000.tar",
        "tiny-train-000001.tar",
    ]
    return images


@pytest.mark.parametrize(
    "file", ["tiny-train-000001.tar", ".tiny-train-000001.tar.done", "manifest.json", "rejected.jsonl"]
)
def test_partial_files_of_a_killed_run_are_removed(tmp_path, interrupted, file):
    _, whole = write_options(tmp_path, interrupted, "whole", samples_per_shard=2)
    (tmp_path / "out" / f".{file}.0123abcd.partial").touch()
    other = tmp_path / "out" / ".tiny-val-000000.tar.0123abcd.partial"
    other.touch()
    _, out = write_options(tmp_path, interrupted, "out", samples_per_shard=2)
    assert out.pop(other.name) == b"", "of another split, which another run may be writing"
    assert out == whole


def test_complete_shards_are_kept_without_reading_their_images_again(tmp_path, interrupted, monkeypatch):
    _, whole = write_options(tmp_path, interrupted, "whole", samples_per_shard=2)
    read = []
    inspect = sample_encoding.inspect_image
    monkeypatch.setattr(
        sample_encoding, "inspect_image", lambda data, **options: read.append(1) or inspect(data, **options)
    )
    assert write_options(tmp_path, interrupted, "out", samples_per_shard=2)[1] == whole
    assert len(read) == 2


def test_complete_splits_are_kept_too(tmp_path, make_images):
    images = [*make_images(4), *make_images(4, split="val", first=4)]
    _, whole = write_options(tmp_path, images, "whole", samples_per_shard=2)
    file = tmp_path / "root" / images[7].file
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(UserError, match="image id 7"):
        write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    out = tmp_path / "out"
    assert list(read_manifest(out)) == ["tiny-train"]
    before = {name: (out / name).stat().st_ino for name in whole if name.endswith(".tar") and (out / name).exists()}
    assert len(before) == 3
    file.write_bytes(data)
    assert write_options(tmp_path, images, "out", samples_per_shard=2)[1] == whole
    assert {name: (out / name).stat().st_ino for name in before} == before


def test_a_record_of_skipped_images_does_not_serve_a_run_that_is_to_stop_at_them(tmp_path, make_images, monkeypatch):
    def interrupt(key, *arguments):
        if key.endswith("4"):
            raise KeyboardInterrupt
        return encode(key, *arguments)

    images = make_images(6)
    (tmp_path / "root" / images[0].file).unlink()
    encode = shards_module.encode_sample
    with monkeypatch.context() as patch:
        patch.setattr(shards_module, "encode_sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2, on_error="skip")
    assert len(read_folder(tmp_path / "out")) == 4
    with pytest.raises(UserError, match="image id 0"):
        write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    entries, _ = write_options(tmp_path, images, "out", samples_per_shard=2, on_error="skip")
    assert entries["tiny-train"]["rejected"] == 1


DIFFERENCES = {
    "another image file": lambda folder, images: (folder / "root" / images[0].file).write_bytes(
        encode_image(size=(9, 9))
    ),
    "a damaged shard": lambda folder, images: (folder / "out" / "tiny-train-000000.tar").write_bytes(b"x"),
    "no record": lambda folder, images: (folder / "out" / ".tiny-train-000000.tar.done").unlink(),
    "a foreign record": lambda folder, images: (folder / "out" / ".tiny-train-000000.tar.done").write_text("[1]"),
    "another caption": lambda folder, images: images.__setitem__(0, replace(images[0], captions=("other", "words"))),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_from_the_interrupted_run_is_not_trusted(tmp_path, interrupted, name):
    DIFFERENCES[name](tmp_path, interrupted)
    _, whole = write_options(tmp_path, interrupted, "whole", samples_per_shard=2)
    if name not in ("no record", "a foreign record"):
        with pytest.raises(UserError, match=r"tiny-train-000000.tar exists and does not belong to this run"):
            write_options(tmp_path, interrupted, "out", samples_per_shard=2)
    assert write_options(tmp_path, interrupted, "out", samples_per_shard=2, overwrite=True)[1] == whole


@pytest.mark.parametrize("options", [{"resize": 3}, {"on_error": "skip"}, {"samples_per_shard": 3}, {"txt": "all"}])
def test_other_options_than_those_of_the_interrupted_run(tmp_path, interrupted, options):
    options = {"samples_per_shard": 2, "overwrite": True, **options}
    _, whole = write_options(tmp_path, interrupted, "whole", **options)
    assert write_options(tmp_path, interrupted, "out", **options)[1] == whole


LIMITED = """
import resource, sys
from vl_plugins.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shard_that_the_system_stops_half_way(tmp_path, large_pictures, workers):
    (tmp_path / "limited.py").write_text(LIMITED)
    command = ["shards", "coco", "--annotations", large_pictures / "dataset.json", "--images", large_pictures]
    command += ["--out", tmp_path / "out", "--on-error", "skip", "--workers", str(workers)]
    finished = subprocess.run([sys.executable, tmp_path / "limited.py", *command], capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1] == (
        f"vl-plugins shards: error: cannot write {tmp_path}/out/large-train-000000.tar: File too large"
    )
    assert "Traceback" not in finished.stderr
    assert read_folder(tmp_path / "out") == {}
