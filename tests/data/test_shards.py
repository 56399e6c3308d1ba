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

from tests.helpers.archives import read_archive, read_folder
from tests.helpers.processes import start_as_terminal
from vl_plugins.data import shards as shards_module
from vl_plugins.data.images import resize_image
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage, RejectedImage
from vl_plugins.data.storage import Folder
from vl_plugins.errors import MissingExtraError, UserError


def encode_image(image_format="PNG", size=(5, 4)):
    stream = io.BytesIO()
    noise = random.Random(0).randbytes(size[0] * size[1])
    Image.frombytes("L", size, noise).convert("RGB").save(stream, format=image_format)
    return stream.getvalue()


def read_records(folder, split):
    """Return the json of all samples of a split, in order."""
    members = {}
    for shard in sorted(folder.glob(f"*-{split}-*.tar")):
        members |= read_archive(shard)
    return [json.loads(members[name]) for name in sorted(members) if name.endswith(".json")]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def make_images(root):
    """Return records of small images in ``root``; image i has the captions ``i-0``, ``i-1``, ...."""

    def make(count=5, split="train", first=0, captions=2):
        images = []
        for index in range(first, first + count):
            name = f"{100 - index}.png"  # names run against the source order
            (root / name).write_bytes(encode_image(size=(index + 1, 4)))
            texts = tuple(f"{index}-{number}" for number in range(captions))
            ids = tuple(10 * index + number for number in range(captions))
            images.append(CaptionedImage(index, name, texts, ids, split, "tiny", name))
        return images

    return make


@pytest.fixture
def write(tmp_path, root):
    """Write shards of two images into a folder; return the manifest's entries and the files."""

    def write_images(images, out="out", **options):
        entries = write_shards(images, root, tmp_path / out, **{"samples_per_shard": 2, **options})
        return entries, read_folder(tmp_path / out) if (tmp_path / out).exists() else {}

    return write_images


class TestContent:
    def test_members(self, tmp_path, root, make_images, write):
        images = make_images(3)
        data = encode_image("JPEG", size=(7, 6))
        (root / images[1].file).write_bytes(data)
        write(images)
        shard = tmp_path / "out" / "tiny-train-000000.tar"
        content = read_archive(shard)
        assert list(content) == [
            "tiny-train-00000000.json",
            "tiny-train-00000000.png",
            "tiny-train-00000000.txt",
            "tiny-train-00000001.jpg",
            "tiny-train-00000001.json",
            "tiny-train-00000001.txt",
        ]
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

    def test_a_shard_is_what_tarfile_would_write(self, tmp_path, root, make_images, write):
        # Every length of the last record occurs, since the pictures grow by a block each.
        images = make_images(2 * tarfile.RECORDSIZE // tarfile.BLOCKSIZE)
        for index, image in enumerate(images):
            data = encode_image("JPEG") + b"x" * (tarfile.BLOCKSIZE * index)
            (root / image.file).write_bytes(data)
        write(images, samples_per_shard=1)
        shards = sorted((tmp_path / "out").glob("*.tar"))
        assert len(shards) == len(images)
        for shard in shards:
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for name, data in read_archive(shard).items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
            assert shard.read_bytes() == stream.getvalue()

    def test_manifest_and_sizes(self, tmp_path, make_images, write):
        images = [*make_images(3, captions=2), *make_images(2, first=3, captions=4)]
        entries, files = write(images, samples_per_shard=4, source={"annotations": "a.json"})
        write(make_images(3, "val", 5))
        assert json.loads(files["manifest.json"])["splits"] == entries
        entry = entries["tiny-train"]
        assert (entry["images"], entry["captions"], entry["rejected"]) == (5, 14, 0)
        assert entry["captions_per_image"] == {"min": 2, "max": 4, "histogram": {"2": 3, "4": 2}}
        assert entry["source"] == {"annotations": "a.json"}
        assert entry["options"] == {
            "samples_per_shard": 4,
            "on_error": "raise",
            "inputs": "images",
            "txt": "first",
            "seed": None,
        }
        assert [(facts["samples"], facts["captions"]) for facts in entry["shards"].values()] == [(4, 10), (1, 4)]
        for name, facts in entry["shards"].items():
            assert facts["sha256"] == hashlib.sha256(files[name]).hexdigest()
            assert facts["bytes"] == len(files[name])
        assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {
            "tiny-train-000000.tar": 4,
            "tiny-train-000001.tar": 1,
            "tiny-val-000000.tar": 2,
            "tiny-val-000001.tar": 1,
        }

    def test_groups(self, tmp_path, root, make_images, write):
        images = make_images(5)
        groups = [7, None, "frog", "frog", "gone"]
        grouped = [replace(image, group=group) for image, group in zip(images, groups, strict=True)]
        (root / images[4].file).write_bytes(b"no picture")
        entries, _ = write(grouped, on_error="skip")
        assert entries["tiny-train"]["groups"] == 2
        records = read_records(tmp_path / "out", "train")
        assert [record.get("group", "none") for record in records] == [7, "none", "frog", "frog"]

    def test_resized_images(self, tmp_path, root, make_images, write):
        images = make_images(1)
        source = encode_image("JPEG", size=(90, 60))
        (root / images[0].file).write_bytes(source)
        entries, _ = write(images, resize=45, quality=70)
        members = read_archive(tmp_path / "out" / "tiny-train-000000.tar")
        assert members["tiny-train-00000000.jpg"] == resize_image(source, 45, quality=70)
        record = json.loads(members["tiny-train-00000000.json"])
        assert (record["width"], record["height"]) == (68, 45)
        options = entries["tiny-train"]["options"]
        assert (options["resize"], options["quality"]) == (45, 70)

    def test_a_seed_shuffles_training_splits_only(self, tmp_path, make_images, write):
        splits = {"train": range(12), "val": range(12, 21), "restval": range(21, 29)}
        images = [image for split, ids in splits.items() for image in make_images(len(ids), split, ids[0])]
        orders = {}
        for seed in (0, 1):
            entries, _ = write(images, str(seed), samples_per_shard=5, seed=seed)
            assert [entry["options"]["seed"] for entry in entries.values()] == [seed] * 3
            for split, ids in splits.items():
                order = [record["image_id"] for record in read_records(tmp_path / str(seed), split)]
                assert sorted(order) == list(ids)
                assert (order == list(ids)) == (split == "val")
                orders[seed, split] = order
        assert orders[0, "train"] != orders[1, "train"]


class TestWrongInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"images": []}, "there are no images"),
            ({"samples_per_shard": 0}, "samples_per_shard must be at least 1, got 0"),
            ({"workers": 0}, "workers must be at least 1, got 0"),
            ({"quality": 101}, "quality must be 1 to 100, got 101"),
            ({"txt": "al"}, "unknown txt 'al' (did you mean 'all'?); known: all, first"),
            ({"on_error": "ignore"}, "unknown on_error 'ignore'; known: raise, skip"),
            ({"out": "nowhere://shards"}, "cannot use nowhere://shards: Protocol not known: nowhere"),
            ({"out": os.devnull}, "cannot make the folder /dev/null: File exists"),
        ],
    )
    def test_arguments(self, tmp_path, root, make_images, options, message):
        arguments = {"images": make_images(1), "files": root, "out": tmp_path / "out", **options}
        with pytest.raises(UserError, match=re.escape(message)):
            write_shards(**arguments)
        assert not (tmp_path / "out").exists()

    def test_a_foreign_manifest_stays(self, root, make_images, write):
        (root / "manifest.json").write_text("{}")
        with pytest.raises(UserError, match=r"manifest.json is not a manifest of vl-plugins shards"):
            write(make_images(1), root)

    def test_names_that_tar_headers_have_no_room_for(self, tmp_path, make_images, write):
        (image,) = make_images(1)
        entries, _ = write([replace(image, dataset="x" * 80)])
        (shard,) = entries["x" * 80 + "-train"]["shards"]
        assert len(read_archive(tmp_path / "out" / shard)) == 3
        with pytest.raises(UserError, match="is longer than 86 characters"):
            write([replace(image, dataset="x" * 81)])

    @pytest.mark.parametrize("module", ["fsspec.core", "PIL.Image"])
    def test_a_missing_dependency_names_the_extra(self, make_images, write, monkeypatch, module):
        images = make_images(1)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"{module} is not installed; .*vl_plugins\[data\]"):
            write(images, on_error="skip")

    def test_an_unusable_image_stops_the_run_and_is_named(self, tmp_path, root, make_images, write):
        images = make_images(5)
        (root / images[2].file).write_bytes(b"a cat on a mat")
        for options in ({}, {"dry_run": True}):
            with pytest.raises(UserError) as raised:
                write(images, samples_per_shard=5, **options)
            assert str(raised.value) == f"{root}/98.png (image id 2): the file is not an image"
        assert read_folder(tmp_path / "out") == {}

    def test_skipped_images_are_listed_and_counted(self, root, make_images, write):
        images = make_images(6)
        _, whole = write(images, "whole")
        (root / images[2].file).write_bytes(b"")
        earlier = [RejectedImage("image 9", "train", "it has no captions"), RejectedImage("image 10", "val", "blank")]
        entries, files = write(images, on_error="skip", rejected=earlier)
        assert [json.loads(line) for line in files["rejected.jsonl"].splitlines()] == [
            {"shards": "tiny-train", "image": "image 9", "split": "train", "reason": "it has no captions"},
            {"shards": "tiny-train", "image": "98.png", "split": "train", "reason": "the file is empty"},
        ]
        assert (entries["tiny-train"]["images"], entries["tiny-train"]["rejected"]) == (5, 2)
        assert list(json.loads(files["sizes.json"]).values()) == [2, 1, 2]
        for name in ("tiny-train-000000.tar", "tiny-train-000002.tar"):
            assert files[name] == whole[name], "other shards do not depend on the missing image"
        (root / images[2].file).write_bytes(encode_image(size=(3, 4)))
        assert "rejected.jsonl" not in write(images, overwrite=True)[1]

    def test_a_split_of_unusable_images_only_is_an_error(self, tmp_path, make_images):
        for options in ({}, {"dry_run": True}):
            with pytest.raises(UserError, match=r"none of the 5 images of tiny-train can be used; 96.png: cannot read"):
                write_shards(make_images(5), tmp_path / "nowhere", tmp_path / "out", on_error="skip", **options)
        assert read_folder(tmp_path / "out") == {}


class TestOtherContents:
    def test_they_are_kept_unless_overwritten(self, tmp_path, make_images, write):
        write(make_images(6))
        _, before = write(make_images(2, "val"))
        for count, samples_per_shard, txt in ((4, 2, "first"), (6, 3, "first"), (8, 3, "first"), (6, 2, "all")):
            for dry_run in (True, False):
                options = {"samples_per_shard": samples_per_shard, "txt": txt, "dry_run": dry_run}
                with pytest.raises(UserError, match=r"tiny-train-00000\d.tar exists and does not .*--overwrite"):
                    write(make_images(count), **options)
                assert read_folder(tmp_path / "out") == before

        entries, files = write(make_images(4), samples_per_shard=3, overwrite=True, dry_run=True)
        assert (entries["tiny-train"]["images"], files) == (4, before)
        _, files = write(make_images(4), samples_per_shard=3, overwrite=True)
        sizes = json.loads(files["sizes.json"])
        assert sizes == {"tiny-train-000000.tar": 3, "tiny-train-000001.tar": 1, "tiny-val-000000.tar": 2}
        assert sorted(name for name in files if name.endswith(".tar")) == sorted(sizes)
        assert files["tiny-val-000000.tar"] == before["tiny-val-000000.tar"]

    def test_an_overwriting_run_that_fails_leaves_no_index_of_replaced_shards(self, tmp_path, root, make_images, write):
        images = make_images(6)
        write(images)
        (root / images[5].file).unlink()
        with pytest.raises(UserError, match="image id 5"):
            write(images, samples_per_shard=3, overwrite=True)
        assert json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"] == {}
        assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {}


class TestSameBytes:
    @pytest.fixture
    def images(self, root):
        """Records of 23 JPEG files of different sizes, the first 20 of ``train``, one of them damaged."""
        images = []
        for index in range(23):
            data = encode_image("JPEG", size=(60 + 7 * index, 90))
            (root / f"{index}.jpg").write_bytes(data[:-80] if index == 7 else data)
            texts = (f"caption {index}", "other " * index + "words")
            split, ids = "train" if index < 20 else "val", (2 * index, 2 * index + 1)
            images.append(CaptionedImage(index, f"{index}.jpg", texts, ids, split, "some", f"{index}.jpg"))
        return images

    @pytest.mark.parametrize("options", [{"samples_per_shard": 3, "seed": 1}, {"resize": 40, "samples_per_shard": 20}])
    def test_with_any_number_of_workers(self, images, write, options):
        options = {"on_error": "skip", **options}
        assert write(images, "dry", dry_run=True, **options) == (write(images, "1", **options)[0], {})
        entries, files = write(images, "1", workers=1, **options)  # again
        assert (entries, files) == write(images, "3", workers=3, **options)
        assert [(entry["images"], entry["rejected"]) for entry in entries.values()] == [(19, 1), (3, 0)]
        shards = [shard for entry in entries.values() for shard in entry["shards"]]
        assert set(files) == {"manifest.json", "sizes.json", "rejected.jsonl", *shards}

    def test_on_any_file_system_of_fsspec(self, tmp_path, root, images, write):
        _, local = write(images, on_error="skip")
        url = f"memory://{uuid.uuid4()}/shards"
        write_shards(images, root, url, samples_per_shard=2, on_error="skip")
        assert {name: Folder(url).read(name) for name in Folder(url).names()} == local
        write_shards(images, root, f"file://{tmp_path}/file", samples_per_shard=2, on_error="skip", workers=2)
        assert read_folder(tmp_path / "file") == local
        # Each process has a file system of its own in memory.
        with pytest.raises(
            UserError, match=r"only the process that wrote memory://.*\.tar can see it: give --workers 1"
        ):
            write_shards(images, root, f"{url}2", samples_per_shard=2, on_error="skip", workers=2)


@pytest.fixture
def interrupted(tmp_path, root, make_images, write):
    """Records of 6 images, and the folder ``out`` as a run leaves it that stops at the fifth."""
    images = make_images(6)
    file = root / images[4].file
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(UserError, match=r"root/96.png \(image id 4\): cannot read the file: No such file") as raised:
        write(images)
    assert "\n" not in str(raised.value)
    file.write_bytes(data)
    assert sorted(read_folder(tmp_path / "out")) == [
        ".tiny-train-000000.tar.done",
        ".tiny-train-000001.tar.done",
        "tiny-train-000000.tar",
        "tiny-train-000001.tar",
    ]
    return images


class TestContinuing:
    def test_complete_shards_are_kept_and_partial_files_removed(self, tmp_path, interrupted, write, monkeypatch):
        for file in ("tiny-train-000001.tar", ".tiny-train-000001.tar.done", "manifest.json", "rejected.jsonl"):
            (tmp_path / "out" / f".{file}.0123abcd.partial").touch()
        _, whole = write(interrupted, "whole")
        read = []
        inspect = shards_module.inspect_image
        monkeypatch.setattr(shards_module, "inspect_image", lambda *args, **kw: read.append(1) or inspect(*args, **kw))
        assert write(interrupted)[1] == whole
        assert len(read) == 2

    def test_complete_splits_are_kept_too(self, tmp_path, root, make_images, write):
        images = [*make_images(4), *make_images(4, split="val", first=4)]
        _, whole = write(images, "whole")
        (root / images[7].file).rename(root / "away")
        with pytest.raises(UserError, match="image id 7"):
            write(images)
        shards = [tmp_path / "out" / f"tiny-{name}.tar" for name in ("train-000000", "train-000001", "val-000000")]
        before = [shard.stat().st_ino for shard in shards]
        (root / "away").rename(root / images[7].file)
        assert write(images)[1] == whole
        assert [shard.stat().st_ino for shard in shards] == before

    @pytest.mark.parametrize(
        ("change", "is_conflict"),
        [
            (lambda root, out, images: (root / images[0].file).write_bytes(encode_image(size=(9, 9))), True),
            (lambda root, out, images: images.__setitem__(0, replace(images[0], captions=("other", "words"))), True),
            (lambda root, out, images: (out / "tiny-train-000000.tar").write_bytes(b"x"), True),
            (lambda root, out, images: (out / ".tiny-train-000000.tar.done").unlink(), False),
            (lambda root, out, images: (out / ".tiny-train-000000.tar.done").write_text("[1]"), False),
        ],
        ids=["another image", "another caption", "a damaged shard", "no record", "a foreign record"],
    )
    def test_what_has_changed_is_written_again(self, tmp_path, root, interrupted, write, change, is_conflict):
        change(root, tmp_path / "out", interrupted)
        _, whole = write(interrupted, "whole")
        if is_conflict:
            with pytest.raises(UserError, match=r"tiny-train-000000.tar exists and does not belong to this run"):
                write(interrupted)
        assert write(interrupted, overwrite=is_conflict)[1] == whole

    @pytest.mark.parametrize("options", [{"resize": 3}, {"on_error": "skip"}, {"samples_per_shard": 3}, {"txt": "all"}])
    def test_with_other_options(self, interrupted, write, options):
        _, whole = write(interrupted, "whole", **options)
        assert write(interrupted, overwrite=True, **options)[1] == whole

    def test_a_record_with_skipped_images_does_not_serve_a_run_that_is_to_stop_at_them(self, root, make_images, write):
        images = [*make_images(2), *make_images(1, "val", 2)]
        for index in (0, 2):
            (root / images[index].file).unlink()
        with pytest.raises(UserError, match="none of the 1 images of tiny-val can be used"):
            write(images, on_error="skip")
        with pytest.raises(UserError, match="image id 0"):
            write(images[:2])
        assert write(images[:2], on_error="skip")[0]["tiny-train"]["rejected"] == 1

    def test_one_process_writes_at_a_time(self, tmp_path, make_images, write):
        (tmp_path / "out").mkdir()
        with Folder(tmp_path / "out").lock(), pytest.raises(UserError, match="another process is writing to"):
            write(make_images(2))
        assert read_folder(tmp_path / "out") == {}


@pytest.fixture(scope="module")
def convert(tmp_path_factory):
    """Return the command that writes 9 shards of 49 pictures, one of them missing."""
    folder = tmp_path_factory.mktemp("large")
    data = encode_image("JPEG", size=(1600, 1200))
    items = []
    for index in range(49):
        if index != 20:
            (folder / f"{index}.jpg").write_bytes(data)
        sentences = [{"raw": f"caption {index}", "sentid": index}]
        item = {"filename": f"{index}.jpg", "filepath": "", "cocoid": index, "split": "train", "sentences": sentences}
        items.append(item)
    (folder / "dataset.json").write_text(json.dumps({"dataset": "large", "images": items}))

    def command(out, workers, *options):
        source = ["--annotations", folder / "dataset.json", "--images", folder, "--on-error", "skip"]
        options = ["--samples-per-shard", "6", "--workers", str(workers), *options]
        return [sys.executable, "-m", "vl_plugins.cli", "shards", "coco", *source, "--out", out, *options]

    return command


# The command, whose processes give no further shard its name while there is the file ``gate`` and so many have theirs.
GATED = """
import os, sys, time
from pathlib import Path
from vl_plugins.cli import main

gate, complete = Path(sys.argv[1]), int(sys.argv[2])
replace = os.replace

def wait_and_replace(source, target):
    while gate.exists() and len(list(Path(target).parent.glob("large-*.tar"))) >= complete:
        time.sleep(0.01)
    replace(source, target)

os.replace = wait_and_replace
if __name__ == "__main__":
    sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("number", "workers", "stops"),
    [
        (signal.SIGKILL, 2, [3]),
        (signal.SIGINT, 2, [3]),
        pytest.param(signal.SIGKILL, 1, [1, 2, 5], marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 2, [1, 2, 5], marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_continues_and_ends_as_if_it_had_not_been_stopped(tmp_path, convert, number, workers, stops):
    whole, out = tmp_path / "whole", tmp_path / "out"
    subprocess.run(convert(whole, 2, "--resize", "150"), check=True, capture_output=True)
    whole = read_folder(whole)
    assert len([name for name in whole if name.endswith(".tar")]) == 9

    (script := tmp_path / "gated.py").write_text(GATED)
    gate, kept = tmp_path / "gate", {}
    for complete in stops:
        gate.touch()
        command = [sys.executable, script, gate, complete, *convert(out, workers, "--resize", "150")[3:]]
        process = start_as_terminal(command, stderr=subprocess.PIPE, text=True)
        while len(list(out.glob("large-*.tar"))) < complete or not list(out.glob(".*.partial")):
            assert process.poll() is None
            time.sleep(0.002)
        if number == signal.SIGKILL:
            process.kill()
            process.communicate()
        else:
            os.killpg(process.pid, number)  # the workers get it too
            gate.unlink()
            assert process.communicate()[1].splitlines()[-1:] == ["vl-plugins shards: interrupted"]
            assert process.returncode == 130
            assert not list(out.glob(".*.partial"))
        shards = list(out.glob("large-*.tar"))
        assert complete <= len(shards) <= 9
        assert all(shard.read_bytes() == whole[shard.name] for shard in shards), "no half shard has a final name"
        assert not (out / "manifest.json").exists()
        assert all(shard.stat().st_ino == kept.get(shard.name, shard.stat().st_ino) for shard in shards)
        kept |= {shard.name: shard.stat().st_ino for shard in shards if (out / f".{shard.name}.done").exists()}
    assert len(kept) >= max(stops) - workers
    subprocess.run(convert(out, workers, "--resize", "150"), check=True, capture_output=True)
    assert read_folder(out) == whole
    assert {name: (out / name).stat().st_ino for name in kept} == kept, "complete shards are not written again"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shard_that_the_system_stops_half_way(tmp_path, convert, workers):
    limited = f"ulimit -f 300; exec {' '.join(map(str, convert(tmp_path / 'out', workers)))}"
    finished = subprocess.run(["bash", "-c", limited], capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1] == (
        f"vl-plugins shards: error: cannot write {tmp_path}/out/large-train-000000.tar: File too large"
    )
    assert "Traceback" not in finished.stderr
    assert read_folder(tmp_path / "out") == {}
