import errno
import os
import pickle
import resource
import stat
import uuid

import pytest
import torch

from vl_plugins.data.files import OpenFiles, exists, join, names, read_bytes, remove, sha256, write_complete, write_file
from vl_plugins.errors import UserError


@pytest.fixture(params=["path", "file", "memory"])
def folder(request, tmp_path):
    return {
        "path": str(tmp_path / "new" / "folder"),
        "file": f"file://{tmp_path}/new/folder",
        "memory": f"memory://{uuid.uuid4()}/folder",
    }[request.param]


def test_files(folder):
    a, b = join(folder, "a.tar"), join(folder, "b.txt")
    assert (a, names(folder)) == (f"{folder}/a.tar", [])
    write_file(b, b"two")
    write_file(a, b"one")
    write_file(join(folder, "in/c.tar"), b"three")
    assert (names(folder), names(folder, "*.tar")) == (["a.tar", "b.txt", "in"], ["a.tar"])
    assert [exists(url) for url in (a, join(folder, "c.tar"))] == [True, False]
    assert read_bytes(b) == b"two"
    assert sha256(a) == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    write_file(a, b"other")
    assert read_bytes(a) == b"other"
    for _ in range(2):
        remove(a)
    assert names(folder) == ["b.txt", "in"]


def test_a_file_appears_when_it_is_complete(folder):
    file = join(folder, "a.tar")
    write_file(file, b"before")
    with write_complete(file) as stream:
        stream.write(b"after")
        assert read_bytes(file) == b"before"
    assert read_bytes(file) == b"after"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_when_writing_fails(folder, error):
    def fail():
        with write_complete(join(folder, "a.tar")) as stream:
            stream.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert names(folder) == []


@pytest.mark.parametrize("before", [b"before", None], ids=["a link to a file", "a link to nothing"])
def test_a_link_stays(tmp_path, before):
    target, link = tmp_path / "disk" / "target.html", tmp_path / "link.html"
    if before is not None:
        write_file(target, before)
    link.symlink_to(target)
    write_file(link, b"after")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    assert names(target.parent) == ["target.html"]


def test_a_pipe_is_written_to(tmp_path):
    """As a device, which a rename would remove: as root, even /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, b"page")
        assert os.read(reader, 100) == b"page"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder: Is a directory"):
        write_file(tmp_path / "folder", b"page")


@pytest.mark.parametrize("size", [50_000, 600_000])
def test_a_full_disk_keeps_the_earlier_file(tmp_path, size):
    """Also where torch's zip writer raises an error of its own in place of the file's."""
    file = tmp_path / "a.pt"
    write_file(file, b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(UserError) as raised, write_complete(file) as stream:
            torch.save([torch.zeros(100_000) for _ in range(4)], stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(raised.value) == f"cannot write {file}: {os.strerror(errno.EFBIG)}"
    assert (names(tmp_path), read_bytes(file)) == (["a.pt"], b"before")


def test_parts_of_many_files_that_stay_open(tmp_path, monkeypatch):
    """Not more than a few at a time; each copy opens its own, and a file that is replaced stays what it was."""
    monkeypatch.setattr("vl_plugins.data.files.MOST_OPEN", 3)
    paths = []
    for number in range(5):
        paths.append(str(tmp_path / f"{number}"))
        write_file(paths[-1], bytes(range(number, number + 10)))
    files = OpenFiles()
    before = len(os.listdir("/proc/self/fd"))
    for reader in (files, pickle.loads(pickle.dumps(files))):
        for _ in range(2):
            assert reader.read([*paths, paths[0]], [2] * 6, [3] * 6) == [
                bytes(range(n + 2, n + 5)) for n in [*range(5), 0]
            ]
    assert len(os.listdir("/proc/self/fd")) <= before + 6
    missing, found = files.read([str(tmp_path / "none"), paths[1]], [0, 8], [1, 5])
    assert isinstance(missing, FileNotFoundError)
    assert found == bytes([9, 10]), "the end of the file"
    write_file(paths[1], b"other content")
    assert files.read([paths[1]], [0], [2]) == [bytes([1, 2])]
    assert OpenFiles().read([paths[1]], [0], [5]) == [b"other"]
    del files, reader
    assert len(os.listdir("/proc/self/fd")) == before
