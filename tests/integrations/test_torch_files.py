"""Files of ``torch.save``, whole, cut off, damaged, and of other kinds."""

import os
import pickle
import random
import re
import warnings

import pytest
import torch

from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import UnreadableFileError, read_torch_file

CONTENT = {
    "epoch": 3,
    "state_dict": {f"layers.{number}.weight": torch.arange(12.0).view(3, 4) + number for number in range(3)},
    "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
}
DAMAGED = (
    r"it is cut off or damaged \([^\n]+\)|it is empty or not a file of torch\.save|"
    "it holds more than tensors and text, and such files can run code"
)


@pytest.fixture
def file(tmp_path):
    torch.save(CONTENT, tmp_path / "file.pt")
    return tmp_path / "file.pt"


def read(file, mmap):
    """Return whether a file can be read, with no other message than that it is damaged or holds code."""
    said = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_torch_file(file, mmap=mmap)
        except UnreadableFileError as error:
            said = str(error)
    assert said is None or re.fullmatch(DAMAGED, said)
    return said is None


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_that_is_cut_off_or_changed_anywhere(file, mmap):
    """A changed one may still be read: a number of a tensor is as good as another."""
    torch.testing.assert_close(read_torch_file(file, mmap=mmap), CONTENT, rtol=0, atol=0)
    whole, draw = file.read_bytes(), random.Random(0)
    for size in range(0, len(whole), 61):
        file.write_bytes(whole[:size])
        assert not read(file, mmap), size
    unreadable = 0
    for _ in range(150):
        changed = bytearray(whole)
        start = draw.randrange(len(whole))
        for place in range(start, min(start + draw.choice([1, 1, 30]), len(whole))):
            changed[place] = draw.randrange(256)
        file.write_bytes(changed)
        unreadable += not read(file, mmap)
    assert unreadable > 10


class Code:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("mmap", [False, True])
def test_code_of_a_file_is_not_run(tmp_path, monkeypatch, mmap):
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": Code()}, "code.pt")
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(Code()))
    for name in ("code.pt", "code.pkl"):
        assert not read(name, mmap)
    assert not os.path.exists("made")


@pytest.mark.parametrize("mmap", [False, True])
def test_what_cannot_be_opened(tmp_path, mmap):
    for name, why in (("no.pt", "no such file"), (".", r"it cannot be opened \(Is a directory\)")):
        with pytest.raises(UserError, match=f"^{why}$"):
            read_torch_file(tmp_path / name, mmap=mmap)
