import argparse
import inspect

import open_clip_train.main
import open_clip_train.params
import pytest
import torch

from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip import host


def test_patched_replaces_and_restores():
    before = dict(vars(open_clip_train.main))
    with host.patched({"create_loss": lambda args: "ours"}) as main:
        assert main.create_loss(None) == "ours"
        with pytest.raises(RuntimeError, match="already patched"), host.patched({}):
            pass
        assert main.create_loss(None) == "ours", "the refused second patch must not have undone the first"
    assert vars(open_clip_train.main) == before


def test_patched_restores_after_an_error():
    before = dict(vars(open_clip_train.main))
    with pytest.raises(ZeroDivisionError), host.patched({"evaluate": lambda: None}):
        raise ZeroDivisionError
    assert vars(open_clip_train.main) == before


@pytest.mark.parametrize("name", sorted(host.SIGNATURES))
def test_unknown_signature_is_refused(name, monkeypatch):
    monkeypatch.setattr(open_clip_train.main, name, lambda task, model: None)
    with pytest.raises(UserError, match=rf"open_clip_torch 3\S* is not supported: .*{name} takes \(task, model\)"):
        host.trainer()
    monkeypatch.delattr(open_clip_train.main, name)
    with pytest.raises(UserError, match=f"{name} does not exist"):
        host.trainer()


def test_parser_is_the_one_open_clip_parses_with():
    argv = ["--train-data", "x.tar", "--lr", "0.5", "--accum-freq", "3", "--aug-cfg", "scale=(0.9, 1.0)", "--siglip"]
    # parse_args fills the optimizer's defaults in after parsing.
    expected = vars(open_clip_train.params.parse_args(argv)) | {"beta1": None, "beta2": None, "eps": None}
    assert vars(host.parser().parse_args(argv)) == expected
    assert open_clip_train.params.argparse is argparse


def test_data_parallel_on_cpu():
    stock = torch.nn.parallel.DistributedDataParallel
    with host.data_parallel_on_cpu():
        replaced = torch.nn.parallel.DistributedDataParallel
        assert issubclass(replaced, stock)
        assert list(inspect.signature(replaced.__init__).parameters)[:3] == ["self", "module", "device_ids"]
    assert torch.nn.parallel.DistributedDataParallel is stock
