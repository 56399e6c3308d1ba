"""Shards on an HTTP server and on S3 are read and written as those in a folder."""

import os
from functools import partial
from http.server import SimpleHTTPRequestHandler
from typing import ClassVar

import fsspec
import numpy as np
import pytest
import torch

from tests.helpers.servers import http_server, s3_server, serve
from vl_plugins.cli import main
from vl_plugins.data import CaptionSampler, ShardDataset, evaluation_loader, read_collection, training_loader
from vl_plugins.data.sources import read_karpathy
from vl_plugins.data.writer import FileFolder, write_shards
from vl_plugins.errors import UserError

SHARDS = "toy-train-{000000..000007}.tar"


@pytest.fixture(scope="module")
def answers():
    """The number of bytes in each answer of the S3 server to a GET request."""
    return []


@pytest.fixture(scope="module")
def bucket(answers):
    with s3_server(answers=answers) as url:
        yield url


@pytest.fixture(params=["http", "s3"])
def remote(request, toy_shards):
    if request.param == "http":
        with http_server(toy_shards) as (url, _):
            yield url
    else:
        bucket = request.getfixturevalue("bucket")
        fsspec.filesystem("s3").put(f"{toy_shards}/", f"{bucket}/toy/", recursive=True)
        yield f"{bucket}/toy"


def to_tensor(image):
    return torch.from_numpy(np.array(image))


def tokenize(texts):
    return torch.tensor([[len(text), *text.encode()[:8]] for text in texts])


def read_all(folder, workers):
    dataset = ShardDataset(f"{folder}/{SHARDS}", to_tensor, tokenize)
    collection = dataset.collection
    training = training_loader(dataset, CaptionSampler(collection, 16, captions_per_image=2), workers=workers)
    evaluation = evaluation_loader(dataset, 24, workers=workers)
    return [*training, *evaluation], collection.records, collection.pictures([3, 60])


def test_batches_names_and_pictures_are_those_of_local_files(remote, toy_shards):
    expected, found = read_all(toy_shards, workers=0), read_all(remote, workers=2)
    assert [len(part) for part in expected] == [4 + 3, 64, 2]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1:] == expected[1:]


def test_a_shard_without_an_index_is_scanned(toy_shards, tmp_path):
    shard = "toy-train-000003.tar"
    os.symlink(toy_shards / shard, tmp_path / shard)
    with http_server(tmp_path) as (url, _):
        found, expected = read_collection(f"{url}/{shard}"), read_collection(toy_shards / shard)
        assert found.records == expected.records
    assert found.starts.tolist() == expected.starts.tolist()


def test_training_reads_indexes_and_drawn_images_only(toy_shards):
    with http_server(toy_shards) as (url, requests):
        dataset = ShardDataset(f"{url}/{SHARDS}", to_tensor, tokenize)
        opening = len(requests)
        assert len(dataset.__getitems__([1, 9])) == 2
    assert all("GET" not in request or ".jsonl bytes=0-" in request for request in requests[:opening])
    ends = dataset.collection.starts + dataset.collection.sizes
    assert sorted(requests[opening:]) == [
        f"GET /toy-train-{shard:06d}.tar bytes={dataset.collection.starts[image]}-{ends[image] - 1}"
        for shard, image in enumerate([1, 9])
    ]


def test_an_s3_server_sends_the_drawn_images_and_nothing_else(toy_shards, bucket, answers):
    """An s3fs of 2020 is not asynchronous, and reads 5 MB of each shard ahead."""
    fsspec.filesystem("s3").put(f"{toy_shards}/", f"{bucket}/counted/", recursive=True)
    dataset = ShardDataset(f"{bucket}/counted/{SHARDS}", to_tensor, tokenize)
    answers.clear()
    assert len(dataset.__getitems__([1, 9])) == 2
    assert sorted(answers) == sorted(dataset.collection.sizes[[1, 9]].tolist())


@pytest.fixture
def pauses(monkeypatch):
    """Return the list of pauses, which take no time."""
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    return pauses


def test_a_server_that_is_busy_now_and_then_gives_every_image(toy_shards, pauses):
    """One answer of ten is 503, and no image is replaced by another one."""
    with http_server(toy_shards, busy=lambda number: number % 10 == 3) as (url, requests):
        dataset = ShardDataset(f"{url}/{SHARDS}", to_tensor, tokenize, on_error="skip")
        labels = []
        for batch in training_loader(dataset, CaptionSampler(dataset.collection, 16)):
            labels += batch[2].tolist()
    assert sorted(labels) == list(range(64))
    assert pauses
    assert set(pauses) <= {0.5, 1.0}
    assert len(requests) < 120


def test_a_server_that_has_gone_ends_the_training(toy_shards, pauses):
    has_gone = []
    with http_server(toy_shards, busy=lambda number: bool(has_gone)) as (url, _):
        dataset = ShardDataset(f"{url}/{SHARDS}", to_tensor, tokenize, on_error="skip")
        has_gone.append(True)
        with pytest.raises(UserError, match=r"cannot read http.*/toy-train-000000.tar, in 5 tries: "):
            dataset.__getitems__([0, 1])
    assert pauses == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("file", ["toy-train-000000.tar.jsonl", "toy-train-000000.tar"])
def test_a_busy_server_has_not_lost_its_files(toy_shards, pauses, file):
    """Not even the index, without which the whole shard would be read."""
    with (
        http_server(toy_shards, busy=lambda number: True, file=file) as (url, _),
        pytest.raises(UserError, match=r"cannot read http.*: .*503|Service Unavailable"),
    ):
        read_collection(f"{url}/toy-train-000000.tar")
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]


class SynchronousFiles(fsspec.AbstractFileSystem):
    """A local folder behind a file system that is not asynchronous, such as sftp, and reads ahead."""

    protocol = "synchronous"
    fetched: ClassVar[list[int]] = []

    def info(self, path, **options):
        return {"name": path, "size": os.path.getsize(path), "type": "file"}

    def _open(self, path, mode="rb", **options):
        return SynchronousFile(self, path, mode, size=os.path.getsize(path), **options)


class SynchronousFile(fsspec.spec.AbstractBufferedFile):
    def _fetch_range(self, start, end):
        SynchronousFiles.fetched.append(end - start)
        with open(self.path, "rb") as stream:
            stream.seek(start)
            return stream.read(end - start)


def test_a_synchronous_file_system_reads_nothing_ahead(toy_shards):
    fsspec.register_implementation("synchronous", SynchronousFiles, clobber=True)
    dataset = ShardDataset(f"synchronous://{toy_shards}/{SHARDS}", to_tensor, tokenize)
    SynchronousFiles.fetched.clear()
    assert len(dataset.__getitems__([1, 9])) == 2
    assert sorted(SynchronousFiles.fetched) == sorted(dataset.collection.sizes[[1, 9]].tolist())


def test_a_missing_shard_or_server_is_one_line(remote, pauses, capsys):
    lines = []
    for url in (remote, "http://127.0.0.1:1"):
        assert main(["shards", "info", f"{url}/toy-train-000008.tar"]) == 2
        lines += capsys.readouterr().err.splitlines()
    missing, unreachable = lines
    assert f"1 of 1 shards do not exist: {remote}/toy-train-000008.tar" in missing
    assert "cannot read http://127.0.0.1:1/toy-train-000008.tar: " in unreachable
    assert "Connect call failed" in unreachable


def test_a_server_without_ranges_is_an_error(toy_shards):
    with serve(partial(SimpleHTTPRequestHandler, directory=os.fspath(toy_shards))) as url:
        dataset = ShardDataset(f"{url}/{SHARDS}", to_tensor, tokenize, on_error="skip")
        with pytest.raises(ValueError, match=r"toy-train-000001\.tar: expected the files of one image"):
            dataset[9]


def test_pictures_of_s3_that_change(toy_scenes, bucket, tmp_path):
    """Also if their folder has been listed before, which fsspec remembers."""
    images = list(read_karpathy(toy_scenes / "dataset_toy.json", "coco"))[:3]
    files = fsspec.filesystem("s3")
    for image in images:
        files.pipe(f"{bucket}/pictures/{image.file}", (toy_scenes / image.file).read_bytes())
    url = f"{bucket}/pictures"
    written = write_shards(images, url, tmp_path / "out")
    states = [FileFolder(url).state(image.file) for image in images]
    assert all(dict(state).keys() >= {"size", "ETag", "LastModified"} for state in states)
    folder = os.path.dirname(images[0].file)
    assert len(files.ls(f"{url}/{folder}", detail=True)) == 3
    assert [FileFolder(url).state(image.file) for image in images] == states
    assert FileFolder(url).state(f"{folder}/none.png") is None

    other = fsspec.filesystem("s3", skip_instance_cache=True)  # as another process
    other.pipe(f"{url}/{images[1].file}", (toy_scenes / images[2].file).read_bytes())
    with pytest.raises(UserError, match="has other contents"):
        write_shards(images, url, tmp_path / "out")
    assert write_shards(images, url, tmp_path / "out", overwrite=True) == written


def test_a_busy_server_has_not_lost_its_pictures(toy_scenes, tmp_path, pauses):
    with (
        http_server(toy_scenes, busy=lambda number: True, file=".png") as (url, _),
        pytest.raises(UserError, match=r"cannot read http.*: .*503|Service Unavailable"),
    ):
        FileFolder(url).state("val/toy_val_000065.png")
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_shards_are_written_to_s3(toy_scenes, toy_shards, bucket, capsys):
    images = read_karpathy(toy_scenes / "dataset_toy.json", "coco")
    write_shards(images, toy_scenes, f"{bucket}/new", samples_per_shard=8)
    folder, files = bucket.removeprefix("s3://") + "/new", fsspec.filesystem("s3", skip_instance_cache=True)
    written = [os.path.relpath(file, folder) for file in files.find(folder)]
    assert sum(file.endswith((".tar", ".jsonl")) for file in written) == 14 + 14
    for file in written:
        assert files.cat(f"{folder}/{file}") == (toy_shards / file).read_bytes(), file
    assert main(["shards", "verify", f"{bucket}/new"]) == 0
    files.pipe(f"{folder}/toy-test-000001.tar", b"damaged")
    assert main(["shards", "verify", f"{bucket}/new"]) == 1
    assert "toy-test-000001.tar" in capsys.readouterr().out
