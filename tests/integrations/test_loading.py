"""Files of ``torch.save``, whole, cut off, damaged, and of other kinds; and open_clip's precisions."""

import os
import pickle
import random
import warnings

import open_clip_train.params
import pytest
import torch
from open_clip import get_input_dtype
from open_clip_train.precision import get_autocast

from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import AUTOCAST, INPUTS, PRECISIONS, read_torch_file

CONTENT = {
    "epoch": 3,
    "state_dict": {f"layers.{number}.weight": torch.arange(12.0).view(3, 4) + number for number in range(3)},
    "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
}


@pytest.fixture
def file(tmp_path):
    torch.save(CONTENT, tmp_path / "file.pt")
    return tmp_path / "file.pt"


def test_content_comes_back(file):
    found = read_torch_file(file)
    torch.testing.assert_close(found, CONTENT, rtol=0, atol=0)
    assert found["state_dict"]["layers.0.weight"].dtype == torch.float32
    torch.save(CONTENT, file, _use_new_zipfile_serialization=False)
    torch.testing.assert_close(read_torch_file(file), CONTENT, rtol=0, atol=0)


def is_readable(file):
    """Return whether a file can be read, with no other error than that of the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_torch_file(file)
        except UserError:
            return False
    return True


def test_a_file_that_is_cut_off_or_changed_anywhere(file):
    """A changed one may still be read: a number of a tensor is as good as another."""
    whole, draw = file.read_bytes(), random.Random(0)
    for size in range(0, len(whole), 61):
        file.write_bytes(whole[:size])
        assert not is_readable(file), size
    unreadable = 0
    for _ in range(150):
        changed = bytearray(whole)
        start = draw.randrange(len(whole))
        for place in range(start, min(start + draw.choice([1, 1, 30]), len(whole))):
            changed[place] = draw.randrange(256)
        file.write_bytes(changed)
        unreadable += not is_readable(file)
    assert unreadable > 10


class Code:
    def __reduce__(self):
        return os.mkdir, ("made",)


def test_code_of_a_file_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": Code()}, "code.pt")
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(Code()))
    for name in ("code.pt", "code.pkl"):
        assert not is_readable(name)
    assert not os.path.exists("made")


def test_precisions_are_those_of_open_clip():
    for precision in PRECISIONS:
        assert INPUTS.get(precision) == get_input_dtype(precision)
        with get_autocast(precision, device_type="cpu")():
            expected = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        assert AUTOCAST.get(precision, torch.float32) == expected
        assert open_clip_train.params.parse_args(["--precision", precision]).precision == precision
