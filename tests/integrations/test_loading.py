"""Files of ``torch.save`` that hold code, and open_clip's precisions."""

import os
import pickle

import open_clip_train.params
import pytest
import torch
from open_clip import get_input_dtype
from open_clip_train.precision import get_autocast

from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import AUTOCAST, INPUTS, PRECISIONS, read_torch_file


class Code:
    def __reduce__(self):
        return os.mkdir, ("made",)


def test_code_of_a_file_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": Code()}, "code.pt")
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(Code()))
    for name in ("code.pt", "code.pkl"):
        with pytest.raises(UserError, match=f"{name}: it is damaged, or holds more than tensors and text"):
            read_torch_file(name)
    assert not os.path.exists("made")


def test_precisions_are_those_of_open_clip():
    for precision in PRECISIONS:
        assert INPUTS.get(precision) == get_input_dtype(precision)
        with get_autocast(precision, device_type="cpu")():
            expected = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        assert AUTOCAST.get(precision, torch.float32) == expected
        assert open_clip_train.params.parse_args(["--precision", precision]).precision == precision
