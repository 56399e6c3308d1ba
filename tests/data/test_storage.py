import errno
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest
import torch

from vl_plugins.data.storage import Folder, open_regular, write_file
from vl_plugins.utils.errors import MissingExtraError, UserError


@pytest.fixture(params=["path", "file", "memory"])
def location(request, tmp_path):
    return {
        "path": str(tmp_path / "folder"),
        "file": f"file://{tmp_path}/folder",
        "memory": f"memory://{uuid.uuid4()}/folder",
    }[request.param]


def write(folder, name, data):
    with folder.write(name) as stream:
        stream.write(data)


def test_files(location):
    folder = Folder(location)
    assert folder.names() == []
    folder.make()
    folder.make()
    assert folder.names() == []
    write(folder, "b.tar", b"two")
    write(folder, "a.tar", b"one")
    assert folder.names() == ["a.tar", "b.tar"]
    assert folder.exists("a.tar")
    assert not folder.exists("c.tar")
    assert folder.read("b.tar") == b"two"
    with folder.open("b.tar") as stream:
        stream.seek(1)
        assert stream.read() == b"wo"
    assert folder.sha256("a.tar") == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    write(folder, "a.tar", b"other")
    assert folder.read("a.tar") == b"other"
    folder.remove("a.tar")
    folder.remove("a.tar")
    assert folder.names() == ["b.tar"]
    assert str(folder) == location
    assert folder / "b.tar" == f"{location}/b.tar"


def test_folders_in_it_are_no_files(location):
    folder = Folder(location)
    inner = Folder(folder / "inner")
    inner.make()
    write(inner, "a.tar", b"")
    assert folder.names() == []
    assert not folder.exists("inner")
    assert inner.names() == ["a.tar"]


def test_a_file_in_place_of_the_folder_holds_none(tmp_path):
    (tmp_path / "file").touch()
    assert Folder(tmp_path / "file").names() == []


def test_a_file_appears_when_it_is_complete(location):
    folder = Folder(location)
    folder.make()
    write(folder, "a.tar", b"before")
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_what_the_system_refuses_is_one_line(tmp_path, monkeypatch, number):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    folder = Folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError) as raised:
        write(folder, "a.tar", b"data")
    assert str(raised.value) == f"cannot write {tmp_path}/a.tar: {os.strerror(number)}"
    assert folder.names() == []


@pytest.mark.parametrize("size", [50_000, 600_000])
def test_a_full_disk_keeps_the_earlier_file(tmp_path, size):
    """Also where torch's zip writer raises an error of its own in place of the file's."""
    folder = Folder(tmp_path)
    write(folder, "a.pt", b"before")
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


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda folder: folder.read("a.tar"), "cannot read"),
        (lambda folder: folder.open("a.tar"), "cannot read"),
        (lambda folder: folder.sha256("a.tar"), "cannot read"),
        (lambda folder: write(folder, "a.tar", b""), "cannot write"),
    ],
)
def test_missing_files_and_folders(tmp_path, action, message):
    with pytest.raises(UserError, match=rf"{message} .*nowhere/a.tar: No such file or directory$"):
        action(Folder(tmp_path / "nowhere"))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*file: File exists"):
        Folder(tmp_path / "file").make()


@pytest.mark.parametrize(
    ("location", "message"),
    [("foo://bucket/shards", "cannot use foo://bucket/shards: Protocol not known: foo"), ("s3://b", "Install s3fs")],
)
def test_unknown_file_systems(location, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=re.escape(message)):
        Folder(location)


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"vl_plugins\[data\]"):
        Folder("shards")


def test_pickling(location):
    folder = pickle.loads(pickle.dumps(Folder(location)))
    folder.make()
    write(folder, "a.tar", b"one")
    assert Folder(location).read("a.tar") == b"one"


WRITE_AND_WAIT = """
import sys, time
from vl_plugins.data.storage import Folder, open_regular, write_file
with Folder(sys.argv[1]).write("a-000000.tar") as stream:
    stream.write(b"half")
    stream.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_leaves_can_be_removed_and_what_a_live_one_writes_stays(tmp_path):
    folder = Folder(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", WRITE_AND_WAIT, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        (partial,) = folder.names()
        assert re.fullmatch(r"\.a-000000\.tar\.[0-9a-f]{8}\.partial", partial)
        folder.remove_partial(r"a-\d{6}\.tar")
        assert folder.names() == [partial]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    for other in (r"b-\d{6}\.tar", r"a", r"-000000\.tar"):
        folder.remove_partial(other)
        assert folder.names() == [partial]
    (tmp_path / f"{partial}.txt").touch()
    folder.remove_partial(r"a-\d{6}\.tar")
    assert folder.names() == [f"{partial}.txt"]


WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
from vl_plugins.data.storage import write_file
while True:
    write_file(Path(sys.argv[1]), bytes(50_000_000))
"""


def test_what_a_killed_process_leaves_of_a_single_file_is_removed_by_the_next(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path / "features.npz")])
    while not (left := list(tmp_path.glob(".features.npz.*"))):
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert left[0].exists()
    (tmp_path / ".other.npz.0123abcd.partial").touch()
    write_file(tmp_path / "features.npz", b"whole")
    assert Folder(tmp_path).names() == [".other.npz.0123abcd.partial", "features.npz"]
    assert (tmp_path / "features.npz").read_bytes() == b"whole"


def test_what_is_being_written_is_never_removed(tmp_path):
    """Not even between its creation and its lock."""
    end = threading.Event()

    def remove():
        while not end.is_set():
            Folder(tmp_path).remove_partial(r"a\.tar")

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(300):
            write(Folder(tmp_path), "a.tar", b"data")
    finally:
        end.set()
        thread.join()
    assert Folder(tmp_path).names() == ["a.tar"]


def test_where_nothing_can_be_locked_nothing_is_removed(tmp_path, monkeypatch):
    """As on some network file systems, where a file in use looks like any other."""

    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fail)
    (tmp_path / ".a.tar.0123abcd.partial").touch()
    Folder(tmp_path).remove_partial(r"a\.tar")
    assert Folder(tmp_path).names() == [".a.tar.0123abcd.partial"]
    with Folder(tmp_path).lock(wait=False):
        write(Folder(tmp_path), "a.tar", b"one")
    assert Folder(tmp_path).read("a.tar") == b"one"


def count_up(location, times):
    folder = Folder(location)
    for _ in range(times):
        with folder.lock():
            number = int(folder.read("number"))
            time.sleep(0.001)
            write(folder, "number", str(number + 1).encode())


def test_the_lock_keeps_processes_apart(tmp_path):
    write(Folder(tmp_path), "number", b"0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=count_up, args=(str(tmp_path), 20)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert Folder(tmp_path).read("number") == b"40"
    assert Folder(tmp_path).names() == ["number"]


def test_a_lock_that_is_held_can_be_an_error(tmp_path):
    folder = Folder(tmp_path)
    with folder.lock(wait=False), pytest.raises(UserError) as raised, folder.lock(wait=False):
        pass
    assert str(raised.value) == f"another process is writing to {tmp_path}: wait for it or choose another folder"
    with folder.lock(wait=False):
        pass


def test_without_locks_everything_else_works(tmp_path, monkeypatch):
    monkeypatch.setattr("vl_plugins.data.storage.fcntl", None)
    folder = Folder(tmp_path)
    with folder.lock():
        write(folder, "a.tar", b"one")
    assert folder.names() == ["a.tar"]


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
