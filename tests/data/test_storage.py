import errno
import os
import pickle
import re
import resource
import subprocess
import sys
import uuid

import pytest
import torch

from vl_plugins.data.storage import Folder, open_regular, write_file
from vl_plugins.errors import UserError


@pytest.fixture(params=["path", "file", "memory"])
def location(request, tmp_path):
    return {
        "path": str(tmp_path / "folder"),
        "file": f"file://{tmp_path}/folder",
        "memory": f"memory://{uuid.uuid4()}/folder",
    }[request.param]


def test_files(location):
    folder = Folder(location)
    assert folder.names() == []
    folder.make()
    folder.make()
    folder.write_bytes("b.tar", b"two")
    folder.write_bytes("a.tar", b"one")
    assert folder.names() == ["a.tar", "b.tar"]
    assert folder.exists("a.tar")
    assert not folder.exists("c.tar")
    assert folder.read("b.tar") == b"two"
    with folder.open("b.tar") as stream:
        stream.seek(1)
        assert stream.read() == b"wo"
    assert folder.sha256("a.tar") == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    folder.write_bytes("a.tar", b"other")
    assert folder.read("a.tar") == b"other"
    folder.remove("a.tar")
    folder.remove("a.tar")
    assert folder.names() == ["b.tar"]
    assert str(folder) == Folder(folder).location == location
    assert folder / "b.tar" == f"{location}/b.tar"
    assert pickle.loads(pickle.dumps(folder)).names() == ["b.tar"]


def test_folders_in_it_are_no_files(location):
    folder = Folder(location)
    inner = Folder(folder / "inner")
    inner.make()
    inner.write_bytes("a.tar", b"")
    assert folder.names() == []
    assert not folder.exists("inner")
    assert inner.names() == ["a.tar"]
    assert Folder(inner / "a.tar").names() == []


def test_a_file_appears_when_it_is_complete(location):
    folder = Folder(location)
    folder.make()
    folder.write_bytes("a.tar", b"before")
    with folder.write("a.tar") as stream:
        stream.write(b"after")
        assert folder.read("a.tar") == b"before"
    assert folder.read("a.tar") == b"after"


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_nothing_is_left_when_writing_fails(location, error):
    folder = Folder(location)
    folder.make()

    def fail():
        with folder.write("a.tar") as stream:
            stream.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert folder.names() == []


@pytest.mark.parametrize("size", [50_000, 600_000])
def test_a_full_disk_keeps_the_earlier_file(tmp_path, size):
    """Also where torch's zip writer raises an error of its own in place of the file's."""
    folder = Folder(tmp_path)
    folder.write_bytes("a.pt", b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(UserError) as raised, folder.write("a.pt") as stream:
            torch.save([torch.zeros(100_000) for _ in range(4)], stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(raised.value) == f"cannot write {tmp_path}/a.pt: {os.strerror(errno.EFBIG)}"
    assert folder.names() == ["a.pt"]
    assert folder.read("a.pt") == b"before"


def test_missing_files_and_folders(tmp_path):
    folder = Folder(tmp_path / "nowhere")
    for read in (folder.read, folder.open, folder.sha256):
        with pytest.raises(UserError, match=r"cannot read .*nowhere/a.tar: No such file or directory$"):
            read("a.tar")
    with pytest.raises(UserError, match=r"cannot write .*nowhere/a.tar: No such file or directory$"):
        folder.write_bytes("a.tar", b"")
    (tmp_path / "nowhere").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*nowhere: File exists"):
        folder.make()


@pytest.mark.parametrize(
    ("location", "message"),
    [("foo://bucket/shards", "cannot use foo://bucket/shards: Protocol not known: foo"), ("s3://b", "Install s3fs")],
)
def test_unknown_file_systems(location, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=re.escape(message)):
        Folder(location)


WRITE_HALF = """
import os, sys
from pathlib import Path
from vl_plugins.data import storage

def wait(descriptor):
    print("half written", flush=True)
    sys.stdin.read()

os.fsync = wait
storage.write_file(Path(sys.argv[1]), b"half")
"""


def test_what_a_killed_process_leaves_of_a_single_file_is_removed_by_the_next(tmp_path):
    command = [sys.executable, "-c", WRITE_HALF, str(tmp_path / "features.npz")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half written\n"
        process.kill()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".features.npz.")
    (tmp_path / ".other.npz.0123abcd.partial").touch()
    write_file(tmp_path / "features.npz", b"whole")
    assert Folder(tmp_path).names() == [".other.npz.0123abcd.partial", "features.npz"]
    assert (tmp_path / "features.npz").read_bytes() == b"whole"


def test_partial_files_are_removed_by_the_name_of_the_file(tmp_path):
    partial = [f".{name}.0123abcd.partial" for name in ("a-000000.tar", "b.tar")]
    others = ["c.0123abcd.partial", ".a-000000.tar.0123abcd.partial.txt"]
    for name in [*partial, *others]:
        (tmp_path / name).touch()
    folder = Folder(tmp_path)
    for pattern in (r"a", r"-000000\.tar"):
        folder.remove_partial(pattern)
        assert folder.names() == sorted([*partial, *others])
    folder.remove_partial(r"a-\d{6}\.tar|x")
    assert folder.names() == sorted([partial[1], *others])
    folder.remove_partial()
    assert folder.names() == sorted(others)


def test_one_process_holds_the_lock(tmp_path):
    folder = Folder(tmp_path)
    with folder.lock(), pytest.raises(UserError) as raised, folder.lock():
        pass
    assert str(raised.value) == f"another process is writing to {tmp_path}: wait for it or choose another folder"
    with folder.lock():
        pass


def test_without_locks_everything_else_works(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    folder = Folder(tmp_path)
    monkeypatch.setattr("fcntl.flock", fail)  # as on some network file systems
    with folder.lock():
        folder.write_bytes("a.tar", b"one")
    monkeypatch.setattr("vl_plugins.data.storage.fcntl", None)  # as on Windows
    with folder.lock():
        folder.write_bytes("b.tar", b"two")
    assert folder.names() == ["a.tar", "b.tar"]


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for file in ("fifo", "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / file)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as stream:
        assert stream.read() == b"data"
