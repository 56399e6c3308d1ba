import hashlib
import io
import json
import random
import sys
import tarfile

import pytest
from PIL import Image

from vl_plugins.data import shards
from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.shards import inspect_image, write_shards
from vl_plugins.errors import MissingExtraError, UserError


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
    assert read_folder(tmp_path / "out") == complete
    (tmp_path / "root" / images[5].file).write_bytes(content)
    write_shards(images, tmp_path / "root", tmp_path / "out", samples_per_shard=2)
    assert read_folder(tmp_path / "out") == whole


def test_an_interruption_leaves_no_partial_file(tmp_path, make_images, monkeypatch):
    def interrupt(data):
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "inspect_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_shards(make_images(), tmp_path / "root", tmp_path / "out")
    assert read_folder(tmp_path / "out") == {}


def test_a_full_disk_ends_with_one_line(tmp_path, make_images, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot write .*tiny-train-000000.tar: No space left on device"):
        write_shards(make_images(), tmp_path / "root", tmp_path / "out")
    assert read_folder(tmp_path / "out") == {}


def damaged_png():
    data = bytearray(encode_image(size=(60, 60)))
    data[60:70] = bytes(10)
    return bytes(data)


UNUSABLE = {
    "empty": (b"", "the file is empty"),
    "text": (b"a cat on a mat", "the file is not an image"),
    "truncated JPEG": (encode_image("JPEG", size=(80, 80))[:-200], "the image is damaged: .*truncated"),
    "truncated PNG": (encode_image("PNG", size=(80, 80))[:2000], "the image is damaged"),
    "damaged PNG": (damaged_png(), "the image is damaged"),
    "GIF": (encode_image("GIF", mode="L"), "the format GIF is not supported; supported are JPEG, PNG and WebP"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_images(tmp_path, make_images, kind):
    data, message = UNUSABLE[kind]
    images = make_images(5)
    (tmp_path / "root" / images[2].file).write_bytes(data)
    with pytest.raises(UserError, match=rf"98.png \(image id 2\): {message}"):
        write_shards(images, tmp_path / "root", tmp_path / "out")
    assert read_folder(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encode_image("JPEG"), "jpg"),
        (encode_image("JPEG", mode="CMYK"), "jpg"),
        (encode_image("MPO", save_all=True, append_images=[Image.new("RGB", (5, 4))]), "jpg"),
        (encode_image("PNG", mode="P"), "png"),
        (encode_image("PNG", mode="I;16"), "png"),
        (encode_image("WEBP"), "webp"),
    ],
)
def test_usable_images(data, expected):
    assert inspect_image(data) == (expected, 5, 4)


@pytest.mark.parametrize("limit", [7, 15])
def test_more_pixels_than_pil_allows(monkeypatch, limit):
    # PIL raises above twice the limit, and only warns above the limit.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UserError, match=f"more than {limit} pixels"):
        inspect_image(encode_image(size=(5, 4)))


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


@pytest.mark.parametrize("module", ["webdataset", "PIL.Image"])
def test_a_missing_dependency_names_the_extra(tmp_path, make_images, monkeypatch, module):
    images = make_images(1)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed; .*vl_plugins\[data\]"):
        write_shards(images, tmp_path / "root", tmp_path / "out", on_error="skip")
    assert not (tmp_path / "out").exists()
