"""Files of ``torch.save``, whole, cut off, damaged, and of other kinds."""

import os
import pickle
import random

import pytest
import torch

from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file

CONTENT = {"epoch": 3, "state_dict": {f"layer{n}": torch.arange(12.0).view(3, 4) + n for n in range(3)}}


class Code:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_cut_off_or_changed_anywhere(tmp_path, mmap):
    """A changed one may still be read: a number of a tensor is as good as another."""
    file, draw = tmp_path / "file.pt", random.Random(0)
    torch.save(CONTENT, file)
    torch.testing.assert_close(read_torch_file(file, mmap=mmap), CONTENT, rtol=0, atol=0)
    whole, unreadable = file.read_bytes(), 0
    for size in range(0, len(whole), 61):
        file.write_bytes(whole[:size])
        with pytest.raises(
            UnreadableFileError, match=r"^it is (cut off or damaged \(.+\)|empty or not a file of tor.*)$"
        ):
            read_torch_file(file, mmap=mmap)
    for _ in range(150):
        start = draw.randrange(len(whole) - 30)
        file.write_bytes(whole[:start] + draw.randbytes(draw.choice([1, 30])) + whole[start + 30 :])
        try:
            read_torch_file(file, mmap=mmap)
        except UnreadableFileError:
            unreadable += 1
    assert unreadable > 10


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_code_of_a_file_is_not_run(tmp_path, monkeypatch, mmap):
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": Code()}, "code.pt")
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(Code()))
    for name in ("code.pt", "code.pkl", "no.pt", "."):
        with pytest.raises(UnreadableFileError):
            read_torch_file(name, mmap=mmap)
    assert not os.path.exists("made")
