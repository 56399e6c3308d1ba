import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
import time
import unicodedata
import uuid
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import PILToTensor

from tests.helpers.archives import encode_picture, read_archive
from tests.helpers.pictures import VAST, fail_to_decode, vast_png
from tests.helpers.processes import start_as_terminal
from vl_plugins.data.captions import CaptionedImage, RejectedImage, is_blank
from vl_plugins.data.files import lock, names, read_bytes, remove, write_file
from vl_plugins.data.index import index_file, read_head, read_records, scan_shard
from vl_plugins.data.samples import decode
from vl_plugins.data.writer import FileFolder, write_shards
from vl_plugins.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:failed to import `ujson`")

SHARDS = ("train-000000", "train-000001", "val-000000", "val-000001")
ENGINES = ("threads", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dask", "ray")))


def skip_without(engine):
    if engine in ("dask", "ray"):
        pytest.importorskip("distributed" if engine == "dask" else "ray", reason=f"{engine} is not installed")


def read_tree(folder):
    """Return the contents of the files in a folder and its folders by path, but for lock files."""
    files = (file for file in Path(folder).rglob("*") if file.is_file() and file.suffix != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def read_samples(folder, split="train"):
    """Return the json of all samples of a split, in order."""
    members = {}
    for shard in sorted(Path(folder).glob(f"*-{split}-*.tar")):
        members |= read_archive(shard)
    return [json.loads(members[name]) for name in sorted(members) if name.endswith(".json")]


def shard_states(folder):
    """Return what changes when a shard or an index is written again, by path."""
    files = [file for file in Path(folder).rglob("*") if file.suffix in (".tar", ".jsonl", ".json")]
    return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def check_complete(folder):
    """Check that each shard has the index that belongs to it, and that ``sizes.json`` says nothing else."""
    sizes = json.loads((folder / "sizes.json").read_text()) if (folder / "sizes.json").exists() else {}
    shards = sorted(folder.glob("*.tar"))
    for shard in shards:
        head = json.loads(Path(index_file(str(shard))).read_bytes().splitlines()[0])
        assert head["sha256"] == hashlib.sha256(shard.read_bytes()).hexdigest()
        assert sizes.get(shard.name, len(head["counts"])) == len(head["counts"])
    return shards


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def make_images(root):
    """Return records of small images in ``root``; image i has the captions ``i-0``, ``i-1``, ...."""

    def make(count=5, split="train", first=0, captions=2):
        images = []
        for index in range(first, first + count):
            name = f"{100 - index}.png"  # names run against the source order
            (root / name).write_bytes(encode_picture((index + 1, 4), mode="RGB"))
            texts, ids = zip(*((f"{index}-{number}", 10 * index + number) for number in range(captions)), strict=True)
            images.append(CaptionedImage(index, name, texts, ids, split, "tiny", name))
        return images

    return make


@pytest.fixture
def write(tmp_path, root):
    """Write shards of two images into a folder; return what was written, and the files."""

    def write_images(images, out="out", **options):
        written = write_shards(iter(images), root, tmp_path / out, **{"samples_per_shard": 2, **options})
        return written, read_tree(tmp_path / out)

    return write_images


class TestContent:
    def test_members(self, root, make_images, write):
        images = make_images(3)
        data = encode_picture((70, 60), "JPEG")
        (root / images[1].file).write_bytes(data)
        written, _ = write(images)
        content = read_archive(written.shards[0])
        keys = "tiny-train-00000000", "tiny-train-00000001"
        assert list(content) == [
            *(f"{keys[0]}.{extension}" for extension in ("json", "png", "txt")),
            *(f"{keys[1]}.{extension}" for extension in ("jpg", "json", "txt")),
        ]
        assert content["tiny-train-00000000.png"] == (root / images[0].file).read_bytes()
        assert content["tiny-train-00000001.jpg"] == data, "the extension fits the bytes"
        assert content["tiny-train-00000001.txt"] == b"1-0"
        expected = {"image_id": 1, "captions": ["1-0", "1-1"], "caption_ids": [10, 11], "split": "train"}
        expected |= {"dataset": "tiny", "filename": "99.png", "width": 70, "height": 60}
        assert json.loads(content["tiny-train-00000001.json"]) == expected

    def test_a_shard_is_what_tarfile_would_write(self, root, make_images, write):
        """Without times and owners. The pictures grow by a block each: every length of the last record occurs."""
        images = make_images(2 * tarfile.RECORDSIZE // tarfile.BLOCKSIZE)
        for index, image in enumerate(images):
            picture = encode_picture((5, 4), "JPEG")
            (root / image.file).write_bytes(picture.ljust(tarfile.BLOCKSIZE * (index + 2), b"x"))
        written, _ = write(images, samples_per_shard=1)
        assert len(written.shards) == len(images)
        for shard in map(Path, written.shards):
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for name, data in read_archive(shard).items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
            assert shard.read_bytes() == stream.getvalue()

    def test_index_and_sizes(self, tmp_path, root, make_images, write):
        images = [*make_images(3, captions=2), *make_images(2, first=3, captions=4)]
        groups = [7, None, "frog", "frog", None]
        images = [replace(image, group=group) for image, group in zip(images, groups, strict=True)]
        written, _ = write(images, samples_per_shard=4)
        assert written[1:] == (5, 14, [])
        assert written.shards == [f"{tmp_path}/out/tiny-train-00000{number}.tar" for number in range(2)]
        write(make_images(3, "val", 5))
        for shard in written.shards:
            head, (scanned, records) = read_head(shard), scan_shard(shard)
            for name in ("starts", "sizes", "counts", "caption_hashes", "groups", "size"):
                assert getattr(head, name) == getattr(scanned, name)
            assert read_records(shard) == records
            assert head.sha256 == hashlib.sha256(Path(shard).read_bytes()).hexdigest()
        assert [sample.get("group") for sample in read_samples(tmp_path / "out")] == groups
        sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
        assert sizes == {f"tiny-{name}.tar": size for name, size in zip(SHARDS, (4, 1, 2, 1), strict=True)}


class TestFeatures:
    @pytest.fixture
    def write_features(self, root, write):
        """Write shards of images with array files of these names, and return the arrays' bytes by key."""

        def write_arrays(images, *names):
            for number, name in enumerate(names):
                (root / name).parent.mkdir(exist_ok=True)
                np.save(root / name, np.full((number + 1, 3), number + 1, dtype="float32"))
            written, _ = write(images, inputs="features")
            return {name: data for shard in written.shards for name, data in read_archive(shard).items()}

        return write_arrays

    @pytest.mark.parametrize("names", [("0.npy", "1.npy"), ("100.npy", "a.b.npy")])
    def test_by_id_or_by_name(self, root, make_images, write_features, names):
        images = make_images(2)
        images[1] = replace(images[1], filename="x/y/a.b.png")
        members = write_features(images, *names, "unrelated.npy")
        for number, name in enumerate(names):
            assert members[f"tiny-train-0000000{number}.npy"] == (root / name).read_bytes()
            record = json.loads(members[f"tiny-train-0000000{number}.json"])
            assert (record["num_features"], record["feature_dim"], "width" in record) == (number + 1, 3, False)

    def test_files_that_cannot_be_used(self, make_images, write_features):
        owls, gulls = (replace(image, filename=f"{image.image_id}/1.jpg") for image in make_images(2, first=11))
        with pytest.raises(UserError, match=r"1\.npy is one file for two images; name the array files by image id"):
            write_features([owls, gulls], "1.npy")
        with pytest.raises(UserError, match=r"^100\.npy \(image id 0\): cannot read .*: No such file"):
            write_features(make_images(1))
        with pytest.raises(UserError, match="leads out of the image root"):
            write_features([replace(owls, image_id="../secret")], "../secret.npy")


class TestChangedPictures:
    @pytest.fixture
    def images(self, root, make_images):
        """Records of a PNG, a GIF, a JPEG and a PNG of 16 bits; the JPEG is large."""
        images = make_images(4)
        for image, (size, *options) in zip(
            images, [((8, 6), "PNG"), ((7, 5), "GIF"), ((90, 60), "JPEG"), ((9, 4), "PNG", None, "I;16")], strict=True
        ):
            (root / image.file).write_bytes(encode_picture(size, *options))
        return images

    def test_members(self, images, write):
        written, _ = write(images, samples_per_shard=4, convert="png", resize=30)
        content = read_archive(written.shards[0])
        pictures = [name for name in content if not name.endswith(("json", "txt"))]
        assert [name[-5:] for name in pictures] == ["0.png", "1.png", "2.png", "3.png"]
        for name, size in zip(pictures, [(8, 6), (7, 5), (45, 30), (9, 4)], strict=True):
            metadata = json.loads(content[name.replace("png", "json")])
            assert (metadata["width"], metadata["height"]) == size == decode({"png": content[name]}).size
        assert content[pictures[0]] == encode_picture((8, 6)), "nothing has to change"
        written, _ = write(images, "2", samples_per_shard=4, convert="jpeg")
        assert [name[-5:] for name in read_archive(written.shards[0]) if name.endswith(("g", "p"))] == [
            *("0.png", "1.jpg", "2.jpg", "3.jpg")
        ]

    def test_without_the_options_there_are_errors(self, images, write):
        hint = r"--convert \(convert= of write_shards\) makes it JPEG or PNG"
        written, _ = write(images, on_error="skip", samples_per_shard=4)
        assert [image.image for image in written.rejected] == [images[1].file, images[3].file]
        for image in (images[1], images[3]):
            with pytest.raises(UserError, match=rf"^{image.file} .*{hint}$"):
                write([image], "2", resize=3)

    def test_other_options_are_another_run(self, tmp_path, root, images, write):
        options = {"samples_per_shard": 4, "on_error": "skip"}
        runs = [{}, {"convert": "png"}, {"convert": "jpeg"}, {"convert": "png", "resize": 30}, {"resize": 30}]
        for run in runs:
            with contextlib.suppress(UserError):
                write(images, **options, **run)
            _, whole = write(images, f"whole{len(run)}{run}", **options, **run)
            assert write(images, **options, **run, overwrite=True)[1] == whole
            files = Reader(root)
            write_shards(images, files, tmp_path / "out", **options, **run)
            assert files.read_files == []

    def test_fingerprints_of_former_versions_stay_valid(self, tmp_path, root, make_images):
        """Without the options. They are those that 0.3 has written."""
        (root / "a.png").write_bytes(encode_picture())
        image = CaptionedImage(0, "a.png", ("one",), (0,), "train", "tiny", "a.png")
        fingerprints = []
        runs = [{}, {"max_image_pixels": 0}, {"resize": 9}, {"resize": 10}, {"convert": "png"}, {"convert": "jpeg"}]
        for number, options in enumerate(runs):
            written = write_shards([image], Unchanging(root), tmp_path / f"{number}", **options)
            fingerprints.append(read_head(written.shards[0]).fingerprint)
        assert fingerprints[:2] == [
            "ec6631c3963e49d11f88185546f14074e6d3385a951f82010bf7d305fa5d01fe",
            "ab711fbe1d37bfd60361e01dfe04b7c4fe727f86699acf7bda6764f3128dce2b",
        ]
        assert len(set(fingerprints)) == len(runs)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"resize": 0}, "resize must be at least 1, got 0"),
            ({"convert": "gif"}, "unknown convert 'gif'; known: jpeg, png"),
            ({"resize": 9, "inputs": "features"}, "--resize changes pictures, but --features (inputs='features') has"),
            ({"convert": "png", "inputs": "features"}, "--convert changes pictures, but --features (inputs='features'"),
        ],
    )
    def test_wrong_options(self, tmp_path, make_images, write, options, message):
        with pytest.raises(UserError, match=re.escape(message)):
            write(make_images(1), **options)
        assert not (tmp_path / "out").exists()

    def test_too_many_pixels(self, root, make_images, write, monkeypatch):
        images = make_images(1)
        (root / images[0].file).write_bytes(vast_png())
        fail_to_decode(monkeypatch)
        for options in ({"resize": 10}, {"convert": "jpeg"}):
            with pytest.raises(UserError, match=f"the image has {VAST}, more than max_image_pixels 89,000,000"):
                write(images, **options)


class Unchanging(FileFolder):
    def state(self, file):
        return 5, 7


class TestWrongInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"images": []}, "there are no images"),
            ({"samples_per_shard": 0}, "samples_per_shard must be at least 1, got 0"),
            ({"out": "nowhere://shards"}, "Protocol not known: nowhere"),
        ],
    )
    def test_arguments(self, tmp_path, root, make_images, options, message):
        arguments = {"images": make_images(1), "files": root, "out": tmp_path / "out", **options}
        with pytest.raises(UserError, match=re.escape(message)):
            write_shards(**arguments)
        assert not (tmp_path / "out").exists()

    def test_the_longest_names_fit_into_tar_headers(self, make_images, write):
        (image,) = make_images(1)
        written, _ = write([replace(image, dataset="x" * 40, split="y" * 40)])
        assert len(read_archive(written.shards[0])) == 3

    def test_an_unusable_image_stops_the_run_and_is_named(self, tmp_path, root, make_images, write):
        images = make_images(5)
        (root / images[2].file).write_bytes(b"a cat on a mat")
        with pytest.raises(UserError) as raised:
            write(images, samples_per_shard=5)
        assert str(raised.value) == "98.png (image id 2): the file is not an image in JPEG, PNG or WebP format"
        with pytest.raises(UserError, match=r"^row 7: blank$"):
            write([*make_images(1), RejectedImage("row 7", "train", "blank")])
        assert read_tree(tmp_path / "out") == {}

    def test_images_that_are_left_out_are_in_the_index(self, tmp_path, root, make_images, write):
        images = [*make_images(6), *make_images(1, "val", 6)]
        _, whole = write(images, "whole")
        (root / images[2].file).write_bytes(b"")
        early, late = (RejectedImage(f"row {number}", "train", "blank") for number in range(2))
        written, files = write([early, *images, late], on_error="skip")
        assert written[1:3] == (6, 12)
        lists = {Path(shard).name: read_head(shard).rejected for shard in written.shards}
        assert lists == {
            "tiny-train-000000.tar": [early],
            "tiny-train-000001.tar": [
                RejectedImage("98.png", "train", "the file is not an image in JPEG, PNG or WebP format")
            ],
            "tiny-train-000002.tar": [late],
            "tiny-val-000000.tar": [],
        }
        assert sorted(written.rejected, key=str) == sorted(itertools.chain(*lists.values()), key=str)
        for name in ("tiny-train-000000.tar", "tiny-train-000002.tar"):
            assert files[name] == whole[name], "other shards do not depend on the missing image"
        assert list(json.loads(files["sizes.json"]).values()) == [2, 1, 2, 1]
        assert "tiny-train-00000002.json" not in read_archive(tmp_path / "out" / "tiny-train-000001.tar")

    def test_an_image_of_too_many_pixels(self, root, make_images, write, monkeypatch):
        images = make_images(2)
        (root / images[1].file).write_bytes(vast_png())
        reason = f"the image has {VAST}, more than max_image_pixels 89,000,000"
        with monkeypatch.context() as patched:
            fail_to_decode(patched)
            with pytest.raises(UserError, match=reason):
                write(images[1:])
        written, _ = write(images, on_error="skip")
        assert [image.reason for image in written.rejected] == [reason]
        assert written.images == 1
        # Another limit is another run, and does not take what is there for complete.
        written, _ = write(images, on_error="skip", max_image_pixels=0, overwrite=True)
        assert written.images == 2
        with pytest.raises(UserError, match="max_image_pixels must be at least 0"):
            write(images, max_image_pixels=-1)

    def test_a_shard_of_unusable_images_is_an_error(self, tmp_path, root, make_images, write):
        images = make_images(6)
        for image in images[2:4]:
            (root / image.file).unlink()
        with pytest.raises(UserError, match=r"000001\.tar can be used, such as 97\.png: cannot read .*: No such"):
            write(images, on_error="skip")
        assert [shard.name for shard in check_complete(tmp_path / "out")][:1] == ["tiny-train-000000.tar"]
        assert not (tmp_path / "out" / "tiny-train-000001.tar").exists()
        with pytest.raises(UserError, match=r"there are no images to write, such as row 9: blank"):
            write([RejectedImage("row 9", "test", "blank")], "2", on_error="skip")


class TestOtherContents:
    def test_they_are_kept_unless_overwritten(self, tmp_path, make_images, write):
        images = make_images(8)
        write(images[:6])
        _, before = write(make_images(2, "val", 8))
        for count, options in (
            (4, {}),
            (6, {"samples_per_shard": 3}),
            (8, {"samples_per_shard": 3}),
        ):
            with pytest.raises(UserError, match=r"tiny-train-00000\d.tar has other contents; overwrite it, or choose"):
                write(images[:count], **options)
            assert read_tree(tmp_path / "out") == before

        _, files = write(images[:4], samples_per_shard=3, overwrite=True)
        sizes = json.loads(files["sizes.json"])
        assert sizes == {"tiny-train-000000.tar": 3, "tiny-train-000001.tar": 1, "tiny-val-000000.tar": 2}
        assert set(files) == {"sizes.json", *sizes, *(f"__index__/{shard}.jsonl" for shard in sizes)}
        assert files["tiny-val-000000.tar"] == before["tiny-val-000000.tar"]

    def test_shards_without_an_index_are_kept_if_they_have_the_same_content(self, tmp_path, make_images, write):
        """As those of version 0.2."""
        images = make_images(6)
        _, before = write(images)
        Path(index_file(f"{tmp_path}/out/tiny-train-000001.tar")).unlink()
        (tmp_path / "out" / "sizes.json").write_text('{"gone.tar": 9}')
        assert write(images)[1] == before


class Reader(FileFolder):
    """Files that note what is read."""

    def __init__(self, root):
        super().__init__(root)
        self.read_files = []

    def read(self, file):
        self.read_files.append(file)
        return super().read(file)


class TestAgain:
    def test_a_finished_run_writes_and_reads_nothing(self, tmp_path, root, make_images):
        images = [*make_images(5), RejectedImage("row 9", "train", "blank")]
        (root / images[1].file).unlink()
        files, options = Reader(root), {"samples_per_shard": 2, "on_error": "skip"}
        first = write_shards(images, files, tmp_path / "out", **options)
        assert len(files.read_files) == 5
        before = shard_states(tmp_path / "out")
        assert write_shards(images, files, tmp_path / "out", **options) == first
        assert len(files.read_files) == 5
        assert shard_states(tmp_path / "out") == before

    @pytest.mark.parametrize(
        ("change", "is_conflict"),
        [
            (lambda root, shard, images: (root / images[0].file).write_bytes(encode_picture((9, 9))), True),
            (lambda root, shard, images: images.__setitem__(0, replace(images[0], captions=("a", "b"))), True),
            (lambda root, shard, images: shard.write_bytes(shard.read_bytes()[:-512]), True),
            (lambda root, shard, images: shard.unlink(), False),
            (lambda root, shard, images: os.utime(root / images[0].file, (1, 1)), False),
            (lambda root, shard, images: Path(index_file(str(shard))).write_text("[1]"), False),
        ],
        ids=["another picture", "another caption", "cut shard", "no shard", "another time", "damaged index"],
    )
    def test_what_has_changed_is_written_again(self, tmp_path, root, make_images, write, change, is_conflict):
        images = make_images(6)
        write(images)
        others = shard_states(tmp_path / "out")
        shard = tmp_path / "out" / "tiny-train-000000.tar"
        change(root, shard, images)
        _, whole = write(images, "whole")
        if is_conflict:
            with pytest.raises(UserError, match=r"tiny-train-000000.tar has other contents"):
                write(images)
        assert write(images, overwrite=is_conflict)[1] == whole
        after = shard_states(tmp_path / "out")
        changed = {str(shard), index_file(str(shard)), f"{tmp_path}/out/sizes.json"}
        assert {name for name in others if after[name] != others[name]} <= changed

    def test_skipped_images_do_not_serve_a_run_that_is_to_stop_at_them(self, root, make_images, write):
        images = make_images(2)
        (root / images[0].file).unlink()
        write(images, on_error="skip")
        with pytest.raises(UserError, match="image id 0"):
            write(images)


class TestPicturesBehindUrls:
    @pytest.fixture
    def url(self):
        return f"memory://{uuid.uuid4()}/pictures"

    def test_they_are_written_as_those_of_a_folder(self, tmp_path, root, make_images, write, url):
        images = make_images(3)
        _, local = write(images)
        for image in images:
            write_file(f"{url}/{image.file}", (root / image.file).read_bytes())
        write_shards(images, url, tmp_path / "remote", samples_per_shard=2)
        remote = read_tree(tmp_path / "remote")
        assert remote.keys() == local.keys()
        for name in local:
            assert name.endswith(".jsonl") or remote[name] == local[name]

    def test_a_picture_that_has_changed_is_noticed(self, tmp_path, make_images, url):
        """Though it has as many bytes as before; one that has not is not read again."""
        images = make_images(2)
        for image in images:
            write_file(f"{url}/sub/{image.file}", encode_picture(color=1))
        images = [replace(image, file=f"sub/{image.file}") for image in images]
        write_shards(images, url, tmp_path / "out")
        files = Reader(url)
        write_shards(images, files, tmp_path / "out")
        assert files.read_files == []

        other = encode_picture(color=2)
        assert len(other) == len(encode_picture(color=1))
        write_file(f"{url}/{images[1].file}", other)
        with pytest.raises(UserError, match="has other contents"):
            write_shards(images, url, tmp_path / "out")
        (shard,) = write_shards(images, url, tmp_path / "out", overwrite=True).shards
        assert read_archive(shard)["tiny-train-00000001.png"] == other
        assert write_shards(images, files, tmp_path / "out").shards == [shard]
        assert files.read_files == []

    def test_states(self, tmp_path, url):
        write_file(f"{url}/a.png", b"one")
        files = FileFolder(url)
        state = files.state("a.png")
        assert state == files.state("a.png") == pickle.loads(pickle.dumps(files)).state("a.png")
        assert state[0] == ["size", "3"]
        assert msgspec.json.decode(msgspec.json.encode(state)) == state
        assert files.state("b.png") is None
        write_file(f"{url}/a.png", b"two")
        assert files.state("a.png") != state
        remove(f"{url}/a.png")
        assert files.state("a.png") is None
        with pytest.raises(UserError, match=rf"^cannot read {url}/a\.png: "):
            files.read("a.png")

    def test_states_of_local_files_are_those_of_former_versions(self, tmp_path):
        (tmp_path / "a b#?.png").write_bytes(b"one")
        status = (tmp_path / "a b#?.png").stat()
        for root in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
            files = FileFolder(root)
            assert files.state("a b#?.png") == (3, status.st_mtime_ns)
            assert files.state("none.png") is None
            assert files.read("a b#?.png") == b"one"

    def test_features_by_image_id(self, tmp_path, make_images, url):
        images = make_images(2)
        for image in images:
            stream = io.BytesIO()
            np.save(stream, np.full((2, 3), image.image_id + 1, dtype="float32"))
            write_file(f"{url}/{image.image_id}.npy", stream.getvalue())
        (shard,) = write_shards(images, url, tmp_path / "out", inputs="features").shards
        assert np.load(io.BytesIO(read_archive(shard)["tiny-train-00000001.npy"]))[0, 0] == 2


class TestSameBytes:
    @pytest.fixture
    def images(self, root):
        """Records of 23 JPEG files of different sizes, the first 20 of ``train``, one of them damaged."""
        images = []
        for index in range(23):
            data = encode_picture((60 + 7 * index, 90), "JPEG", mode="RGB")
            (root / f"{index}.jpg").write_bytes(data[:-80] if index == 7 else data)
            texts = (f"caption {index}", "other " * index + "words")
            split, ids = "train" if index < 20 else "val", (2 * index, 2 * index + 1)
            images.append(CaptionedImage(index, f"{index}.jpg", texts, ids, split, "some", f"{index}.jpg"))
        return images

    @pytest.mark.parametrize("engine", ENGINES)
    def test_with_any_engine_and_number_of_workers(self, images, write, engine):
        skip_without(engine)
        options = {"on_error": "skip", "samples_per_shard": 3}
        written, files = write(images, "1", workers=1, **options)
        assert (written[1:3], len(written.rejected)) == ((22, 44), 1)
        assert write(images, "3", executor=engine, workers=3, **options)[1] == files

    def test_on_any_file_system_of_fsspec(self, tmp_path, root, images, write):
        _, local = write(images, on_error="skip")
        url, options = f"memory://{uuid.uuid4()}/shards", {"samples_per_shard": 2, "on_error": "skip"}
        for _ in range(2):
            write_shards(images, root, url, **options)
            indexes = {f"__index__/{name}": read_bytes(f"{url}/__index__/{name}") for name in names(f"{url}/__index__")}
            assert {name: read_bytes(f"{url}/{name}") for name in names(url, "*.*")} | indexes == local
        write_shards(images, root, f"file://{tmp_path}/file", **options, workers=2)
        assert read_tree(tmp_path / "file") == local
        with ProcessPoolExecutor(1) as pool, pytest.raises(UserError, match="its worker wrote it to a disk"):
            write_shards(images, root, f"{url}2", **options, executor=pool)


class TestSeveralRuns:
    def test_one_at_a_time_writes_a_split(self, tmp_path, make_images, write):
        def images(split):
            """Images of a split; while they are read, others are written."""
            train, val = make_images(2, split), make_images(2, "val")
            yield train[0]
            write(val)
            with pytest.raises(UserError, match=f"another process is writing tiny-{split} to {tmp_path}/out: wait"):
                write(train)
            yield train[1]

        sizes = json.loads(write(images("train"))[1]["sizes.json"])
        assert sizes == {"tiny-train-000000.tar": 2, "tiny-val-000000.tar": 2}

    def test_sizes_are_written_by_one_at_a_time(self, tmp_path, make_images, write):
        with ThreadPoolExecutor(1) as pool:
            with lock(tmp_path / "out" / "__index__" / ".sizes.json.lock", "sizes"):
                run = pool.submit(write, make_images(2))
                while not (tmp_path / "out" / "tiny-train-000000.tar").exists():
                    assert not run.done()
                    time.sleep(0.01)
                assert not (tmp_path / "out" / "sizes.json").exists()
            assert list(json.loads(run.result()[1]["sizes.json"])) == ["tiny-train-000000.tar"]


# Writes 9 shards of 6 pictures with an engine, and reads no further picture while there is the file ``gate`` and so
# many shards are complete.
SCRIPT = """
import os, sys, time
from pathlib import Path
from vl_plugins.data.captions import CaptionedImage
from vl_plugins.data.writer import FileFolder, write_shards

root, out, engine, gate, complete = sys.argv[1:]

class Files(FileFolder):
    def __init__(self, *arguments):
        super().__init__(root)
        self.out, self.gate, self.complete = arguments

    def read(self, file):
        while os.path.exists(self.gate) and len(list(Path(self.out).glob("*.tar"))) >= int(self.complete):
            time.sleep(0.01)
        return super().read(file)

def images():
    for number in range(54):
        yield CaptionedImage(number, f"{number}.jpg", ("a", "b"), (number, -number), "train", "large", f"{number}.jpg")

if __name__ == "__main__":
    write_shards(images(), Files(out, gate, complete), out, samples_per_shard=6, workers=2, executor=engine)
"""


@pytest.fixture
def run(tmp_path):
    """Return the command that runs the script with an engine, and what it writes."""
    (root := tmp_path / "large").mkdir()
    for number in range(54):
        (root / f"{number}.jpg").write_bytes(encode_picture((90 + number, 60), "JPEG", mode="RGB"))
    (tmp_path / "script.py").write_text(SCRIPT)

    def command(engine, gate="no-gate", complete=0):
        arguments = [root, tmp_path / "out", engine, tmp_path / gate, complete]
        return [sys.executable, *map(str, [tmp_path / "script.py", *arguments])]

    names = {name: f"{name}.jpg" for name in range(54)}
    images = (CaptionedImage(n, file, ("a", "b"), (n, -n), "train", "large", file) for n, file in names.items())
    write_shards(images, root, tmp_path / "whole", samples_per_shard=6)
    return command, read_tree(tmp_path / "whole")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_continues_and_ends_as_if_it_had_not_been_stopped(tmp_path, run, engine):
    skip_without(engine)
    command, whole = run
    out, kept = tmp_path / "out", {}
    for complete in (2, 5):
        (tmp_path / f"gate {complete}").touch()
        process = start_as_terminal(command(engine, f"gate {complete}", complete), stderr=subprocess.DEVNULL)
        while len(list(out.glob("*.tar"))) < complete or not list(out.glob(".*.partial")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        shards = check_complete(out)
        assert complete <= len(shards)
        assert all(shard.read_bytes() == whole[shard.name] for shard in shards)
        states = shard_states(out)
        assert {name: states[name] for name in kept} == kept
        kept = {name: state for name, state in states.items() if name.endswith(".tar")}
    subprocess.run(command(engine), check=True)
    assert read_tree(out) == whole
    assert {name: shard_states(out)[name] for name in kept} == kept, "complete shards are not written again"


def write_and_kill(images, root, out, step):
    """Write shards over those that are there, and kill this process at a step, before it changes the disk."""
    left = itertools.count(-step)

    def counted(call):
        def count_and_call(*arguments, **options):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return count_and_call

    for name in ("fsync", "replace", "remove"):
        setattr(os, name, counted(getattr(os, name)))
    write_shards(images, root, out, samples_per_shard=2, workers=1, overwrite=True)


def test_a_kill_at_any_step_leaves_complete_shards(tmp_path, root, make_images, write):
    new, old = make_images(5), [replace(image, captions=("old", "words")) for image in make_images(8)]
    _, whole = write(new, "whole")
    steps = itertools.count()
    for step in steps:
        write(old, f"{step}")
        if (process := os.fork()) == 0:
            write_and_kill(new, root, tmp_path / f"{step}", step)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        shards = check_complete(tmp_path / f"{step}")
        if status == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert len(shards) >= 3
        assert write(new, f"{step}", overwrite=True)[1] == whole
    assert step > 20


# Anything that JSON can hold, but for the halves of surrogate pairs; not blank.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda text: not is_blank(text)
)
ids = st.one_of(st.integers(-(2**63), 2**63), st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
labels = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)


@st.composite
def data_sets(draw):
    dataset, splits = draw(labels), draw(st.lists(labels, min_size=1, max_size=3, unique=True))
    images = []
    for index, image_id in enumerate(draw(st.lists(ids, min_size=1, max_size=12, unique_by=str))):
        captions = tuple(draw(st.lists(texts, min_size=1, max_size=4)))
        caption_ids = tuple(10 * index + number for number in range(len(captions)))
        names = (draw(st.sampled_from(splits)), dataset, f"{index}.png")
        images.append(CaptionedImage(image_id, f"{index}.png", captions, caption_ids, *names, draw(st.none() | ids)))
    return images


@given(images=data_sets(), samples_per_shard=st.integers(1, 5))
@settings(max_examples=40)
def test_what_goes_into_shards_comes_out_of_them(tmp_path_factory, images, samples_per_shard):
    folder = tmp_path_factory.mktemp("any")
    for number in range(len(images)):
        (folder / f"{number}.png").write_bytes(encode_picture((number + 1, 1)))
    write_shards(images, folder, folder / "out", samples_per_shard=samples_per_shard)
    for split in {image.split for image in images}:
        members = [image for image in images if image.split == split]
        pattern = re.compile(rf"{members[0].dataset}-{split}-\d{{6}}\.tar")
        shards = sorted(str(shard) for shard in (folder / "out").glob("*.tar") if pattern.fullmatch(shard.name))
        samples = list(webdataset.WebDataset(shards, shardshuffle=False))  # the library that the format is of
        records = [record for shard in shards for record in read_records(shard)]
        for sample, record, image in zip(samples, records, members, strict=True):
            assert (sample["png"], sample["txt"].decode()) == ((folder / image.file).read_bytes(), image.captions[0])
            for found in (json.loads(sample["json"]), msgspec.structs.asdict(record)):
                for name in ("image_id", "dataset", "split", "group"):
                    assert found.get(name) == getattr(image, name)
                assert [*found["captions"], *found["caption_ids"]] == [*image.captions, *image.caption_ids]


class TestOtherReaders:
    """They take a folder of shards as it is."""

    def test_datasets(self, toy_shards):
        datasets = pytest.importorskip("datasets")
        pattern = f"{toy_shards}/toy-{{}}-*.tar".format
        by_name = {"data_files": {"train": pattern("train"), "test": pattern("test")}}
        for options, numbers in (({"data_dir": str(toy_shards)}, [64, 24, 24]), (by_name, [64, 24])):
            found = datasets.load_dataset("webdataset", **options)
            assert [len(rows) for rows in found.values()] == numbers
            assert found["train"][0]["json"]["captions"][0] == found["train"][0]["txt"]

    def test_open_clip(self, toy_shards):
        """It takes the number of samples from ``sizes.json``."""
        data = pytest.importorskip("open_clip_train.data")
        options = {"train_data": f"{toy_shards}/toy-train-{{000000..000007}}.tar", "train_num_samples": None}
        options |= {"train_data_upsampling_factors": None, "batch_size": 8, "workers": 0, "world_size": 1, "seed": 0}
        tokenize, arguments = (lambda text: (text,)), argparse.Namespace(**options)
        loader = data.get_wds_dataset(arguments, PILToTensor(), is_train=True, tokenizer=tokenize).dataloader
        assert loader.num_samples == 64
        texts = [text for _, batch in loader for text in batch]
        assert sorted(texts) == sorted(sample["captions"][0] for sample in read_samples(toy_shards))


@pytest.mark.parametrize(("listed", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_of_files_may_be_composed_otherwise(tmp_path, listed, stored):
    """An archive that was unpacked on a Mac has umlauts of two characters."""
    name = "K\N{LATIN SMALL LETTER O WITH DIAERESIS}ln.png"
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / unicodedata.normalize(stored, name)).write_bytes(encode_picture())
    files = FileFolder(tmp_path / "pictures")
    file = unicodedata.normalize(listed, name)
    assert files.read(file) == encode_picture()
    assert files.state(file) is not None
    with pytest.raises(UserError, match=r"cannot read '.*/K.ln.png ': No such file"):
        files.read(f"{unicodedata.normalize('NFC', name)} ")
