"""Files of ``torch.save`` that hold code, and open_clip's precisions."""

import os
import pickle
from argparse import Namespace

import numpy as np
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
    reasons = {
        "code.pt": "it holds more than tensors, numbers and text, namely (os|posix).mkdir, .*clean it",
        "code.pkl": "it is damaged, or holds more than tensors, numbers and text: ",
    }
    for name, expected in reasons.items():
        with pytest.raises(UserError, match=f"{name}: {expected}"):
            read_torch_file(name)
    assert not os.path.exists("made")


def test_a_refused_file_can_be_cleaned_as_the_message_says(tmp_path):
    """Checkpoints of early trainers hold the command line as a Namespace."""
    file = tmp_path / "old.pt"
    torch.save({"state_dict": {"weight": torch.ones(2)}, "args": Namespace(lr=0.1)}, file)
    with pytest.raises(
        UserError, match=r"namely argparse.Namespace, .*torch.save\(content\['state_dict'\], NEW_FILE\)"
    ):
        read_torch_file(file)
    content = torch.load(file, weights_only=False)
    torch.save(content["state_dict"], file)
    assert read_torch_file(file)["weight"].tolist() == [1, 1]


@pytest.mark.skipif(
    not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"), reason="torch 2.6 names safe types"
)
@pytest.mark.parametrize("number", [np.float64(1.5), np.float32(1.5), np.int64(-3), np.bool_(True)])
def test_a_number_of_numpy_is_a_number(number, tmp_path):
    """Checkpoints of open_clip before 2.27 and of LAION hold some."""
    torch.save({"loss": number}, tmp_path / "numpy.pt")
    loss = read_torch_file(tmp_path / "numpy.pt")["loss"]
    assert (loss, type(loss)) == (number, type(number))


def test_precisions_are_those_of_open_clip():
    for precision in PRECISIONS:
        assert INPUTS.get(precision) == get_input_dtype(precision)
        with get_autocast(precision, device_type="cpu")():
            expected = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        assert AUTOCAST.get(precision, torch.float32) == expected
        assert open_clip_train.params.parse_args(["--precision", precision]).precision == precision
